"""layer_norm on the CPU: each row is read from memory once, and read again from the core's own caches.

Three passes over a row: the mean, summed in float64; the variance about it; the output. With a residual the first
pass also writes the rounded sum, and the others read that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import activate
from onepass.launch.cpu_vector import (
    inline,
    keep_first,
    load,
    load_first,
    multiply_add,
    rounded_as,
    row_start,
    splat,
    store,
    store_first,
    sum_lanes,
    take,
    widen,
    zero64,
)

if TYPE_CHECKING:
    from onepass.ops.layer_norm.op import Desc, RowStrides


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.weight_dtype, desc.bias_dtype)


# Squares are summed in float32 over this many elements (32 for each of 64 lanes), and these sums in float64.
_BLOCK = 2048


@inline
def _sum_row(x_row: Any, residual_row: Any, residual_out_row: Any, n: int) -> float:
    """The sum of x + residual, rounded to x's dtype and written to residual_out, in float64."""
    even, odd = zero64(), zero64()
    pairs = n & ~31
    for i in range(0, pairs, 32):
        v = rounded_as(residual_out_row, load(x_row, i) + load(residual_row, i))
        store(residual_out_row, i, v, False)
        even += widen(v)
        v = rounded_as(residual_out_row, load(x_row, i + 16) + load(residual_row, i + 16))
        store(residual_out_row, i + 16, v, False)
        odd += widen(v)
    for i in range(pairs, n, 16):
        count = n - i
        v = rounded_as(residual_out_row, load_first(x_row, i, count) + load_first(residual_row, i, count))
        store_first(residual_out_row, i, v, count)
        even += widen(v)
    return sum_lanes(even + odd)


@inline
def _sum_squares(row: Any, centre: Any, n: int) -> float:
    """The sum of (row - centre)²."""
    total = zero64()
    fours = n & ~63
    for first in range(0, fours, _BLOCK):
        s0 = s1 = s2 = s3 = splat(0.0)
        for i in range(first, min(first + _BLOCK, fours), 64):
            d = load(row, i) - centre
            s0 = multiply_add(d, d, s0)
            d = load(row, i + 16) - centre
            s1 = multiply_add(d, d, s1)
            d = load(row, i + 32) - centre
            s2 = multiply_add(d, d, s2)
            d = load(row, i + 48) - centre
            s3 = multiply_add(d, d, s3)
        total += widen(s0 + s1) + widen(s2 + s3)
    for i in range(fours, n, 16):
        d = keep_first(load_first(row, i, n - i) - centre, n - i)
        total += widen(d * d)
    return sum_lanes(total)


@inline
def _finish(activation: Any, v: Any, centre: Any, rstd: Any, shift: Any, weight: Any, bias: Any) -> Any:
    return activate(activation, multiply_add(multiply_add(v - centre, rstd, shift), weight, bias))


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
    vectors = n & ~15
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            total_row = row_start(total, row, stride_total)
            y_row = row_start(y, row, stride_y)
            mean = (
                _sum_row(
                    row_start(x, row, stride_x),
                    row_start(residual, row, stride_residual),
                    row_start(residual_out, row, stride_total),
                    n,
                )
                / n
            )
            # The mean as float32, and what that leaves: for values around 10^6 it is as large as their spread.
            centre = np.float32(mean)
            rest = mean - centre
            variance = _sum_squares(total_row, splat(centre), n) / n - rest * rest
            variance = max(variance, 0.0)
            rstd = 1.0 / math.sqrt(variance + eps)
            centre_v, rstd_v, shift_v = splat(centre), splat(rstd), splat(-rest * rstd)
            for i in range(0, vectors, 16):
                v = _finish(activation, load(total_row, i), centre_v, rstd_v, shift_v, load(weight, i), load(bias, i))
                store(y_row, i, v, streaming)
            if vectors < n:
                count = n - vectors
                v = _finish(
                    activation,
                    load_first(total_row, vectors, count),
                    centre_v,
                    rstd_v,
                    shift_v,
                    load_first(weight, vectors, count),
                    load_first(bias, vectors, count),
                )
                store_first(y_row, vectors, v, count)
        first_row = take(counter, chunk)


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


def run(
    desc: Desc,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    y: Tensor,
    residual_out: Tensor | None,
    strides: RowStrides,
) -> None:
    kernel = _compiled(desc.dtype, desc.weight_dtype, desc.bias_dtype, desc.activation, desc.has_residual)
    n = desc.hidden_size
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
    cpu.run_rows(kernel, args, desc.num_rows, n)
