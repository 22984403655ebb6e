"""append_kv on the CPU: one head of one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_memory import (
    load_first,
    load_index,
    load_pair,
    publish,
    row_start,
    store_first,
    store_pair,
    take,
)
from onepass.launch.cpu_vector import inline, splat

if TYPE_CHECKING:
    from onepass.ops.append_kv.op import Desc, Strides


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.cache_dtype)


@inline
def _copy(source: Any, target: Any, scale: float, n: int) -> None:
    """A division by 1 leaves every value as it is."""
    divisor = splat(scale)
    pairs = n & ~31
    for i in range(0, pairs, 32):
        a, b = load_pair(source, i, target)
        store_pair(target, i, a / divisor, b / divisor, False)
    for i in range(pairs, n, 16):
        store_first(target, i, load_first(source, i, n - i) / divisor, n - i)


@cpu.kernel
def append_kv_kernel(
    k: Any,
    v: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    stride_kt: int,
    stride_kh: int,
    stride_vt: int,
    stride_vh: int,
    stride_key_page: int,
    stride_key_slot: int,
    stride_key_head: int,
    stride_value_page: int,
    stride_value_slot: int,
    stride_value_head: int,
    num_heads: int,
    head_dim: int,
    page_size: int,
    num_slots: int,
    k_scale: float,
    v_scale: float,
    num_tokens: int,
    chunk: int,
    counter: int,
) -> None:
    first = take(counter, chunk)
    while first < num_tokens:
        for token in range(first, min(first + chunk, num_tokens)):
            slot = load_index(slots, token)
            if slot < 0 or slot >= num_slots:
                continue
            page = slot // page_size
            place = slot - page * page_size
            for head in range(num_heads):
                _copy(
                    row_start(k, 1, token * stride_kt + head * stride_kh),
                    row_start(key_cache, 1, page * stride_key_page + place * stride_key_slot + head * stride_key_head),
                    k_scale,
                    head_dim,
                )
                _copy(
                    row_start(v, 1, token * stride_vt + head * stride_vh),
                    row_start(
                        value_cache,
                        1,
                        page * stride_value_page + place * stride_value_slot + head * stride_value_head,
                    ),
                    v_scale,
                    head_dim,
                )
        first = take(counter, chunk)
    publish()


@lru_cache(maxsize=16)
def _compiled(dtype: torch.dtype, cache_dtype: torch.dtype) -> Callable[..., None]:
    new, cache = cpu.pointer(dtype), cpu.pointer(cache_dtype)
    numbers = (*(int,) * 14, float, float, *(int,) * 3)
    return append_kv_kernel.compiled(new, new, cache, cache, cpu.pointer(torch.int64), *numbers)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their scales, strides and tensors."""
    return partial(_launch, _compiled(desc.dtype, desc.cache_dtype), desc)


def _launch(
    kernel: Callable[..., None],
    desc: Desc,
    scales: tuple[float, float],
    strides: Strides,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    pointers = (t.data_ptr() for t in (k, v, key_cache, value_cache, slot_mapping))
    sizes = (desc.num_kv_heads, desc.head_dim, desc.page_size, desc.num_pages * desc.page_size)
    cpu.run_rows(kernel, (*pointers, *strides, *sizes, *scales), desc.num_tokens, 2 * desc.num_kv_heads * desc.head_dim)
