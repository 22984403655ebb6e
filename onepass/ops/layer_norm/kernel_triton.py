"""layer_norm in Triton: the row stays in registers, or is read a second time from the L2 when it is too long.

Bytes: x once in, y once out (with a residual: two in, two out); the weight and bias come from the L2. Flops: about
20 instructions an element, which an H200 can just issue at the rate its memory delivers.

The variance of a row in registers is centred on a pivot, the mean of the row's first K = 8 elements: with
d = x - pivot, sum(d) and sum(d^2) travel through one exchange between warps, where mean-then-variance takes two.
Cancellation is bounded: those elements are part of the row, so (mean - pivot)^2 is at most N / K times the variance,
and rounding costs the variance at most about N / K * 2^-24 of itself, 1.2e-4 at N = 16384, far below the rounding of
half precision. float32 needs better: its pivot is the mean. In a long row every lane keeps the mean of its columns and
the squares about it (Welford, 1962), and the lanes are put together at the end (Chan, Golub and LeVeque, 1979). What is
summed for a mean is scaled first, so that it does not overflow.
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
from onepass.ops.layer_norm import config as configs
from onepass.ops.triton_math import INTERPRETED, activate, narrow, widen
from onepass.ops.triton_rows import (
    FEW_ROWS,
    LONG_LOAD_STAGES,
    integer,
    load_columns,
    load_sum,
    reciprocal_root,
    rows_per_program,
    within,
)

if TYPE_CHECKING:
    from onepass.ops.layer_norm.op import Desc
    from onepass.ops.norm_call import RowStrides

PIVOT = tl.constexpr(8)
"""Elements whose mean centres the variance of half-precision rows."""

MAX_FLOAT32 = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _sum_both(a, b):
    """The sums along each row, [ROWS, 1] each, in one exchange between warps."""
    if INTERPRETED:  # NumPy sums pairwise only along the last axis
        a, b = tl.sum(a, axis=1), tl.sum(b, axis=1)
    else:
        a, b = tl.split(tl.sum(tl.join(a, b), axis=1))
    return a[:, None], b[:, None]


@triton.jit
def _affine(x, weight_ptr, weight, bias_ptr, bias, ACTIVATION: tl.constexpr, PTX: tl.constexpr):
    """activation(x * weight + bias), without what is None."""
    if weight_ptr is not None:
        x = x * widen(weight, PTX)
    if bias_ptr is not None:
        x = x + widen(bias, PTX)
    return activate(x, ACTIVATION, PTX)


@triton.jit
def layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    num_rows,
    N,
    stride_xm,
    stride_rm,
    stride_ym,
    stride_rom,
    eps,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
    FEW_ROWS: tl.constexpr,
):
    """ROWS rows a program, each in CHUNKS blocks that stay in registers. EVEN: N == BLOCK * CHUNKS.

    FEW_ROWS spends registers on latency: the weight is fetched together with x. With many rows the other programs of
    a multiprocessor hide that latency, and fewer registers make room for more of them. The arithmetic is the same.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    rows_mask = rows < num_rows
    lanes = tl.arange(0, BLOCK)[None, :]
    x_row, residual_row = rows * stride_xm, rows * stride_rm

    # All loads come before the first exchange between lanes: the compiler moves none across it.
    first_cols = tl.arange(0, PIVOT)[None, :]
    first_mask = rows_mask & (first_cols < N)
    first = widen(
        load_sum(x_ptr, residual_ptr, x_row + first_cols, residual_row + first_cols, first_mask, False), False
    )
    ts = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(rows_mask, cols, N, EVEN or chunk < CHUNKS - 1)
        t = load_sum(x_ptr, residual_ptr, x_row + cols, residual_row + cols, mask, PTX)
        ts = ts + (t,)
    ws, bs = (), ()
    if FEW_ROWS:
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            mask = within(lanes < BLOCK, cols, N, EVEN or chunk < CHUNKS - 1)
            ws = ws + (load_columns(weight_ptr, cols, mask),)
            bs = bs + (load_columns(bias_ptr, cols, mask),)
        if PDL and PTX:
            # A second time, which changes nothing for the next kernel: the compiler moves no load across this, and
            # would otherwise fetch the weight after x has arrived. Long rows of float32 have no registers for that.
            gdc_launch_dependents()

    if residual_out_ptr is not None:
        # residual_out may be x itself: no warp may store before every warp has read the first elements.
        tl.debug_barrier()
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            mask = within(rows_mask, cols, N, EVEN or chunk < CHUNKS - 1)
            tl.store(residual_out_ptr + rows * stride_rom + cols, ts[chunk], mask=mask)
    xs = ()
    for chunk in tl.static_range(CHUNKS):
        xs = xs + (widen(ts[chunk], PTX),)

    scale = 1.0 / N
    if x_ptr.dtype.element_ty == tl.float32:
        total = xs[0] * scale
        for chunk in tl.static_range(1, CHUNKS):
            total += xs[chunk] * scale
        centre = tl.sum(total, axis=1, keep_dims=True)
    else:
        centre = tl.sum(first * (1.0 / tl.minimum(N, PIVOT)), axis=1, keep_dims=True)

    total = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    ds = ()
    for chunk in tl.static_range(CHUNKS):
        d = xs[chunk] - centre
        if not EVEN and chunk == CHUNKS - 1:
            d = tl.where(chunk * BLOCK + lanes < N, d, 0.0)
        total += d
        squares += d * d
        ds = ds + (d,)
    total, squares = _sum_both(total, squares)
    offset = total * scale
    # The bound keeps rows whose squares overflow from inf - inf: their rstd is 0, as torch's is.
    rstd = reciprocal_root(squares * scale - tl.minimum(offset * offset, MAX_FLOAT32), eps)
    shift = -offset * rstd

    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN or chunk < CHUNKS - 1)
        if FEW_ROWS:
            w, b = ws[chunk], bs[chunk]
        else:
            w, b = load_columns(weight_ptr, cols, mask), load_columns(bias_ptr, cols, mask)
        y = _affine(ds[chunk] * rstd + shift, weight_ptr, w, bias_ptr, b, ACTIVATION, PTX)
        tl.store(y_ptr + rows * stride_ym + cols, narrow(y, y_ptr.dtype.element_ty), mask=rows_mask & mask)


@triton.jit
def layer_norm_long_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    num_rows,
    N,
    stride_xm,
    stride_rm,
    stride_ym,
    stride_rom,
    eps,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
    LOAD_STAGES: tl.constexpr,
):
    """One row a program, BLOCK columns at a time: statistics first, then the row again, last block first.

    EVEN: N is a multiple of BLOCK. N is at least BLOCK.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * stride_ym
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
        residual_out_ptr += row * stride_rom
    lanes = tl.arange(0, BLOCK)[None, :]
    scale = 1.0 / N
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    # Each lane keeps the mean of its columns and the sum of squares about it.
    means = tl.zeros([1, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=LOAD_STAGES):
        cols = start + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN)
        t = load_sum(x_ptr, residual_ptr, cols, cols, mask, PTX)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + cols, t, mask=mask)
        x = widen(t, PTX)
        d = x - means
        if not EVEN:
            d = tl.where(cols < N, d, 0.0)
        means += d * (1.0 / (start // BLOCK + 1))
        squares += d * (x - means)
    counts = (last // BLOCK + tl.where(last + lanes < N, 1, 0)).to(tl.float32)
    mean = tl.sum(means * (counts * scale), axis=1, keep_dims=True)
    d = means - mean
    rstd = reciprocal_root(tl.sum(squares + counts * d * d, axis=1, keep_dims=True) * scale, eps)

    normed_ptr = x_ptr
    if residual_out_ptr is not None:
        # The sums were stored by other threads of this program.
        tl.debug_barrier()
        normed_ptr = residual_out_ptr
    for start in tl.range(0, N, BLOCK):
        cols = last - start + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN)
        x = widen(tl.load(normed_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first"), PTX)
        w, b = load_columns(weight_ptr, cols, mask), load_columns(bias_ptr, cols, mask)
        y = _affine((x - mean) * rstd, weight_ptr, w, bias_ptr, b, ACTIVATION, PTX)
        tl.store(y_ptr + cols, narrow(y, y_ptr.dtype.element_ty), mask=mask)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, config: configs.Config, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    ptx = features.ptx and desc.dtype != torch.float32
    present = desc.dtype if desc.has_residual else None
    types = (
        pointer(desc.dtype),
        pointer(present),
        pointer(desc.weight_dtype),
        pointer(desc.bias_dtype),
        pointer(desc.dtype),
        pointer(present),
        *(integer(desc.num_rows), integer(desc.hidden_size), "i64", "i64", "i64", "i64", "fp32"),
    )
    pointers_and_strides = (0, 1, 2, 3, 4, 5, 8, 9, 10, 11) if desc.aligned else ()
    multiples = pointers_and_strides + ((7,) if desc.hidden_size % 16 == 0 else ())
    kernel: Any
    constants: tuple[Any, ...]
    if config.chunks == 0:
        kernel = layer_norm_long_kernel
        even = desc.hidden_size % config.block == 0
        constants = (config.block, even, desc.activation, ptx, features.pdl, LONG_LOAD_STAGES)
    else:
        kernel = layer_norm_kernel
        even = desc.hidden_size == config.block * config.chunks
        rows = rows_per_program(desc.num_rows, desc.dtype.itemsize, config)
        few_rows = desc.num_rows <= FEW_ROWS
        constants = (config.block, config.chunks, rows, even, desc.activation, ptx, features.pdl, few_rows)
    return kernel, Specialization(types, constants, multiples, config.num_warps, features.pdl)


def prepare(desc: Desc, config: configs.Config | None = None) -> Callable[..., None]:
    """The tuner says which config; calls take the chosen one."""
    config = config or configs.choose(desc)
    launch = load(*specialize(desc, config, features(desc.device)), desc.device)
    grid = -(-desc.num_rows // rows_per_program(desc.num_rows, desc.dtype.itemsize, config))
    num_rows, hidden_size = desc.num_rows, desc.hidden_size

    def run(
        strides: RowStrides,
        eps: float,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        y: Tensor,
        residual_out: Tensor | None,
    ) -> None:
        launch(grid, (x, residual, weight, bias, y, residual_out), num_rows, hidden_size, *strides, eps)

    return run
