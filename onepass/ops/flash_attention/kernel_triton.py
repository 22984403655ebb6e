"""flash_attention in Triton, for any GPU: the forward pass of FlashAttention-2 (Dao, 2023).

A program takes BLOCK_M queries of one head and walks over blocks of keys with the softmax's running maximum and sum
(Milakov and Gimelshein, 2018), in base 2. Blocks that every query of the program sees whole take no mask. Blocks begin
at multiples of BLOCK_N, and a block of which a row sees nothing changes nothing in it: a row's bits do not depend on
what shares its program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.flash_attention.config import MAX_HEAD_DIM, Config, block_d, heuristic
from onepass.ops.flash_attention.desc import UNBOUNDED
from onepass.ops.triton_math import INTERPRETED, narrow, widen

if TYPE_CHECKING:
    from onepass.ops.flash_attention.op import Desc, Strides

LOG2_E = 1.0 / math.log(2.0)

MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch costs more than it hides (see add_relu)."""

L2_BYTES = 24 << 20
"""What the keys and values of the heads that run side by side should take."""


@triton.jit
def _operand(x):
    """What goes into a product: Triton's interpreter gets products of bfloat16 wrong."""
    if INTERPRETED:
        x = widen(x, False)
    return x


@triton.jit
def _tanh(x, ACCURATE: tl.constexpr):
    """tanh in float32: absolute error 1e-7, and with ACCURATE also a relative one."""
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.885390081777927))
    if ACCURATE:
        # Moshier, Cephes library, tanhf, below 0.625.
        z = x * x
        p = -5.70498872745e-3 * z + 2.06390887954e-2
        p = p * z - 5.37397155531e-2
        p = p * z + 1.33314422036e-1
        p = p * z - 3.33332819422e-1
        far = tl.where(tl.abs(x) < 0.625, p * z * x + x, far)
    return far


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k_ptr,
    v_ptr,
    offsets_k,
    offsets_v,
    stride_k,
    stride_v,
    first,
    last,
    positions,
    seqlen_k,
    left,
    right,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Keys from `first` up to `last`. `top`: the largest score yet, in base 2; `total`: the sum of 2^(score - top)."""
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k_block = k_ptr + tl.cast(start, tl.int64) * stride_k + offsets_k
        v_block = v_ptr + tl.cast(start, tl.int64) * stride_v + offsets_v
        if MASKED:
            inside = (keys[:, None] < seqlen_k) & (dims[None, :] < HEAD_DIM)
            k = tl.load(k_block, mask=inside, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k = tl.load(k_block, mask=dims[None, :] < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_block)
        scores = tl.dot(q, _operand(tl.trans(k)), input_precision="ieee")
        if SOFTCAP:
            scores = softcap * _tanh(scores * scale, k.dtype == tl.float32)
        if MASKED:
            visible = keys[None, :] < seqlen_k
            if RIGHT:
                visible = visible & (keys[None, :] <= positions[:, None] + right)
            if LEFT:
                visible = visible & (keys[None, :] >= positions[:, None] - left)
            scores = tl.where(visible, scores, float("-inf"))
        largest = tl.max(scores, 1)
        if not SOFTCAP:
            # -inf * 0 is no number.
            largest = tl.where(largest == float("-inf"), largest, largest * scale)
        largest = tl.maximum(top, largest)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        if SOFTCAP:
            weights = tl.exp2(scores - shift[:, None])
        else:
            weights = tl.exp2(scores * scale - shift[:, None])
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        top = largest
        if MASKED:
            v = tl.load(v_block, mask=inside, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            v = tl.load(v_block, mask=dims[None, :] < HEAD_DIM, other=0.0)
        else:
            v = tl.load(v_block)
        acc = tl.dot(_operand(narrow(weights, v.dtype)), _operand(v), acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def flash_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    tokens_q,
    tokens_k,
    num_heads,
    group,
    num_columns,
    section,
    blocks_m,
    left,
    right,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    NEGATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Strides count UNIT elements, 16 bytes where everything is aligned: the compiler then knows it. WIDE: offsets in a
    block of rows need 64 bits. NEGATE: `scale` is that of -q, since the largest score must be the one with the largest
    product. `num_columns` is sequences times heads; `section` of them run side by side."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    # Section by section; in each the last queries, which see most keys, first.
    first_column = program // (section * blocks_m) * section
    columns = tl.minimum(section, num_columns - first_column)
    within = program - first_column * blocks_m
    column = first_column + within % columns
    block_m = blocks_m - 1 - within // columns
    sequence = column // num_heads
    head = column % num_heads
    kv_head = head // group

    if cu_seqlens_q_ptr is None:
        first_q, seqlen_q = 0, tokens_q
        first_k, seqlen_k = 0, tokens_k
    else:
        total_q, total_k = tl.cast(tokens_q, tl.int64), tl.cast(tokens_k, tl.int64)
        begin = tl.load(cu_seqlens_q_ptr + sequence).to(tl.int64)
        end = tl.load(cu_seqlens_q_ptr + sequence + 1).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), total_q)
        seqlen_q = (tl.minimum(tl.maximum(end, begin), total_q) - begin).to(tl.int32)
        first_q = begin
        begin = tl.load(cu_seqlens_k_ptr + sequence).to(tl.int64)
        end = tl.load(cu_seqlens_k_ptr + sequence + 1).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), total_k)
        seqlen_k = (tl.minimum(tl.maximum(end, begin), total_k) - begin).to(tl.int32)
        first_k = begin
    first_row = block_m * BLOCK_M
    if first_row >= seqlen_q:
        return

    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    step_q, step_k, step_v, step_o = stride_qt * UNIT, stride_kt * UNIT, stride_vt * UNIT, stride_ot * UNIT
    if WIDE:
        offsets_q = row[:, None] * step_q + dims[None, :]
        offsets_k = col[:, None] * step_k + dims[None, :]
        offsets_v = col[:, None] * step_v + dims[None, :]
        offsets_o = row[:, None] * step_o + dims[None, :]
    else:
        offsets_q = row[:, None] * (stride_qt.to(tl.int32) * UNIT) + dims[None, :]
        offsets_k = col[:, None] * (stride_kt.to(tl.int32) * UNIT) + dims[None, :]
        offsets_v = col[:, None] * (stride_vt.to(tl.int32) * UNIT) + dims[None, :]
        offsets_o = row[:, None] * (stride_ot.to(tl.int32) * UNIT) + dims[None, :]
    wide_sequence = sequence.to(tl.int64)
    q_ptr += (
        wide_sequence * (stride_qb * UNIT) + (first_q + first_row.to(tl.int64)) * step_q + head * (stride_qh * UNIT)
    )
    k_ptr += wide_sequence * (stride_kb * UNIT) + first_k * step_k + kv_head * (stride_kh * UNIT)
    v_ptr += wide_sequence * (stride_vb * UNIT) + first_k * step_v + kv_head * (stride_vh * UNIT)
    out_ptr += (
        wide_sequence * (stride_ob * UNIT) + (first_q + first_row.to(tl.int64)) * step_o + head * (stride_oh * UNIT)
    )

    rows = first_row + row
    inside = (rows[:, None] < seqlen_q) & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + offsets_q, mask=inside, other=0.0)
    q = _operand(q)
    if NEGATE:
        q = -q
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if sinks_ptr is None:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        # As if a key with this score and a value of zero had come first.
        sink = widen(tl.load(sinks_ptr + head), False) * 1.4426950408889634
        top = tl.zeros([BLOCK_M], tl.float32) + sink
        total = tl.where(top == float("-inf"), 0.0, 1.0)

    # Keys that some query of this program sees, and those in between that all of them see, in whole blocks.
    diagonal = first_row + seqlen_k - seqlen_q
    last_diagonal = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
    begin, end = 0, seqlen_k
    whole_begin, whole_end = 0, seqlen_k
    if RIGHT:
        end = tl.maximum(0, tl.minimum(end, last_diagonal + right + 1))
        whole_end = tl.maximum(0, tl.minimum(whole_end, diagonal + right + 1))
    if LEFT:
        begin = tl.maximum(0, diagonal - left) // BLOCK_N * BLOCK_N
        whole_begin = (tl.maximum(0, last_diagonal - left) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        whole_begin = tl.minimum(whole_begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    whole_end = tl.maximum(whole_end // BLOCK_N * BLOCK_N, whole_begin)
    positions = rows + (seqlen_k - seqlen_q)
    if LEFT:
        acc, top, total = _attend(
            acc, top, total, q, k_ptr, v_ptr, offsets_k, offsets_v, step_k, step_v, begin, whole_begin,
            positions, seqlen_k, left, right, scale, softcap,
            HEAD_DIM, BLOCK_D, BLOCK_N, True, LEFT, RIGHT, SOFTCAP,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, offsets_k, offsets_v, step_k, step_v, whole_begin, whole_end,
        positions, seqlen_k, left, right, scale, softcap,
        HEAD_DIM, BLOCK_D, BLOCK_N, False, LEFT, RIGHT, SOFTCAP,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, offsets_k, offsets_v, step_k, step_v, whole_end, end,
        positions, seqlen_k, left, right, scale, softcap,
        HEAD_DIM, BLOCK_D, BLOCK_N, True, LEFT, RIGHT, SOFTCAP,
    )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    result = acc * (1.0 / total)[:, None]
    tl.store(out_ptr + offsets_o, narrow(result, out_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None:
        if cu_seqlens_q_ptr is None:
            lse_ptr += column.to(tl.int64) * tokens_q
        else:
            lse_ptr += head.to(tl.int64) * tokens_q + first_q
        lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse_ptr + rows, lse, mask=rows < seqlen_q)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    reasons = unsupported_device(desc.device)
    if desc.head_dim > MAX_HEAD_DIM:
        reasons += (f"head_dim is {desc.head_dim}, and it takes up to {MAX_HEAD_DIM}",)
    return reasons


def specialize(desc: Desc, features: Features, config: Config | None = None) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    config = config or _config(desc, features)
    data = pointer(desc.dtype)
    index = pointer(desc.index_dtype)
    lse = pointer(torch.float32 if desc.has_lse else None)
    types = (*(data,) * 4, lse, pointer(desc.sinks_dtype), index, index)
    types += (*("i64",) * 12, *("i32",) * 9, "fp32", "fp32")
    pdl = features.pdl and _grid(desc, config) < MANY_PROGRAMS
    constants = (
        desc.head_dim,
        block_d(desc.head_dim),
        config.block_m,
        config.block_n,
        desc.left != UNBOUNDED,
        desc.right != UNBOUNDED,
        desc.softcap is not None,
        _unit(desc),
        desc.far_rows,
        desc.softmax_scale < 0.0,
        pdl,
    )
    multiples = (0, 1, 2, 3) if desc.aligned else ()
    return flash_attention_kernel, Specialization(types, constants, multiples, config.num_warps, pdl, config.num_stages)


def _config(desc: Desc, features: Features) -> Config:
    config = heuristic(desc.head_dim, desc.dtype.itemsize, features.shared_bytes, features.wgmma)
    # Elements that are loaded one by one each take an address in a register.
    return config if desc.aligned else config._replace(block_n=max(16, config.block_n // 2))


def _unit(desc: Desc) -> int:
    return 16 // desc.dtype.itemsize if desc.aligned else 1


def _grid(desc: Desc, config: Config) -> int:
    return desc.batch * desc.num_q_heads * -(-desc.seqlen_q // config.block_m)


def prepare(desc: Desc) -> Callable[..., None]:
    found = features(desc.device)
    config = _config(desc, found)
    launch = load(*specialize(desc, found, config), desc.device)
    unit, grid = _unit(desc), _grid(desc, config)
    head_bytes = 2 * desc.seqlen_k * desc.head_dim * desc.dtype.itemsize
    section = max(1, L2_BYTES // max(1, head_bytes)) * desc.group
    if desc.softcap is None:
        scale, softcap = abs(desc.softmax_scale) * LOG2_E, 0.0
    else:
        scale, softcap = abs(desc.softmax_scale) / desc.softcap, desc.softcap * LOG2_E
    far = 1 << 30  # further than any key; positions added to it stay in 32 bits
    numbers = (
        desc.total_q if desc.varlen else desc.seqlen_q,
        desc.total_k if desc.varlen else desc.seqlen_k,
        desc.num_q_heads,
        desc.group,
        desc.batch * desc.num_q_heads,
        min(section, desc.batch * desc.num_q_heads),
        -(-desc.seqlen_q // config.block_m),
        min(desc.left, far),
        min(desc.right, far),
        scale,
        softcap,
    )

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
        if grid == 0:
            return
        units = [stride // unit for tensor in strides for stride in tensor]
        launch(grid, (q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k), *units, *numbers)

    return run
