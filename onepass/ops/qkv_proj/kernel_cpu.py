"""qkv_proj on the CPU: up to 16 tokens in a kernel of its own, above in torch's matrix product.

Up to 16 tokens the weights are what takes time, and reading them at the speed of memory takes no special
instructions: four output features and up to four tokens at a time, in 16-lane vectors of float32. x is normed once,
to float32, in the order in which the weights' lanes come apart. Every product of a token and a feature is one chain
of additions, so a token's bits do not depend on the other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_memory import (
    load_first,
    load_index,
    load_pair,
    publish,
    row_start,
    store_first,
    store_pair,
    take,
)
from onepass.launch.cpu_vector import inline, multiply_add, splat, sum_lanes, widen, zero64
from onepass.ops import rope_cpu
from onepass.ops.qkv_proj.op import FEW_TOKENS, Call
from onepass.ops.rope_call import Desc as RopeDesc
from onepass.ops.rope_call import Strides

if TYPE_CHECKING:
    from onepass.ops.qkv_proj.op import Desc

# Squares are summed in float32 over this many elements, and these sums in float64.
_BLOCK = 256
# Output features that are summed together.
_FEATURES = 4


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    weights = (desc.bias_dtype, desc.norm_weight_dtype, desc.q_norm_dtype, desc.k_norm_dtype)
    return cpu.missing_features(desc.dtype, *weights)


@cpu.kernel
def norm_kernel(
    x: Any,
    weight: Any,
    y: Any,
    stride_x: int,
    stride_y: int,
    n: int,
    eps: float,
    offset: float,
    normed: bool,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """RMSNorm of each row, or the row as it is. In a y of float32 the pairs of x stay as they came apart."""
    pairs = n & ~31
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            x_row, y_row = row_start(x, row, stride_x), row_start(y, row, stride_y)
            rstd = splat(1.0)
            if normed:
                total = zero64()
                for first in range(0, pairs, _BLOCK):
                    s0 = s1 = splat(0.0)
                    for i in range(first, min(first + _BLOCK, pairs), 32):
                        a, b = load_pair(x_row, i, x)
                        s0, s1 = multiply_add(a, a, s0), multiply_add(b, b, s1)
                    total += widen(s0) + widen(s1)
                for i in range(pairs, n, 16):
                    a = load_first(x_row, i, n - i)
                    total += widen(a * a)
                rstd = splat(1.0 / math.sqrt(sum_lanes(total) / n + eps))
            add = splat(offset)
            for i in range(0, pairs, 32):
                a, b = load_pair(x_row, i, x)
                wa, wb = load_pair(weight, i, x)
                if normed:
                    a, b = a * rstd * (wa + add), b * rstd * (wb + add)
                store_pair(y_row, i, a, b, False)
            for i in range(pairs, n, 16):
                a, w = load_first(x_row, i, n - i), load_first(weight, i, n - i)
                if normed:
                    a = a * rstd * (w + add)
                store_first(y_row, i, a, n - i)
        first_row = take(counter, chunk)
    publish()


@inline
def _dot_4(x: Any, w0: Any, w1: Any, w2: Any, w3: Any, n: int) -> tuple[Any, Any, Any, Any]:
    """The products of one token and four features, 16 lanes each."""
    s0 = s1 = s2 = s3 = splat(0.0)
    pairs = n & ~31
    for i in range(0, pairs, 32):
        xa, xb = load_pair(x, i, x)
        a, b = load_pair(w0, i, w0)
        s0 = multiply_add(b, xb, multiply_add(a, xa, s0))
        a, b = load_pair(w1, i, w0)
        s1 = multiply_add(b, xb, multiply_add(a, xa, s1))
        a, b = load_pair(w2, i, w0)
        s2 = multiply_add(b, xb, multiply_add(a, xa, s2))
        a, b = load_pair(w3, i, w0)
        s3 = multiply_add(b, xb, multiply_add(a, xa, s3))
    for i in range(pairs, n, 16):
        count = n - i
        xa = load_first(x, i, count)
        s0 = multiply_add(load_first(w0, i, count), xa, s0)
        s1 = multiply_add(load_first(w1, i, count), xa, s1)
        s2 = multiply_add(load_first(w2, i, count), xa, s2)
        s3 = multiply_add(load_first(w3, i, count), xa, s3)
    return s0, s1, s2, s3


@inline
def _dot_4_4(
    x0: Any, x1: Any, x2: Any, x3: Any, w0: Any, w1: Any, w2: Any, w3: Any, n: int
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The products of four tokens and four features: [token][feature], each summed as `_dot_4` sums it."""
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = splat(0.0)
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = splat(0.0)
    pairs = n & ~31
    for i in range(0, pairs, 32):
        xa0, xb0 = load_pair(x0, i, x0)
        xa1, xb1 = load_pair(x1, i, x0)
        xa2, xb2 = load_pair(x2, i, x0)
        xa3, xb3 = load_pair(x3, i, x0)
        a, b = load_pair(w0, i, w0)
        s00, s10 = multiply_add(b, xb0, multiply_add(a, xa0, s00)), multiply_add(b, xb1, multiply_add(a, xa1, s10))
        s20, s30 = multiply_add(b, xb2, multiply_add(a, xa2, s20)), multiply_add(b, xb3, multiply_add(a, xa3, s30))
        a, b = load_pair(w1, i, w0)
        s01, s11 = multiply_add(b, xb0, multiply_add(a, xa0, s01)), multiply_add(b, xb1, multiply_add(a, xa1, s11))
        s21, s31 = multiply_add(b, xb2, multiply_add(a, xa2, s21)), multiply_add(b, xb3, multiply_add(a, xa3, s31))
        a, b = load_pair(w2, i, w0)
        s02, s12 = multiply_add(b, xb0, multiply_add(a, xa0, s02)), multiply_add(b, xb1, multiply_add(a, xa1, s12))
        s22, s32 = multiply_add(b, xb2, multiply_add(a, xa2, s22)), multiply_add(b, xb3, multiply_add(a, xa3, s32))
        a, b = load_pair(w3, i, w0)
        s03, s13 = multiply_add(b, xb0, multiply_add(a, xa0, s03)), multiply_add(b, xb1, multiply_add(a, xa1, s13))
        s23, s33 = multiply_add(b, xb2, multiply_add(a, xa2, s23)), multiply_add(b, xb3, multiply_add(a, xa3, s33))
    for i in range(pairs, n, 16):
        count = n - i
        a0, a1, a2, a3 = (
            load_first(w0, i, count),
            load_first(w1, i, count),
            load_first(w2, i, count),
            load_first(w3, i, count),
        )
        xa = load_first(x0, i, count)
        s00, s01 = multiply_add(a0, xa, s00), multiply_add(a1, xa, s01)
        s02, s03 = multiply_add(a2, xa, s02), multiply_add(a3, xa, s03)
        xa = load_first(x1, i, count)
        s10, s11 = multiply_add(a0, xa, s10), multiply_add(a1, xa, s11)
        s12, s13 = multiply_add(a2, xa, s12), multiply_add(a3, xa, s13)
        xa = load_first(x2, i, count)
        s20, s21 = multiply_add(a0, xa, s20), multiply_add(a1, xa, s21)
        s22, s23 = multiply_add(a2, xa, s22), multiply_add(a3, xa, s23)
        xa = load_first(x3, i, count)
        s30, s31 = multiply_add(a0, xa, s30), multiply_add(a1, xa, s31)
        s32, s33 = multiply_add(a2, xa, s32), multiply_add(a3, xa, s33)
    return (s00, s01, s02, s03), (s10, s11, s12, s13), (s20, s21, s22, s23), (s30, s31, s32, s33)


@inline
def _store_4(row: Any, bias: Any, first: int, last: int, sums: tuple[Any, Any, Any, Any]) -> None:
    """Features first … first + 3 of a token, those up to `last`."""
    s0, s1, s2, s3 = sums
    store_first(row, first, splat(sum_lanes(widen(s0))) + load_first(bias, first, 1), 1)
    if first + 1 <= last:
        store_first(row, first + 1, splat(sum_lanes(widen(s1))) + load_first(bias, first + 1, 1), 1)
    if first + 2 <= last:
        store_first(row, first + 2, splat(sum_lanes(widen(s2))) + load_first(bias, first + 2, 1), 1)
    if first + 3 <= last:
        store_first(row, first + 3, splat(sum_lanes(widen(s3))) + load_first(bias, first + 3, 1), 1)


@cpu.kernel
def product_kernel(
    x: Any,
    w: Any,
    bias: Any,
    y: Any,
    stride_w: int,
    n: int,
    num_tokens: int,
    num_features: int,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """y = x · w^T + bias for float32 x and y, contiguous; a row of the work is four features."""
    last = num_features - 1
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            f = row * 4
            # Features past the last one are computed as the last one, and not stored.
            w0, w1 = row_start(w, f, stride_w), row_start(w, min(f + 1, last), stride_w)
            w2, w3 = row_start(w, min(f + 2, last), stride_w), row_start(w, min(f + 3, last), stride_w)
            if num_tokens == 1:
                _store_4(y, bias, f, last, _dot_4(x, w0, w1, w2, w3, n))
                continue
            for t in range(0, num_tokens, 4):
                t1, t2, t3 = min(t + 1, num_tokens - 1), min(t + 2, num_tokens - 1), min(t + 3, num_tokens - 1)
                x0, x1, x2, x3 = row_start(x, t, n), row_start(x, t1, n), row_start(x, t2, n), row_start(x, t3, n)
                of0, of1, of2, of3 = _dot_4_4(x0, x1, x2, x3, w0, w1, w2, w3, n)
                _store_4(row_start(y, t, num_features), bias, f, last, of0)
                _store_4(row_start(y, t1, num_features), bias, f, last, of1)
                _store_4(row_start(y, t2, num_features), bias, f, last, of2)
                _store_4(row_start(y, t3, num_features), bias, f, last, of3)
        first_row = take(counter, chunk)
    publish()


@inline
def _append(cache: Any, head: Any, stride: int, source: Any, stride_source: int, num_heads: int, head_dim: int) -> None:
    for i in range(num_heads):
        to, of = row_start(head, i, stride), row_start(source, i, stride_source)
        for j in range(0, head_dim, 16):
            store_first(to, j, load_first(of, j, head_dim - j), head_dim - j)


@cpu.kernel
def append_kernel(
    k: Any,
    v: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    num_heads: int,
    head_dim: int,
    page_size: int,
    num_slots: int,
    stride_slots: int,
    stride_k: int,
    stride_k_head: int,
    stride_v: int,
    stride_v_head: int,
    stride_key_page: int,
    stride_key_slot: int,
    stride_key_head: int,
    stride_value_page: int,
    stride_value_slot: int,
    stride_value_head: int,
    num_tokens: int,
    chunk: int,
    counter: int,
) -> None:
    """k and v of each token into the caches; a slot outside them is skipped."""
    first_token = take(counter, chunk)
    while first_token < num_tokens:
        for token in range(first_token, min(first_token + chunk, num_tokens)):
            slot = load_index(slots, token * stride_slots)
            if slot < 0 or slot >= num_slots:
                continue
            page = slot // page_size
            in_page = slot - page * page_size
            to = row_start(row_start(key_cache, page, stride_key_page), in_page, stride_key_slot)
            _append(key_cache, to, stride_key_head, row_start(k, token, stride_k), stride_k_head, num_heads, head_dim)
            to = row_start(row_start(value_cache, page, stride_value_page), in_page, stride_value_slot)
            _append(
                value_cache, to, stride_value_head, row_start(v, token, stride_v), stride_v_head, num_heads, head_dim
            )
        first_token = take(counter, chunk)
    publish()


@lru_cache(maxsize=64)
def _compiled_norm(dtype: torch.dtype, weight: torch.dtype | None, out: torch.dtype) -> Callable[..., None]:
    pointers = (cpu.pointer(dtype), cpu.pointer(weight, "ones"), cpu.pointer(out))
    return norm_kernel.compiled(*pointers, int, int, int, float, float, bool, *(int,) * 3)


@lru_cache(maxsize=64)
def _compiled_product(dtype: torch.dtype, bias: torch.dtype | None) -> Callable[..., None]:
    x = cpu.pointer(dtype)
    return product_kernel.compiled(cpu.pointer(torch.float32), x, cpu.pointer(bias), x, *(int,) * 7)


@lru_cache(maxsize=8)
def _compiled_append(dtype: torch.dtype) -> Callable[..., None]:
    return append_kernel.compiled(*(cpu.pointer(dtype),) * 4, cpu.pointer(torch.int64), *(int,) * 18)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their numbers and tensors."""
    few, has_norm = desc.num_tokens <= FEW_TOKENS, desc.norm_weight_dtype is not None
    norm = _compiled_norm(desc.dtype, desc.norm_weight_dtype, torch.float32 if few else desc.dtype)
    product = _compiled_product(desc.dtype, desc.bias_dtype)
    finish = _prepare_finish(desc)
    append = _compiled_append(desc.dtype) if desc.has_cache else None
    num_tokens, hidden_size = desc.num_tokens, desc.hidden_size
    features = (desc.num_q_heads + 2 * desc.num_kv_heads) * desc.head_dim

    def run(
        call: Call,
        x: Tensor,
        w_qkv: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        table: Tensor | None,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        positions: Tensor | None,
        slots: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        qkv = torch.empty((num_tokens, features), dtype=x.dtype)
        if few or has_norm:
            normed = torch.empty((num_tokens, hidden_size), dtype=torch.float32 if few else x.dtype)
            addresses = x.data_ptr(), _address(norm_weight), normed.data_ptr()
            numbers = call.x, hidden_size, hidden_size, call.norm_eps, call.norm_weight_offset, has_norm
            cpu.run_rows(norm, (*addresses, *numbers), num_tokens, hidden_size)
        else:
            normed = x
        if few:
            args = (normed.data_ptr(), w_qkv.data_ptr(), _address(bias), qkv.data_ptr(), call.w, hidden_size)
            rows = -(-features // _FEATURES)
            cpu.run_rows(product, (*args, num_tokens, features), rows, _FEATURES * hidden_size)
        elif bias is None or bias.dtype != x.dtype:
            torch.mm(normed, w_qkv.t(), out=qkv)
            if bias is not None:
                qkv.add_(bias)
        else:
            torch.addmm(bias, normed, w_qkv.t(), out=qkv)
        finish(call, qkv, q_norm, k_norm, table, positions, q, k, v)
        if append is not None and slots is not None:
            tensors = (k, v, key_cache, value_cache, slots)
            strides = (call.k_token, call.k_head, call.v_token, call.v_head, *call[17:])
            sizes = (desc.num_kv_heads, desc.head_dim, call.page_size, call.num_slots, call.slots)
            cpu.run_rows(
                append, (*map(_address, tensors), *sizes, *strides), num_tokens, 2 * desc.num_kv_heads * desc.head_dim
            )

    return run


# What stands for the table and the positions of a call without RoPE: no element is rotated, by position 0.
_NO_TABLE, _ZERO = torch.empty((1, 0)), torch.zeros(1, dtype=torch.int64)


def _prepare_finish(desc: Desc) -> Callable[..., None]:
    """q/k norm and RoPE from the product to q, k and v, in the kernel of the ops with RoPE."""
    head_dim, q_heads, kv_heads = desc.head_dim, desc.num_q_heads, desc.num_kv_heads
    position_dtype = desc.position_dtype or torch.int64
    norms = desc.q_norm_dtype, desc.k_norm_dtype
    rope = rope_cpu.prepare(
        RopeDesc(
            *(desc.device, desc.dtype, *norms, position_dtype, desc.num_tokens, q_heads, kv_heads, kv_heads, head_dim),
            *(desc.rotary_dim, desc.interleaved, desc.aligned, ()),
        )
    )
    features, k_at = (q_heads + 2 * kv_heads) * head_dim, q_heads * head_dim
    v_at = k_at + kv_heads * head_dim

    def run(
        call: Call,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        table: Tensor | None,
        positions: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        strides = Strides(*(features, head_dim) * 3, *call[11:17], call.cos_sin, call.positions)
        table, positions = (_NO_TABLE, _ZERO) if table is None or positions is None else (table, positions)
        inputs = (qkv, qkv[:, k_at:], qkv[:, v_at:], q_norm, k_norm, table, positions)
        rope(strides, call.qk_norm_eps, call.norm_weight_offset, *inputs, q, k, v)

    return run


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
