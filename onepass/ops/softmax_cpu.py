"""The softmax statistics of a row on the CPU: what softmax, logsumexp and softmax_weighted_sum share.

A row is read block by block: a block's maximum, then, from the first-level cache, its sum of exponentials about the
largest value so far. A new maximum scales the sum (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018). The maximum skips NaN, which then makes the sum NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepass.launch.cpu_math import exp_minus_for
from onepass.launch.cpu_memory import load_first, load_pair
from onepass.launch.cpu_vector import fill_rest, inline, keep_first, max_lanes, maximum, splat, sum_lanes, widen

BLOCK = 2048
"""Elements of which the sum is in float32, 32 for each of 64 lanes."""

_LARGEST = float(np.finfo(np.float32).max)


@inline
def inverse_of(temperature: float) -> float:
    """1 / temperature, finite, so that 0 times it is 0; NaN where the temperature is negative, infinite or NaN."""
    if not 0.0 <= temperature <= _LARGEST:
        return math.nan
    return min(1.0 / temperature, _LARGEST)


@inline
def statistics(row: Any, accuracy: Any, n: int, inverse: float) -> tuple[float, float]:
    """The maximum of row, and the sum of exp((x - maximum) * inverse), as accurate as what `accuracy` points to.

    Where the maximum is infinite the sum is about 0: it is 0 or infinite. NaN makes it NaN.
    """
    largest, total = -math.inf, 0.0
    scale = splat(inverse)
    for first in range(0, n, BLOCK):
        last = min(first + BLOCK, n)
        pairs = first + ((last - first) & ~31)
        m0 = m1 = splat(-math.inf)
        for i in range(first, pairs, 32):
            a, b = load_pair(row, i, row)
            m0, m1 = maximum(m0, a), maximum(m1, b)
        for i in range(pairs, last, 16):
            a = fill_rest(load_first(row, i, last - i), last - i, splat(-math.inf))
            m0 = maximum(m0, a)
        block_largest = max_lanes(maximum(m0, m1))
        if block_largest > largest:
            total *= math.exp((largest - block_largest) * inverse)
            largest = block_largest
        centre = splat(0.0 if math.isinf(largest) else largest)
        s0 = s1 = s2 = s3 = splat(0.0)
        for i in range(first, pairs, 32):
            a, b = load_pair(row, i, row)
            a, b = exp_minus_for(accuracy, (centre - a) * scale), exp_minus_for(accuracy, (centre - b) * scale)
            s0, s1, s2, s3 = s2, s3, s0 + a, s1 + b
        total += sum_lanes(widen(s0 + s2) + widen(s1 + s3))
        for i in range(pairs, last, 16):
            e = exp_minus_for(accuracy, (centre - load_first(row, i, last - i)) * scale)
            total += sum_lanes(widen(keep_first(e, last - i)))
    return largest, total


@inline
def softmax_factor(largest: float, total: float) -> float:
    """1 / total; NaN for a row that softmax makes NaN."""
    return math.nan if math.isinf(largest) else 1.0 / total
