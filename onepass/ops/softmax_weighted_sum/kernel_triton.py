"""softmax_weighted_sum in Triton: values pass once through registers, weighted on the way.

Rows with values of their own: a program takes one row and BLOCK_D columns. Each of BLOCK_N lanes walks its own part of
the row and keeps a maximum, a sum and BLOCK_D weighted sums of its own, rescaled as its maximum grows; the lanes are
put together once, at the end, so that nothing in the loop waits for another lane.

Rows that share their values: a product of matrices whose left one is made on the fly. A program takes BLOCK_M rows and
BLOCK_D columns.

Bytes: the values once, logits once a block of columns (from the L2 after the first). About 4 instructions a value for
rows of their own; for shared values the matrix units do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.softmax_triton import LOG2_E, MANY_PROGRAMS, exp2
from onepass.ops.triton_math import INTERPRETED, narrow, widen

if TYPE_CHECKING:
    from onepass.ops.softmax_weighted_sum.op import Desc, Strides

NUM_WARPS = 4

BLOCK_M = 64
"""Rows of a product, also where there are fewer: a row's bits are then the same in every batch."""

PRODUCT_WARPS = 8

ONE_BLOCK = 32
"""Up to this many values, a program takes all of a row's at once."""

STAGES = 4
"""Blocks of values in flight."""

PRODUCT_STAGES = {torch.float32: 2, torch.bfloat16: 3, torch.float16: 3}
"""The same in products: with one more, float32 runs out of registers, and half precision of shared memory on AMD."""


@triton.jit
def _centre(largest):
    """What is subtracted: the maximum, or 0 while all is -inf."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def own_values_kernel(
    logits_ptr,
    values_ptr,
    out_ptr,
    N,
    D,
    blocks_per_row,
    stride_lm,
    stride_vm,
    stride_vn,
    stride_om,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and BLOCK_D columns a program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) // blocks_per_row
    cols = (tl.program_id(0) % blocks_per_row) * BLOCK_D + tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    logits_ptr += row * stride_lm
    values_ptr += row * stride_vm
    cols_mask = (cols < D)[None, :]
    largest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        n = start + lanes
        x = widen(tl.load(logits_ptr + n, mask=n < N, other=float("-inf")), False)
        at = n.to(tl.int64)[:, None] * stride_vn + cols[None, :]
        v = widen(tl.load(values_ptr + at, mask=(n < N)[:, None] & cols_mask, other=0.0), PTX)
        grown = tl.maximum(largest, x)
        shrink = exp2((largest - _centre(grown)) * LOG2_E, PTX)
        weight = exp2((x - _centre(grown)) * LOG2_E, PTX)
        total = total * shrink + weight
        sums = sums * shrink[:, None] + weight[:, None] * v
        largest = grown
    share = exp2((largest - tl.max(largest, axis=0)) * LOG2_E, PTX)
    share = tl.where(share == share, share / tl.sum(total * share, axis=0), float("nan"))
    result = tl.sum(sums * share[:, None], axis=0)
    tl.store(out_ptr + row * stride_om + cols, narrow(result, out_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def shared_values_kernel(
    logits_ptr,
    values_ptr,
    out_ptr,
    num_rows,
    N,
    D,
    blocks_per_row,
    stride_lm,
    stride_vn,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_D columns a program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = (tl.program_id(0) // blocks_per_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks_per_row) * BLOCK_D + tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    rows_mask, cols_mask = (rows < num_rows)[:, None], (cols < D)[None, :]
    logits_ptr += rows[:, None] * stride_lm
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        n = start + lanes
        x = widen(tl.load(logits_ptr + n[None, :], mask=rows_mask & (n < N)[None, :], other=float("-inf")), False)
        at = n.to(tl.int64)[:, None] * stride_vn + cols[None, :]
        v = tl.load(values_ptr + at, mask=(n < N)[:, None] & cols_mask, other=0.0)
        grown = tl.maximum(largest, tl.max(x, axis=1))
        shrink = exp2((largest - _centre(grown)) * LOG2_E, PTX)
        weight = exp2((x - _centre(grown)[:, None]) * LOG2_E, PTX)
        total = total * shrink + tl.sum(weight, axis=1)
        if INTERPRETED:  # it multiplies bfloat16 wrongly
            sums = sums * shrink[:, None] + tl.dot(widen(narrow(weight, dtype), False), widen(v, False))
        elif dtype == tl.float32:
            # A product of its own for each block keeps long sums accurate; as an addition it would be folded into one.
            product = tl.dot(weight, v, input_precision="ieee")
            sums = tl.fma(sums, tl.broadcast_to(shrink[:, None], sums.shape), product)
        else:
            sums = tl.dot(narrow(weight, dtype), v, sums * shrink[:, None])
        largest = grown
    factor = 1.0 / total
    result = sums * factor[:, None]
    at = rows[:, None] * stride_om + cols[None, :]
    tl.store(out_ptr + at, narrow(result, dtype), mask=rows_mask & cols_mask)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def _blocks(desc: Desc) -> tuple[int, int]:
    """(BLOCK_N, BLOCK_D)."""
    widest = max(16, triton.next_power_of_2(desc.width))
    if desc.shared:
        return (64, min(128, widest)) if desc.dtype != torch.float32 else (32, min(32, widest))
    if desc.num_values <= ONE_BLOCK:
        # All values at once, 8 KB of them.
        block_n = triton.next_power_of_2(desc.num_values)
        return block_n, min(8192 // desc.dtype.itemsize // block_n, widest)
    # 128 bytes of a value; with fewer, more values: the lanes hold the same number of elements.
    block_d = min(128 // desc.dtype.itemsize, widest)
    return 4096 // desc.dtype.itemsize // block_d, block_d


def grid(desc: Desc) -> int:
    blocks_per_row = -(-desc.width // _blocks(desc)[1])
    return blocks_per_row * (-(-desc.num_rows // BLOCK_M) if desc.shared else desc.num_rows)


def specialize(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    block_n, block_d = _blocks(desc)
    pdl = features.pdl and grid(desc) < MANY_PROGRAMS
    pointers = (pointer(desc.logits_dtype), pointer(desc.dtype), pointer(desc.dtype))
    whole_vectors = desc.width % 16 == 0
    if desc.shared:
        types = (*pointers, "i64", "i32", "i32", "i32", "i64", "i64", "i64")
        multiples = ((1, 2, 8, 9) if desc.aligned else ()) + ((5,) if whole_vectors else ())
        constants = (BLOCK_M, block_n, block_d, PRODUCT_STAGES[desc.dtype], features.ptx, pdl)
        return shared_values_kernel, Specialization(types, constants, multiples, PRODUCT_WARPS, pdl)
    types = (*pointers, "i32", "i32", "i32", "i64", "i64", "i64", "i64")
    multiples = ((1, 2, 7, 8, 9) if desc.aligned else ()) + ((4,) if whole_vectors else ())
    constants = (block_n, block_d, STAGES if desc.num_values > block_n else 1, features.ptx, pdl)
    return own_values_kernel, Specialization(types, constants, multiples, NUM_WARPS, pdl)


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(*specialize(desc, features(desc.device)), desc.device)
    programs = grid(desc)
    n, width = desc.num_values, desc.width
    blocks_per_row = -(-width // _blocks(desc)[1])

    def run_own(strides: Strides, logits: Tensor, values: Tensor, out: Tensor) -> None:
        launch(programs, (logits, values, out), n, width, blocks_per_row, *strides)

    def run_shared(strides: Strides, logits: Tensor, values: Tensor, out: Tensor) -> None:
        numbers = (desc.num_rows, n, width, blocks_per_row, strides.logits, strides.values, strides.out)
        launch(programs, (logits, values, out), *numbers)

    return run_shared if desc.shared else run_own
