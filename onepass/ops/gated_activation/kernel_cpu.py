"""Gated activations on the CPU: tiles of a row, 32 elements at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import activate
from onepass.launch.cpu_memory import load_first, load_pair, publish, row_start, store_first, store_pair, take

if TYPE_CHECKING:
    from onepass.ops.gated_activation.op import Desc, RowStrides

# Columns of a tile, the unit that threads share: contiguous tensors arrive as one long row. A multiple of 32, so
# that tiles of an aligned row are aligned.
_TILE = 8192


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype)


@cpu.kernel
def gated_activation_kernel(
    activation: Any,
    gate: Any,
    up: Any,
    out: Any,
    stride_gate: int,
    stride_up: int,
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
            gate_row, up_row = row_start(gate, row, stride_gate), row_start(up, row, stride_up)
            out_row = row_start(out, row, stride_out)
            pairs = start + ((end - start) & ~31)
            for i in range(start, pairs, 32):
                ga, gb = load_pair(gate_row, i, gate)
                ua, ub = load_pair(up_row, i, gate)
                a, b = activate(activation, out, ga) * ua, activate(activation, out, gb) * ub
                store_pair(out_row, i, a, b, streaming)
            for i in range(pairs, end, 16):
                count = end - i
                g, u = load_first(gate_row, i, count), load_first(up_row, i, count)
                store_first(out_row, i, activate(activation, out, g) * u, count)
        first_tile = take(counter, chunk)
    publish()


@lru_cache(maxsize=16)
def _compiled(dtype: torch.dtype, activation: str) -> Callable[..., None]:
    tensors = (cpu.pointer(dtype),) * 3
    return gated_activation_kernel.compiled(cpu.choice(activation), *tensors, *(int,) * 5, bool, *(int,) * 3)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    half_bytes = desc.num_cols * desc.dtype.itemsize
    return partial(_launch, _compiled(desc.dtype, desc.activation), desc.num_rows, desc.num_cols, half_bytes)


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    num_cols: int,
    half_bytes: int,
    strides: RowStrides,
    gate: Tensor,
    up: Tensor | None,
    out: Tensor,
) -> None:
    """`half_bytes` from gate to up, where one tensor holds both."""
    tiles_per_row = -(-num_cols // _TILE)
    gate_address = gate.data_ptr()
    args = (
        None,
        gate_address,
        gate_address + half_bytes if up is None else up.data_ptr(),
        out.data_ptr(),
        strides.gate,
        strides.up,
        strides.out,
        num_cols,
        tiles_per_row,
        cpu.streams(out, strides.out if num_rows > 1 else 0),
    )
    cpu.run_rows(kernel, args, num_rows * tiles_per_row, min(num_cols, _TILE))
