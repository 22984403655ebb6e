"""What benchmarks and tests need to know of paged_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.ops.kv_cache import nhd_shape
from onepass.ops.paged_attention.op import paged_attention
from onepass.ops.paged_attention.reference import paged_attention as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

PAGE_SIZE = 16


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Sequences of one query each, for a shape (batch, keys of each, num_q_heads, num_kv_heads, head_dim)."""
    batch, length, num_q_heads, num_kv_heads, dim = shape
    generator = torch.Generator(device).manual_seed(seed)
    max_pages = -(-length // PAGE_SIZE)
    num_pages = batch * max_pages

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator).to(dtype)

    table = torch.randperm(num_pages, device=device, generator=generator).view(batch, max_pages)
    return {
        "q": normal(batch, 1, num_q_heads, dim),
        "key_cache": normal(num_pages, PAGE_SIZE, num_kv_heads, dim),
        "value_cache": normal(num_pages, PAGE_SIZE, num_kv_heads, dim),
        "block_table": table.int(),
        "cache_seqlens": torch.full((batch,), length, dtype=torch.int32, device=device),
    }


def unfused(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, causal: bool = True
) -> Tensor:
    """Gathers the pages, repeats the heads, and multiplies in two products around a softmax."""
    batch, q_len, num_q_heads, dim = q.shape
    page_size, num_kv_heads = key_cache.shape[1:3]
    length = block_table.shape[1] * page_size
    keys, values = (
        cache[block_table].view(batch, length, num_kv_heads, dim).repeat_interleave(num_q_heads // num_kv_heads, dim=2)
        for cache in (key_cache, value_cache)
    )
    scores = q.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / math.sqrt(dim)
    last = cache_seqlens[:, None] - 1
    if causal:
        last = last - torch.arange(q_len - 1, -1, -1, device=q.device)
    hidden = torch.arange(length, device=q.device) > last[:, :, None]
    weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ values.transpose(1, 2)).transpose(1, 2)


def _bytes_moved(inputs: dict[str, Any]) -> int:
    """Every page of the table once; sequences fill their pages here."""
    key_cache, table = inputs["key_cache"], inputs["block_table"]
    pages = 2 * table.numel() * key_cache[0].numel() * key_cache.element_size()
    return pages + 2 * tensor_bytes(inputs["q"]) + tensor_bytes(table, inputs["cache_seqlens"])


def _keys(inputs: dict[str, Any]) -> int:
    return int(inputs["block_table"].shape[1] * nhd_shape(inputs["key_cache"], "NHD")[1])


def _unfused_bytes(inputs: dict[str, Any]) -> int:
    """Gather; repeat; scores and their scaling, mask, softmax in float32 and rounding; the second product."""
    q, cache = inputs["q"], inputs["key_cache"]
    pages = 2 * inputs["block_table"].numel() * cache[0].numel() * cache.element_size()
    group = q.shape[2] // cache.shape[2]
    scores = q.numel() // q.shape[3] * _keys(inputs)
    size = q.element_size()
    return (
        2 * pages + pages * (1 + group) + group * pages + scores * (6 * size + 2 * 4 + 2 * size) + 2 * tensor_bytes(q)
    )


_LENGTHS = ((1, 8192), (1, 131072), (16, 4096), (64, 4096), (256, 1024))

SPEC = OpSpec(
    op="paged_attention",
    # Llama-3-8B's heads.
    shapes=tuple((batch, length, 32, 8, 128) for batch, length in _LENGTHS),
    make_inputs=make_inputs,
    fused=paged_attention,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {"out": torch.empty_like(inputs["q"])},
    bytes_moved=_bytes_moved,
    unfused_bytes=_unfused_bytes,
    unfused_launches=10,
    # Two products of 2 operations an element, and about 5 for a score.
    flops=lambda inputs: inputs["q"].numel() // inputs["q"].shape[3] * _keys(inputs) * (4 * inputs["q"].shape[3] + 5),
    row_inputs=("q", "block_table", "cache_seqlens"),
    ceiling="read",
)
