"""What benchmarks and tests need to know of merge_attention_states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.merge_attention_states.op import merge_attention_states
from onepass.ops.merge_attention_states.reference import merge_attention_states as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Results of one query a sequence, [batch, num_heads, head_dim], with lse of a few."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, heads, dim = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator)

    inputs: Inputs = {}
    for name in ("a", "b"):
        inputs[f"out_{name}"] = normal(batch, 1, heads, dim).to(dtype)
        inputs[f"lse_{name}"] = 5 + normal(batch, heads, 1)
    return inputs


def unfused(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """In torch's own kernels, in float32 between them."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse_a, lse_b))
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def _bytes_moved(inputs: dict[str, Any]) -> int:
    return 3 * (tensor_bytes(inputs["out_a"]) + tensor_bytes(inputs["lse_a"]))


def _unfused_bytes(inputs: dict[str, Any]) -> int:
    """logaddexp; difference and exp of each lse; two products in float32, their sum, and the rounding."""
    lse, out = tensor_bytes(inputs["lse_a"]), tensor_bytes(inputs["out_a"])
    wide = 4 * inputs["out_a"].numel()
    return 3 * lse + 2 * 5 * lse + 2 * (out + lse + wide) + 3 * wide + wide + out


SPEC = OpSpec(
    op="merge_attention_states",
    shapes=((1, 32, 128), (64, 32, 128), (8192, 32, 128), (64, 9, 64)),
    make_inputs=make_inputs,
    fused=merge_attention_states,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {
        "out": torch.empty_like(inputs["out_a"]),
        "lse": torch.empty_like(inputs["lse_a"]),
    },
    bytes_moved=_bytes_moved,
    unfused_bytes=_unfused_bytes,
    unfused_launches=9,
    # Two products and a sum an element; about 10 operations a row.
    flops=lambda inputs: 3 * inputs["out_a"].numel() + 10 * inputs["lse_a"].numel(),
    row_inputs=("out_a", "lse_a", "out_b", "lse_b"),
)
