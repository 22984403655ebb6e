"""RoPE on the CPU, with the RMSNorm of each head before it or without: a head stays in the core's caches.

The norm's sum of squares reads a head once, the rotation reads it again and writes it. A thread takes whole tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from numba.extending import overload
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_memory import (
    load_first,
    load_index,
    load_pair,
    move,
    publish,
    row_start,
    store_first,
    store_pair,
    take,
)
from onepass.launch.cpu_vector import (
    even_odd,
    inline,
    interleave,
    multiply_add,
    splat,
    sum_lanes,
    widen,
    zero64,
)

if TYPE_CHECKING:
    from onepass.ops.rope_call import Desc, Strides


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.q_weight_dtype, desc.k_weight_dtype)


# What a kernel is compiled from depends on its pointers' storage and on its layout. Each choice is an overload: it
# returns one of two functions, which have its own signature.


def _root_of_squares(weight: Any, x: Any, head_dim: Any, eps: Any) -> Any:
    s0 = s1 = splat(0.0)
    whole = head_dim & ~31
    for i in range(0, whole, 32):
        a, b = load_pair(x, i, x)
        s0, s1 = multiply_add(a, a, s0), multiply_add(b, b, s1)
    total = zero64() + widen(s0) + widen(s1)
    for i in range(whole, head_dim, 16):
        a = load_first(x, i, head_dim - i)
        total += widen(a * a)
    return 1.0 / math.sqrt(sum_lanes(total) / head_dim + eps)


def _one(weight: Any, x: Any, head_dim: Any, eps: Any) -> Any:
    return 1.0


def _scale(weight: Any, x: Any, head_dim: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x^2) + eps); 1 where there is no norm."""
    raise NotImplementedError("_scale() runs inside compiled kernels")


@overload(_scale, jit_options={"forceinline": True})
def _choose_scale(weight: Any, x: Any, head_dim: Any, eps: Any) -> Any:
    return _one if weight.storage == "ones" else _root_of_squares


def _weighted(weight: Any, w: Any, offset: Any, scale: Any) -> Any:
    return (w + offset) * scale


def _unweighted(weight: Any, w: Any, offset: Any, scale: Any) -> Any:
    return w


def _factor(weight: Any, w: Any, offset: Any, scale: Any) -> Any:
    """(w + offset) * scale; w, which is 1, where there is no norm."""
    raise NotImplementedError("_factor() runs inside compiled kernels")


@overload(_factor, jit_options={"forceinline": True})
def _choose_factor(weight: Any, w: Any, offset: Any, scale: Any) -> Any:
    return _unweighted if weight.storage == "ones" else _weighted


def _same(x: Any, a: Any, b: Any) -> Any:
    return a, b


def _even_odd(x: Any, a: Any, b: Any) -> Any:
    return even_odd(a, b)


def _interleave(x: Any, a: Any, b: Any) -> Any:
    return interleave(a, b)


def _as_pairs(x: Any, a: Any, b: Any) -> Any:
    """What `load_pair(..., x)` loaded, as even and odd elements."""
    raise NotImplementedError("_as_pairs() runs inside compiled kernels")


@overload(_as_pairs, jit_options={"forceinline": True})
def _choose_as_pairs(x: Any, a: Any, b: Any) -> Any:
    return _same if x.storage == "bfloat16" else _even_odd


def _from_pairs(x: Any, a: Any, b: Any) -> Any:
    """Even and odd elements in the order of `load_pair(..., x)`."""
    raise NotImplementedError("_from_pairs() runs inside compiled kernels")


@overload(_from_pairs, jit_options={"forceinline": True})
def _choose_from_pairs(x: Any, a: Any, b: Any) -> Any:
    return _same if x.storage == "bfloat16" else _interleave


@inline
def _turned(a: Any, b: Any, cos: Any, sin: Any) -> Any:
    return multiply_add(a, cos, splat(0.0) - b * sin), multiply_add(b, cos, a * sin)


def _turn_halves(
    layout: Any, x: Any, out: Any, angles: Any, weight: Any, offset: Any, scale: Any, rotary_dim: Any, streaming: Any
) -> Any:
    """Element i with element i + rotary_dim / 2. `angles`: a row of the table."""
    half = rotary_dim // 2
    whole = half & ~31
    for i in range(0, whole, 32):
        a0, a1 = load_pair(x, i, x)
        b0, b1 = load_pair(x, half + i, x)
        w0, w1 = load_pair(weight, i, x)
        a0, a1 = a0 * _factor(weight, w0, offset, scale), a1 * _factor(weight, w1, offset, scale)
        w0, w1 = load_pair(weight, half + i, x)
        b0, b1 = b0 * _factor(weight, w0, offset, scale), b1 * _factor(weight, w1, offset, scale)
        cos0, cos1 = load_pair(angles, i, x)
        sin0, sin1 = load_pair(angles, half + i, x)
        a0, b0 = _turned(a0, b0, cos0, sin0)
        a1, b1 = _turned(a1, b1, cos1, sin1)
        store_pair(out, i, a0, a1, streaming)
        store_pair(out, half + i, b0, b1, streaming)
    for i in range(whole, half, 16):
        count = half - i
        a = load_first(x, i, count) * _factor(weight, load_first(weight, i, count), offset, scale)
        b = load_first(x, half + i, count) * _factor(weight, load_first(weight, half + i, count), offset, scale)
        a, b = _turned(a, b, load_first(angles, i, count), load_first(angles, half + i, count))
        store_first(out, i, a, count)
        store_first(out, half + i, b, count)


def _turn_interleaved(
    layout: Any, x: Any, out: Any, angles: Any, weight: Any, offset: Any, scale: Any, rotary_dim: Any, streaming: Any
) -> Any:
    """Element 2 i with element 2 i + 1."""
    half = rotary_dim // 2
    whole = rotary_dim & ~31
    for i in range(0, whole, 32):
        a, b = load_pair(x, i, x)
        w0, w1 = load_pair(weight, i, x)
        a, b = _as_pairs(x, a * _factor(weight, w0, offset, scale), b * _factor(weight, w1, offset, scale))
        a, b = _turned(a, b, load_first(angles, i // 2, 16), load_first(angles, half + i // 2, 16))
        a, b = _from_pairs(x, a, b)
        store_pair(out, i, a, b, streaming)
    count = rotary_dim - whole
    if count > 0:
        more = max(count - 16, 0)
        a = load_first(x, whole, count) * _factor(weight, load_first(weight, whole, count), offset, scale)
        b = load_first(x, whole + 16, more) * _factor(weight, load_first(weight, whole + 16, more), offset, scale)
        a, b = even_odd(a, b)
        cos, sin = load_first(angles, whole // 2, count // 2), load_first(angles, half + whole // 2, count // 2)
        a, b = _turned(a, b, cos, sin)
        a, b = interleave(a, b)
        store_first(out, whole, a, count)
        store_first(out, whole + 16, b, more)


def _turn(
    layout: Any, x: Any, out: Any, angles: Any, weight: Any, offset: Any, scale: Any, rotary_dim: Any, streaming: Any
) -> Any:
    """One of the two above, by the `Choice` of a layout."""
    raise NotImplementedError("_turn() runs inside compiled kernels")


@overload(_turn, jit_options={"forceinline": True})
def _choose_turn(
    layout: Any, x: Any, out: Any, angles: Any, weight: Any, offset: Any, scale: Any, rotary_dim: Any, streaming: Any
) -> Any:
    return _turn_interleaved if layout.choice == "interleaved" else _turn_halves


@inline
def _copy(x: Any, out: Any, weight: Any, offset: Any, scale: Any, first: int, end: int, streaming: bool) -> None:
    """Elements that are not rotated, normalised where there is a norm."""
    whole = first + ((end - first) & ~31)
    for i in range(first, whole, 32):
        a, b = load_pair(x, i, x)
        w0, w1 = load_pair(weight, i, x)
        a, b = a * _factor(weight, w0, offset, scale), b * _factor(weight, w1, offset, scale)
        store_pair(out, i, a, b, streaming)
    for i in range(whole, end, 16):
        count = end - i
        a = load_first(x, i, count) * _factor(weight, load_first(weight, i, count), offset, scale)
        store_first(out, i, a, count)


@inline
def _fill_nan(out: Any, head_dim: int) -> None:
    nan = splat(math.nan)
    for i in range(0, head_dim, 16):
        store_first(out, i, nan, head_dim - i)


@inline
def _heads(
    layout: Any,
    x: Any,
    out: Any,
    weight: Any,
    angles: Any,
    valid: bool,
    num_heads: int,
    stride_x: int,
    stride_out: int,
    head_dim: int,
    rotary_dim: int,
    eps: float,
    weight_offset: float,
    streaming: bool,
) -> None:
    """All heads of q or of k of one token."""
    offset = splat(weight_offset)
    for head in range(num_heads):
        x_head, out_head = row_start(x, head, stride_x), row_start(out, head, stride_out)
        if valid:
            scale = splat(_scale(weight, x_head, head_dim, eps))
            _turn(layout, x_head, out_head, angles, weight, offset, scale, rotary_dim, streaming)
            _copy(x_head, out_head, weight, offset, scale, rotary_dim, head_dim, streaming)
        else:
            _fill_nan(out_head, head_dim)


@cpu.kernel
def rope_kernel(
    layout: Any,
    q: Any,
    k: Any,
    v: Any,
    q_weight: Any,
    k_weight: Any,
    cache: Any,
    positions_32: Any,
    positions_64: Any,
    q_out: Any,
    k_out: Any,
    v_out: Any,
    wide_positions: bool,
    num_q_heads: int,
    num_k_heads: int,
    num_v_heads: int,
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    stride_qt: int,
    stride_qh: int,
    stride_kt: int,
    stride_kh: int,
    stride_vt: int,
    stride_vh: int,
    stride_qot: int,
    stride_qoh: int,
    stride_kot: int,
    stride_koh: int,
    stride_vot: int,
    stride_voh: int,
    stride_cache: int,
    stride_positions: int,
    eps: float,
    weight_offset: float,
    streaming: bool,
    num_tokens: int,
    chunk: int,
    counter: int,
) -> None:
    first_token = take(counter, chunk)
    while first_token < num_tokens:
        for token in range(first_token, min(first_token + chunk, num_tokens)):
            at = token * stride_positions
            position = load_index(positions_64, at) if wide_positions else load_index(positions_32, at)
            valid = position >= 0 and position < max_position
            angles = row_start(cache, position, stride_cache)
            _heads(
                layout,
                row_start(q, token, stride_qt),
                row_start(q_out, token, stride_qot),
                q_weight,
                angles,
                valid,
                num_q_heads,
                stride_qh,
                stride_qoh,
                head_dim,
                rotary_dim,
                eps,
                weight_offset,
                streaming,
            )
            _heads(
                layout,
                row_start(k, token, stride_kt),
                row_start(k_out, token, stride_kot),
                k_weight,
                angles,
                valid,
                num_k_heads,
                stride_kh,
                stride_koh,
                head_dim,
                rotary_dim,
                eps,
                weight_offset,
                streaming,
            )
            v_token, v_out_token = row_start(v, token, stride_vt), row_start(v_out, token, stride_vot)
            for head in range(num_v_heads):
                v_head, v_out_head = row_start(v_token, head, stride_vh), row_start(v_out_token, head, stride_voh)
                move(v_out_head, v_head, head_dim)
        first_token = take(counter, chunk)
    publish()


@lru_cache(maxsize=64)
def _compiled(
    dtype: torch.dtype,
    q_weight_dtype: torch.dtype | None,
    k_weight_dtype: torch.dtype | None,
    interleaved: bool,
) -> Callable[..., None]:
    x = cpu.pointer(dtype)
    return rope_kernel.compiled(
        cpu.choice("interleaved" if interleaved else "halves"),
        *(x, x, x),
        *(cpu.pointer(weight, "ones") for weight in (q_weight_dtype, k_weight_dtype)),
        cpu.pointer(torch.float32),
        cpu.pointer(torch.int32),
        cpu.pointer(torch.int64),
        *(x, x, x),
        bool,
        *(int,) * 20,
        *(float,) * 2,
        bool,
        *(int,) * 3,
    )


def prepare(desc: Desc) -> Callable[..., None]:
    """run(strides, eps, weight_offset, q, k, v, q_weight, k_weight, cos_sin_cache, positions, q_out, k_out, v_out)."""
    weights = desc.q_weight_dtype, desc.k_weight_dtype if desc.num_k_heads else desc.q_weight_dtype
    kernel = _compiled(desc.dtype, *weights, desc.interleaved)
    sizes = desc.num_q_heads, desc.num_k_heads, desc.num_v_heads, desc.head_dim, desc.rotary_dim
    return partial(_launch, kernel, desc.num_tokens, sizes)


def _launch(
    kernel: Callable[..., None],
    num_tokens: int,
    sizes: tuple[int, int, int, int, int],
    strides: Strides,
    eps: float,
    weight_offset: float,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cache: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_out: Tensor | None,
    v_out: Tensor | None,
) -> None:
    num_q_heads, num_k_heads, num_v_heads, head_dim, rotary_dim = sizes
    # Each vector that is stored starts at a multiple of these.
    steps = rotary_dim // 2
    for distance in strides[6:12]:
        steps |= distance
    outputs = q_out.data_ptr(), _address(k_out), _address(v_out)
    args = (
        None,
        q.data_ptr(),
        _address(k),
        _address(v),
        _address(q_weight),
        _address(k_weight),
        cache.data_ptr(),
        positions.data_ptr(),
        positions.data_ptr(),
        *outputs,
        positions.dtype == torch.int64,
        *sizes,
        cache.shape[0],
        *strides,
        eps,
        weight_offset,
        cpu.streams(q_out, steps) and not (outputs[1] | outputs[2]) & 63,
    )
    cpu.run_rows(kernel, args, num_tokens, (num_q_heads + num_k_heads + num_v_heads) * head_dim)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
