"""add_relu on the CPU: tiles of a row, 32 elements at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import relu
from onepass.launch.cpu_memory import load_first, load_pair, publish, row_start, store_first, store_pair, take

if TYPE_CHECKING:
    from onepass.ops.add_relu.op import Desc, RowStrides

# Columns of a tile, the unit that threads share: contiguous tensors arrive as one long row. A multiple of 32, so
# that tiles of an aligned row are aligned.
_TILE = 8192


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype)


@cpu.kernel
def add_relu_kernel(
    x: Any,
    y: Any,
    out: Any,
    stride_x: int,
    stride_y: int,
    stride_out: int,
    num_cols: int,
    tiles_per_row: int,
    streaming: bool,
    num_tiles: int,
    chunk: int,
    counter: int,
) -> None:
    first_tile = take(counter, chunk)
    while first_tile < num_tiles:
        for tile in range(first_tile, min(first_tile + chunk, num_tiles)):
            row = tile // tiles_per_row
            start = (tile - row * tiles_per_row) * _TILE
            end = min(start + _TILE, num_cols)
            x_row, y_row = row_start(x, row, stride_x), row_start(y, row, stride_y)
            out_row = row_start(out, row, stride_out)
            pairs = start + ((end - start) & ~31)
            for i in range(start, pairs, 32):
                xa, xb = load_pair(x_row, i, x)
                ya, yb = load_pair(y_row, i, x)
                store_pair(out_row, i, relu(xa + ya), relu(xb + yb), streaming)
            for i in range(pairs, end, 16):
                count = end - i
                store_first(out_row, i, relu(load_first(x_row, i, count) + load_first(y_row, i, count)), count)
        first_tile = take(counter, chunk)
    publish()


@lru_cache(maxsize=8)
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    return add_relu_kernel.compiled(*(cpu.pointer(dtype),) * 3, *(int,) * 5, bool, *(int,) * 3)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    return partial(_launch, _compiled(desc.dtype), desc.num_rows, desc.num_cols)


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    num_cols: int,
    strides: RowStrides,
    x: Tensor,
    y: Tensor,
    out: Tensor,
) -> None:
    tiles_per_row = -(-num_cols // _TILE)
    args = (
        x.data_ptr(),
        y.data_ptr(),
        out.data_ptr(),
        strides.x,
        strides.y,
        strides.out,
        num_cols,
        tiles_per_row,
        cpu.streams(out, strides.out if num_rows > 1 else 0),
    )
    cpu.run_rows(kernel, args, num_rows * tiles_per_row, min(num_cols, _TILE))
