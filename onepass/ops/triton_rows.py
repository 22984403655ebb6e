"""What Triton kernels that reduce rows share: loads with a residual, the root, how many rows a program takes."""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops.row_config import WARP_BYTES, Config
from onepass.ops.triton_math import add_rounded

FEW_ROWS = 1024
"""Up to this many rows, a kernel's time is the latency of one program."""

LONG_LOAD_STAGES = 4
"""Blocks in flight while a long row's statistics are taken."""


@triton.jit
def within(mask, cols, N, FULL: tl.constexpr):
    """The mask, and columns below N. FULL: they all are."""
    if not FULL:
        mask = mask & (cols < N)
    return mask


@triton.jit
def load_sum(x_ptr, residual_ptr, x_at, residual_at, mask, PTX: tl.constexpr):
    """x; with a residual the sum, rounded to x's dtype."""
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0)
    if residual_ptr is not None:
        x = add_rounded(x, tl.load(residual_ptr + residual_at, mask=mask, other=0.0), PTX)
    return x


@triton.jit
def reciprocal_root(variance, eps):
    """1 / sqrt(variance + eps), also where that is subnormal, which rsqrt takes for zero."""
    # Rounding may leave a tiny negative variance for a constant row; NaN must stay NaN.
    square = tl.where(variance < 0.0, 0.0, variance) + eps
    small = square < 2.0**-100
    return tl.rsqrt(tl.where(small, square * 2.0**80, square)) * tl.where(small, 2.0**40, 1.0)


@triton.jit
def load_columns(ptr, cols, mask):
    """The weight or the bias; where there is none, a number that nobody reads."""
    if ptr is None:
        columns = 0.0
    else:
        columns = tl.load(ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    return columns


def integer(size: int) -> str:
    """The type of a size; a block past it must not overflow."""
    return "i32" if size < 2**31 - 2**16 else "i64"


def rows_per_program(num_rows: int, element_size: int, config: Config) -> int:
    """The config's; of few rows one, where a block spans all lanes, so that its layout and its sums stay the same."""
    spans_all_lanes = config.block * element_size == config.num_warps * WARP_BYTES
    return 1 if num_rows <= FEW_ROWS and spans_all_lanes else config.rows
