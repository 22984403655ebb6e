"""softmax_weighted_sum on the CPU: the weights of 16 values at a time are made in a register, and used there.

A thread takes a row and up to _UNIT columns: the row's maximum and sum first, then tiles of columns whose sums stay in
registers while the row's values pass by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import exp_minus_for
from onepass.launch.cpu_memory import load_first, load_pair, row_start, store_first, store_pair, take
from onepass.launch.cpu_vector import inline, lane, multiply_add, splat
from onepass.ops.softmax_cpu import softmax_factor, statistics

if TYPE_CHECKING:
    from onepass.ops.softmax_weighted_sum.op import Desc, Strides

_UNIT = 1024
"""Columns that a thread takes at a time."""

_BLOCK = 256
"""Values whose weighted sum runs in one register, before it is added to the row's."""


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.logits_dtype)


@inline
def _tile_of_128(
    logits: Any, values: Any, out: Any, n: int, stride: int, col: int, largest: float, factor: float
) -> None:
    """Columns col … col + 127."""
    centre, zero = splat(largest), splat(0.0)
    t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = zero
    for first in range(0, n, _BLOCK):
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = zero
        last = min(first + _BLOCK, n)
        for i in range(first, last, 16):
            count = min(16, last - i)
            weights = exp_minus_for(out, centre - load_first(logits, i, count))
            for j in range(count):
                w, at = splat(lane(weights, j)), (i + j) * stride + col
                b0, b1 = load_pair(values, at, values)
                b2, b3 = load_pair(values, at + 32, values)
                b4, b5 = load_pair(values, at + 64, values)
                b6, b7 = load_pair(values, at + 96, values)
                a0, a1, a2, a3 = (
                    multiply_add(w, b0, a0),
                    multiply_add(w, b1, a1),
                    multiply_add(w, b2, a2),
                    multiply_add(w, b3, a3),
                )
                a4, a5, a6, a7 = (
                    multiply_add(w, b4, a4),
                    multiply_add(w, b5, a5),
                    multiply_add(w, b6, a6),
                    multiply_add(w, b7, a7),
                )
        t0, t1, t2, t3 = t0 + a0, t1 + a1, t2 + a2, t3 + a3
        t4, t5, t6, t7 = t4 + a4, t5 + a5, t6 + a6, t7 + a7
    f = splat(factor)
    store_pair(out, col, t0 * f, t1 * f, False)
    store_pair(out, col + 32, t2 * f, t3 * f, False)
    store_pair(out, col + 64, t4 * f, t5 * f, False)
    store_pair(out, col + 96, t6 * f, t7 * f, False)


@inline
def _tile_of_16(
    logits: Any, values: Any, out: Any, n: int, stride: int, col: int, width: int, largest: float, factor: float
) -> None:
    """Columns col … col + width - 1, 16 of them at most."""
    centre, zero = splat(largest), splat(0.0)
    total = zero
    for first in range(0, n, _BLOCK):
        part = zero
        last = min(first + _BLOCK, n)
        for i in range(first, last, 16):
            count = min(16, last - i)
            weights = exp_minus_for(out, centre - load_first(logits, i, count))
            for j in range(count):
                value = load_first(values, (i + j) * stride + col, width)
                part = multiply_add(splat(lane(weights, j)), value, part)
        total = total + part
    store_first(out, col, total * splat(factor), width)


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
    units_per_row: int,
    num_units: int,
    chunk: int,
    counter: int,
) -> None:
    first_unit = take(counter, chunk)
    while first_unit < num_units:
        for unit in range(first_unit, min(first_unit + chunk, num_units)):
            row = unit // units_per_row
            start = (unit - row * units_per_row) * _UNIT
            end = min(start + _UNIT, width)
            row_logits = row_start(logits, row, stride_logits)
            row_values = row_start(values, row, stride_values_row)
            row_out = row_start(out, row, stride_out)
            largest, total = statistics(row_logits, out, n, 1.0)
            factor = softmax_factor(largest, total)
            tiles = start + (end - start) // 128 * 128
            for col in range(start, tiles, 128):
                _tile_of_128(row_logits, row_values, row_out, n, stride_values, col, largest, factor)
            for col in range(tiles, end, 16):
                columns = min(16, end - col)
                _tile_of_16(row_logits, row_values, row_out, n, stride_values, col, columns, largest, factor)
        first_unit = take(counter, chunk)


@lru_cache(maxsize=16)
def _compiled(dtype: torch.dtype, logits_dtype: torch.dtype) -> Callable[..., None]:
    pointers = (cpu.pointer(logits_dtype), cpu.pointer(dtype), cpu.pointer(dtype))
    return softmax_weighted_sum_kernel.compiled(*pointers, *(int,) * 10)


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
    units_per_row = -(-width // _UNIT)
    pointers = (logits.data_ptr(), values.data_ptr(), out.data_ptr())
    cpu.run_rows(
        kernel, (*pointers, *strides, n, width, units_per_row), num_rows * units_per_row, n * min(width, _UNIT)
    )
