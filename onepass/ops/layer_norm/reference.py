"""LayerNorm, its activation and its residual add in plain torch ops: the meaning of the op, in any dtype.

LayerNorm is from Ba, Kiros and Hinton, "Layer Normalization" (2016), SiLU from Elfwing, Uchibe and Doya (2017),
GELU from Hendrycks and Gimpel (2016).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


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

    The sum is rounded to x's dtype before the statistics. Everything after it runs in float32, or in float64
    when x is float64, and is rounded once at the end.
    """
    total = x if residual is None else x + residual
    work = torch.promote_types(x.dtype, torch.float32)
    centred = total.to(work) - total.to(work).mean(dim=-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(work)
    if bias is not None:
        y = y + bias.to(work)
    if activation is not None:
        y = ACTIVATION_FUNCTIONS[activation](y)
    y = y.to(x.dtype)
    return y if residual is None else (y, total)


def unsupported_reasons(desc: object) -> tuple[str, ...]:
    return ()


def run(
    desc: object,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    y: Tensor,
    residual_out: Tensor | None,
    strides: object,
) -> None:
    result = layer_norm(x, weight, bias, eps, activation=desc.activation, residual=residual)  # type: ignore[attr-defined]
    if residual is None:
        y.copy_(result)
    else:
        y.copy_(result[0])
        residual_out.copy_(result[1])
