"""layer_norm on the CPU: each row is read from memory once, and read again from the core's own caches.

Three passes over a row: a mean to centre on; the sums of the deviations from it and of their squares, which give the
variance and what the centre lacks to the mean (the corrected two-pass algorithm of Chan, Golub and LeVeque,
"Algorithms for Computing the Sample Variance", 1983); the output. With a residual the first pass also writes the
rounded sum, and the others read that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
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
from onepass.launch.cpu_vector import inline, keep_first, multiply_add, splat, sum_lanes, widen, zero64

if TYPE_CHECKING:
    from onepass.ops.layer_norm.op import Desc
    from onepass.ops.norm_call import RowStrides


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.weight_dtype, desc.bias_dtype)


# Sums run in float32 over this many elements (4 for each of 64 lanes), and sums of these in float64: after an
# outlier, each further square in a lane is rounded the same way.
_BLOCK = 256

# The first pass sums x · 2^-7: a block of the largest float32 does not overflow.
_SHRINK = 2.0**-7


@inline
def _rough_mean(x_row: Any, residual_row: Any, residual_out_row: Any, order: Any, n: int) -> float:
    """The mean of x + residual, rounded to x's dtype and written to residual_out: a centre for the second pass."""
    total = zero64()
    shrink = splat(_SHRINK)
    pairs = n & ~31
    for first in range(0, pairs, _BLOCK):
        s0 = s1 = s2 = s3 = splat(0.0)
        last = min(first + _BLOCK, pairs)
        for i in range(first, last, 32):
            a, b = load_pair(x_row, i, order)
            ra, rb = load_pair(residual_row, i, order)
            a, b = rounded_as(residual_out_row, a + ra), rounded_as(residual_out_row, b + rb)
            store_pair(residual_out_row, i, a, b, False)
            s0, s1, s2, s3 = s2, s3, multiply_add(a, shrink, s0), multiply_add(b, shrink, s1)
        total += widen(s0 + s1) + widen(s2 + s3)
    for i in range(pairs, n, 16):
        count = n - i
        a = rounded_as(residual_out_row, load_first(x_row, i, count) + load_first(residual_row, i, count))
        store_first(residual_out_row, i, a, count)
        total += widen(a * shrink)
    return sum_lanes(total) / (n * _SHRINK)


@inline
def _deviations(row: Any, centre: Any, n: int) -> tuple[float, float]:
    """The sums of row - centre and of its square."""
    total, squares = zero64(), zero64()
    pairs = n & ~31
    for first in range(0, pairs, _BLOCK):
        s0 = s1 = q0 = q1 = q2 = q3 = splat(0.0)
        for i in range(first, min(first + _BLOCK, pairs), 32):
            a, b = load_pair(row, i, row)
            a, b = a - centre, b - centre
            s0 += a
            s1 += b
            q0, q1, q2, q3 = q2, q3, multiply_add(a, a, q0), multiply_add(b, b, q1)
        total += widen(s0 + s1)
        squares += widen(q0 + q1) + widen(q2 + q3)
    for i in range(pairs, n, 16):
        a = keep_first(load_first(row, i, n - i) - centre, n - i)
        total += widen(a)
        squares += widen(a * a)
    return sum_lanes(total), sum_lanes(squares)


@inline
def _finish(activation: Any, y: Any, v: Any, centre: Any, rstd: Any, shift: Any, weight: Any, bias: Any) -> Any:
    return activate(activation, y, multiply_add(multiply_add(v - centre, rstd, shift), weight, bias))


@cpu.kernel
def layer_norm_kernel(
    activation: Any,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    y: Any,
    residual_out: Any,
    total: Any,
    stride_x: int,
    stride_residual: int,
    stride_y: int,
    stride_total: int,
    n: int,
    eps: float,
    streaming: bool,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """`total` is what is normalised: residual_out, or x where there is no residual."""
    pairs = n & ~31
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            total_row = row_start(total, row, stride_total)
            y_row = row_start(y, row, stride_y)
            centre = np.float32(
                _rough_mean(
                    row_start(x, row, stride_x),
                    row_start(residual, row, stride_residual),
                    row_start(residual_out, row, stride_total),
                    total,
                    n,
                )
            )
            deviation, squares = _deviations(total_row, splat(centre), n)
            # What the centre lacks to the mean: for values around 10^6 it is as large as their spread.
            rest = deviation / n
            variance = squares / n - rest * rest
            variance = max(variance, 0.0)
            rstd = 1.0 / math.sqrt(variance + eps)
            centre_v, rstd_v, shift_v = splat(centre), splat(rstd), splat(-rest * rstd)
            for i in range(0, pairs, 32):
                a, b = load_pair(total_row, i, total)
                wa, wb = load_pair(weight, i, total)
                ba, bb = load_pair(bias, i, total)
                a = _finish(activation, y, a, centre_v, rstd_v, shift_v, wa, ba)
                b = _finish(activation, y, b, centre_v, rstd_v, shift_v, wb, bb)
                store_pair(y_row, i, a, b, streaming)
            for i in range(pairs, n, 16):
                count = n - i
                a, wa, ba = load_first(total_row, i, count), load_first(weight, i, count), load_first(bias, i, count)
                store_first(y_row, i, _finish(activation, y, a, centre_v, rstd_v, shift_v, wa, ba), count)
        first_row = take(counter, chunk)
    publish()


@lru_cache(maxsize=256)
def _compiled(
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    activation: str | None,
    has_residual: bool,
) -> Callable[..., None]:
    x = cpu.pointer(dtype)
    return layer_norm_kernel.compiled(
        cpu.choice(activation),
        x,
        x if has_residual else cpu.pointer(None),
        cpu.pointer(weight_dtype, "ones"),
        cpu.pointer(bias_dtype),
        x,
        x if has_residual else cpu.pointer(None, "nowhere"),
        x,
        *(int,) * 5,
        float,
        bool,
        *(int,) * 3,
    )


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    kernel = _compiled(desc.dtype, desc.weight_dtype, desc.bias_dtype, desc.activation, desc.has_residual)
    return partial(_launch, kernel, desc.num_rows, desc.hidden_size)


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    n: int,
    strides: RowStrides,
    eps: float,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
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
        x_address,
        residual_address,
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        residual_out_address,
        total_address,
        strides.x,
        strides.residual,
        strides.y,
        total_stride,
        n,
        eps,
        cpu.streams(y, strides.y),
    )
    cpu.run_rows(kernel, args, num_rows, n, cost=1.5)
