"""add_relu in Triton: x and y once in, the result once out, 16 bytes a load and two loads a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.triton_math import activate, narrow, widen

if TYPE_CHECKING:
    from onepass.ops.add_relu.op import Desc, RowStrides

NUM_WARPS = 4

MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch is left out: it hides the launch, some microseconds at most, and each
program then takes 1.2 ns longer to start (measured on an H200)."""


@triton.jit
def add_relu_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    num_cols,
    blocks_per_row,
    stride_xm,
    stride_ym,
    stride_om,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of one row a program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks_per_row
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0)
    y = tl.load(y_ptr + row * stride_ym + cols, mask=mask, other=0.0)
    total = activate(widen(x, False) + widen(y, False), "relu", False)
    tl.store(out_ptr + row * stride_om + cols, narrow(total, out_ptr.dtype.element_ty), mask=mask)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    types = (*(pointer(desc.dtype),) * 3, "i64", "i64", "i64", "i64", "i64")
    multiples = (0, 1, 2, 5, 6, 7) if desc.aligned else ()
    if desc.num_cols % 16 == 0:
        multiples += (3,)
    pdl = features.pdl and _grid(desc) < MANY_PROGRAMS
    return add_relu_kernel, Specialization(types, (_block(desc), pdl), multiples, NUM_WARPS, pdl)


def _block(desc: Desc) -> int:
    return 32 * NUM_WARPS * 2 * 16 // desc.dtype.itemsize


def _grid(desc: Desc) -> int:
    return desc.num_rows * -(-desc.num_cols // _block(desc))


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(*specialize(desc, features(desc.device)), desc.device)
    blocks_per_row = -(-desc.num_cols // _block(desc))
    grid, num_cols = _grid(desc), desc.num_cols

    def run(strides: RowStrides, x: Tensor, y: Tensor, out: Tensor) -> None:
        # The stride of a single row means nothing, and may be no multiple of 16.
        launch(grid, (x, y, out), num_cols, blocks_per_row, *(strides if desc.num_rows > 1 else (0, 0, 0)))

    return run
