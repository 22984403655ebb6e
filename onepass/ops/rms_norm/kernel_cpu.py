"""rms_norm on the CPU: each row is read from memory once, and read again from the core's own caches.

Two passes over a row: the sum of squares, which with a residual also writes the rounded sum; and the output, from x or
from that sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import activate
from onepass.launch.cpu_memory import (
    load_first,
    load_pair,
    publish,
    rounded_as,
    row_start,
    store_first,
    store_pair,
    take,
)
from onepass.launch.cpu_vector import inline, multiply_add, splat, sum_lanes, widen, zero64

if TYPE_CHECKING:
    from onepass.ops.norm_call import RowStrides
    from onepass.ops.rms_norm.op import Desc


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.weight_dtype)


# Sums run in float32 over this many elements (8 for each of 64 lanes), and sums of these in float64.
_BLOCK = 512


@inline
def _sum_of_squares(x_row: Any, residual_row: Any, residual_out_row: Any, order: Any, n: int) -> float:
    """The sum of squares of x + residual, which is rounded to x's dtype and written to residual_out."""
    squares = zero64()
    pairs = n & ~31
    for first in range(0, pairs, _BLOCK):
        q0 = q1 = q2 = q3 = splat(0.0)
        for i in range(first, min(first + _BLOCK, pairs), 32):
            a, b = load_pair(x_row, i, order)
            ra, rb = load_pair(residual_row, i, order)
            a, b = rounded_as(residual_out_row, a + ra), rounded_as(residual_out_row, b + rb)
            store_pair(residual_out_row, i, a, b, False)
            q0, q1, q2, q3 = q2, q3, multiply_add(a, a, q0), multiply_add(b, b, q1)
        squares += widen(q0 + q1) + widen(q2 + q3)
    for i in range(pairs, n, 16):
        count = n - i
        a = rounded_as(residual_out_row, load_first(x_row, i, count) + load_first(residual_row, i, count))
        store_first(residual_out_row, i, a, count)
        squares += widen(a * a)
    return sum_lanes(squares)


@inline
def _finish(activation: Any, rounding: Any, y: Any, v: Any, rrms: Any, weight: Any, offset: Any) -> Any:
    return activate(activation, y, rounded_as(rounding, v * rrms) * (weight + offset))


@cpu.kernel
def rms_norm_kernel(
    activation: Any,
    rounding: Any,
    x: Any,
    residual: Any,
    weight: Any,
    y: Any,
    residual_out: Any,
    total: Any,
    stride_x: int,
    stride_residual: int,
    stride_y: int,
    stride_total: int,
    n: int,
    eps: float,
    weight_offset: float,
    streaming: bool,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """`total` is what is normalised: residual_out, or x where there is no residual. The type of `rounding` is that
    to which the normalised value is rounded before it meets the weight; its value is not used."""
    pairs = n & ~31
    offset = splat(weight_offset)
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            total_row = row_start(total, row, stride_total)
            y_row = row_start(y, row, stride_y)
            squares = _sum_of_squares(
                row_start(x, row, stride_x),
                row_start(residual, row, stride_residual),
                row_start(residual_out, row, stride_total),
                total,
                n,
            )
            rrms = splat(1.0 / math.sqrt(squares / n + eps))
            for i in range(0, pairs, 32):
                a, b = load_pair(total_row, i, total)
                wa, wb = load_pair(weight, i, total)
                a = _finish(activation, rounding, y, a, rrms, wa, offset)
                b = _finish(activation, rounding, y, b, rrms, wb, offset)
                store_pair(y_row, i, a, b, streaming)
            for i in range(pairs, n, 16):
                count = n - i
                a, wa = load_first(total_row, i, count), load_first(weight, i, count)
                store_first(y_row, i, _finish(activation, rounding, y, a, rrms, wa, offset), count)
        first_row = take(counter, chunk)
    publish()


@lru_cache(maxsize=256)
def _compiled(
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    activation: str | None,
    has_residual: bool,
    rounds_before_weight: bool,
) -> Callable[..., None]:
    x = cpu.pointer(dtype)
    return rms_norm_kernel.compiled(
        cpu.choice(activation),
        x if rounds_before_weight else cpu.pointer(None, "nowhere"),
        x,
        x if has_residual else cpu.pointer(None),
        cpu.pointer(weight_dtype, "ones"),
        x,
        x if has_residual else cpu.pointer(None, "nowhere"),
        x,
        *(int,) * 5,
        *(float,) * 2,
        bool,
        *(int,) * 3,
    )


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    kernel = _compiled(desc.dtype, desc.weight_dtype, desc.activation, desc.has_residual, desc.rounds_before_weight)
    return partial(_launch, kernel, desc.num_rows, desc.hidden_size)


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    n: int,
    strides: RowStrides,
    eps: float,
    weight_offset: float,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    residual_out: Tensor | None,
) -> None:
    x_address = x.data_ptr()
    if residual is None or residual_out is None:
        residual_address = residual_out_address = 0
        total_address, total_stride = x_address, strides.x
    else:
        residual_address, residual_out_address = residual.data_ptr(), residual_out.data_ptr()
        total_address, total_stride = residual_out_address, strides.residual_out
    args = (
        None,
        0,
        x_address,
        residual_address,
        0 if weight is None else weight.data_ptr(),
        y.data_ptr(),
        residual_out_address,
        total_address,
        strides.x,
        strides.residual,
        strides.y,
        total_stride,
        n,
        eps,
        weight_offset or -0.0,  # w + (-0.0) is w for every w
        cpu.streams(y, strides.y),
    )
    cpu.run_rows(kernel, args, num_rows, n)
