"""logsumexp in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onepass.ops.logsumexp.op import Desc


def logsumexp(x: Tensor) -> Tensor:
    """log(sum(exp(x))) of the last dimension in float32, or in float64 when x is float64."""
    return torch.logsumexp(x.to(torch.promote_types(x.dtype, torch.float32)), -1)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(strides: object, x: Tensor, out: Tensor) -> None:
        out.copy_(logsumexp(x))

    return run
