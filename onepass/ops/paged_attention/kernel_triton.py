"""paged_attention in Triton: keys in chunks of fixed size, the q heads of a group together, K and V read once.

A *chunk* is CHUNK keys, a *run* RUN chunks; both depend on what a model fixes, never on the batch. Attention over a
chunk is FlashAttention's loop (Dao et al., 2022); chunks are added up in order within a run, and runs in a second
kernel (split-KV, "Flash-Decoding", Dao et al., 2023). Small batches have one program for each chunk, large ones one for
each run, which adds its chunks up in registers: the same operations in the same order, so the same bits, with a
fraction of the partial results to write and to read.

The grid follows from the width of the block table, never from the lengths, which stay on the device. A program with no
keys ends after reading its sequence's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import (
    Features,
    Specialization,
    features,
    load,
    missing_float8,
    pointer,
    unsupported_device,
)
from onepass.ops.paged_attention.config import Config, heuristic
from onepass.ops.paged_attention.triton_state import (
    LOG2_E,
    MINUS_INF,
    finish,
    finite,
    fold,
    store_result,
    tanh,
    visible,
)
from onepass.ops.triton_math import INTERPRETED

if TYPE_CHECKING:
    from onepass.ops.paged_attention.op import Desc, Numbers, Strides

MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch is left out: each program then takes 1.2 ns longer to start."""


@triton.jit
def attend(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    end,
    low,
    high,
    last_key,
    num_pages,
    stride_kp,
    stride_kt,
    stride_vp,
    stride_vt,
    window,
    scale,
    cap,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
):
    """The state (see `fold`) of the queries over keys start … end - 1, of which [low, high) may be read."""
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    d = tl.arange(0, BLOCK_D)
    run_top = tl.full((BLOCK_M,), MINUS_INF, tl.float32)
    run_total = tl.zeros((BLOCK_M,), tl.float32)
    run_sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), MINUS_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    keys = start + tl.arange(0, BLOCK_N)
    next_page = tl.load(table_ptr + keys // PAGE, mask=(keys >= low) & (keys < high), other=0)
    for block in tl.range(start, end, BLOCK_N):
        page = next_page
        keys = block + BLOCK_N + tl.arange(0, BLOCK_N)
        # Read a step ahead: the loads of K and V, which are further ahead, need the page.
        next_page = tl.load(table_ptr + keys // PAGE, mask=(keys >= low) & (keys < high), other=0)
        keys = block + tl.arange(0, BLOCK_N)
        inside = (keys >= low) & (keys < high)
        known = (page >= 0) & (page < num_pages)
        page = page.to(tl.int64)
        slot = (keys % PAGE).to(tl.int64)
        readable = (inside & known)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + (page * stride_kp + slot * stride_kt)[:, None] + d[None, :], mask=readable, other=0.0)
        v = tl.load(v_ptr + (page * stride_vp + slot * stride_vt)[:, None] + d[None, :], mask=readable, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if SOFTCAP:
            scores = cap * tanh(scores * scale)
        else:
            scores = scores * scale
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= last_key[:, None])
        if WINDOW:
            seen = seen & (keys[None, :] > last_key[:, None] - window)
        # A page that is not in the cache: NaN, as for every index that cannot be checked beforehand.
        scores = tl.where(known[None, :], scores, float("nan"))
        scores = tl.where(seen, scores, MINUS_INF)
        new_top = tl.maximum(top, tl.max(scores, 1))
        old = tl.exp2(top - finite(new_top))
        weights = tl.exp2(scores - finite(new_top)[:, None])
        total = tl.fma(total, old, tl.sum(weights, 1))
        sums = tl.dot(weights.to(q.dtype), v.to(q.dtype), sums * old[:, None], input_precision="ieee")
        top = new_top
        if RUN > 1 and (block + BLOCK_N) % CHUNK == 0:
            run_top, run_total, run_sums = fold(run_top, run_total, run_sums, top, total, sums)
            top = tl.full((BLOCK_M,), MINUS_INF, tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    return fold(run_top, run_total, run_sums, top, total, sums)


@triton.jit
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    work_ptr,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    stride_tb,
    stride_ob,
    stride_ol,
    stride_oh,
    batch,
    q_len,
    num_pages,
    capacity,
    num_parts,
    num_programs,
    window,
    scale,
    cap,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Parts split, split + num_programs, ... of one sequence, kv head and block of queries; a part is RUN chunks.

    Scores are in base 2: `scale` and `cap` hold log2(e). DIRECT: there is one part, and its result is final.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    head = program % KV_HEADS
    batch32, q_len32 = batch.to(tl.int32), q_len.to(tl.int32)
    num_programs, window = num_programs.to(tl.int32), window.to(tl.int32)
    row_blocks = tl.cdiv(q_len32 * GROUP, BLOCK_M)
    row_block = (program // KV_HEADS) % row_blocks
    sequence = ((program // KV_HEADS) // row_blocks) % batch32
    split = ((program // KV_HEADS) // row_blocks) // batch32

    length = tl.load(lens_ptr + sequence)
    first_query = row_block * BLOCK_M // GROUP
    last_query = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len32 - 1)
    low, high = visible(length, q_len32, capacity.to(tl.int32), first_query, last_query, window, CAUSAL, WINDOW)
    first_part = low // (CHUNK * RUN) // num_programs * num_programs + split
    first_part = tl.where(first_part < low // (CHUNK * RUN), first_part + num_programs, first_part)
    end_part = tl.cdiv(high, CHUNK * RUN)
    if (first_part >= end_part) & (not DIRECT):
        return

    sequence = sequence.to(tl.int64)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    q_head = head * GROUP + rows % GROUP
    d = tl.arange(0, BLOCK_D)
    row_mask = query < q_len
    mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    q_rows = q_ptr + sequence * stride_qb + query.to(tl.int64) * stride_ql + q_head.to(tl.int64) * stride_qh
    q = tl.load(q_rows[:, None] + d[None, :], mask=mask, other=0.0)
    if INTERPRETED:
        q = q.to(tl.float32)  # a bfloat16 tl.dot gives wrong values there
    last_key = length - q_len32 + query
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh
    table_ptr += sequence * stride_tb

    if DIRECT:
        sink = tl.full((BLOCK_M,), MINUS_INF, tl.float32)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2_E
        top, total, sums = attend(
            q, k_ptr, v_ptr, table_ptr, low // BLOCK_N * BLOCK_N, high, low, high, last_key, num_pages,
            stride_kp, stride_kt, stride_vp, stride_vt, window, scale, cap,
            HEAD_DIM, PAGE, CAUSAL, WINDOW, SOFTCAP, BLOCK_N, CHUNK, RUN,
        )  # fmt: skip
        result, lse = finish(top, total, sums, sink, v_scale)
        store_result(
            result, lse, out_ptr, lse_ptr, sequence, query, q_head, mask, row_mask, d, stride_ob, stride_ol, stride_oh,
            q_len, (length < 0) | (length > capacity), KV_HEADS * GROUP,
        )  # fmt: skip
    else:
        num_rows = q_len * GROUP
        all_rows = batch * KV_HEADS * num_parts * num_rows
        for part in tl.range(first_part, end_part, num_programs, num_stages=1):
            start = tl.maximum(part * (CHUNK * RUN), low // BLOCK_N * BLOCK_N)
            end = tl.minimum((part + 1) * (CHUNK * RUN), high)
            top, total, sums = attend(
                q, k_ptr, v_ptr, table_ptr, start, end, low, high, last_key, num_pages,
                stride_kp, stride_kt, stride_vp, stride_vt, window, scale, cap,
                HEAD_DIM, PAGE, CAUSAL, WINDOW, SOFTCAP, BLOCK_N, CHUNK, RUN,
            )  # fmt: skip
            # work: sums [batch, kv heads, parts, q_len * GROUP, HEAD_DIM], then tops and totals without HEAD_DIM.
            row = ((sequence * KV_HEADS + head) * num_parts + part) * num_rows + rows
            tl.store(work_ptr + row[:, None] * HEAD_DIM + d[None, :], sums, mask=mask)
            tl.store(work_ptr + all_rows * HEAD_DIM + row, top, mask=row_mask)
            tl.store(work_ptr + all_rows * (HEAD_DIM + 1) + row, total, mask=row_mask)


@triton.jit
def merge_kernel(
    lens_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    work_ptr,
    stride_ob,
    stride_ol,
    stride_oh,
    batch,
    q_len,
    capacity,
    num_parts,
    window,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    FOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The result of one q head and query from its parts: FOLD parts at a time make a run, and runs are summed."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    q_head = program % (KV_HEADS * GROUP)
    query = (program // (KV_HEADS * GROUP)) % q_len.to(tl.int32)
    sequence = (program // (KV_HEADS * GROUP)) // q_len.to(tl.int32)
    row = query * GROUP + q_head % GROUP
    row_block = row // BLOCK_M
    length = tl.load(lens_ptr + sequence)
    first_query = row_block * BLOCK_M // GROUP
    last_query = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len.to(tl.int32) - 1)
    low, high = visible(
        length, q_len.to(tl.int32), capacity.to(tl.int32), first_query, last_query, window.to(tl.int32), CAUSAL, WINDOW
    )
    first_part, end_part = low // (CHUNK * RUN), tl.cdiv(high, CHUNK * RUN)

    sequence = sequence.to(tl.int64)
    num_rows = q_len * GROUP
    all_rows = batch * KV_HEADS * num_parts * num_rows
    work_row = (sequence * KV_HEADS + q_head // GROUP) * num_parts * num_rows + row
    d = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_P)

    all_top = tl.full((1,), MINUS_INF, tl.float32)
    for first in tl.range(first_part, end_part, BLOCK_P):
        parts = first + lanes
        tops = tl.load(
            work_ptr + all_rows * HEAD_DIM + work_row + parts * num_rows, mask=parts < end_part, other=MINUS_INF
        )
        all_top = tl.maximum(all_top, tl.max(tops, 0))

    all_total = tl.zeros((1,), tl.float32)
    all_sums = tl.zeros((1, BLOCK_D), tl.float32)
    # Blocks start at a multiple of BLOCK_P runs, so what a run is summed with depends on nothing but its place.
    for first in tl.range(first_part // FOLD // BLOCK_P * BLOCK_P, tl.cdiv(end_part, FOLD), BLOCK_P):
        top = tl.full((BLOCK_P,), MINUS_INF, tl.float32)
        total = tl.zeros((BLOCK_P,), tl.float32)
        sums = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        for step in tl.static_range(FOLD):
            part = (first + lanes) * FOLD + step
            there = (part >= first_part) & (part < end_part)
            at = work_row + part * num_rows
            next_sums = tl.load(
                work_ptr + at[:, None] * HEAD_DIM + d[None, :],
                mask=there[:, None] & (d < HEAD_DIM)[None, :],
                other=0.0,
            )
            next_top = tl.load(work_ptr + all_rows * HEAD_DIM + at, mask=there, other=MINUS_INF)
            next_total = tl.load(work_ptr + all_rows * (HEAD_DIM + 1) + at, mask=there, other=0.0)
            if FOLD == 1:
                top, total, sums = next_top, next_total, next_sums
            else:
                top, total, sums = fold(top, total, sums, next_top, next_total, next_sums)
        weight = tl.exp2(top - finite(all_top))
        all_total += tl.sum(total * weight, 0, keep_dims=True)
        all_sums += tl.sum(sums * weight[:, None], 0, keep_dims=True)
    sink = tl.full((1,), MINUS_INF, tl.float32)
    if sinks_ptr is not None:
        sink = tl.full((1,), tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2_E, tl.float32)
    result, lse = finish(all_top, all_total, all_sums, sink, v_scale)
    one = tl.full((1,), 0, tl.int32)
    store_result(
        result, lse, out_ptr, lse_ptr, sequence, one + query, one + q_head,
        (one == 0)[:, None] & (d < HEAD_DIM)[None, :], one == 0, d, stride_ob, stride_ol, stride_oh,
        q_len, (length < 0) | (length > capacity), KV_HEADS * GROUP,
    )  # fmt: skip


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device) or missing_float8(desc.device, desc.cache_dtype)


def specialize(desc: Desc, config: Config, features: Features) -> tuple[Any, Specialization]:
    """The attention kernel and what it is compiled for."""
    q, cache, lse = pointer(desc.dtype), pointer(desc.cache_dtype), "*fp32" if desc.return_lse else "none"
    types = (q, cache, cache, "*i32", "*i32", pointer(desc.sinks_dtype), q, lse, "*fp32")
    types += ("i64",) * 13 + ("i64",) * 7 + ("fp32",) * 3
    multiples = (0, 1, 2, 6, 8, *range(9, 18), *range(19, 22)) if desc.aligned else (8,)
    pdl = features.pdl and num_programs(desc, config) < MANY_PROGRAMS
    constants = (
        desc.num_kv_heads,
        desc.num_q_heads // desc.num_kv_heads,
        desc.head_dim,
        desc.page_size,
        desc.causal,
        desc.window,
        desc.softcap,
        config.block_m,
        config.block_n,
        triton.next_power_of_2(max(desc.head_dim, 16)),
        config.chunk,
        config.part,
        config.num_parts(desc) == 1,
        pdl,
    )
    return paged_attention_kernel, Specialization(types, constants, multiples, config.num_warps, pdl, config.num_stages)


def specialize_merge(desc: Desc, config: Config, features: Features) -> tuple[Any, Specialization]:
    """The kernel that adds parts up, and what it is compiled for."""
    lse = "*fp32" if desc.return_lse else "none"
    types = ("*i32", pointer(desc.sinks_dtype), pointer(desc.dtype), lse, "*fp32", *("i64",) * 8, "fp32")
    pdl = features.pdl and num_programs(desc, config) < MANY_PROGRAMS
    constants = (
        desc.num_kv_heads,
        desc.num_q_heads // desc.num_kv_heads,
        desc.head_dim,
        desc.causal,
        desc.window,
        config.block_m,
        triton.next_power_of_2(max(desc.head_dim, 16)),
        MERGED_AT_ONCE,
        config.chunk,
        config.part,
        config.run // config.part,
        pdl,
    )
    return merge_kernel, Specialization(types, constants, (4,), 4, pdl)


MERGED_AT_ONCE = 16


def splits(desc: Desc, config: Config) -> int:
    """Programs of one sequence, kv head and block of queries."""
    whole = desc.batch * desc.num_kv_heads * config.row_blocks(desc)
    return min(config.num_parts(desc), max(1, MAX_PROGRAMS // whole))


MAX_PROGRAMS = 1 << 14


def num_programs(desc: Desc, config: Config) -> int:
    return desc.batch * desc.num_kv_heads * config.row_blocks(desc) * splits(desc, config)


def prepare(desc: Desc, config: Config | None = None) -> Callable[..., None]:
    config = config or heuristic(desc)
    usable = features(desc.device)
    attention = load(*specialize(desc, config, usable), desc.device)
    num_parts, grid, num_splits = config.num_parts(desc), num_programs(desc, config), splits(desc, config)
    capacity = desc.max_pages * desc.page_size
    merge = load(*specialize_merge(desc, config, usable), desc.device) if num_parts > 1 else None
    merge_grid = desc.batch * desc.q_len * desc.num_q_heads

    def run(
        numbers: Numbers,
        strides: Strides,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        sinks: Tensor | None,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        scale, cap = numbers.base_2()
        attention(
            grid,
            (q, key_cache, value_cache, block_table, cache_seqlens, sinks, out, lse, workspace),
            *strides,
            desc.batch,
            desc.q_len,
            desc.num_pages,
            capacity,
            num_parts,
            num_splits,
            numbers.window,
            scale,
            cap,
            numbers.v_scale,
        )
        if merge is not None:
            merge(
                merge_grid,
                (cache_seqlens, sinks, out, lse, workspace),
                *strides[-3:],
                desc.batch,
                desc.q_len,
                capacity,
                num_parts,
                numbers.window,
                numbers.v_scale,
            )

    return run
