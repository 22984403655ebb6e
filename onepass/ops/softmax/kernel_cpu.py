"""softmax on the CPU: a row is read from memory once, and again from the core's own caches while it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import exp_minus_for
from onepass.launch.cpu_memory import load_first, load_pair, publish, row_start, store_first, store_pair, take
from onepass.launch.cpu_vector import fill_rest, inline, keep_first, max_lanes, splat, sum_lanes, widen
from onepass.ops.softmax_cpu import inverse_of, softmax_factor, statistics

if TYPE_CHECKING:
    from onepass.ops.softmax.op import Desc, RowStrides


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype)


@inline
def _first_of(row: Any, n: int, value: float) -> int:
    """The first element that is `value`."""
    below = splat(-math.inf)
    for i in range(0, n, 16):
        count = min(16, n - i)
        if max_lanes(fill_rest(load_first(row, i, count), count, below)) == value:
            for j in range(i, i + count):
                if max_lanes(fill_rest(load_first(row, j, 1), 1, below)) == value:
                    return j
    return n


@inline
def _fill(row: Any, n: int, value: float, streaming: bool) -> None:
    v = splat(value)
    pairs = n & ~31
    for i in range(0, pairs, 32):
        store_pair(row, i, v, v, streaming)
    for i in range(pairs, n, 16):
        store_first(row, i, v, n - i)


@cpu.kernel
def softmax_kernel(
    logits: Any,
    temperatures: Any,
    out: Any,
    stride_logits: int,
    stride_temperature: int,
    stride_out: int,
    n: int,
    temperature: float,
    streaming: bool,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """`temperature` is added to a row's own, which an absent tensor leaves at 0."""
    pairs = n & ~31
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            row_in = row_start(logits, row, stride_logits)
            row_out = row_start(out, row, stride_out)
            own = load_first(row_start(temperatures, row, stride_temperature), 0, 1)
            t = temperature + sum_lanes(widen(keep_first(own, 1)))
            cold = t == 0.0
            inverse = inverse_of(1.0 if cold else t)
            largest, total = statistics(row_in, out, n, inverse)
            factor_of_row = softmax_factor(largest, total)
            bad = math.isnan(factor_of_row)
            if cold:
                first = 0 if bad else _first_of(row_in, n, largest)
                _fill(row_out, n, math.nan if bad else 0.0, streaming)
                if not bad:
                    store_first(row_out, first, splat(1.0), 1)
                continue
            centre, scale, factor = splat(largest), splat(inverse), splat(factor_of_row)
            for i in range(0, pairs, 32):
                a, b = load_pair(row_in, i, logits)
                a, b = exp_minus_for(out, (centre - a) * scale), exp_minus_for(out, (centre - b) * scale)
                store_pair(row_out, i, a * factor, b * factor, streaming)
            for i in range(pairs, n, 16):
                e = exp_minus_for(out, (centre - load_first(row_in, i, n - i)) * scale)
                store_first(row_out, i, e * factor, n - i)
        first_row = take(counter, chunk)
    publish()


@lru_cache(maxsize=8)
def _compiled(dtype: torch.dtype, per_row: bool) -> Callable[..., None]:
    x = cpu.pointer(dtype)
    temperatures = cpu.pointer(torch.float32 if per_row else None)
    return softmax_kernel.compiled(x, temperatures, x, *(int,) * 4, float, bool, *(int,) * 3)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    return partial(_launch, _compiled(desc.dtype, desc.per_row), desc.num_rows, desc.vocab_size)


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    n: int,
    strides: RowStrides,
    temperature: float,
    logits: Tensor,
    temperatures: Tensor | None,
    out: Tensor,
) -> None:
    args = (
        logits.data_ptr(),
        0 if temperatures is None else temperatures.data_ptr(),
        out.data_ptr(),
        strides.logits,
        strides.temperature,
        strides.out,
        n,
        temperature if temperatures is None else 0.0,
        cpu.streams(out, strides.out),
    )
    cpu.run_rows(kernel, args, num_rows, n)
