"""paged_attention on the CPU: chunks of keys shared among threads, the q heads of a group together, K and V read once.

A block of keys is multiplied where it lies with four rows (queries and heads of the group) at a time, whose softmax
goes on from block to block (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018). A chunk's result goes to the workspace; a second kernel adds up the chunks of each row, in order.
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
from onepass.launch.cpu_gather import (
    KEYS,
    ROWS,
    add_weighted,
    address_of,
    dots,
    load_address,
    prefetch,
    store_address,
)
from onepass.launch.cpu_math import exp_minus_for, tanh
from onepass.launch.cpu_memory import load_first, load_index, publish, row_start, store_first, take
from onepass.launch.cpu_vector import (
    fill_rest,
    inline,
    lane,
    max_lanes,
    maximum,
    multiply_add,
    splat,
    sum_lanes,
    widen,
    zero64,
)
from onepass.ops.paged_attention.config import heuristic

if TYPE_CHECKING:
    from onepass.ops.paged_attention.op import Desc, Numbers, Strides

BLOCK = 64
"""Keys at a time; a row's bits depend on it."""

_TILE_ROWS = 128
"""Rows of an item, of all its heads together, unless 4 a head are more."""


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype, desc.cache_dtype, desc.sinks_dtype)


@inline
def _softmax_row(
    like: Any, scores: Any, state: Any, out_row: Any, first: int, end: int, scale: float, softcap: float, padded: int
) -> None:
    """64 scores become weights; the row's maximum and its sums (`state`, 16 times each) and its output go with them.

    Keys before `first` and from `end` on, counted from the block's first, are not seen. With a soft cap, `scale` is
    over the cap.
    """
    hidden = splat(-math.inf)
    top = load_first(state, 0, 16)
    largest = top
    for i in range(0, BLOCK, 16):
        s = load_first(scores, i, 16) * splat(scale)
        if softcap > 0.0:
            s = tanh(s) * splat(softcap)
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
    for i in range(0, BLOCK, 16):
        weights = exp_minus_for(like, shift - load_first(scores, i, 16))
        store_first(scores, i, weights, 16)
        total += weights
    store_first(state, 16, total, 16)


@inline
def _begin_row(q_row: Any, q_to: Any, out_row: Any, state: Any, count: int, padded: int) -> None:
    """Nothing seen yet; `count` elements of q, and zeros after them."""
    for d in range(0, padded, 16):
        store_first(q_to, d, load_first(q_row, d, min(max(count - d, 0), 16)), 16)
        store_first(out_row, d, splat(0.0), 16)
    store_first(state, 0, splat(-math.inf), 16)
    store_first(state, 16, splat(0.0), 16)


@inline
def _end_row(out_row: Any, state: Any, sums: Any, top: Any, total: Any, head_dim: int) -> None:
    for d in range(0, head_dim, 16):
        store_first(sums, d, load_first(out_row, d, 16), min(head_dim - d, 16))
    store_first(top, 0, load_first(state, 0, 16), 1)
    store_first(total, 0, splat(sum_lanes(zero64() + widen(load_first(state, 16, 16)))), 1)


@inline
def _visible_from(window: int, position: int) -> int:
    """The first key that a query at `position` sees."""
    return max(position + 1 - window, 0) if window > 0 else 0


@inline
def _visible_to(causal: bool, position: int, length: int) -> int:
    """One past the last key that a query at `position` sees."""
    return max(min(position + 1, length), 0) if causal else length


@cpu.kernel
def paged_attention_kernel(
    q: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    work: Any,
    scratch: Any,
    taken_slots: int,
    num_slots: int,
    slot_size: int,
    stride_qb: int,
    stride_qt: int,
    stride_qh: int,
    stride_kp: int,
    stride_ks: int,
    stride_kh: int,
    stride_vp: int,
    stride_vs: int,
    stride_vh: int,
    stride_table: int,
    batch: int,
    q_len: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    capacity: int,
    num_parts: int,
    part_keys: int,
    heads: int,
    tile_rows: int,
    row_bytes: int,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    num_items: int,
    chunk: int,
    counter: int,
) -> None:
    """An item is a chunk of keys of one sequence, and a tile of rows for each of some kv heads.

    Heads go round block by block: in most caches a token's heads lie side by side.
    """
    padded = (head_dim + 15) & ~15
    slot = take(taken_slots, 1)
    if slot >= num_slots:  # the number of threads has just been raised: the others do the work
        return
    q_tile = row_start(scratch, slot, slot_size)
    out_tile = row_start(q_tile, heads * tile_rows, padded)
    states = row_start(out_tile, heads * tile_rows, padded)
    scores = row_start(states, heads * tile_rows, 32)
    # Two tables of the addresses of BLOCK rows of K, and of V.
    tables = address_of(row_start(scores, ROWS, BLOCK))
    # Stand-ins: a row of zeros for a key that nobody sees, one of NaN (all bits set) for a page that is not there.
    zero_row = tables + 32 * BLOCK
    nan_row = zero_row + 4 * padded
    for i in range(0, padded):
        store_address(zero_row, i, 0 if i < padded // 2 else -1)
    rows_in_all = q_len * group
    tiles = (rows_in_all + tile_rows - 1) // tile_rows
    head_groups = (num_kv_heads + heads - 1) // heads
    first_item = take(counter, chunk)
    while first_item < num_items:
        for item in range(first_item, min(first_item + chunk, num_items)):
            first_head = item % head_groups * heads
            end_head = min(first_head + heads, num_kv_heads)
            rest = item // head_groups
            tile = rest % tiles
            rest = rest // tiles
            part = rest % num_parts
            sequence = rest // num_parts
            length = load_index(cache_seqlens, sequence)
            if length < 0 or length > capacity:
                continue
            first_row = tile * tile_rows
            rows = min(tile_rows, rows_in_all - first_row)
            offset = length - q_len
            low = _visible_from(window, first_row // group + offset)
            high = _visible_to(causal, (first_row + rows - 1) // group + offset, length)
            start = max(part * part_keys, low // BLOCK * BLOCK)
            end = min((part + 1) * part_keys, high)
            if start >= end:
                continue
            for head in range(first_head, end_head):
                for r in range((rows + 3) & ~3):
                    at = (head - first_head) * tile_rows + r
                    i = (first_row + r) // group
                    q_at = sequence * stride_qb + i * stride_qt + (head * group + first_row + r - i * group) * stride_qh
                    count = head_dim if r < rows else 0
                    _begin_row(
                        row_start(q, 1, q_at),
                        row_start(q_tile, at, padded),
                        row_start(out_tile, at, padded),
                        row_start(states, at, 32),
                        count,
                        padded,
                    )
            num_heads = end_head - first_head
            all_steps = (end - start + BLOCK - 1) // BLOCK * num_heads
            # A step ahead, so that the memory of the next rows is asked for while these are worked on.
            for next_step in range(all_steps + 1):
                rows_at = tables + (next_step + 1) % 2 * (16 * BLOCK)
                next_at = tables + next_step % 2 * (16 * BLOCK)
                if next_step < all_steps:
                    head = first_head + next_step % num_heads
                    k_head, v_head = row_start(key_cache, head, stride_kh), row_start(value_cache, head, stride_vh)
                    for n in range(BLOCK):
                        key = start + next_step // num_heads * BLOCK + n
                        page = place = -1
                        if key >= low and key < end:
                            column = key // page_size
                            place = key - column * page_size
                            page = load_index(block_table, sequence * stride_table + column)
                        there = page >= 0 and page < num_pages
                        absent = zero_row if place < 0 else nan_row
                        k_at = address_of(row_start(row_start(k_head, page, stride_kp), place, stride_ks))
                        v_at = address_of(row_start(row_start(v_head, page, stride_vp), place, stride_vs))
                        store_address(next_at, n, k_at if there else absent)
                        store_address(next_at, BLOCK + n, v_at if there else zero_row)
                if next_step == 0:
                    continue
                head = first_head + (next_step - 1) % num_heads
                begin = start + (next_step - 1) // num_heads * BLOCK
                block = min(BLOCK, end - begin)
                whole = (block + KEYS - 1) // KEYS * KEYS
                for r in range(0, rows, ROWS):
                    last = min(r + ROWS, rows) - 1
                    four_low = _visible_from(window, (first_row + r) // group + offset)
                    four_high = _visible_to(causal, (first_row + last) // group + offset, length)
                    if four_low >= begin + block or four_high <= begin:
                        continue
                    at = (head - first_head) * tile_rows + r
                    q_rows, out_rows = row_start(q_tile, at, padded), row_start(out_tile, at, padded)
                    for n in range(0, whole, KEYS):
                        if r == 0 and next_step < all_steps:
                            for m in range(n, n + KEYS):
                                prefetch(load_address(next_at, m), row_bytes)
                                prefetch(load_address(next_at, BLOCK + m), row_bytes)
                        to = row_start(scores, n, 1)
                        dots(to, BLOCK, q_rows, padded, key_cache, rows_at + 8 * n, head_dim)
                    for row in range(ROWS):
                        position = (first_row + min(r + row, rows - 1)) // group + offset
                        _softmax_row(
                            work,
                            row_start(scores, row, BLOCK),
                            row_start(states, at + row, 32),
                            row_start(out_rows, row, padded),
                            _visible_from(window, position) - begin,
                            min(_visible_to(causal, position, length) - begin, block),
                            scale,
                            softcap,
                            padded,
                        )
                    steps = min(four_high - begin, block)
                    add_weighted(out_rows, padded, scores, BLOCK, value_cache, rows_at + 8 * BLOCK, head_dim, steps)
            # work: sums [batch, kv heads, parts, q_len * group, head_dim], then tops and totals without head_dim.
            all_rows = batch * num_kv_heads * num_parts * rows_in_all
            for head in range(first_head, end_head):
                to = ((sequence * num_kv_heads + head) * num_parts + part) * rows_in_all + first_row
                at = (head - first_head) * tile_rows
                for r in range(rows):
                    _end_row(
                        row_start(out_tile, at + r, padded),
                        row_start(states, at + r, 32),
                        row_start(work, to + r, head_dim),
                        row_start(work, 1, all_rows * head_dim + to + r),
                        row_start(work, 1, all_rows * (head_dim + 1) + to + r),
                        head_dim,
                    )
        first_item = take(counter, chunk)
    publish()


@cpu.kernel
def merge_kernel(
    out: Any,
    lse: Any,
    sinks: Any,
    cache_seqlens: Any,
    work: Any,
    stride_ob: int,
    stride_ot: int,
    stride_oh: int,
    batch: int,
    q_len: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    capacity: int,
    num_parts: int,
    part_keys: int,
    tile_rows: int,
    causal: bool,
    window: int,
    has_sinks: bool,
    v_scale: float,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """A row is one q head of one query; the tops in the workspace become the parts' weights."""
    num_heads = num_kv_heads * group
    rows_in_all = q_len * group
    all_rows = batch * num_kv_heads * num_parts * rows_in_all
    tops = row_start(work, all_rows, head_dim)
    totals = row_start(work, all_rows, head_dim + 1)
    first = take(counter, chunk)
    while first < num_rows:
        for number in range(first, min(first + chunk, num_rows)):
            head = number % num_heads
            token = number // num_heads
            sequence = token // q_len
            query = token - sequence * q_len
            row = query * group + head % group
            length = load_index(cache_seqlens, sequence)
            wrong = length < 0 or length > capacity
            if wrong:
                length = 0
            # What a tile's first and last queries see is what was written for it.
            first_row = row // tile_rows * tile_rows
            last_row = min(first_row + tile_rows, rows_in_all) - 1
            offset = length - q_len
            low = _visible_from(window, first_row // group + offset)
            high = _visible_to(causal, last_row // group + offset, length)
            first_part, end_part = low // part_keys, (high + part_keys - 1) // part_keys
            first_at = (sequence * num_kv_heads + head // group) * num_parts * rows_in_all + row
            sink = lane(load_first(sinks, head, 1), 0) if has_sinks else -math.inf
            top = sink
            for part in range(first_part, end_part):
                top = max(top, lane(load_first(tops, first_at + part * rows_in_all, 1), 0))
            shift = 0.0 if top == -math.inf else top
            total = math.exp(sink - shift)
            for part in range(first_part, end_part):
                at = first_at + part * rows_in_all
                weight = math.exp(lane(load_first(tops, at, 1), 0) - shift)
                store_first(tops, at, splat(weight), 1)
                total += weight * lane(load_first(totals, at, 1), 0)
            factor = splat(math.nan if wrong else 0.0 if total == 0.0 else v_scale / total)
            out_row = row_start(out, 1, sequence * stride_ob + query * stride_ot + head * stride_oh)
            for d in range(0, head_dim, 16):
                count = min(head_dim - d, 16)
                sums = splat(0.0)
                for part in range(first_part, end_part):
                    at = first_at + part * rows_in_all
                    weight_v = splat(lane(load_first(tops, at, 1), 0))
                    sums = multiply_add(load_first(work, at * head_dim + d, count), weight_v, sums)
                store_first(out_row, d, sums * factor, count)
            result = math.nan if wrong else -math.inf if total == 0.0 else shift + math.log(total)
            store_first(lse, (sequence * num_heads + head) * q_len + query, splat(result), 1)
        first = take(counter, chunk)
    publish()


@lru_cache(maxsize=64)
def _compiled(dtype: torch.dtype, cache_dtype: torch.dtype) -> Callable[..., None]:
    q, cache, index, work = (cpu.pointer(d) for d in (dtype, cache_dtype, torch.int32, torch.float32))
    return paged_attention_kernel.compiled(
        q, cache, cache, index, index, work, work, *(int,) * 26, bool, int, float, float, *(int,) * 3
    )


@lru_cache(maxsize=64)
def _compiled_merge(dtype: torch.dtype, sinks_dtype: torch.dtype | None, has_lse: bool) -> Callable[..., None]:
    lse = cpu.pointer(torch.float32) if has_lse else cpu.pointer(None, "nowhere")
    pointers = (cpu.pointer(dtype), lse, cpu.pointer(sinks_dtype), cpu.pointer(torch.int32), cpu.pointer(torch.float32))
    return merge_kernel.compiled(*pointers, *(int,) * 12, bool, int, bool, float, *(int,) * 3)


def _heads_of_an_item(desc: Desc, num_parts: int) -> int:
    """All, or so many that there are two items for each thread."""
    groups = -(-2 * torch.get_num_threads() // (desc.batch * num_parts))
    return -(-desc.num_kv_heads // min(groups, desc.num_kv_heads))


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their numbers, strides and tensors."""
    attend = _compiled(desc.dtype, desc.cache_dtype)
    merge = _compiled_merge(desc.dtype, desc.sinks_dtype, desc.return_lse)
    config = heuristic(desc)
    num_parts, part_keys = config.num_parts(desc), config.chunk * config.part
    padded = -(-desc.head_dim // 16) * 16
    rows = desc.q_len * desc.group
    heads = _heads_of_an_item(desc, num_parts)
    tile_rows = min(max(_TILE_ROWS // heads, ROWS), -(-rows // ROWS) * ROWS) // ROWS * ROWS
    slot_size = heads * tile_rows * (2 * padded + 32) + (ROWS + 8) * BLOCK + 2 * padded
    items = desc.batch * -(-desc.num_kv_heads // heads) * num_parts * -(-rows // tile_rows)
    sizes = (desc.batch, desc.q_len, desc.num_kv_heads, desc.group, desc.head_dim)
    keys = min(part_keys, desc.capacity)
    # In elements of a memory-bound kernel; an element takes as long as 8 products.
    item_work = keys * desc.head_dim * heads * (2 + tile_rows // 8)

    def run(
        numbers: Numbers,
        strides: Strides,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        sinks: Tensor | None,
        workspace: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        slots = min(torch.get_num_threads(), max(items, 1))
        # A line of the cache for the counter of slots that are taken, and one to align the first.
        scratch = torch.empty(slots * slot_size + 32, dtype=torch.float32)
        counter = (scratch.data_ptr() + 63) & ~63
        c_int64.from_address(counter).value = 0
        work, lens = workspace.data_ptr(), cache_seqlens.data_ptr()
        scale = numbers.softmax_scale / numbers.softcap if numbers.softcap else numbers.softmax_scale
        caches = (key_cache.data_ptr(), value_cache.data_ptr(), block_table.data_ptr(), lens)
        paging: tuple[int, ...] = (
            desc.num_pages,
            desc.page_size,
            desc.capacity,
            num_parts,
            part_keys,
            heads,
            tile_rows,
            desc.head_dim * desc.cache_dtype.itemsize,
        )
        memory = (work, counter + 64, counter, slots, slot_size)
        options: tuple[float, ...] = (desc.causal, numbers.window, scale, numbers.softcap)
        args = (q.data_ptr(), *caches, *memory, *strides[:10], *sizes, *paging, *options)
        cpu.run_rows(attend, args, items, item_work)
        pointers = (out.data_ptr(), 0 if lse is None else lse.data_ptr(), 0 if sinks is None else sinks.data_ptr())
        paging = (desc.capacity, num_parts, part_keys, tile_rows)
        options = (desc.causal, numbers.window, sinks is not None, numbers.v_scale)
        args = (*pointers, lens, work, *strides[10:], *sizes, *paging, *options)
        cpu.run_rows(merge, args, desc.batch * desc.q_len * desc.num_q_heads, desc.head_dim * num_parts)

    return run
