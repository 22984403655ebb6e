"""softmax in Triton: the row stays in registers; a longer one is read twice, by many programs.

A long row is cut into chunks of 8 KB, so that one row fills the GPU. One kernel leaves each chunk's maximum and sum in
a workspace, the next puts a row's together in a fixed order and writes.

Bytes: short rows once in and once out. Long rows twice in, the second time from the L2 where that holds the batch. On
an H200, 128256 float32: 3.4 µs for one row, 25 for 64, 98 for 256 (a copy: 2.0, 17, 63).
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
    MANY_PROGRAMS,
    NO_COLUMN,
    NUM_WARPS,
    chunks_of,
    merge_parts,
    row_scale,
    specialize_statistics,
    terms,
)
from onepass.ops.triton_math import narrow, widen
from onepass.ops.triton_rows import integer, rows_per_program, within

if TYPE_CHECKING:
    from onepass.ops.softmax.op import Desc, RowStrides


@triton.jit
def _results(e, factor, is_first, temperature, GREEDY: tl.constexpr):
    """The probabilities; at temperature 0 one of them is 1. A row that is NaN has a factor of NaN or infinity."""
    y = e * factor
    if GREEDY:
        y = tl.where(temperature == 0.0, tl.where(is_first, 1.0, 0.0) + 0.0 * factor, y)
    return y


@triton.jit
def softmax_kernel(
    x_ptr,
    temperature_ptr,
    y_ptr,
    num_rows,
    N,
    stride_xm,
    stride_tm,
    stride_ym,
    temperature,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    GREEDY: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows a program, each in CHUNKS blocks that stay in registers. EVEN: N == BLOCK * CHUNKS.

    GREEDY: a temperature may be 0. Such a row's sum is taken at temperature 1, to see whether the row is NaN.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    rows_mask = rows < num_rows
    lanes = tl.arange(0, BLOCK)[None, :]
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + rows * stride_tm, mask=rows_mask, other=1.0)
    scale = row_scale(temperature, GREEDY)

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
    first = 0
    if GREEDY:
        firsts = tl.where(xs[0] == largest, lanes, N)
        for chunk in tl.static_range(1, CHUNKS):
            firsts = tl.minimum(firsts, tl.where(xs[chunk] == largest, chunk * BLOCK + lanes, N))
        first = tl.min(firsts, axis=1, keep_dims=True)

    centre = tl.where(largest == float("-inf"), 0.0, largest)
    es = ()
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        e = terms(xs[chunk], centre, scale, PTX)
        total += e
        es = es + (e,)
    total = tl.sum(total, axis=1, keep_dims=True)
    factor = 1.0 / total

    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(rows_mask, cols, N, EVEN or chunk < CHUNKS - 1)
        y = _results(es[chunk], factor, cols == first, temperature, GREEDY)
        tl.store(y_ptr + rows * stride_ym + cols, narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_kernel(
    x_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    firsts_ptr,
    y_ptr,
    num_rows,
    N,
    num_chunks,
    stride_xm,
    stride_tm,
    stride_ym,
    temperature,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    GREEDY: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The result, from the statistics of the row's chunks. The last rows first: they are in the L2.

    num_chunks is at most PARTS * ROUNDS.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    row = num_rows - 1 - program // num_chunks
    start = (program % num_chunks) * CHUNK
    lanes = tl.arange(0, CHUNK)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row * stride_tm)
    scale = row_scale(temperature, GREEDY)
    x = tl.load(x_ptr + row * stride_xm + start + lanes, mask=lanes < N - start, other=float("-inf"))
    largest, total = merge_parts(maxima_ptr, sums_ptr, row * num_chunks, num_chunks, scale, PARTS, ROUNDS, PTX)
    first = start
    if GREEDY:
        firsts = tl.full([PARTS], NO_COLUMN, tl.int64)
        for i in tl.static_range(ROUNDS):
            parts = i * PARTS + tl.arange(0, PARTS)
            m = tl.load(maxima_ptr + row * num_chunks + parts, mask=parts < num_chunks, other=float("-inf"))
            holds = (m == largest) & (parts < num_chunks)
            at = tl.load(firsts_ptr + row * num_chunks + parts, mask=holds, other=NO_COLUMN)
            firsts = tl.minimum(firsts, at)
        first = tl.min(firsts, axis=0)
    factor = tl.where(tl.abs(largest) == float("inf"), float("nan"), 1.0 / total)
    e = terms(widen(x, PTX and x_ptr.dtype.element_ty != tl.float32), largest, scale, PTX)
    y = narrow(_results(e, factor, lanes == first - start, temperature, GREEDY), y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * stride_ym + start + lanes, y, mask=lanes < N - start)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, features: Features, config: Config | None = None) -> tuple[Any, Specialization]:
    """The kernel for rows that fit in registers, and what it is compiled for."""
    block, chunks, _, num_warps = config = config or heuristic(desc.vocab_size, desc.dtype.itemsize)
    types = (
        pointer(desc.dtype),
        _temperatures(desc),
        pointer(desc.dtype),
        *(integer(desc.num_rows), "i32", "i64", "i64", "i64", "fp32"),
    )
    multiples = (0, 2, 5, 7) if desc.aligned else ()
    if desc.vocab_size % 16 == 0:
        multiples += (4,)
    rows = rows_per_program(desc.num_rows, desc.dtype.itemsize, config)
    even = desc.vocab_size == block * chunks
    pdl = features.pdl and desc.num_rows < MANY_PROGRAMS * rows
    constants = (block, chunks, rows, even, desc.greedy, features.ptx, pdl)
    return softmax_kernel, Specialization(types, constants, multiples, num_warps, pdl)


def _temperatures(desc: Desc) -> str:
    return pointer(torch.float32 if desc.per_row else None)


def specialize_long(desc: Desc, features: Features) -> tuple[tuple[Any, Specialization], tuple[Any, Specialization]]:
    """The two kernels for longer rows."""
    chunks = chunks_of(desc.vocab_size, desc.dtype.itemsize)
    statistics = specialize_statistics(
        desc.dtype, desc.num_rows, desc.vocab_size, desc.aligned, desc.per_row, desc.greedy, features
    )
    firsts = pointer(torch.int64 if desc.greedy else None)
    pdl = features.pdl and desc.num_rows * chunks.number < MANY_PROGRAMS
    finish = Specialization(
        (
            *(pointer(desc.dtype), _temperatures(desc), "*fp32", "*fp32", firsts, pointer(desc.dtype)),
            *("i64", "i64", "i32", "i64", "i64", "i64", "fp32"),
        ),
        (chunks.size, chunks.parts, chunks.rounds, desc.greedy, features.ptx, pdl),
        ((0, 5, 9, 11) if desc.aligned else ()) + ((7,) if desc.vocab_size % 16 == 0 else ()),
        NUM_WARPS,
        pdl,
    )
    return statistics, (finish_kernel, finish)


def prepare(desc: Desc) -> Callable[..., None]:
    return _prepare_long(desc) if desc.vocab_size > MAX_RESIDENT else _prepare_short(desc)


def _prepare_short(desc: Desc) -> Callable[..., None]:
    config = heuristic(desc.vocab_size, desc.dtype.itemsize)
    launch = load(*specialize(desc, features(desc.device), config), desc.device)
    grid = -(-desc.num_rows // rows_per_program(desc.num_rows, desc.dtype.itemsize, config))
    num_rows, vocab_size = desc.num_rows, desc.vocab_size

    def run(strides: RowStrides, temperature: float, logits: Tensor, temperatures: Tensor | None, out: Tensor) -> None:
        launch(grid, (logits, temperatures, out), num_rows, vocab_size, *strides, temperature)

    return run


def _prepare_long(desc: Desc) -> Callable[..., None]:
    statistics, finish = (load(*kernel, desc.device) for kernel in specialize_long(desc, features(desc.device)))
    num_rows, vocab_size = desc.num_rows, desc.vocab_size
    num_chunks = chunks_of(vocab_size, desc.dtype.itemsize).number
    grid = num_rows * num_chunks

    def run(strides: RowStrides, temperature: float, logits: Tensor, temperatures: Tensor | None, out: Tensor) -> None:
        maxima, sums = torch.empty((2, grid), dtype=torch.float32, device=logits.device)
        firsts = torch.empty(grid, dtype=torch.int64, device=logits.device) if desc.greedy else None
        parts = (maxima, sums, firsts)
        numbers = (vocab_size, num_chunks, strides.logits, strides.temperature)
        statistics(grid, (logits, temperatures, *parts), *numbers, temperature)
        numbers = (num_rows, *numbers, strides.out)
        finish(grid, (logits, temperatures, *parts, out), *numbers, temperature)

    return run
