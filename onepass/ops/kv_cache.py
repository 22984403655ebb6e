"""The paged cache of keys and values as ops see it: its layouts, dtypes and scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.errors import ArgumentTypeError, ArgumentValueError

FP8 = torch.float8_e4m3fn
LAYOUTS = ("NHD", "HND")


def nhd_shape(cache: Tensor, kv_layout: str) -> tuple[int, int, int, int]:
    """num_pages, page_size, num_kv_heads, head_dim."""
    pages, a, b, dim = cache.shape
    return (pages, a, b, dim) if kv_layout == "NHD" else (pages, b, a, dim)


def nhd_strides(cache: Tensor, kv_layout: str) -> tuple[int, int, int]:
    """Distances between pages, between slots of a page, and between heads, in elements."""
    page, a, b, _ = cache.stride()
    return (page, a, b) if kv_layout == "NHD" else (page, b, a)


def check_caches(
    op: str, key_cache: Tensor, value_cache: Tensor, kv_layout: Any, dtype: torch.dtype, name: str
) -> None:
    """Layout, rank, dtype and that the two agree; `dtype` is that of the argument `name`."""
    if kv_layout not in LAYOUTS:
        raise ArgumentValueError(op, "kv_layout", "'NHD' or 'HND'", repr(kv_layout))
    if key_cache.dtype not in (dtype, FP8):
        raise ArgumentTypeError(op, "key_cache", f"the dtype of {name}, {dtype}, or {FP8}", key_cache.dtype)
    if key_cache.ndim != 4:
        sizes = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
        raise ArgumentValueError(op, "key_cache", f"shape [num_pages, {sizes}, head_dim]", list(key_cache.shape))
    if value_cache.dtype != key_cache.dtype:
        raise ArgumentTypeError(op, "value_cache", f"the dtype of key_cache, {key_cache.dtype}", value_cache.dtype)
    if value_cache.shape != key_cache.shape:
        expected = f"the shape of key_cache, {list(key_cache.shape)}"
        raise ArgumentValueError(op, "value_cache", expected, list(value_cache.shape))


def check_scales(op: str, cache_dtype: torch.dtype, **scales: Any) -> None:
    """Numbers, and 1 where the cache does not hold float8."""
    for name, scale in scales.items():
        if not isinstance(scale, (float, int, torch.SymFloat)):
            raise ArgumentTypeError(op, name, "a number", type(scale).__name__)
        if cache_dtype != FP8 and scale != 1.0:
            raise ArgumentValueError(op, name, f"1 for a cache that is not {FP8}", scale)


def uneven(t: Tensor) -> bool:
    """Whether the last dimension is not contiguous."""
    return t.shape[-1] > 1 and t.stride(-1) != 1
