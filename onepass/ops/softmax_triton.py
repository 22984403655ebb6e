"""The softmax statistics of a row in Triton: what softmax, logsumexp and softmax_weighted_sum share.

A row, or a part of it, comes down to its maximum m and the sum s of exp2((x - m) * scale), scale = log2(e) /
temperature. Parts are put together by their maxima (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018). Special values take no branches: tl.max skips NaN, which then makes s NaN; sums about +inf are NaN by
inf - inf; a part that is all -inf has m = -inf and s = 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, pointer
from onepass.ops.triton_math import widen

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_FLOAT32 = tl.constexpr(3.4028234663852886e38)
MIN_FLOAT32 = tl.constexpr(1.1754943508222875e-38)
NO_COLUMN = tl.constexpr(2**62)

CHUNK_BYTES = 8192
"""What a program holds of a long row."""

NUM_WARPS = 4

MAX_PARTS = 4096
"""Chunks whose statistics are put together at once."""

MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch is left out: it hides the launch, and each program starts 1.2 ns later."""


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
def row_scale(temperature, GREEDY: tl.constexpr):
    """The scale of the logits. At temperature 0 that of 1: the sum then shows whether the row is NaN."""
    if GREEDY:
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
    return scale_of(temperature)


@triton.jit
def terms(x, centre, scale, PTX: tl.constexpr):
    """What is summed of a part. -inf gives 0, also past the row's end, where the centre is finite."""
    return exp2((x - centre) * scale, PTX)


@triton.jit
def finite_centre(largest):
    """What is subtracted from logits: their maximum, or 0 where that is infinite."""
    return tl.where(tl.abs(largest) == float("inf"), 0.0, largest)


@triton.jit
def first_lane(x, largest, lanes):
    """The first lane that holds the maximum; 2^31 - 1 where none does."""
    return tl.min(tl.where(x == largest, lanes, 2**31 - 1), axis=0)


@triton.jit
def merge_parts(
    maxima_ptr, sums_ptr, start, num_parts, scale, PARTS: tl.constexpr, ROUNDS: tl.constexpr, PTX: tl.constexpr
):
    """The maximum of a row and its sum about that, or about 0 where the maximum is infinite, from those of its parts.

    Lane i takes the parts i, i + PARTS, ..., ROUNDS of them; num_parts is at most PARTS * ROUNDS.
    """
    lanes = tl.arange(0, PARTS)
    largest = tl.full([PARTS], float("-inf"), tl.float32)
    for i in tl.static_range(ROUNDS):
        mask = i * PARTS + lanes < num_parts
        largest = tl.maximum(largest, tl.load(maxima_ptr + start + i * PARTS + lanes, mask=mask, other=float("-inf")))
    whole = tl.max(largest, axis=0)
    centre = finite_centre(whole)
    total = tl.zeros([PARTS], tl.float32)
    for i in tl.static_range(ROUNDS):
        mask = i * PARTS + lanes < num_parts
        m = tl.load(maxima_ptr + start + i * PARTS + lanes, mask=mask, other=float("-inf"))
        s = tl.load(sums_ptr + start + i * PARTS + lanes, mask=mask, other=0.0)
        total += s * exp2((m - centre) * scale, PTX)
    return whole, tl.sum(total, axis=0)


@triton.jit
def statistics_kernel(
    x_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    firsts_ptr,
    N,
    num_chunks,
    stride_xm,
    stride_tm,
    temperature,
    CHUNK: tl.constexpr,
    GREEDY: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each chunk of CHUNK columns the maximum, the sum and the maximum's first column, each [rows, num_chunks]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    row = program // num_chunks
    start = (program % num_chunks) * CHUNK
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row * stride_tm)
    scale = row_scale(temperature, GREEDY)
    lanes = tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * stride_xm + start + lanes, mask=lanes < N - start, other=float("-inf"))
    x = widen(x, PTX and x_ptr.dtype.element_ty != tl.float32)
    largest = tl.max(x, axis=0)
    total = tl.sum(terms(x, finite_centre(largest), scale, PTX), axis=0)
    tl.store(maxima_ptr + program, largest)
    tl.store(sums_ptr + program, total)
    if GREEDY:
        tl.store(firsts_ptr + program, start + first_lane(x, largest, lanes))


class Chunks(NamedTuple):
    """How a long row is cut. It depends on N and the dtype alone, and so do the bits of a row."""

    size: int
    """Columns of a chunk."""
    number: int
    parts: int
    """Chunks that `merge_parts` takes at once."""

    @property
    def rounds(self) -> int:
        return -(-self.number // self.parts)


def chunks_of(n: int, element_size: int) -> Chunks:
    """The chunks of a row of n elements."""
    size = CHUNK_BYTES // element_size
    number = -(-n // size)
    return Chunks(size, number, min(MAX_PARTS, triton.next_power_of_2(number)))


def specialize_statistics(
    dtype: torch.dtype, num_rows: int, n: int, aligned: bool, per_row: bool, greedy: bool, features: Features
) -> tuple[Any, Specialization]:
    """`statistics_kernel` and what it is compiled for."""
    chunks = chunks_of(n, dtype.itemsize)
    pdl = features.pdl and num_rows * chunks.number < MANY_PROGRAMS
    special = Specialization(
        (
            *(pointer(dtype), pointer(torch.float32 if per_row else None)),
            *("*fp32", "*fp32", pointer(torch.int64 if greedy else None)),
            *("i64", "i32", "i64", "i64", "fp32"),
        ),
        (chunks.size, greedy, features.ptx, pdl),
        ((0, 7) if aligned else ()) + ((5,) if n % 16 == 0 else ()),
        NUM_WARPS,
        pdl,
    )
    return statistics_kernel, special
