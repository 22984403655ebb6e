"""RoPE in Triton, with the RMSNorm of each head before it or without: a program takes some heads of some tokens.

Bytes: q and k once in, once out; cosines and sines once a program, from the L2. Flops: 3 an element, 7 with the norm.
Instructions: 6 an element, 11 with the norm; an H200 issues about 30 while its memory delivers an element's bytes.

A thread holds 16 bytes of a head's first half and the 16 bytes of its second half that they are paired with, so no
element changes threads, and the cosines it loads serve all heads of a token. Interleaved pairs lie in one anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.triton_math import narrow, widen
from onepass.ops.triton_rows import reciprocal_root

if TYPE_CHECKING:
    from onepass.ops.rope_call import Desc, Strides


@triton.jit
def _pick(step, q, k, v, Q_STEPS: tl.constexpr, K_STEPS: tl.constexpr, V_STEPS: tl.constexpr):
    """What belongs to a step: the first ones are q's heads, then k's, then v's."""
    chosen = q
    if K_STEPS > 0:
        if V_STEPS > 0:
            k = tl.where(step < Q_STEPS + K_STEPS, k, v)
        chosen = tl.where(step < Q_STEPS, q, k)
    return chosen


@triton.constexpr_function
def _block_start(j, block, rotary_blocks, width, rotary_dim):
    """The first element of a block of a head."""
    return j * width if j < rotary_blocks else rotary_dim + (j - rotary_blocks) * block


@triton.constexpr_function
def _block_width(j, block, rotary_blocks, width, rotary_dim, head_dim):
    """How many elements it has."""
    return width if j < rotary_blocks else min(block, head_dim - rotary_dim - (j - rotary_blocks) * block)


@triton.jit
def _turn(first, second, cos, sin):
    """The pair turned. Which product is rounded is said, so that every kernel rounds alike."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def _heads_of(
    step,
    q_ptr,
    k_ptr,
    v_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    tokens,
    rows,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    HEADS_V: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Where the heads of a step start, one a row, and which rows have one."""
    Q_STEPS: tl.constexpr = (HEADS_Q + HEADS - 1) // HEADS
    K_STEPS: tl.constexpr = (HEADS_K + HEADS - 1) // HEADS
    V_STEPS: tl.constexpr = (HEADS_V + HEADS - 1) // HEADS
    first_step = _pick(step, 0, Q_STEPS, Q_STEPS + K_STEPS, Q_STEPS, K_STEPS, V_STEPS)
    head = (step - first_step) * HEADS + rows % HEADS
    stride_t = _pick(step, stride_qt, stride_kt, stride_vt, Q_STEPS, K_STEPS, V_STEPS)
    stride_h = _pick(step, stride_qh, stride_kh, stride_vh, Q_STEPS, K_STEPS, V_STEPS)
    at = _pick(step, q_ptr, k_ptr, v_ptr, Q_STEPS, K_STEPS, V_STEPS) + tokens * stride_t + head * stride_h
    return at, head < _pick(step, HEADS_Q, HEADS_K, HEADS_V, Q_STEPS, K_STEPS, V_STEPS)


@triton.jit
def _load_weight(
    q_ptr, k_ptr, step, at, mask, Q_STEPS: tl.constexpr, K_STEPS: tl.constexpr, V_STEPS: tl.constexpr, PTX: tl.constexpr
):
    """The norm's weight of a step's heads: as it is in memory, or in float32 where q's and k's dtypes differ."""
    if k_ptr is None:
        w = tl.load(q_ptr + at, mask=mask, other=0.0)
    elif q_ptr.dtype == k_ptr.dtype:
        w = tl.load(_pick(step, q_ptr, k_ptr, k_ptr, Q_STEPS, K_STEPS, V_STEPS) + at, mask=mask, other=0.0)
    else:
        is_q = at * 0 + step < Q_STEPS
        wq = widen(tl.load(q_ptr + at, mask=mask & is_q, other=0.0), PTX)
        wk = widen(tl.load(k_ptr + at, mask=mask & ~is_q, other=0.0), PTX)
        w = tl.where(is_q, wq, wk)
    return w


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cache_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    num_tokens,
    max_position,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_qot,
    stride_qoh,
    stride_kot,
    stride_koh,
    stride_vot,
    stride_voh,
    stride_ct,
    stride_p,
    eps,
    weight_offset,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    HEADS_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """STEPS times HEADS heads, all of q, k or v, of TOKENS tokens a program. BLOCK lanes for a head's pairs
    (interleaved: for their elements), and REST_BLOCKS times as many for the elements behind them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    NORM: tl.constexpr = q_weight_ptr is not None
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    Q_STEPS: tl.constexpr = (HEADS_Q + HEADS - 1) // HEADS
    K_STEPS: tl.constexpr = (HEADS_K + HEADS - 1) // HEADS
    V_STEPS: tl.constexpr = (HEADS_V + HEADS - 1) // HEADS
    PROGRAMS: tl.constexpr = (Q_STEPS + K_STEPS + V_STEPS + STEPS - 1) // STEPS
    PAIRS: tl.constexpr = ROTARY_DIM // 2
    WIDTH: tl.constexpr = ROTARY_DIM if INTERLEAVED else PAIRS
    # A head in blocks of lanes: the first of each pair and the second, or both interleaved; then the rest.
    ROTARY_BLOCKS: tl.constexpr = 1 if INTERLEAVED else 2
    BLOCKS: tl.constexpr = ROTARY_BLOCKS + REST_BLOCKS
    program = tl.program_id(0).to(tl.int64)
    if PROGRAMS == 1:
        first_token = program * TOKENS
        first_step = 0  # steps are then known to the compiler, and so is what is q and what is k
    else:
        first_token = (program // PROGRAMS) * TOKENS
        first_step = (program % PROGRAMS).to(tl.int32) * STEPS
    rows = tl.arange(0, HEADS * TOKENS)[:, None]
    tokens = first_token + rows // HEADS
    lanes = tl.arange(0, BLOCK)[None, :]
    nan = narrow(tl.full([1, 1], float("nan"), tl.float32), dtype)
    in_batch = tokens < num_tokens

    # All loads come first: the compiler moves none across a store or an exchange between lanes.
    positions = tl.load(positions_ptr + tokens * stride_p, mask=in_batch, other=0).to(tl.int64)
    xs, ws = (), ()
    for i in tl.static_range(STEPS):
        at, is_head = _heads_of(
            *(first_step + i, q_ptr, k_ptr, v_ptr, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh),
            *(tokens, rows, HEADS_Q, HEADS_K, HEADS_V, HEADS),
        )
        mask = in_batch & is_head
        for j in tl.static_range(BLOCKS):
            start = _block_start(j, BLOCK, ROTARY_BLOCKS, WIDTH, ROTARY_DIM)
            width = _block_width(j, BLOCK, ROTARY_BLOCKS, WIDTH, ROTARY_DIM, HEAD_DIM)
            xs = xs + (tl.load(at + start + lanes, mask=mask & (lanes < width), other=0.0),)
    # Cosines and weights are loaded for each head, so that they arrive in the layout of x; a thread still loads those
    # of its columns once.
    if INTERLEAVED:
        pairs = tl.arange(0, BLOCK // 2)[None, :]
    else:
        pairs = lanes
    valid = (positions >= 0) & (positions < max_position)
    at = cache_ptr + positions * stride_ct + pairs
    cos = tl.load(at, mask=valid & (pairs < PAIRS), other=float("nan"))
    sin = tl.load(at + PAIRS, mask=valid & (pairs < PAIRS), other=float("nan"))
    if NORM:
        for i in tl.static_range(STEPS):
            for j in tl.static_range(BLOCKS):
                start = _block_start(j, BLOCK, ROTARY_BLOCKS, WIDTH, ROTARY_DIM)
                width = _block_width(j, BLOCK, ROTARY_BLOCKS, WIDTH, ROTARY_DIM, HEAD_DIM)
                cols = lanes + rows * 0
                mask = cols < width
                w = _load_weight(
                    *(q_weight_ptr, k_weight_ptr, first_step + i, start + cols, mask, Q_STEPS, K_STEPS, V_STEPS, PTX)
                )
                ws = ws + (w,)

    for i in tl.static_range(STEPS):
        step = first_step + i
        ys = ()
        for j in tl.static_range(BLOCKS):
            ys = ys + (widen(xs[i * BLOCKS + j], PTX),)
        if NORM:
            squares = ys[0] * ys[0]
            for j in tl.static_range(1, BLOCKS):
                squares = tl.fma(ys[j], ys[j], squares)
            scale = reciprocal_root(tl.sum(squares, axis=1, keep_dims=True) * (1.0 / HEAD_DIM), eps)
            normed = ()
            for j in tl.static_range(BLOCKS):
                normed = normed + (ys[j] * scale * (widen(ws[i * BLOCKS + j], PTX) + weight_offset),)
            ys = normed
        if INTERLEAVED:
            even, odd = tl.split(tl.reshape(ys[0], [HEADS * TOKENS, BLOCK // 2, 2]))
            even, odd = _turn(even, odd, cos, sin)
            turned = (tl.reshape(tl.join(even, odd), [HEADS * TOKENS, BLOCK]),)
        else:
            turned = _turn(ys[0], ys[1], cos, sin)
        for j in tl.static_range(ROTARY_BLOCKS, BLOCKS):
            turned = turned + (ys[j],)

        at, is_head = _heads_of(
            *(step, q_out_ptr, k_out_ptr, v_out_ptr),
            *(stride_qot, stride_qoh, stride_kot, stride_koh, stride_vot, stride_voh),
            *(tokens, rows, HEADS_Q, HEADS_K, HEADS_V, HEADS),
        )
        mask = in_batch & is_head
        for j in tl.static_range(BLOCKS):
            start = _block_start(j, BLOCK, ROTARY_BLOCKS, WIDTH, ROTARY_DIM)
            width = _block_width(j, BLOCK, ROTARY_BLOCKS, WIDTH, ROTARY_DIM, HEAD_DIM)
            # Chosen once they are rounded: NaN then has the same bits in every kernel, and v its own.
            y = narrow(turned[j], dtype)
            if j >= ROTARY_BLOCKS:
                y = tl.where(valid, y, nan)
            if V_STEPS > 0:
                y = tl.where(step < Q_STEPS + K_STEPS, y, xs[i * BLOCKS + j])
            tl.store(at + start + lanes, y, mask=mask & (lanes < width))


class Config(NamedTuple):
    """The shape of a program. Which lane takes which elements of a head depends on none of it."""

    heads: int
    """Heads that the threads take side by side; a power of two."""
    tokens: int
    """Tokens of which they take them; a power of two."""
    steps: int
    """Times so many heads."""
    num_warps: int


FEW_TOKENS = 512
"""Up to this many tokens, the time is the latency of one program: each takes as little as it can."""

MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch is left out: it hides the launch, some microseconds at most, and each
program then takes 1.2 ns longer to start (measured on an H200)."""

NUM_WARPS = 2
MOST_LOADS = 12
"""Of 16 bytes a thread: so many in flight, and registers for them."""
MOST_REST_BLOCKS = 6


def block_sizes(desc: Desc) -> tuple[int, int]:
    """Lanes for the pairs of a head (interleaved: for their elements), and how many times as many hold the rest."""
    rest = desc.head_dim - desc.rotary_dim
    width = desc.rotary_dim if desc.interleaved else desc.rotary_dim // 2
    block = _power_of_two(max(width, -(-rest // MOST_REST_BLOCKS)))
    return block, -(-rest // block)


def heuristic(desc: Desc) -> Config:
    """16 bytes a load. Few tokens: one step a program; many: all heads of a token, or of several if they are few.

    Rows fill the warps in both, so that each row has the same layout, and its sum the same order. Where accesses are
    narrow, a row may lie across the warps: they are then as many in both.
    """
    block, rest_blocks = block_sizes(desc)
    lanes = max(1, block * desc.dtype.itemsize // 16)
    most = max(1, 32 * NUM_WARPS // lanes)
    most_steps = max(1, MOST_LOADS // (rest_blocks + (1 if desc.interleaved else 2)))
    # A block is all of q, of k or of v: the heads that leave the fewest idle, in not too many steps.
    heads = min(_powers_of_two(most), key=lambda h: (_steps(desc, h) > most_steps, _steps(desc, h) * h, -h))
    few = desc.num_tokens <= FEW_TOKENS
    rows = max(heads, 32 // lanes) if few and desc.aligned else most
    steps = _steps(desc, heads)
    steps = 1 if few else -(-steps // -(-steps // most_steps))
    return Config(heads, rows // heads, steps, max(1, rows * lanes // 32))


def _steps(desc: Desc, heads: int) -> int:
    return sum(-(-count // heads) for count in (desc.num_q_heads, desc.num_k_heads, desc.num_v_heads))


def _powers_of_two(last: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(last.bit_length()))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _grid(desc: Desc, config: Config) -> int:
    return -(-desc.num_tokens // config.tokens) * -(-_steps(desc, config.heads) // config.steps)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, config: Config, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    ptx = features.ptx and desc.dtype != torch.float32
    pdl = features.pdl and _grid(desc, config) < MANY_PROGRAMS
    q = pointer(desc.dtype)
    k = pointer(desc.dtype if desc.num_k_heads else None)
    v = pointer(desc.dtype if desc.num_v_heads else None)
    types = (
        *(q, k, v),
        pointer(desc.q_weight_dtype),
        pointer(desc.k_weight_dtype if desc.num_k_heads else None),
        pointer(torch.float32),
        pointer(desc.position_dtype),
        *(q, k, v),
        *("i64",) * 16,
        *("fp32",) * 2,
    )
    # All but the positions, the sizes and the positions' stride.
    multiples = (*range(6), *range(7, 10), *range(12, 25)) if desc.aligned else ()
    constants = (
        desc.num_q_heads,
        desc.num_k_heads,
        desc.num_v_heads,
        desc.head_dim,
        desc.rotary_dim,
        desc.interleaved,
        *block_sizes(desc),
        *config[:3],
        ptx,
        pdl,
    )
    return rope_kernel, Specialization(types, constants, multiples, config.num_warps, pdl)


def prepare(desc: Desc, config: Config | None = None) -> Callable[..., None]:
    """run(strides, eps, weight_offset, q, k, v, q_weight, k_weight, cos_sin_cache, positions, q_out, k_out, v_out)."""
    config = config or heuristic(desc)
    launch = load(*specialize(desc, config, features(desc.device)), desc.device)
    grid, num_tokens = _grid(desc, config), desc.num_tokens
    has_k = desc.num_k_heads > 0

    def run(strides: Strides, eps: float, weight_offset: float, *tensors: Tensor | None) -> None:
        q, k, v, q_weight, k_weight, cache, positions, q_out, k_out, v_out = tensors
        assert cache is not None
        if not has_k:
            k = k_weight = k_out = None
        operands = (q, k, v, q_weight, k_weight, cache, positions, q_out, k_out, v_out)
        launch(grid, operands, num_tokens, cache.shape[0], *strides, eps, weight_offset)

    return run
