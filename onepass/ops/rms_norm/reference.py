"""RMSNorm, its activation and its residual add in plain torch ops: the meaning of the op, in any dtype.

RMSNorm is from Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.ops.activations import ACTIVATION_FUNCTIONS

if TYPE_CHECKING:
    from onepass.ops.rms_norm.op import Desc


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    casting: str = "llama",
) -> Tensor | tuple[Tensor, Tensor]:
    """activation(rms_norm(x + residual)); with a residual also the sum.

    The sum is rounded to x's dtype before the statistics, and with casting "llama" the normalised value before it is
    multiplied with a weight. All else runs in float32, with the mean taken in float64, or all in float64 when x is
    float64, and is rounded once at the end.
    """
    total = x if residual is None else x + residual
    work = torch.promote_types(x.dtype, torch.float32)
    mean_square = total.double().square().mean(dim=-1, keepdim=True)
    y = total.to(work) * torch.rsqrt(mean_square + eps).to(work)
    if weight is not None:
        if casting == "llama":
            y = y.to(x.dtype).to(work)
        y = y * (weight_offset + weight.to(work))
    if activation is not None:
        y = ACTIVATION_FUNCTIONS[activation](y)
    y = y.to(x.dtype)
    return y if residual is None else (y, total)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    casting = "llama" if desc.rounds_before_weight else "gemma"

    def run(
        strides: object,
        eps: float,
        weight_offset: float,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        y: Tensor,
        residual_out: Tensor | None,
    ) -> None:
        options = {"activation": desc.activation, "weight_offset": weight_offset, "casting": casting}
        result = rms_norm(x, weight, eps, residual=residual, **options)  # type: ignore[arg-type]
        for target, value in zip((y, residual_out), result if residual is not None else (result,), strict=False):
            target.copy_(value)  # type: ignore[union-attr]

    return run
