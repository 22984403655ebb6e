"""The softmax statistics of a row in Triton: what softmax, logsumexp and softmax_weighted_sum share.

A row, or a part of it, comes down to its maximum m and the sum s of exp2((x - m) * scale), scale = log2(e) /
temperature. Parts are put together by their maxima (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018). Special values take no branches: tl.max skips NaN, which then makes s NaN; +inf makes s NaN by
inf - inf; a part that is all -inf has m = -inf and s = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_FLOAT32 = tl.constexpr(3.4028234663852886e38)
MIN_FLOAT32 = tl.constexpr(1.1754943508222875e-38)
NO_COLUMN = tl.constexpr(2**62)

CHUNK = 4096
"""Columns of a long row that a program holds at once."""

NUM_WARPS = 4

MAX_PARTS = 4096
"""Chunks whose statistics are put together at once."""

FEW_CHUNKS = 2048
CHUNKS_OF_MANY = 2


@triton.jit
def exp2(x, PTX: tl.constexpr):
    """2^x in float32; a subnormal result is 0. -inf gives 0 and NaN stays."""
    if PTX:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature; NaN where that is negative, infinite or NaN.

    Kept in the normal numbers, so that 0 * scale is 0 and -inf * scale is -inf.
    """
    scale = LOG2_E / temperature
    scale = tl.where(scale > MAX_FLOAT32, MAX_FLOAT32, scale)
    scale = tl.where(scale < MIN_FLOAT32, MIN_FLOAT32, scale)
    return tl.where((temperature >= 0.0) & (temperature < float("inf")), scale, float("nan"))


@triton.jit
def terms(x, largest, scale, PTX: tl.constexpr):
    """What is summed of a part with this maximum. -inf gives 0, also past the row's end and where all is -inf."""
    return exp2((x - tl.where(largest == float("-inf"), 0.0, largest)) * scale, PTX)


@triton.jit
def first_lane(x, largest, lanes):
    """The first lane that holds the maximum; 2^31 - 1 where none does."""
    return tl.min(tl.where(x == largest, lanes, 2**31 - 1), axis=0)


@triton.jit
def merge_parts(
    maxima_ptr, sums_ptr, start, num_parts, scale, PARTS: tl.constexpr, ROUNDS: tl.constexpr, PTX: tl.constexpr
):
    """The maximum and the sum of a row from those of its parts; the sum is NaN where all is -inf.

    Lane i takes the parts i, i + PARTS, ..., ROUNDS of them; num_parts is at most PARTS * ROUNDS.
    """
    lanes = tl.arange(0, PARTS)
    largest = tl.full([PARTS], float("-inf"), tl.float32)
    for i in tl.static_range(ROUNDS):
        mask = i * PARTS + lanes < num_parts
        largest = tl.maximum(largest, tl.load(maxima_ptr + start + i * PARTS + lanes, mask=mask, other=float("-inf")))
    whole = tl.max(largest, axis=0)
    total = tl.zeros([PARTS], tl.float32)
    for i in tl.static_range(ROUNDS):
        mask = i * PARTS + lanes < num_parts
        m = tl.load(maxima_ptr + start + i * PARTS + lanes, mask=mask, other=float("-inf"))
        s = tl.load(sums_ptr + start + i * PARTS + lanes, mask=mask, other=0.0)
        total += s * exp2((m - whole) * scale, PTX)
    return whole, tl.sum(total, axis=0)


def chunks_a_program(num_rows: int, num_chunks: int) -> int:
    """How many chunks a program takes: one where there are few, so that one row fills the GPU.

    A chunk's arithmetic and the order of the merge are the same in both.
    """
    return 1 if num_rows * num_chunks <= FEW_CHUNKS else CHUNKS_OF_MANY
