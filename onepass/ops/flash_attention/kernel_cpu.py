"""flash_attention on the CPU: blocks of keys and values stay in a core's caches while a tile of queries meets them.

The rows of a tile are the queries of one key and value head, all heads of its group together, so that a step of
decoding reads K and V once. A block of keys is transposed into float32, a block of values copied to it; four rows at a
time get their scores, their softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) and
their part of the output. Blocks begin at multiples of BLOCK_N, and one of which a row sees nothing changes nothing in
it: a row's bits do not depend on its tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_int64
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_math import exp_minus_for, tanh
from onepass.launch.cpu_memory import load_first, load_index, publish, row_start, store_first, take
from onepass.launch.cpu_tile import product, transpose
from onepass.launch.cpu_vector import (
    fill_rest,
    inline,
    lane,
    max_lanes,
    maximum,
    splat,
    sum_lanes,
    widen,
)
from onepass.ops.flash_attention.desc import UNBOUNDED

if TYPE_CHECKING:
    from onepass.ops.flash_attention.op import Desc, Strides

BLOCK_N = 64
"""Keys at a time; a row's bits depend on it."""

_TILE = 128
"""Rows of a tile, a multiple of 4."""

_FAR = 1 << 60
"""More keys than there are."""

# What a unit of cpu_threads' work, a float32 element of a memory-bound kernel, takes as long as.
_PRODUCTS_AN_ELEMENT = 8

_scores_4x4 = product(4, 4, add=False)
_outputs_4x4 = product(4, 4, add=True)
_outputs_4x1 = product(4, 1, add=True)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.sinks_dtype)


@inline
def _first_key(position: int, left: int, seqlen_k: int) -> int:
    return min(max(position - left, 0), seqlen_k)


@inline
def _end_key(position: int, right: int, seqlen_k: int) -> int:
    return min(max(position + right + 1, 0), seqlen_k)


@inline
def _capped(softcap: float, scale: float, scores: Any) -> Any:
    """Scores times the scale, and with a cap its tanh: `scale` is then over the cap."""
    scores = scores * splat(scale)
    if softcap > 0.0:
        scores = tanh(scores) * splat(softcap)
    return scores


@inline
def _softmax_row(
    like: Any, scores: Any, state: Any, out_row: Any, first: int, end: int, scale: float, softcap: float, padded: int
) -> None:
    """64 scores become weights; the row's maximum (state, 16 times), its sums and its output go with them.

    Keys before `first` and from `end` on, counted from the block's first, are not seen.
    """
    hidden = splat(-math.inf)
    top = load_first(state, 0, 16)
    largest = top
    for i in range(0, 64, 16):
        s = _capped(softcap, scale, load_first(scores, i, 16))
        s = fill_rest(s, min(max(end - i, 0), 16), hidden)
        s = fill_rest(hidden, min(max(first - i, 0), 16), s)
        store_first(scores, i, s, 16)
        largest = maximum(s, largest)
    # NaN scores count in no maximum, and make their weight NaN.
    new_top = max_lanes(largest)
    shift = splat(0.0 if new_top == -math.inf else new_top)
    total = load_first(state, 16, 16)
    if new_top > lane(top, 0):
        shrink = exp_minus_for(like, shift - top)
        total = total * shrink
        store_first(state, 0, shift, 16)
        for i in range(0, padded, 16):
            store_first(out_row, i, load_first(out_row, i, 16) * shrink, 16)
    for i in range(0, 64, 16):
        weights = exp_minus_for(like, shift - load_first(scores, i, 16))
        store_first(scores, i, weights, 16)
        total += weights
    store_first(state, 16, total, 16)


@inline
def _bounds(varlen: bool, cu_seqlens: Any, sequence: int, tokens: int) -> tuple[int, int]:
    """A sequence's first token, and how many it has."""
    if not varlen:
        return 0, tokens
    first = min(max(load_index(cu_seqlens, sequence), 0), tokens)
    return first, min(max(load_index(cu_seqlens, sequence + 1), first), tokens) - first


@inline
def _transpose_keys(keys: Any, k: Any, stride: int, count: int, head_dim: int) -> None:
    """`count` keys of a block become columns."""
    for n in range(0, count, 16):
        for d in range(0, head_dim, 16):
            target = row_start(keys, d * BLOCK_N + n, 1)
            source = row_start(row_start(k, n, stride), d, 1)
            transpose(target, BLOCK_N, source, stride, count - n, min(head_dim - d, 16))


@inline
def _copy_row(target: Any, source: Any, count: int, padded: int) -> None:
    """`count` elements, then zeros."""
    for d in range(0, padded, 16):
        store_first(target, d, load_first(source, d, min(max(count - d, 0), 16)), 16)


@inline
def _start_state(state: Any, sink: float) -> None:
    """As if a key with the sink's score and a value of zero had come first."""
    store_first(state, 0, splat(sink), 16)
    store_first(state, 16, splat(0.0), 16)
    store_first(state, 16, splat(0.0 if sink == -math.inf else 1.0), 1)


@inline
def _add_outputs(out_rows: Any, weights: Any, values: Any, padded: int, steps: int) -> None:
    """Four rows of the output get 64 weights of each times `steps` values."""
    wide = padded & ~63
    for d in range(0, wide, 64):
        _outputs_4x4(row_start(out_rows, d, 1), padded, weights, BLOCK_N, row_start(values, d, 1), padded, steps)
    for d in range(wide, padded, 16):
        _outputs_4x1(row_start(out_rows, d, 1), padded, weights, BLOCK_N, row_start(values, d, 1), padded, steps)


@inline
def _finish_row(out: Any, out_row: Any, state: Any, lse: Any, place: int, head_dim: int) -> None:
    total = sum_lanes(widen(load_first(state, 16, 16)))
    inverse = splat(0.0 if total == 0.0 else 1.0 / total)
    for d in range(0, head_dim, 16):
        store_first(out, d, load_first(out_row, d, 16) * inverse, min(head_dim - d, 16))
    top = lane(load_first(state, 0, 16), 0)
    store_first(lse, place, splat(-math.inf if total == 0.0 else top + math.log(total)), 1)


@inline
def _attend(
    q_tile: Any,
    out_tile: Any,
    keys: Any,
    values: Any,
    states: Any,
    scores: Any,
    like: Any,
    rows: int,
    first_row: int,
    group: int,
    offset: int,
    start: int,
    seqlen_k: int,
    head_dim: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> None:
    """The rows of a tile meet the block of keys from `start` on."""
    padded = (head_dim + 15) & ~15
    block = min(BLOCK_N, seqlen_k - start)
    for r in range(0, rows, 4):
        last = min(r + 3, rows - 1)
        begin = _first_key((first_row + r) // group + offset, left, seqlen_k) - start
        end = _end_key((first_row + last) // group + offset, right, seqlen_k) - start
        if begin >= block or end <= 0:
            continue
        _scores_4x4(scores, BLOCK_N, row_start(q_tile, r, padded), padded, keys, BLOCK_N, head_dim)
        for row in range(r, r + 4):
            position = (first_row + min(row, rows - 1)) // group + offset
            first = _first_key(position, left, seqlen_k) - start
            _softmax_row(
                like,
                row_start(scores, row - r, BLOCK_N),
                row_start(states, row, 32),
                row_start(out_tile, row, padded),
                first,
                _end_key(position, right, seqlen_k) - start,
                scale,
                softcap,
                padded,
            )
        _add_outputs(row_start(out_tile, r, padded), scores, values, padded, min(end, block))


@cpu.kernel
def flash_attention_kernel(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sinks: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    scratch: Any,
    taken_slots: int,
    num_slots: int,
    slot_size: int,
    stride_qb: int,
    stride_qt: int,
    stride_qh: int,
    stride_kb: int,
    stride_kt: int,
    stride_kh: int,
    stride_vb: int,
    stride_vt: int,
    stride_vh: int,
    stride_ob: int,
    stride_ot: int,
    stride_oh: int,
    tokens_q: int,
    tokens_k: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    left: int,
    right: int,
    varlen: bool,
    has_sinks: bool,
    scale: float,
    softcap: float,
    tiles: int,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """A "row" of the call is a tile: the last queries, which see most keys, come first."""
    padded = (head_dim + 15) & ~15
    slot = take(taken_slots, 1)
    if slot >= num_slots:  # the number of threads has just been raised: the others do the work
        return
    q_tile = row_start(scratch, slot, slot_size)
    out_tile = row_start(q_tile, _TILE, padded)
    keys = row_start(out_tile, _TILE, padded)
    values = row_start(keys, padded, BLOCK_N)
    states = row_start(values, BLOCK_N, padded)
    scores = row_start(states, _TILE, 32)
    columns = num_rows // tiles
    first_item = take(counter, chunk)
    while first_item < num_rows:
        for item in range(first_item, min(first_item + chunk, num_rows)):
            first_row = (tiles - 1 - item // columns) * _TILE
            sequence = item % columns // num_kv_heads
            kv_head = item % columns - sequence * num_kv_heads
            first_q, seqlen_q = _bounds(varlen, cu_seqlens_q, sequence, tokens_q)
            first_k, seqlen_k = _bounds(varlen, cu_seqlens_k, sequence, tokens_k)
            rows = min(_TILE, seqlen_q * group - first_row)
            offset = seqlen_k - seqlen_q
            q_start = row_start(row_start(q, sequence, stride_qb), first_q, stride_qt)
            for r in range((rows + 3) & ~3):
                i = (first_row + r) // group
                head = kv_head * group + (first_row + r) - i * group
                q_row = row_start(row_start(q_start, i, stride_qt), head, stride_qh)
                _copy_row(row_start(q_tile, r, padded), q_row, head_dim if r < rows else 0, padded)
                _copy_row(row_start(out_tile, r, padded), q_row, 0, padded)
                sink = lane(load_first(sinks, head, 1), 0) if has_sinks and r < rows else -math.inf
                _start_state(row_start(states, r, 32), sink)
            begin = _first_key(first_row // group + offset, left, seqlen_k) // BLOCK_N * BLOCK_N
            end = _end_key((first_row + rows - 1) // group + offset, right, seqlen_k)
            for start in range(begin, end if rows > 0 else 0, BLOCK_N):
                block = min(BLOCK_N, seqlen_k - start)
                k_block = row_start(row_start(k, sequence, stride_kb), first_k + start, stride_kt)
                _transpose_keys(keys, row_start(k_block, kv_head, stride_kh), stride_kt, block, head_dim)
                v_block = row_start(row_start(v, sequence, stride_vb), first_k + start, stride_vt)
                v_block = row_start(v_block, kv_head, stride_vh)
                for n in range(block):
                    _copy_row(row_start(values, n, padded), row_start(v_block, n, stride_vt), head_dim, padded)
                _attend(
                    q_tile,
                    out_tile,
                    keys,
                    values,
                    states,
                    scores,
                    q,
                    rows,
                    first_row,
                    group,
                    offset,
                    start,
                    seqlen_k,
                    head_dim,
                    left,
                    right,
                    scale,
                    softcap,
                )
            out_start = row_start(row_start(out, sequence, stride_ob), first_q, stride_ot)
            for r in range(rows):
                i = (first_row + r) // group
                head = kv_head * group + (first_row + r) - i * group
                place = ((0 if varlen else sequence * num_kv_heads * group) + head) * tokens_q + first_q + i
                out_row = row_start(row_start(out_start, i, stride_ot), head, stride_oh)
                _finish_row(out_row, row_start(out_tile, r, padded), row_start(states, r, 32), lse, place, head_dim)
        first_item = take(counter, chunk)
    publish()


@lru_cache(maxsize=64)
def _compiled(
    dtype: torch.dtype, sinks_dtype: torch.dtype | None, index_dtype: torch.dtype | None, has_lse: bool
) -> Callable[..., None]:
    data, index = cpu.pointer(dtype), cpu.pointer(index_dtype or torch.int32)
    lse = cpu.pointer(torch.float32) if has_lse else cpu.pointer(None, "nowhere")
    pointers = (data, data, data, data, lse, cpu.pointer(sinks_dtype), index, index, cpu.pointer(torch.float32))
    return flash_attention_kernel.compiled(*pointers, *(int,) * 22, *(bool,) * 2, *(float,) * 2, *(int,) * 4)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    kernel = _compiled(desc.dtype, desc.sinks_dtype, desc.index_dtype, desc.has_lse)
    padded = -(-desc.head_dim // 16) * 16
    tiles = -(-desc.seqlen_q * desc.group // _TILE)
    items = desc.batch * desc.num_kv_heads * tiles
    scale = desc.softmax_scale if desc.softcap is None else desc.softmax_scale / desc.softcap
    slot_size = padded * (2 * _TILE + 2 * BLOCK_N) + _TILE * 32 + 4 * BLOCK_N
    numbers = (
        desc.total_q if desc.varlen else desc.seqlen_q,
        desc.total_k if desc.varlen else desc.seqlen_k,
        desc.num_kv_heads,
        desc.group,
        desc.head_dim,
        _FAR if desc.left == UNBOUNDED else min(desc.left, _FAR),
        _FAR if desc.right == UNBOUNDED else min(desc.right, _FAR),
        desc.varlen,
        desc.sinks_dtype is not None,
        scale,
        desc.softcap or 0.0,
        tiles,
    )
    rows = min(_TILE, desc.seqlen_q * desc.group)
    work = 2 * desc.seqlen_k * desc.head_dim * (1 + rows // _PRODUCTS_AN_ELEMENT)

    def run(
        strides: Strides,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> None:
        if items == 0:
            return
        slots = min(torch.get_num_threads(), items)
        # A line of the cache for the counter of slots that are taken, and one to align the first.
        scratch = torch.empty(slots * slot_size + 32, dtype=torch.float32)
        counter = (scratch.data_ptr() + 63) & ~63
        c_int64.from_address(counter).value = 0
        tensors = (q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        distances = [stride for tensor in strides for stride in tensor]
        memory = (counter + 64, counter, slots, slot_size)
        cpu.run_rows(kernel, (*addresses, *memory, *distances, *numbers), items, work)

    return run
