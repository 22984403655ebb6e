"""The state of attention over some of the keys, in Triton: what both kernels of kernel_triton.py do with it."""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops.triton_math import narrow

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MINUS_INF = tl.constexpr(-float("inf"))


@triton.jit
def tanh(x):
    """tanh within a few units in the last place; the exponential alone loses digits near 0."""
    s = x * x
    # A fit of (tanh(x) / x - 1) / x^2 for |x| < 0.625.
    series = 1.0 + s * (-0.33333287 + s * (0.13328287 + s * (-0.05370398 + s * (0.02081141 + s * -0.00576346))))
    far = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def finite(top):
    """A maximum to subtract: 0 where there was no score."""
    return tl.where(top == MINUS_INF, 0.0, top)


@triton.jit
def fold(top, total, sums, next_top, next_total, next_sums):
    """Two states of the online softmax as one: the largest score in base 2, the sum of weights, the weighted values."""
    both = tl.maximum(top, next_top)
    old, new = tl.exp2(top - finite(both)), tl.exp2(next_top - finite(both))
    total = tl.fma(total, old, next_total * new)
    sums = tl.fma(sums, old[:, None], next_sums * new[:, None])
    return both, total, sums


@triton.jit
def finish(top, total, sums, sink, v_scale):
    """The result and its lse (natural) from a complete state; `sink`, in base 2, is -inf where there is none.

    Nothing attended to: zeros, and -inf.
    """
    both = tl.maximum(top, sink)
    weight = tl.exp2(top - finite(both))
    total = tl.fma(total, weight, tl.exp2(sink - finite(both)))
    scale = tl.where(total == 0.0, 0.0, weight * v_scale / total)
    lse = tl.where(total == 0.0, MINUS_INF, (finite(both) + tl.log2(total)) * LN_2)
    return sums * scale[:, None] + 0.0, lse  # + 0.0: no -0, which a sum of one run and of several would not share


@triton.jit
def visible(length, q_len, capacity, first_query, last_query, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys [low, high) that queries first_query … last_query see at all; a length past the table counts as 0."""
    length = tl.where((length < 0) | (length > capacity), 0, length)
    low, high = 0, length
    if CAUSAL:
        high = tl.minimum(length, tl.maximum(length - q_len + last_query + 1, 0))
    if WINDOW:
        low = tl.maximum(length - q_len + first_query + 1 - window, 0)
    return low, high


@triton.jit
def store_result(
    result,
    lse,
    out_ptr,
    lse_ptr,
    sequence,
    query,
    q_head,
    mask,
    row_mask,
    d,
    stride_ob,
    stride_ol,
    stride_oh,
    q_len,
    wrong_length,
    Q_HEADS: tl.constexpr,
):
    """A length that the table does not have gives NaN, as for every index that cannot be checked beforehand."""
    result = tl.where(wrong_length, float("nan"), result)
    lse = tl.where(wrong_length, float("nan"), lse)
    out_rows = out_ptr + sequence * stride_ob + query.to(tl.int64) * stride_ol + q_head.to(tl.int64) * stride_oh
    tl.store(out_rows[:, None] + d[None, :], narrow(result, out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + (sequence * Q_HEADS + q_head) * q_len + query, lse, mask=row_mask)
