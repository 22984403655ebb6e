"""What benchmarks and tests need to know of rms_norm_rope. A shape is [num_tokens, heads, head_dim]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.rms_norm_rope.op import rms_norm_rope
from onepass.ops.rms_norm_rope.reference import rms_norm_rope as reference
from onepass.ops.rope_spec import (
    gathered,
    table_and_positions,
    table_bytes,
    unfused_rms_norm,
    unfused_rope,
)
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator)

    return {
        "x": normal(*shape).to(dtype),
        "weight": (1 + 0.1 * normal(shape[-1])).to(dtype),
        **table_and_positions(shape[0], shape[-1], device, generator),
    }


def unfused(
    x: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    normed = unfused_rms_norm(x, weight, eps, weight_offset)
    return unfused_rope(normed, *gathered(cos_sin_cache, positions, x.dtype, interleaved), interleaved)


def _bytes_moved(inputs: dict[str, Any]) -> int:
    table = table_bytes(inputs["cos_sin_cache"], inputs["positions"])
    return 2 * tensor_bytes(inputs["x"]) + tensor_bytes(inputs["weight"]) + table


def _unfused_bytes(inputs: dict[str, Any]) -> int:
    """The norm in float32: converted, squared 2, mean 1, scaled 2, converted, weight 2 in x's dtype. The rotation: 10
    times x, as apply_rope counts it."""
    x, rows = inputs["x"], inputs["positions"].numel() * inputs["cos_sin_cache"].shape[1]
    size = x.element_size()
    norm = x.numel() * ((size + 4) + 4 * (2 + 1 + 2) + (4 + size) + 2 * size)
    table = rows * (4 + 4) + rows * (4 + size) + 2 * rows * 2 * size
    return norm + 10 * tensor_bytes(x) + table + tensor_bytes(inputs["positions"], inputs["weight"])


SPEC = OpSpec(
    op="rms_norm_rope",
    shapes=(*((t, 32, 128) for t in (1, 64, 8192)), *((t, 9, 64) for t in (1, 64))),
    make_inputs=make_inputs,
    fused=rms_norm_rope,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {"out": torch.empty_like(inputs["x"])},
    bytes_moved=_bytes_moved,
    unfused_bytes=_unfused_bytes,
    # Norm: 2 conversions, square, mean, eps, root, scale, weight; table 4; rotation 5. Fewer in float32.
    unfused_launches=17,
    # Square and sum 2, scale and weight 2, rotation 3.
    flops=lambda inputs: 7 * inputs["x"].numel(),
    row_inputs=("x", "positions"),
)
