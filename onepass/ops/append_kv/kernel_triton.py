"""append_kv in Triton: a block of one token's heads a program, K and V together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import (
    Features,
    Specialization,
    features,
    load,
    missing_float8,
    pointer,
    unsupported_device,
)
from onepass.ops.triton_math import INTERPRETED

if TYPE_CHECKING:
    from onepass.ops.append_kv.op import Desc, Strides

NUM_WARPS = 4
MAX_BLOCK = 2048
MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch is left out: each program then takes 1.2 ns longer to start."""


@triton.jit
def float8_by_hand(x):
    """float32 x, at most 448, rounded to float8_e4m3: the interpreter's own conversion loses small numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the values are multiples of 2^-9, the unit of float32 at 2^14: the addition rounds to it.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def as_cached(x, scale, dtype: tl.constexpr):
    """x as the cache holds it: as it is, or divided by the scale and rounded to float8 within its range."""
    if dtype == tl.float8e4nv:
        x = tl.div_rn(x.to(tl.float32), tl.full(x.shape, 0.0, tl.float32) + scale)
        # Comparisons, so that NaN stays NaN.
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
        if INTERPRETED:
            x = float8_by_hand(x)
    return x if x.dtype == dtype else x.to(dtype)


@triton.jit
def append_kv_kernel(
    k_ptr,
    v_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_key_page,
    stride_key_slot,
    stride_key_head,
    stride_value_page,
    stride_value_slot,
    stride_value_head,
    num_slots,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK of the HEADS * HEAD_DIM elements of one token a program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (HEADS * HEAD_DIM + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    token = program // BLOCKS
    slot = tl.load(slots_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        element = (program % BLOCKS).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        mask = element < HEADS * HEAD_DIM
        head, d = (element // HEAD_DIM).to(tl.int64), element % HEAD_DIM
        k = tl.load(k_ptr + token * stride_kt + head * stride_kh + d, mask=mask)
        v = tl.load(v_ptr + token * stride_vt + head * stride_vh + d, mask=mask)
        page, place = slot // PAGE, slot % PAGE
        key_at = page * stride_key_page + place * stride_key_slot + head * stride_key_head + d
        value_at = page * stride_value_page + place * stride_value_slot + head * stride_value_head + d
        tl.store(key_ptr + key_at, as_cached(k, k_scale, key_ptr.dtype.element_ty), mask=mask)
        tl.store(value_ptr + value_at, as_cached(v, v_scale, value_ptr.dtype.element_ty), mask=mask)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device) or missing_float8(desc.device, desc.cache_dtype)


def specialize(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    new, cache = pointer(desc.dtype), pointer(desc.cache_dtype)
    types = (new, new, cache, cache, "*i64", *("i64",) * 11, "fp32", "fp32")
    multiples = (*range(4), *range(5, 15)) if desc.aligned else ()
    pdl = features.pdl and _grid(desc) < MANY_PROGRAMS
    constants = (desc.num_kv_heads, desc.head_dim, desc.page_size, _block(desc), pdl)
    return append_kv_kernel, Specialization(types, constants, multiples, NUM_WARPS, pdl)


def _block(desc: Desc) -> int:
    return min(MAX_BLOCK, max(128, triton.next_power_of_2(desc.num_kv_heads * desc.head_dim)))


def _grid(desc: Desc) -> int:
    return desc.num_tokens * -(-desc.num_kv_heads * desc.head_dim // _block(desc))


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(*specialize(desc, features(desc.device)), desc.device)
    grid, num_slots = _grid(desc), desc.num_pages * desc.page_size

    def run(
        scales: tuple[float, float],
        strides: Strides,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        launch(grid, (k, v, key_cache, value_cache, slot_mapping), *strides, num_slots, *scales)

    return run
