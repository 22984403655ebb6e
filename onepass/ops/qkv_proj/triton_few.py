"""The Triton kernel of qkv_proj for up to 16 tokens: everything in one launch, bound by the weights.

A program has PAIRS pairs of output features of one head and all of the hidden dimension, so that both halves of a
RoPE pair are at hand when their sums are complete. One token: each lane multiplies what it loads and keeps its own
sums. More: the weights are the rows of a tensor-core product, the tokens, padded to 16, its columns. The root mean
square of x is gathered on the way and applied to the sums, so x is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.ops.triton_math import INTERPRETED, narrow, widen
from onepass.ops.triton_rows import reciprocal_root


@triton.jit
def few_tokens_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    norm_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    num_tokens,
    K,
    num_positions,
    page_size,
    num_slots,
    stride_x,
    stride_w,
    stride_cos_sin,
    stride_positions,
    stride_slots,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_key_page,
    stride_key_slot,
    stride_key_head,
    stride_value_page,
    stride_value_slot,
    stride_value_head,
    eps,
    offset,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOKENS: 1 or 16. EVEN: K is a multiple of BLOCK_K. ROTARY: 0 for no RoPE."""
    HALF: tl.constexpr = ROTARY // 2
    ROTARY_BLOCKS: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    BLOCKS: tl.constexpr = ROTARY_BLOCKS + (HEAD_DIM - ROTARY + 2 * PAIRS - 1) // (2 * PAIRS)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    head = program // BLOCKS
    block = program % BLOCKS
    in_pairs = block < ROTARY_BLOCKS

    rows = tl.arange(0, 2 * PAIRS)
    pair = block * PAIRS + rows % PAIRS
    second = rows // PAIRS
    rest = ROTARY + (block - ROTARY_BLOCKS) * (2 * PAIRS) + rows
    feature = tl.where(in_pairs, 2 * pair + second if INTERLEAVED else pair + second * HALF, rest)
    real = tl.where(in_pairs, pair < HALF, rest < HEAD_DIM)
    w_rows = (head * HEAD_DIM + feature).to(tl.int64) * stride_w
    tokens = tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    x_rows = tokens.to(tl.int64) * stride_x

    # One token: [features, columns] of lanes; more: [features, tokens].
    sums = tl.zeros([2 * PAIRS, BLOCK_K if TOKENS == 1 else TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_K)
        w_mask, x_mask = real[:, None], is_token[:, None]
        if not EVEN:
            w_mask, x_mask = w_mask & (cols < K)[None, :], x_mask & (cols < K)[None, :]
        w = tl.load(w_ptr + w_rows[:, None] + cols[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + x_rows[:, None] + cols[None, :], mask=x_mask, other=0.0)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + cols, mask=cols < K, other=0.0).to(tl.float32) + offset
            wide = widen(x, PTX)
            squares += wide * wide
            wide *= norm[None, :]
            if TOKENS > 1:
                x = narrow(wide, dtype)
        else:
            wide = widen(x, PTX)
        if TOKENS == 1:
            sums += widen(w, PTX) * wide
        elif INTERPRETED:
            sums += tl.dot(widen(w, False), tl.trans(widen(x, False)), input_precision="ieee")
        elif dtype == tl.float32:
            # Summed block by block: one chain of additions over all of K errs too much. An fma, as the compiler would
            # make one chain of a plain sum.
            sums = tl.fma(tl.dot(w, tl.trans(x), input_precision="ieee"), tl.full(sums.shape, 1.0, tl.float32), sums)
        else:
            sums = tl.dot(w, tl.trans(x), sums)
    if TOKENS == 1:
        sums = tl.sum(sums, axis=1, keep_dims=True)
    if norm_ptr is not None:
        rstd = reciprocal_root(tl.sum(squares, axis=1) / K, eps)
        sums *= rstd[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + head * HEAD_DIM + feature, mask=real, other=0.0).to(tl.float32)[:, None]

    if ROTARY > 0:
        if head < NUM_Q_HEADS + NUM_KV_HEADS:
            position = tl.load(positions_ptr + tokens * stride_positions, mask=is_token, other=0).to(tl.int64)
            good = (position >= 0) & (position < num_positions)
            if in_pairs:
                angle = block * PAIRS + tl.arange(0, PAIRS)
                at = cos_sin_ptr + (position * stride_cos_sin)[None, :] + angle[:, None]
                mask = (is_token & good)[None, :] & (angle < HALF)[:, None]
                cosine, sine = tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)
                low, high = tl.split(tl.permute(tl.reshape(sums, [2, PAIRS, TOKENS]), [1, 2, 0]))
                turned = tl.join(low * cosine - high * sine, high * cosine + low * sine)
                sums = tl.reshape(tl.permute(turned, [2, 0, 1]), [2 * PAIRS, TOKENS])
            sums = tl.where(good[None, :], sums, float("nan"))

    # Selections, not branches: with a store in each branch, Triton 3.6 fails to compile some of these.
    is_q, is_k = head < NUM_Q_HEADS, head < NUM_Q_HEADS + NUM_KV_HEADS
    own_head = head - tl.where(is_q, 0, tl.where(is_k, NUM_Q_HEADS, NUM_Q_HEADS + NUM_KV_HEADS))
    result = narrow(sums, dtype)
    mask = real[:, None] & is_token[None, :]
    target = tl.where(is_q, q_ptr, tl.where(is_k, k_ptr, v_ptr))
    target += own_head * tl.where(is_q, stride_q_head, tl.where(is_k, stride_k_head, stride_v_head))
    at = tokens.to(tl.int64) * tl.where(is_q, stride_q, tl.where(is_k, stride_k, stride_v))
    tl.store(target + at[None, :] + feature[:, None], result, mask=mask)
    if slots_ptr is not None:
        appended = is_token & (head + 0 * tokens >= NUM_Q_HEADS)
        slot = tl.load(slots_ptr + tokens * stride_slots, mask=appended, other=-1)
        cache = tl.where(is_k, key_cache_ptr, value_cache_ptr)
        cache += own_head * tl.where(is_k, stride_key_head, stride_value_head)
        at = slot // page_size * tl.where(is_k, stride_key_page, stride_value_page)
        at += slot % page_size * tl.where(is_k, stride_key_slot, stride_value_slot)
        cached = appended & (slot >= 0) & (slot < num_slots)
        tl.store(cache + at[None, :] + feature[:, None], result, mask=mask & cached[None, :])
