"""merge_attention_states on the CPU: one row after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_memory import load_first, load_pair, publish, row_start, store_first, store_pair, take
from onepass.launch.cpu_vector import inline, lane, multiply_add, splat

if TYPE_CHECKING:
    from onepass.ops.merge_attention_states.op import Desc, Strides


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype)


@inline
def _weighted(target: Any, a: Any, b: Any, weight_a: float, weight_b: float, n: int) -> None:
    wa, wb = splat(weight_a), splat(weight_b)
    pairs = n & ~31
    for i in range(0, pairs, 32):
        a0, a1 = load_pair(a, i, target)
        b0, b1 = load_pair(b, i, target)
        store_pair(target, i, multiply_add(a0, wa, b0 * wb), multiply_add(a1, wa, b1 * wb), False)
    for i in range(pairs, n, 16):
        count = n - i
        result = multiply_add(load_first(a, i, count), wa, load_first(b, i, count) * wb)
        store_first(target, i, result, count)


@inline
def _scaled(target: Any, a: Any, weight: float, n: int) -> None:
    w = splat(weight)
    for i in range(0, n, 16):
        count = min(n - i, 16)
        store_first(target, i, load_first(a, i, count) * w, count)


@inline
def _zeros(target: Any, n: int) -> None:
    for i in range(0, n, 16):
        store_first(target, i, splat(0.0), min(n - i, 16))


@cpu.kernel
def merge_attention_states_kernel(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    out: Any,
    lse: Any,
    stride_ab: int,
    stride_al: int,
    stride_ah: int,
    stride_bb: int,
    stride_bl: int,
    stride_bh: int,
    stride_ob: int,
    stride_ol: int,
    stride_oh: int,
    stride_lab: int,
    stride_lah: int,
    stride_lal: int,
    stride_lbb: int,
    stride_lbh: int,
    stride_lbl: int,
    stride_lb: int,
    stride_lh: int,
    stride_ll: int,
    q_len: int,
    num_heads: int,
    head_dim: int,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    first = take(counter, chunk)
    while first < num_rows:
        for row in range(first, min(first + chunk, num_rows)):
            token = row // num_heads
            head = row - token * num_heads
            sequence = token // q_len
            query = token - sequence * q_len
            a = lane(load_first(lse_a, sequence * stride_lab + head * stride_lah + query * stride_lal, 1), 0)
            b = lane(load_first(lse_b, sequence * stride_lbb + head * stride_lbh + query * stride_lbl, 1), 0)
            a_row = row_start(out_a, 1, sequence * stride_ab + query * stride_al + head * stride_ah)
            b_row = row_start(out_b, 1, sequence * stride_bb + query * stride_bl + head * stride_bh)
            target = row_start(out, 1, sequence * stride_ob + query * stride_ol + head * stride_oh)
            # The values of an empty state are not read.
            if a == -math.inf and b == -math.inf:
                merged = -math.inf
                _zeros(target, head_dim)
            elif a == -math.inf:
                merged = b + (b - b)  # NaN for infinity
                _scaled(target, b_row, math.exp(b - b), head_dim)
            elif b == -math.inf:
                merged = a + (a - a)
                _scaled(target, a_row, math.exp(a - a), head_dim)
            else:
                top = max(a, b)
                weight_a, weight_b = math.exp(a - top), math.exp(b - top)
                total = weight_a + weight_b
                merged = top + math.log(total)
                _weighted(target, a_row, b_row, weight_a / total, weight_b / total, head_dim)
            lse_row = row_start(lse, 1, sequence * stride_lb + head * stride_lh + query * stride_ll)
            store_first(lse_row, 0, splat(merged), 1)
        first = take(counter, chunk)
    publish()


@lru_cache(maxsize=8)
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    out, lse = cpu.pointer(dtype), cpu.pointer(torch.float32)
    return merge_attention_states_kernel.compiled(out, lse, out, lse, out, lse, *(int,) * 24)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    num_rows = desc.batch * desc.q_len * desc.num_heads
    return partial(_launch, _compiled(desc.dtype), num_rows, (desc.q_len, desc.num_heads, desc.head_dim))


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    sizes: tuple[int, int, int],
    strides: Strides,
    *tensors: Tensor,
) -> None:
    cpu.run_rows(kernel, (*(t.data_ptr() for t in tensors), *strides, *sizes), num_rows, sizes[2])
