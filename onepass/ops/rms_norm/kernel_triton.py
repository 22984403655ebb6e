"""rms_norm in Triton: the row stays in registers, or is read a second time from the L2 when it is too long.

Bytes: x once in, y once out (with a residual: two in, two out); the weight comes from the L2. Instructions: 5 an
element with a residual, a fifth of what an H200 issues while these bytes move, so that memory is the limit. For few
rows the limit is the latency of one: loads, one exchange between warps, stores. The loads of x, residual and weight
travel together, and the sum is stored while the exchange goes on.
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
from onepass.ops.row_config import Config, heuristic
from onepass.ops.triton_math import activate, multiply_rounded, narrow, widen
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
    from onepass.ops.norm_call import RowStrides
    from onepass.ops.rms_norm.op import Desc


@triton.jit
def _finish(
    x,
    weight_ptr,
    weight,
    weight_offset,
    dtype: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PTX: tl.constexpr,
):
    """activation(x * (weight_offset + weight)) in dtype. ROUNDS: x is rounded to dtype first."""
    if ROUNDS and weight_ptr.dtype.element_ty == dtype and not OFFSET and ACTIVATION is None:
        y = multiply_rounded(narrow(x, dtype), weight, PTX)
    else:
        if ROUNDS:
            x = widen(narrow(x, dtype), PTX)
        if weight_ptr is not None:
            w = widen(weight, PTX)
            if OFFSET:
                w += weight_offset
            x = x * w
        y = narrow(activate(x, ACTIVATION, PTX), dtype)
    return y


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    residual_out_ptr,
    num_rows,
    N,
    stride_xm,
    stride_rm,
    stride_ym,
    stride_rom,
    eps,
    weight_offset,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
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
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    if ROWS == 1:
        rows_mask = lanes < BLOCK  # the compiler sees that it is true
    else:
        rows_mask = rows < num_rows

    # All loads come before the exchange between lanes: the compiler moves none across it.
    ts = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(rows_mask, cols, N, EVEN or chunk < CHUNKS - 1)
        ts = ts + (load_sum(x_ptr, residual_ptr, rows * stride_xm + cols, rows * stride_rm + cols, mask, PTX),)
    ws = ()
    if FEW_ROWS:
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            mask = within(lanes < BLOCK, cols, N, EVEN or chunk < CHUNKS - 1)
            ws = ws + (load_columns(weight_ptr, cols, mask),)
        if PDL:
            # A second time, which changes nothing for the next kernel: the compiler moves no load across this, and
            # would otherwise fetch the weight after x has arrived (T = 1 x 4096: 1.83 -> 1.60 us).
            gdc_launch_dependents()

    if residual_out_ptr is not None:
        # It may be x: what a lane stores it has loaded itself, as have the lanes of its warp that hold the same.
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            mask = within(rows_mask, cols, N, EVEN or chunk < CHUNKS - 1)
            tl.store(residual_out_ptr + rows * stride_rom + cols, ts[chunk], mask=mask)

    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        x = widen(ts[chunk], PTX)
        squares += x * x
    rrms = reciprocal_root(tl.sum(squares, axis=1, keep_dims=True) * (1.0 / N), eps)

    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN or chunk < CHUNKS - 1)
        if FEW_ROWS:
            w = ws[chunk]
        else:
            w = load_columns(weight_ptr, cols, mask)
        x = widen(ts[chunk], PTX) * rrms
        y = _finish(x, weight_ptr, w, weight_offset, dtype, ROUNDS, OFFSET, ACTIVATION, PTX)
        tl.store(y_ptr + rows * stride_ym + cols, y, mask=rows_mask & mask)


@triton.jit
def rms_norm_long_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    residual_out_ptr,
    num_rows,
    N,
    stride_xm,
    stride_rm,
    stride_ym,
    stride_rom,
    eps,
    weight_offset,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
    LOAD_STAGES: tl.constexpr,
):
    """One row a program, BLOCK columns at a time: the sum of squares first, then the row again, last block first.

    EVEN: N is a multiple of BLOCK.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * stride_ym
    if residual_ptr is not None:
        residual_ptr += row * stride_rm
        residual_out_ptr += row * stride_rom
    lanes = tl.arange(0, BLOCK)[None, :]
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=LOAD_STAGES):
        cols = start + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN)
        t = load_sum(x_ptr, residual_ptr, cols, cols, mask, PTX)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + cols, t, mask=mask)
        x = widen(t, PTX)
        squares += x * x
    rrms = reciprocal_root(tl.sum(squares, axis=1, keep_dims=True) * (1.0 / N), eps)

    normed_ptr = x_ptr
    if residual_out_ptr is not None:
        # The sums were stored by other threads of this program.
        tl.debug_barrier()
        normed_ptr = residual_out_ptr
    last = (tl.cdiv(N, BLOCK) - 1) * BLOCK
    for start in tl.range(0, N, BLOCK):
        cols = last - start + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN)
        x = widen(tl.load(normed_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first"), PTX)
        w = load_columns(weight_ptr, cols, mask)
        y = _finish(x * rrms, weight_ptr, w, weight_offset, dtype, ROUNDS, OFFSET, ACTIVATION, PTX)
        tl.store(y_ptr + cols, y, mask=mask)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, config: Config, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    ptx = features.ptx and desc.dtype != torch.float32
    present = desc.dtype if desc.has_residual else None
    types = (
        pointer(desc.dtype),
        pointer(present),
        pointer(desc.weight_dtype),
        pointer(desc.dtype),
        pointer(present),
        *(integer(desc.num_rows), integer(desc.hidden_size), "i64", "i64", "i64", "i64", "fp32", "fp32"),
    )
    pointers_and_strides = (0, 1, 2, 3, 4, 7, 8, 9, 10) if desc.aligned else ()
    multiples = pointers_and_strides + ((6,) if desc.hidden_size % 16 == 0 else ())
    finish = (desc.rounds_before_weight, desc.has_weight_offset, desc.activation, ptx, features.pdl)
    kernel: Any
    constants: tuple[Any, ...]
    if config.chunks == 0:
        kernel = rms_norm_long_kernel
        constants = (config.block, desc.hidden_size % config.block == 0, *finish, LONG_LOAD_STAGES)
    else:
        kernel = rms_norm_kernel
        even = desc.hidden_size == config.block * config.chunks
        rows = rows_per_program(desc.num_rows, desc.dtype.itemsize, config)
        constants = (config.block, config.chunks, rows, even, *finish, desc.num_rows <= FEW_ROWS)
    return kernel, Specialization(types, constants, multiples, config.num_warps, features.pdl)


def prepare(desc: Desc, config: Config | None = None) -> Callable[..., None]:
    config = config or heuristic(desc.hidden_size, desc.dtype.itemsize)
    launch = load(*specialize(desc, config, features(desc.device)), desc.device)
    grid = -(-desc.num_rows // rows_per_program(desc.num_rows, desc.dtype.itemsize, config))
    num_rows, hidden_size = desc.num_rows, desc.hidden_size

    def run(
        strides: RowStrides,
        eps: float,
        weight_offset: float,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        y: Tensor,
        residual_out: Tensor | None,
    ) -> None:
        tensors = (x, residual, weight, y, residual_out)
        launch(grid, tensors, num_rows, hidden_size, *strides, eps, weight_offset)

    return run
