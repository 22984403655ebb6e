"""softmax_weighted_sum on the CPU: the weights of 16 values at a time are made in a register, and used there.

A thread takes a row and a unit of columns: the row's maximum and sum first, then the values as they lie in memory, 16
of them by tiles of columns. A tile's sums over the 16 stay in registers, and are then added to the row's, which stay in
the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import exp_minus_for
from onepass.launch.cpu_memory import load_first, load_pair, row_start, stack_float32, store_first, store_pair, take
from onepass.launch.cpu_vector import inline, lane, multiply_add, splat
from onepass.ops.softmax_cpu import softmax_factor, statistics

if TYPE_CHECKING:
    from onepass.ops.softmax_weighted_sum.op import Desc, Strides

_MAX_UNIT = 4096
_UNIT_OF_FEW_ROWS = 1024
"""Columns that a thread takes at a time: whole values, which lie one after the other, where there are rows for all
threads. It changes nothing in a column."""


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.logits_dtype)


@inline
def _add_128(values: Any, at: int, stride: int, weights: Any, count: int, sums: Any, col: int) -> None:
    """Add to sums[col …] the weighted values of 128 columns."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = splat(0.0)
    for j in range(count):
        w = splat(lane(weights, j))
        b0, b1 = load_pair(values, at, values)
        b2, b3 = load_pair(values, at + 32, values)
        b4, b5 = load_pair(values, at + 64, values)
        b6, b7 = load_pair(values, at + 96, values)
        a0, a1, a2 = multiply_add(w, b0, a0), multiply_add(w, b1, a1), multiply_add(w, b2, a2)
        a3, a4, a5 = multiply_add(w, b3, a3), multiply_add(w, b4, a4), multiply_add(w, b5, a5)
        a6, a7 = multiply_add(w, b6, a6), multiply_add(w, b7, a7)
        at += stride
    _add_pair(sums, col, a0, a1)
    _add_pair(sums, col + 32, a2, a3)
    _add_pair(sums, col + 64, a4, a5)
    _add_pair(sums, col + 96, a6, a7)


@inline
def _add_pair(sums: Any, col: int, a: Any, b: Any) -> None:
    c, d = load_pair(sums, col, sums)
    store_pair(sums, col, c + a, d + b, False)


@inline
def _add_16(values: Any, at: int, stride: int, weights: Any, count: int, sums: Any, col: int, width: int) -> None:
    """The same for 16 columns at most."""
    a = splat(0.0)
    for j in range(count):
        a = multiply_add(splat(lane(weights, j)), load_first(values, at, width), a)
        at += stride
    store_first(sums, col, load_first(sums, col, width) + a, width)


@cpu.kernel
def softmax_weighted_sum_kernel(
    logits: Any,
    values: Any,
    out: Any,
    stride_logits: int,
    stride_values_row: int,
    stride_values: int,
    stride_out: int,
    n: int,
    width: int,
    unit_columns: int,
    units_per_row: int,
    num_units: int,
    chunk: int,
    counter: int,
) -> None:
    # Tiles as they are loaded: of bfloat16 the even columns of 32 and the odd ones apart.
    sums = stack_float32(_MAX_UNIT)
    first_unit = take(counter, chunk)
    while first_unit < num_units:
        for unit in range(first_unit, min(first_unit + chunk, num_units)):
            row = unit // units_per_row
            start = (unit - row * units_per_row) * unit_columns
            row_logits = row_start(logits, row, stride_logits)
            row_values = row_start(values, row, stride_values_row)
            row_out = row_start(out, row, stride_out)
            columns = min(unit_columns, width - start)
            tiles = columns // 128 * 128
            for col in range(0, (columns + 31) & ~31, 32):
                store_pair(sums, col, splat(0.0), splat(0.0), False)
            largest, total = statistics(row_logits, out, n, 1.0)
            centre, factor = splat(largest), splat(softmax_factor(largest, total))
            for i in range(0, n, 16):
                count = min(16, n - i)
                weights = exp_minus_for(out, centre - load_first(row_logits, i, count))
                at = i * stride_values + start
                for col in range(0, tiles, 128):
                    _add_128(row_values, at + col, stride_values, weights, count, sums, col)
                for col in range(tiles, columns, 16):
                    _add_16(row_values, at + col, stride_values, weights, count, sums, col, min(16, columns - col))
            for col in range(0, tiles, 32):
                a, b = load_pair(sums, col, sums)
                store_pair(row_out, start + col, a * factor, b * factor, False)
            for col in range(tiles, columns, 16):
                store_first(row_out, start + col, load_first(sums, col, columns - col) * factor, columns - col)
        first_unit = take(counter, chunk)


@lru_cache(maxsize=16)
def _compiled(dtype: torch.dtype, logits_dtype: torch.dtype) -> Callable[..., None]:
    pointers = (cpu.pointer(logits_dtype), cpu.pointer(dtype), cpu.pointer(dtype))
    return softmax_weighted_sum_kernel.compiled(*pointers, *(int,) * 11)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    kernel = _compiled(desc.dtype, desc.logits_dtype)
    return partial(_launch, kernel, desc.num_rows, desc.num_values, desc.width)


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    n: int,
    width: int,
    strides: Strides,
    logits: Tensor,
    values: Tensor,
    out: Tensor,
) -> None:
    unit = _MAX_UNIT if num_rows >= torch.get_num_threads() else _UNIT_OF_FEW_ROWS
    units_per_row = -(-width // unit)
    args = (logits.data_ptr(), values.data_ptr(), out.data_ptr(), *strides, n, width, unit, units_per_row)
    cpu.run_rows(kernel, args, num_rows * units_per_row, n * min(width, unit))
