"""append_kv in plain torch ops: the meaning of the op, in any dtype.

The paged cache is from Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.ops.kv_cache import FP8

if TYPE_CHECKING:
    from onepass.ops.append_kv.op import Desc, Strides

_FP8_MAX = torch.finfo(FP8).max


def append_kv(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Caches change in place. Values for a float8 cache are divided in float32 and rounded once."""
    for new, cache, scale in ((k, key_cache, k_scale), (v, value_cache, v_scale)):
        rows = cache if kv_layout == "NHD" else cache.transpose(1, 2)
        page_size = rows.shape[1]
        there = (slot_mapping >= 0) & (slot_mapping < rows.shape[0] * page_size)
        slots = slot_mapping[there]
        values = new[there]
        if cache.dtype == FP8:
            values = (values.float() / scale).clamp(-_FP8_MAX, _FP8_MAX)
        rows[slots // page_size, slots % page_size] = values.to(cache.dtype)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    shape = (desc.num_pages, desc.page_size, desc.num_kv_heads, desc.head_dim)

    def run(
        scales: tuple[float, float],
        strides: Strides,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        keys = key_cache.as_strided(shape, (*strides[4:7], 1))
        values = value_cache.as_strided(shape, (*strides[7:10], 1))
        append_kv(k, v, keys, values, slot_mapping, k_scale=scales[0], v_scale=scales[1])

    return run
