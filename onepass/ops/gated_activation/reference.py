"""activation(gate) * up in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.ops.activations import ACTIVATION_FUNCTIONS

if TYPE_CHECKING:
    from onepass.ops.gated_activation.op import Desc


def gated_activation(x: Tensor, up: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """activation(gate) * up in float32, or in float64 when x is float64, rounded once.

    With `up`, x is the gate; without it x holds both, the gate in the left half of each row.
    """
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    work = torch.promote_types(x.dtype, torch.float32)
    return (ACTIVATION_FUNCTIONS[activation](gate.to(work)) * up.to(work)).to(x.dtype)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(strides: object, gate: Tensor, up: Tensor | None, out: Tensor) -> None:
        out.copy_(gated_activation(gate, up, activation=desc.activation))

    return run
