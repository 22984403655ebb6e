"""What benchmarks and tests know of apply_rope. A shape: (num_tokens, num_q_heads, num_kv_heads, head_dim)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.apply_rope.op import apply_rope
from onepass.ops.apply_rope.reference import apply_rope as reference
from onepass.ops.rope_spec import (
    gathered,
    table_and_positions,
    table_bytes,
    unfused_rope,
)
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    num_tokens, num_q_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator(device).manual_seed(seed)
    q, k = (
        torch.randn((num_tokens, heads, head_dim), dtype=torch.float32, device=device, generator=generator).to(dtype)
        for heads in (num_q_heads, num_kv_heads)
    )
    return {
        "q": q,
        "k": k,
        **table_and_positions(num_tokens, head_dim, device, generator),
    }


def unfused(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    cos, sin = gathered(cos_sin_cache, positions, q.dtype, interleaved)
    return unfused_rope(q, cos, sin, interleaved), unfused_rope(k, cos, sin, interleaved)


def _bytes_moved(inputs: dict[str, Any]) -> int:
    return 2 * tensor_bytes(inputs["q"], inputs["k"]) + table_bytes(inputs["cos_sin_cache"], inputs["positions"])


def _unfused_bytes(inputs: dict[str, Any]) -> int:
    """Of q and k: x * cos 2, negation of a half 1, concatenation 2, * sin 2, sum 3. Of the table: gathered in float32,
    rounded, each half written twice."""
    rows = inputs["positions"].numel() * inputs["cos_sin_cache"].shape[1]
    size = inputs["q"].element_size()
    table = rows * (4 + 4) + rows * (4 + size) + 2 * rows * 2 * size
    return 10 * tensor_bytes(inputs["q"], inputs["k"]) + table + tensor_bytes(inputs["positions"])


SPEC = OpSpec(
    op="apply_rope",
    shapes=(*((t, 32, 8, 128) for t in (1, 64, 8192)), *((t, 9, 3, 64) for t in (1, 64))),
    make_inputs=make_inputs,
    fused=apply_rope,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {
        "q_out": torch.empty_like(inputs["q"]),
        "k_out": torch.empty_like(inputs["k"]),
    },
    bytes_moved=_bytes_moved,
    unfused_bytes=_unfused_bytes,
    # Table: gather, rounding, 2 concatenations; of q and k 5 each. Without the rounding in float32.
    unfused_launches=14,
    flops=lambda inputs: 3 * (inputs["q"].numel() + inputs["k"].numel()),
    row_inputs=("q", "k", "positions"),
)
