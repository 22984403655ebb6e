"""The Triton kernels of qkv_proj around a matrix product: the RMSNorm before it, and all that comes after it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.ops.triton_math import narrow, widen
from onepass.ops.triton_rows import reciprocal_root, within


@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    N,
    stride_x,
    eps,
    offset,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """RMSNorm of one row a program; y is contiguous. EVEN: N is BLOCK * CHUNKS."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    xs, ws = (), ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN or chunk < CHUNKS - 1)
        xs = xs + (tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0),)
        ws = ws + (tl.load(weight_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last"),)
    squares = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        x = widen(xs[chunk], PTX)
        squares += x * x
    rstd = reciprocal_root(tl.sum(squares, axis=0) / N, eps)
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        mask = within(lanes < BLOCK, cols, N, EVEN or chunk < CHUNKS - 1)
        y = widen(xs[chunk], PTX) * rstd * (widen(ws[chunk], False) + offset)
        tl.store(y_ptr + row * N + cols, narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight(is_q, is_k, q_norm_ptr, k_norm_ptr, at, mask, offset):
    """Elements of the norm weight of q or of k, whose dtypes may differ, with the offset; 1 for v."""
    of_q = tl.load(q_norm_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    of_k = tl.load(k_norm_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    return tl.where(is_q, of_q, tl.where(is_k, of_k, 1.0))[None, :]


@triton.jit
def after_kernel(
    q_in_ptr,
    k_in_ptr,
    v_in_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    num_tokens,
    num_positions,
    page_size,
    num_slots,
    stride_q_in,
    stride_k_in,
    stride_v_in,
    stride_q_in_head,
    stride_k_in_head,
    stride_v_in_head,
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
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    STORE_V: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bias, q/k norm, RoPE and cache append of TOKENS tokens and HEADS heads of one kind a program, last tokens first:
    the product wrote them last, so they are still in the L2. IN_PLACE: the outputs are the inputs.

    A head is taken as its pairs, the first and the second elements apart, and the rest that is not rotated; without
    RoPE all of it is rest. PAIR_BLOCK, REST_BLOCK: powers of two at least as large, 0 where there is none. STORE_V: v
    is stored, and not only appended.
    """
    HALF: tl.constexpr = ROTARY // 2
    Q_PROGRAMS: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    KV_PROGRAMS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    KINDS: tl.constexpr = Q_PROGRAMS + KV_PROGRAMS * (2 if STORE_V or slots_ptr is not None else 1)
    group = (tl.num_programs(0) - 1 - program) // KINDS
    kind = program % KINDS

    rows = tl.arange(0, TOKENS * HEADS)
    token = group.to(tl.int64) * TOKENS + rows // HEADS
    is_q = kind < Q_PROGRAMS
    is_k = (kind >= Q_PROGRAMS) & (kind < Q_PROGRAMS + KV_PROGRAMS)
    first = tl.where(is_q, kind, tl.where(is_k, kind - Q_PROGRAMS, kind - Q_PROGRAMS - KV_PROGRAMS)) * HEADS
    head = first + rows % HEADS
    real = (token < num_tokens) & (head < tl.where(is_q, NUM_Q_HEADS, NUM_KV_HEADS))
    is_qk = is_q | is_k
    # Selections, not branches: the compiler keeps 16-byte accesses through them.
    source = tl.where(is_q, q_in_ptr, tl.where(is_k, k_in_ptr, v_in_ptr))
    source += (token * tl.where(is_q, stride_q_in, tl.where(is_k, stride_k_in, stride_v_in)))[:, None]
    source += (head * tl.where(is_q, stride_q_in_head, tl.where(is_k, stride_k_in_head, stride_v_in_head)))[:, None]
    target = tl.where(is_q, q_ptr, tl.where(is_k, k_ptr, v_ptr))
    target += (token * tl.where(is_q, stride_q, tl.where(is_k, stride_k, stride_v)))[:, None]
    target += (head * tl.where(is_q, stride_q_head, tl.where(is_k, stride_k_head, stride_v_head)))[:, None]
    stored = real[:, None]
    if not STORE_V:
        stored = (real & (kind + 0 * rows < Q_PROGRAMS + KV_PROGRAMS))[:, None]
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token * stride_slots, mask=real & (kind + 0 * rows >= Q_PROGRAMS), other=-1)
        cached = ((slot >= 0) & (slot < num_slots))[:, None]
        cache = tl.where(is_k, key_cache_ptr, value_cache_ptr)
        cache += (slot // page_size * tl.where(is_k, stride_key_page, stride_value_page))[:, None]
        cache += (slot % page_size * tl.where(is_k, stride_key_slot, stride_value_slot))[:, None]
        cache += (head * tl.where(is_k, stride_key_head, stride_value_head))[:, None]
    if bias_ptr is not None:
        first_head = tl.where(is_q, 0, tl.where(is_k, NUM_Q_HEADS, NUM_Q_HEADS + NUM_KV_HEADS))
        bias = bias_ptr + ((first_head + head) * HEAD_DIM)[:, None]

    # All loads come first. a and b are the first and second elements of the pairs, c is the rest.
    if PAIR_BLOCK > 0:
        pairs = tl.arange(0, PAIR_BLOCK)
        pair_mask = real[:, None] & (pairs < HALF)[None, :]
        if INTERLEAVED:
            both = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
            both_mask = real[:, None] & (both < ROTARY)
            x = widen(tl.load(source + both, mask=both_mask, other=0.0), PTX)
            if bias_ptr is not None:
                x += tl.load(bias + both, mask=both_mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, [TOKENS * HEADS, PAIR_BLOCK, 2]))
        else:
            low, high = pairs[None, :], HALF + pairs[None, :]
            a = widen(tl.load(source + low, mask=pair_mask, other=0.0), PTX)
            b = widen(tl.load(source + high, mask=pair_mask, other=0.0), PTX)
            if bias_ptr is not None:
                a += tl.load(bias + low, mask=pair_mask, other=0.0).to(tl.float32)
                b += tl.load(bias + high, mask=pair_mask, other=0.0).to(tl.float32)
        turns = real & (kind + 0 * rows < Q_PROGRAMS + KV_PROGRAMS)
        position = tl.load(positions_ptr + token * stride_positions, mask=turns, other=0).to(tl.int64)
        good = (position >= 0) & (position < num_positions)
        angle = cos_sin_ptr + (position * stride_cos_sin)[:, None] + pairs[None, :]
        angle_mask = (turns & good)[:, None] & (pairs < HALF)[None, :]
        cosine = tl.load(angle, mask=angle_mask, other=1.0)
        sine = tl.load(angle + HALF, mask=angle_mask, other=0.0)
        wrong = (turns & (good == 0))[:, None]
    if REST_BLOCK > 0:
        rest = ROTARY + tl.arange(0, REST_BLOCK)
        rest_mask = real[:, None] & (rest < HEAD_DIM)[None, :]
        c = widen(tl.load(source + rest[None, :], mask=rest_mask, other=0.0), PTX)
        if bias_ptr is not None:
            c += tl.load(bias + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)

    if IN_PLACE:
        # Where a tile has fewer elements than the program has lanes, several of them read one, and one writes it.
        tl.debug_barrier()
    if q_norm_ptr is not None:
        total = tl.zeros([TOKENS * HEADS], tl.float32)
        if PAIR_BLOCK > 0:
            total += tl.sum(a * a + b * b, axis=1)
        if REST_BLOCK > 0:
            total += tl.sum(c * c, axis=1)
        rstd = tl.where(is_qk, reciprocal_root(total / HEAD_DIM, eps), 1.0)[:, None]
        if PAIR_BLOCK > 0:
            step: tl.constexpr = 2 if INTERLEAVED else 1
            second: tl.constexpr = 1 if INTERLEAVED else HALF
            a *= rstd * _weight(is_q, is_k, q_norm_ptr, k_norm_ptr, pairs * step, pairs < HALF, offset)
            b *= rstd * _weight(is_q, is_k, q_norm_ptr, k_norm_ptr, pairs * step + second, pairs < HALF, offset)
        if REST_BLOCK > 0:
            c *= rstd * _weight(is_q, is_k, q_norm_ptr, k_norm_ptr, rest, rest < HEAD_DIM, offset)

    if PAIR_BLOCK > 0:
        # v stays as it is: an infinity of v times a sine of 0 would be NaN.
        turned = tl.where(turns[:, None], a * cosine - b * sine, a)
        b = tl.where(wrong, float("nan"), tl.where(turns[:, None], b * cosine + a * sine, b))
        a = tl.where(wrong, float("nan"), turned)
        if REST_BLOCK > 0:
            c = tl.where(wrong, float("nan"), c)
        if INTERLEAVED:
            y = narrow(tl.reshape(tl.join(a, b), [TOKENS * HEADS, 2 * PAIR_BLOCK]), dtype)
            tl.store(target + both, y, mask=both_mask & stored)
            if slots_ptr is not None:
                tl.store(cache + both, y, mask=both_mask & cached)
        else:
            a, b = narrow(a, dtype), narrow(b, dtype)
            tl.store(target + low, a, mask=pair_mask & stored)
            tl.store(target + high, b, mask=pair_mask & stored)
            if slots_ptr is not None:
                tl.store(cache + low, a, mask=pair_mask & cached)
                tl.store(cache + high, b, mask=pair_mask & cached)
    if REST_BLOCK > 0:
        y = narrow(c, dtype)
        tl.store(target + rest[None, :], y, mask=rest_mask & stored)
        if slots_ptr is not None:
            tl.store(cache + rest[None, :], y, mask=rest_mask & cached)
