"""add_relu in Triton: x and y once in, the result once out, 16 bytes a load and two loads a thread."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from onepass.launch.triton import Specialization, load, pointer, unsupported_device
from onepass.ops.triton_math import activate, narrow, widen

if TYPE_CHECKING:
    from onepass.ops.add_relu.op import Desc, RowStrides

NUM_WARPS = 4


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
):
    """BLOCK columns of one row a program."""
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


def specialize(desc: Desc) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    types = (*(pointer(desc.dtype),) * 3, "i64", "i64", "i64", "i64", "i64")
    multiples = (0, 1, 2) + ((5, 6, 7) if desc.num_rows > 1 else ()) if desc.aligned else ()
    if desc.num_cols % 16 == 0:
        multiples += (3,)
    return add_relu_kernel, Specialization(types, (_block(desc),), multiples, NUM_WARPS)


def _block(desc: Desc) -> int:
    return 32 * NUM_WARPS * 2 * 16 // desc.dtype.itemsize


@lru_cache(maxsize=4096)
def _plan(desc: Desc) -> tuple[Any, int]:
    """The loaded kernel and the blocks of a row."""
    kernel, special = specialize(desc)
    return load(kernel, special, desc.device), -(-desc.num_cols // _block(desc))


def run(desc: Desc, x: Tensor, y: Tensor, out: Tensor, strides: RowStrides) -> None:
    launch, blocks_per_row = _plan(desc)
    launch(desc.num_rows * blocks_per_row, (x, y, out), desc.num_cols, blocks_per_row, *strides)
