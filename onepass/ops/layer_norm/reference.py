"""LayerNorm, its activation and its residual add in plain torch ops: the meaning of the op, in any dtype.

LayerNorm is from Ba, Kiros and Hinton, "Layer Normalization" (2016).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.ops.activations import ACTIVATION_FUNCTIONS

if TYPE_CHECKING:
    from onepass.ops.layer_norm.op import Desc


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """activation(layer_norm(x + residual)); with a residual also the sum.

    The sum is rounded to x's dtype before the statistics. Everything after it runs in float32, with means taken in
    float64, or all in float64 when x is float64, and is rounded once at the end.
    """
    total = x if residual is None else x + residual
    work = torch.promote_types(x.dtype, torch.float32)
    centred = total.to(work) - _mean(total.to(work))
    # The mean of large values is rounded more coarsely than their spread: centre what is left once more.
    centred = centred - _mean(centred)
    y = centred * torch.rsqrt(_mean(centred.square()) + eps)
    if weight is not None:
        y = y * weight.to(work)
    if bias is not None:
        y = y + bias.to(work)
    if activation is not None:
        y = ACTIVATION_FUNCTIONS[activation](y)
    y = y.to(x.dtype)
    return y if residual is None else (y, total)


def _mean(t: Tensor) -> Tensor:
    return t.mean(dim=-1, keepdim=True, dtype=torch.float64).to(t.dtype)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(
        strides: object,
        eps: float,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        y: Tensor,
        residual_out: Tensor | None,
    ) -> None:
        result = layer_norm(x, weight, bias, eps, activation=desc.activation, residual=residual)
        for target, value in zip((y, residual_out), result if residual is not None else (result,), strict=False):
            target.copy_(value)  # type: ignore[union-attr]

    return run
