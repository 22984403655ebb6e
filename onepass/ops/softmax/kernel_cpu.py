"""softmax on the CPU: a row is read from memory once, and again from the core's own caches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from numba.extending import overload
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import exp_minus, exp_minus_for
from onepass.launch.cpu_memory import load_first, load_pair, publish, row_start, store_first, store_pair, take
from onepass.launch.cpu_vector import fill_rest, inline, keep_first, max_lanes, maximum, splat, sum_lanes, widen, zero64
from onepass.ops.softmax_cpu import BLOCK, inverse_of, softmax_factor, statistics

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


def write_row(row_in: Any, row_out: Any, n: int, inverse: float, streaming: bool) -> None:
    """A row's probabilities; callable inside kernels only."""
    raise NotImplementedError("write_row() runs inside compiled kernels")


@inline
def _write_float32(row_in: Any, row_out: Any, n: int, inverse: float, streaming: bool) -> None:
    """The exponentials wait in the output for their sum; or, when the output goes past the caches, are taken twice.

    Both give the same bits.
    """
    m0 = m1 = m2 = m3 = splat(-math.inf)
    pairs = n & ~31
    for i in range(0, pairs, 32):
        a, b = load_pair(row_in, i, row_in)
        m0, m1, m2, m3 = m2, m3, maximum(m0, a), maximum(m1, b)
    for i in range(pairs, n, 16):
        m0 = maximum(m0, fill_rest(load_first(row_in, i, n - i), n - i, splat(-math.inf)))
    largest, total = max_lanes(maximum(maximum(m0, m1), maximum(m2, m3))), zero64()
    centre, scale = splat(largest), splat(inverse)
    for first in range(0, pairs, BLOCK):
        s0 = s1 = s2 = s3 = splat(0.0)
        for i in range(first, min(first + BLOCK, pairs), 32):
            a, b = load_pair(row_in, i, row_in)
            a, b = exp_minus((centre - a) * scale), exp_minus((centre - b) * scale)
            if not streaming:
                store_pair(row_out, i, a, b, False)
            s0, s1, s2, s3 = s2, s3, s0 + a, s1 + b
        total += widen(s0 + s2) + widen(s1 + s3)
    for i in range(pairs, n, 16):
        e = exp_minus((centre - load_first(row_in, i, n - i)) * scale)
        store_first(row_out, i, e, n - i)
        total += widen(keep_first(e, n - i))
    factor = splat(softmax_factor(largest, sum_lanes(total)))
    if streaming:
        for i in range(0, pairs, 32):
            a, b = load_pair(row_in, i, row_in)
            a, b = exp_minus((centre - a) * scale), exp_minus((centre - b) * scale)
            store_pair(row_out, i, a * factor, b * factor, True)
    else:
        for i in range(0, pairs, 32):
            a, b = load_pair(row_out, i, row_out)
            store_pair(row_out, i, a * factor, b * factor, False)
    for i in range(pairs, n, 16):
        store_first(row_out, i, load_first(row_out, i, n - i) * factor, n - i)


@inline
def _write_half(row_in: Any, row_out: Any, n: int, inverse: float, streaming: bool) -> None:
    """Half precision: exponentials that are rounded to wait would be rounded twice, so they are taken twice."""
    largest, total = statistics(row_in, row_out, n, inverse)
    centre, scale, factor = splat(largest), splat(inverse), splat(softmax_factor(largest, total))
    pairs = n & ~31
    for i in range(0, pairs, 32):
        a, b = load_pair(row_in, i, row_in)
        a, b = exp_minus_for(row_out, (centre - a) * scale), exp_minus_for(row_out, (centre - b) * scale)
        store_pair(row_out, i, a * factor, b * factor, streaming)
    for i in range(pairs, n, 16):
        e = exp_minus_for(row_out, (centre - load_first(row_in, i, n - i)) * scale)
        store_first(row_out, i, e * factor, n - i)


@overload(write_row, jit_options={"forceinline": True})
def _write_row(row_in: Any, row_out: Any, n: Any, inverse: Any, streaming: Any) -> Any:
    function = _write_float32 if row_out.storage == "float32" else _write_half

    # Numba compares this signature with the one above, annotations included.
    def call(row_in: Any, row_out: Any, n: Any, inverse: Any, streaming: Any) -> Any:
        function(row_in, row_out, n, inverse, streaming)

    return call


@inline
def _write_cold(row_in: Any, row_out: Any, n: int, streaming: bool) -> None:
    """Temperature 0. The sum at temperature 1 shows whether the row is NaN."""
    largest, total = statistics(row_in, row_out, n, 1.0)
    if math.isnan(softmax_factor(largest, total)):
        _fill(row_out, n, math.nan, streaming)
    else:
        first = _first_of(row_in, n, largest)
        _fill(row_out, n, 0.0, streaming)
        store_first(row_out, first, splat(1.0), 1)


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
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            row_in = row_start(logits, row, stride_logits)
            row_out = row_start(out, row, stride_out)
            own = load_first(row_start(temperatures, row, stride_temperature), 0, 1)
            t = temperature + sum_lanes(widen(keep_first(own, 1)))
            if t == 0.0:
                _write_cold(row_in, row_out, n, streaming)
            else:
                write_row(row_in, row_out, n, inverse_of(t), streaming)
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
    cpu.run_rows(kernel, args, num_rows, n, cost=1.25)
