"""logsumexp in Triton: the row stays in registers; a longer one is shared by many programs, and a second kernel puts
their results together.

Bytes: x once in. About 6 instructions an element.
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
from onepass.ops.row_config import MAX_RESIDENT, Config, heuristic
from onepass.ops.softmax_triton import (
    LOG2_E,
    MANY_PROGRAMS,
    chunks_of,
    finite_centre,
    merge_parts,
    specialize_statistics,
    terms,
)
from onepass.ops.triton_math import widen
from onepass.ops.triton_rows import integer, rows_per_program, within

if TYPE_CHECKING:
    from onepass.ops.logsumexp.op import Desc, RowStrides


@triton.jit
def logsumexp_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    N,
    stride_xm,
    stride_om,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows a program, each in CHUNKS blocks that stay in registers. EVEN: N == BLOCK * CHUNKS."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    rows_mask = rows < num_rows
    lanes = tl.arange(0, BLOCK)[None, :]
    xs = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(rows_mask, cols, N, EVEN or chunk < CHUNKS - 1)
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=float("-inf"))
        xs = xs + (widen(x, PTX and x_ptr.dtype.element_ty != tl.float32),)
    largest = xs[0]
    for chunk in tl.static_range(1, CHUNKS):
        largest = tl.maximum(largest, xs[chunk])
    largest = tl.max(largest, axis=1, keep_dims=True)
    centre = finite_centre(largest)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        total += terms(xs[chunk], centre, LOG2_E, PTX)
    total = tl.sum(total, axis=1, keep_dims=True)
    tl.store(out_ptr + rows * stride_om, largest + tl.log(total), mask=rows_mask)


@triton.jit
def merge_kernel(
    maxima_ptr,
    sums_ptr,
    out_ptr,
    num_chunks,
    stride_om,
    PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program, from the statistics of its chunks; num_chunks is at most PARTS * ROUNDS."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    largest, total = merge_parts(maxima_ptr, sums_ptr, row * num_chunks, num_chunks, LOG2_E, PARTS, ROUNDS, PTX)
    tl.store(out_ptr + row * stride_om, largest + tl.log(total))


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, features: Features, config: Config | None = None) -> tuple[Any, Specialization]:
    """The kernel for rows that fit in registers, and what it is compiled for."""
    block, chunks, _, num_warps = config = config or heuristic(desc.num_cols, desc.dtype.itemsize)
    types = (pointer(desc.dtype), "*fp32", integer(desc.num_rows), "i32", "i64", "i64")
    multiples = ((0, 4) if desc.aligned else ()) + ((3,) if desc.num_cols % 16 == 0 else ())
    rows = rows_per_program(desc.num_rows, desc.dtype.itemsize, config)
    pdl = features.pdl and desc.num_rows < MANY_PROGRAMS * rows
    constants = (block, chunks, rows, desc.num_cols == block * chunks, features.ptx, pdl)
    return logsumexp_kernel, Specialization(types, constants, multiples, num_warps, pdl)


def specialize_long(desc: Desc, features: Features) -> tuple[tuple[Any, Specialization], tuple[Any, Specialization]]:
    """The two kernels for longer rows."""
    chunks = chunks_of(desc.num_cols, desc.dtype.itemsize)
    pdl = features.pdl and desc.num_rows < MANY_PROGRAMS
    merge = Specialization(
        ("*fp32", "*fp32", "*fp32", "i32", "i64"),
        (chunks.parts, chunks.rounds, features.ptx, pdl),
        (),
        1 if chunks.parts <= 128 else 4,
        pdl,
    )
    statistics = specialize_statistics(desc.dtype, desc.num_rows, desc.num_cols, desc.aligned, False, False, features)
    return statistics, (merge_kernel, merge)


def prepare(desc: Desc) -> Callable[..., None]:
    return _prepare_long(desc) if desc.num_cols > MAX_RESIDENT else _prepare_short(desc)


def _prepare_short(desc: Desc) -> Callable[..., None]:
    config = heuristic(desc.num_cols, desc.dtype.itemsize)
    launch = load(*specialize(desc, features(desc.device), config), desc.device)
    grid = -(-desc.num_rows // rows_per_program(desc.num_rows, desc.dtype.itemsize, config))
    num_rows, num_cols = desc.num_rows, desc.num_cols

    def run(strides: RowStrides, x: Tensor, out: Tensor) -> None:
        launch(grid, (x, out), num_rows, num_cols, *strides)

    return run


def _prepare_long(desc: Desc) -> Callable[..., None]:
    statistics, merge = (load(*kernel, desc.device) for kernel in specialize_long(desc, features(desc.device)))
    num_rows, num_cols = desc.num_rows, desc.num_cols
    num_chunks = chunks_of(num_cols, desc.dtype.itemsize).number
    grid = num_rows * num_chunks

    def run(strides: RowStrides, x: Tensor, out: Tensor) -> None:
        maxima, sums = torch.empty((2, grid), dtype=torch.float32, device=x.device)
        statistics(grid, (x, None, maxima, sums, None), num_cols, num_chunks, strides.x, 0, 1.0)
        merge(num_rows, (maxima, sums, out), num_chunks, strides.out)

    return run
