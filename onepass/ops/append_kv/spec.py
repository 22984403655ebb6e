"""What benchmarks and tests need to know of append_kv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.append_kv.op import append_kv
from onepass.ops.append_kv.reference import append_kv as append_in_torch
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

PAGE_SIZE = 16


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Tokens [num_tokens, num_kv_heads, head_dim] for random slots of a cache with room for twice as many."""
    generator = torch.Generator(device).manual_seed(seed)
    num_tokens, heads, dim = shape
    num_pages = 2 * -(-num_tokens // PAGE_SIZE)
    k, v = (torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype) for _ in range(2))
    key_cache, value_cache = (torch.zeros(num_pages, PAGE_SIZE, heads, dim, dtype=dtype, device=device) for _ in "kv")
    slots = torch.randperm(num_pages * PAGE_SIZE, device=device, generator=generator)[:num_tokens]
    return {"k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slots}


def fused(key_cache: Tensor, value_cache: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """The op, which returns nothing, and then the caches that it changed."""
    append_kv(key_cache=key_cache, value_cache=value_cache, **others)
    return key_cache, value_cache


def reference(key_cache: Tensor, value_cache: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    append_in_torch(key_cache=key_cache, value_cache=value_cache, **others)
    return key_cache, value_cache


def unfused(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """One index_copy a cache."""
    for new, cache in ((k, key_cache), (v, value_cache)):
        cache.flatten(0, 1).index_copy_(0, slot_mapping, new)
    return key_cache, value_cache


def _bytes_moved(inputs: dict[str, Any]) -> int:
    return 2 * tensor_bytes(inputs["k"], inputs["v"]) + tensor_bytes(inputs["slot_mapping"])


SPEC = OpSpec(
    op="append_kv",
    shapes=((1, 8, 128), (64, 8, 128), (8192, 8, 128), (64, 3, 64)),
    make_inputs=make_inputs,
    fused=fused,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {},
    bytes_moved=_bytes_moved,
    unfused_bytes=lambda inputs: _bytes_moved(inputs) + tensor_bytes(inputs["slot_mapping"]),
    unfused_launches=2,
    flops=lambda inputs: 0,
)
