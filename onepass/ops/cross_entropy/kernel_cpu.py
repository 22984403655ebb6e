"""cross_entropy on the CPU: a row is read from memory once, block by block.

A block's maximum, then, from the first-level cache, its sum of exponentials about the largest logit so far. A new
maximum scales the sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The maximum skips
NaN, which then makes the sum NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import exp_minus
from onepass.launch.cpu_memory import load_first, load_index, load_pair, row_start, store_first, take
from onepass.launch.cpu_vector import (
    fill_rest,
    inline,
    keep_first,
    max_lanes,
    maximum,
    minimum,
    polynomial,
    splat,
    sum_lanes,
    widen,
)

if TYPE_CHECKING:
    from onepass.ops.cross_entropy.op import Desc, Numbers

# Elements of which the sum is in float32, 32 for each of 64 lanes.
_BLOCK = 2048


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype)


# tanh(u) = u · P(u²) / Q(u²) for |u| ≤ 9, fitted for the least relative error, 1.3e-9; beyond it tanh rounds to 1.
_TANH_LAST = 9.0
_tanh_p = polynomial(
    -1.2246119765631911e-11,
    3.06424740798604e-08,
    2.8031331678096073e-05,
    0.0038695103839198855,
    0.13680858723042202,
    1.0,
)
_tanh_q = polynomial(1.2890351355302017e-06, 0.0003940716604635046, 0.027250166571271127, 0.47014190817690166, 1.0)


@inline
def _soft_cap(x: Any, softcap: float) -> Any:
    """softcap · tanh(x / softcap) within 3 ulp."""
    u = minimum(maximum(x * splat(1.0 / softcap), splat(-_TANH_LAST)), splat(_TANH_LAST))
    s = u * u
    return splat(softcap) * u * (_tanh_p(s) / _tanh_q(s))


@inline
def _itself(x: Any, softcap: float) -> Any:
    return x


def _capped(capped: Any, x: Any, softcap: float) -> Any:
    """x, or with the `Choice` "True" its soft cap; callable inside kernels only."""
    raise NotImplementedError("_capped() runs inside compiled kernels")


@overload(_capped, jit_options={"forceinline": True})
def _capped_overload(capped: Any, x: Any, softcap: float) -> Any:
    function = _soft_cap if capped.choice == "True" else _itself

    # Numba compares this signature with the one above, annotations included.
    def call(capped: Any, x: Any, softcap: float) -> Any:
        return function(x, softcap)

    return call


@inline
def _statistics(capped: Any, row: Any, n: int, softcap: float) -> tuple[float, float, float]:
    """The largest logit, the sum of exp(logit - largest), and the sum of all logits."""
    largest, total, logits = -math.inf, 0.0, 0.0
    for first in range(0, n, _BLOCK):
        last = min(first + _BLOCK, n)
        pairs = first + ((last - first) & ~31)
        m0 = m1 = splat(-math.inf)
        for i in range(first, pairs, 32):
            a, b = load_pair(row, i, row)
            m0, m1 = maximum(a, m0), maximum(b, m1)
        for i in range(pairs, last, 16):
            m0 = maximum(fill_rest(load_first(row, i, last - i), last - i, splat(-math.inf)), m0)
        # The soft cap keeps the order of logits: that of the largest is the largest.
        block_largest = max_lanes(_capped(capped, splat(max_lanes(maximum(m0, m1))), softcap))
        if block_largest > largest:
            total *= math.exp(largest - block_largest)
            largest = block_largest
        centre = 0.0 if math.isinf(largest) else largest
        c = splat(centre)
        s0 = s1 = s2 = s3 = d0 = d1 = splat(0.0)
        for i in range(first, pairs, 32):
            a, b = load_pair(row, i, row)
            a, b = c - _capped(capped, a, softcap), c - _capped(capped, b, softcap)
            d0, d1 = d0 + a, d1 + b
            s0, s1, s2, s3 = s2, s3, s0 + exp_minus(a), s1 + exp_minus(b)
        total += sum_lanes(widen(s0 + s2) + widen(s1 + s3))
        distance = sum_lanes(widen(d0) + widen(d1))
        for i in range(pairs, last, 16):
            a = c - _capped(capped, load_first(row, i, last - i), softcap)
            total += sum_lanes(widen(keep_first(exp_minus(a), last - i)))
            distance += sum_lanes(widen(keep_first(a, last - i)))
        logits += (last - first) * centre - distance
    return largest, total, logits


@cpu.kernel
def cross_entropy_kernel(
    capped: Any,
    logits: Any,
    target: Any,
    loss: Any,
    lse: Any,
    stride: int,
    stride_target: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    with_lse: bool,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """Without the lse, rows that are ignored are not read."""
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            x = row_start(logits, row, stride)
            wanted = load_index(target, row * stride_target)
            if wanted == ignore_index and not with_lse:
                store_first(loss, row, splat(0.0), 1)
                continue
            largest, total, sum_of_logits = _statistics(capped, x, vocab_size, softcap)
            log_total = np.log(total)
            store_first(lse, row, splat(largest + log_total), 1)
            value = math.nan
            if wanted == ignore_index:
                value = 0.0
            elif 0 <= wanted < vocab_size and largest != math.inf:
                chosen = _capped(capped, load_first(x, wanted, 1), softcap)
                value = largest - sum_lanes(widen(keep_first(chosen, 1)))
                if label_smoothing != 0.0:
                    value *= 1.0 - label_smoothing
                    value += label_smoothing * (largest - sum_of_logits / vocab_size)
                value += log_total
            store_first(loss, row, splat(value), 1)
        first_row = take(counter, chunk)


@cpu.kernel
def reduce_kernel(
    losses: Any, target: Any, result: Any, stride_target: int, ignore_index: int, mean: bool, num_rows: int
) -> None:
    """The sum of all losses, in order, or their mean over the targets that count."""
    total, count = 0.0, 0
    for row in range(num_rows):
        total += sum_lanes(widen(load_first(losses, row, 1)))
        if load_index(target, row * stride_target) != ignore_index:
            count += 1
    if mean:
        total = total / count if count else math.nan
    store_first(result, 0, splat(total), 1)


@lru_cache(maxsize=64)
def _compiled(
    dtype: torch.dtype, target_dtype: torch.dtype, capped: bool, with_lse: bool
) -> tuple[Callable[..., None], Callable[..., None]]:
    fp32, target = cpu.pointer(torch.float32), cpu.pointer(target_dtype)
    lse = cpu.pointer(torch.float32 if with_lse else None, "nowhere")
    numbers = (*(int,) * 4, float, float, bool, *(int,) * 3)
    first = cross_entropy_kernel.compiled(cpu.choice(capped), cpu.pointer(dtype), target, fp32, lse, *numbers)
    return first, reduce_kernel.compiled(fp32, target, fp32, int, int, bool, int)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their numbers and tensors."""
    kernels = _compiled(desc.dtype, desc.target_dtype, desc.capped, desc.with_lse)
    return partial(_launch, kernels, desc.num_rows, desc.vocab_size, desc.reduction)


def _launch(
    kernels: tuple[Callable[..., None], Callable[..., None]],
    num_rows: int,
    vocab_size: int,
    reduction: str,
    numbers: Numbers,
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
) -> None:
    first, reduce = kernels
    target_address = target.data_ptr()
    losses = (loss if reduction == "none" else workspace).data_ptr()
    args = (
        None,
        logits.data_ptr(),
        target_address,
        losses,
        0 if lse is None else lse.data_ptr(),
        numbers.stride,
        numbers.target_stride,
        vocab_size,
        numbers.ignore_index,
        numbers.label_smoothing,
        numbers.softcap or 1.0,
        lse is not None,
    )
    cpu.run_rows(first, args, num_rows, max(vocab_size, 1))
    if reduction != "none":
        stride, ignore_index = numbers.target_stride, numbers.ignore_index
        reduce(losses, target_address, loss.data_ptr(), stride, ignore_index, reduction == "mean", num_rows)
