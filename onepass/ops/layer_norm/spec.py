"""What benchmarks, the study and tests need to know of layer_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from onepass.ops.activations import ACTIVATION_FUNCTIONS
from onepass.ops.layer_norm.op import layer_norm
from onepass.ops.layer_norm.reference import layer_norm as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

HEADLINE = (4, 1024, 4096)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Random x, weight around 1 and bias around 0, with SiLU after the norm."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator)

    return {
        "x": normal(*shape).to(dtype),
        "weight": (1 + 0.1 * normal(shape[-1])).to(dtype),
        "bias": (0.1 * normal(shape[-1])).to(dtype),
        "eps": 1e-5,
        "activation": "silu",
    }


def unfused(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> Any:
    """The same in torch's own kernels: add, layer_norm, activation."""
    total = x if residual is None else x + residual
    y = F.layer_norm(total, x.shape[-1:], weight, bias, eps)
    if activation is not None:
        y = ACTIVATION_FUNCTIONS[activation](y)
    return y if residual is None else (y, total)


def _bytes_moved(inputs: dict[str, Any]) -> int:
    return 2 * tensor_bytes(inputs["x"]) + tensor_bytes(inputs["weight"], inputs["bias"])


SPEC = OpSpec(
    op="layer_norm",
    shapes=(
        HEADLINE,
        (1, 4096),
        (512, 4096),
        (16384, 4096),
        (65536, 4096),
        (65536, 1024),
        (65536, 768),
        (16384, 16384),
        (4096, 32768),
        (4096, 65536),
    ),
    make_inputs=make_inputs,
    fused=layer_norm,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {"out": torch.empty_like(inputs["x"])},
    bytes_moved=_bytes_moved,
    unfused_bytes=lambda inputs: _bytes_moved(inputs) + 2 * tensor_bytes(inputs["x"]),
    unfused_launches=2,
    # mean 1, centring 1, square and sum 2, scale 1, weight and bias 2, SiLU 4 (exp, add, divide, multiply).
    flops=lambda inputs: 11 * inputs["x"].numel(),
)
