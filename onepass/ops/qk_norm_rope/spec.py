"""What benchmarks and tests know of qk_norm_rope. A shape: (num_tokens, num_q_heads, num_kv_heads, head_dim)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.qk_norm_rope.op import qk_norm_rope
from onepass.ops.qk_norm_rope.reference import qk_norm_rope as reference
from onepass.ops.rope_spec import (
    gathered,
    table_and_positions,
    table_bytes,
    unfused_rms_norm,
    unfused_rope,
)
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    num_tokens, num_q_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator)

    return {
        "qkv": normal(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim).to(dtype),
        "q_weight": (1 + 0.1 * normal(head_dim)).to(dtype),
        "k_weight": (1 + 0.1 * normal(head_dim)).to(dtype),
        **table_and_positions(num_tokens, head_dim, device, generator),
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def unfused(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = gathered(cos_sin_cache, positions, qkv.dtype, interleaved)
    q, k = (
        unfused_rope(unfused_rms_norm(x, weight, eps, weight_offset), cos, sin, interleaved)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k, v


def _elements(inputs: dict[str, Any]) -> int:
    """Of q and k: v is not moved."""
    heads: int = inputs["num_q_heads"] + inputs["num_kv_heads"]
    return int(inputs["qkv"].shape[0]) * heads * int(inputs["head_dim"])


def _bytes_moved(inputs: dict[str, Any]) -> int:
    weights = tensor_bytes(inputs["q_weight"], inputs["k_weight"])
    table = table_bytes(inputs["cos_sin_cache"], inputs["positions"])
    return 2 * _elements(inputs) * inputs["qkv"].element_size() + weights + table


def _unfused_bytes(inputs: dict[str, Any]) -> int:
    """Norms as rms_norm_rope counts them, rotations as apply_rope does."""
    size, rows = inputs["qkv"].element_size(), inputs["positions"].numel() * inputs["cos_sin_cache"].shape[1]
    norm = (size + 4) + 4 * (2 + 1 + 2) + (4 + size) + 2 * size
    table = rows * (4 + 4) + rows * (4 + size) + 2 * rows * 2 * size
    weights = tensor_bytes(inputs["q_weight"], inputs["k_weight"], inputs["positions"])
    return _elements(inputs) * (norm + 10 * size) + table + weights


def _allocate_out(inputs: Inputs) -> Inputs:
    def empty(heads: int) -> Tensor:
        return torch.empty(
            (inputs["qkv"].shape[0], heads, inputs["head_dim"]), dtype=inputs["qkv"].dtype, device=inputs["qkv"].device
        )

    return {"q_out": empty(inputs["num_q_heads"]), "k_out": empty(inputs["num_kv_heads"])}


SPEC = OpSpec(
    op="qk_norm_rope",
    shapes=(*((t, 32, 8, 128) for t in (1, 64, 8192)), *((t, 9, 3, 64) for t in (1, 64))),
    make_inputs=make_inputs,
    fused=qk_norm_rope,
    unfused=unfused,
    reference=reference,
    allocate_out=_allocate_out,
    bytes_moved=_bytes_moved,
    unfused_bytes=_unfused_bytes,
    # Table 4; of q and k 8 for the norm and 5 for the rotation, each.
    unfused_launches=30,
    flops=lambda inputs: 7 * _elements(inputs),
    row_inputs=("qkv", "positions"),
)
