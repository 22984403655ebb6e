"""The softmax-weighted sum in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onepass.ops.softmax_weighted_sum.op import Desc


def softmax_weighted_sum(logits: Tensor, values: Tensor) -> Tensor:
    """softmax(logits) over the last dimension, then the sum of the values with these weights, in float32 and rounded
    once, or all in float64 when the values are float64."""
    work = torch.promote_types(values.dtype, torch.float32)
    weights = torch.softmax(logits.to(work), -1)
    return torch.matmul(weights.unsqueeze(-2), values.to(work)).squeeze(-2).to(values.dtype)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(strides: object, logits: Tensor, values: Tensor, out: Tensor) -> None:
        out.copy_(softmax_weighted_sum(logits, values))

    return run
