"""cross_entropy in Triton: every logit is read once, 16 bytes a load, and stays in registers until its exponential.

A row is cut into parts (config.py), a program each, which finds the largest logit m of its part and the sum of
exp(x - m). Each thread has a maximum of its own until the end, so that a warp waits for its own loads alone: the
exponentials of some run while the loads of others are on their way. A second kernel puts the parts of each row
together, always in the same order, and picks the target's logit. For "mean" and "sum" it adds up its rows; a third
kernel, one program, adds those sums when there are several.

What an H200 does an element in half precision: a quarter of an instruction for the maximum, and one each to widen, to
subtract m, to scale, for the exponential and for the sum. The exponential is the dearest: 16 a cycle and
multiprocessor, where memory delivers 10 elements of 2 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.cross_entropy.config import ROWS, Config, heuristic
from onepass.ops.triton_math import INTERPRETED, widen

if TYPE_CHECKING:
    from onepass.ops.cross_entropy.op import Desc, Numbers

LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))

MANY_PROGRAMS = 4096
"""From here on a program may wait for its target before it reads logits: others keep the memory busy."""

COMBINE_WARPS = 4

SUMS = 1024
"""Sums that the third kernel adds at a time."""


@triton.jit
def _larger(a, b, PTX: tl.constexpr):
    """The larger of a and b, that which is no NaN; for half precision two in one instruction."""
    if PTX and a.dtype == tl.bfloat16:
        c = tl.inline_asm_elementwise(
            "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif PTX and a.dtype == tl.float16:
        c = tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2)
    else:
        c = tl.maximum(a, b)
    return c


@triton.jit
def _soft_cap(x, softcap, FAST: tl.constexpr):
    """softcap * tanh(x / softcap). tanh(u) is 1 - 2 / (1 + exp(2u)); near 0 that has lost digits, which float32 needs
    and FAST gives up."""
    u = x * (1.0 / softcap)
    if FAST:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0f4038AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            fma.rn.f32 $0, t, 0fC0000000, 0f3F800000;
            }""",
            "=f,f",
            [u],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        large = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * u))
        s = u * u
        series = 1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0))))
        y = tl.where(s < 0.0625, u * series, large)
    return softcap * y


@triton.jit
def _exp(x, PTX: tl.constexpr):
    """exp(x) of x not above 0, or of inf."""
    if PTX:
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.exp2(x * LOG2_E)
    return y


@triton.jit
def _finite(m):
    """m, or 0 for an infinite one, from which differences would be NaN."""
    return tl.where(tl.abs(m) == INFINITY, 0.0, m)


@triton.jit
def _weight(m, larger):
    """exp(m - larger), 1 where they are equal, infinite or not."""
    return tl.exp2(tl.where(m == larger, 0.0, m - larger) * LOG2_E)


@triton.jit
def _take(
    x_ptr,
    limit,
    m,
    total,
    distance,
    reference,
    softcap,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr,
    PTX: tl.constexpr,
):
    """Take in CHUNKS chunks of a row. Of what each thread has seen, m [threads] is the largest logit, total the sums of
    exp(x - m), and distance that of x - reference, both [threads, LANES]."""
    FAST: tl.constexpr = PTX and x_ptr.dtype.element_ty != tl.float32
    columns = tl.arange(0, CHUNK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    xs = ()
    for chunk in tl.static_range(CHUNKS):
        mask = chunk * CHUNK + columns < limit
        x = tl.load(x_ptr + chunk * CHUNK + columns, mask=mask, other=float("-inf"))
        if INTERPRETED:  # it knows neither a bfloat16 -inf nor the larger of two
            x = tl.where(mask, widen(x, PTX), float("-inf"))
        xs = xs + (x,)
    highest = xs[0]
    for chunk in tl.static_range(1, CHUNKS):
        highest = _larger(highest, xs[chunk], PTX)
    largest = tl.max(widen(highest, PTX), axis=1)
    if CAPPED:
        largest = _soft_cap(largest, softcap, FAST)
    largest = tl.maximum(m, largest)
    total *= _weight(m, largest)[:, None]
    m = largest
    base = _finite(m)[:, None]
    for chunk in tl.static_range(CHUNKS):
        x = widen(xs[chunk], PTX)
        mask = chunk * CHUNK + columns < limit
        if CAPPED:
            x = tl.where(mask, _soft_cap(x, softcap, FAST), float("-inf"))
        total += _exp(x - base, PTX)
        if SMOOTH:
            distance += tl.where(mask, x - reference, 0.0)
    return m, total, distance


@triton.jit
def partial_kernel(
    logits_ptr,
    target_ptr,
    workspace_ptr,
    num_rows,
    vocab_size,
    stride_lm,
    stride_t,
    ignore_index,
    softcap,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one row a program. What it finds goes to the workspace, [2 or with SMOOTH 3, PARTS, num_rows].

    With `target_ptr`, rows that are ignored are not read.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    part = program % PARTS
    start = part.to(tl.int64) * (CHUNK * CHUNKS * STEPS)
    x_ptr = logits_ptr + row * stride_lm + start
    left = tl.minimum(vocab_size - start, CHUNK * CHUNKS * STEPS)
    if target_ptr is not None:
        left = tl.where(tl.load(target_ptr + row * stride_t) == ignore_index, 0, left)
    reference = 0.0
    if SMOOTH:
        reference = widen(tl.load(x_ptr, mask=left > 0, other=0.0), False)
        if CAPPED:
            reference = _soft_cap(reference, softcap, PTX and logits_ptr.dtype.element_ty != tl.float32)
        reference = _finite(reference)
    m = tl.full([CHUNK // LANES], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK // LANES, LANES], tl.float32)
    distance = tl.zeros([CHUNK // LANES, LANES], tl.float32)
    if STEPS == 1:
        m, total, distance = _take(
            x_ptr,
            left.to(tl.int32),
            m,
            total,
            distance,
            reference,
            softcap,
            CHUNK,
            CHUNKS,
            LANES,
            CAPPED,
            SMOOTH,
            PTX,
        )
    else:
        for step in tl.range(0, STEPS):
            at = step * (CHUNK * CHUNKS)
            m, total, distance = _take(
                x_ptr + at,
                (left - at).to(tl.int32),
                m,
                total,
                distance,
                reference,
                softcap,
                CHUNK,
                CHUNKS,
                LANES,
                CAPPED,
                SMOOTH,
                PTX,
            )
    largest = tl.max(m, axis=0)
    s = tl.sum(tl.sum(total, axis=1) * _weight(m, largest), axis=0)
    m = largest
    d = 0.0
    if SMOOTH:
        count = tl.maximum(left, 0).to(tl.float32)
        d = tl.sum(tl.sum(distance, axis=1), axis=0) + count * (reference - _finite(m))
    num_rows = tl.cast(num_rows, tl.int64)
    workspace_ptr += part * num_rows + row
    tl.store(workspace_ptr, m)
    tl.store(workspace_ptr + PARTS * num_rows, s)
    if SMOOTH:
        tl.store(workspace_ptr + 2 * PARTS * num_rows, d)


@triton.jit
def combine_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    workspace_ptr,
    num_rows,
    vocab_size,
    stride_lm,
    stride_t,
    ignore_index,
    softcap,
    label_smoothing,
    SEGMENT: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    REDUCTION: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows a program: the loss and the lse of each, or the sum of their losses and the number of those that count,
    which go to the end of the workspace, [2, blocks]. ONE_BLOCK: these are all rows."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    target = tl.load(target_ptr + rows * stride_t, mask=mask, other=0).to(tl.int64)
    valid = mask & (target >= 0) & (target < vocab_size)
    x = widen(tl.load(logits_ptr + rows * stride_lm + target, mask=valid, other=0.0), False)
    if CAPPED:
        x = _soft_cap(x, softcap, PTX and logits_ptr.dtype.element_ty != tl.float32)
    plane = PARTS * tl.cast(num_rows, tl.int64)
    maxima, sums, distances = (), (), ()
    for part in tl.static_range(PARTS):
        at = workspace_ptr + part * tl.cast(num_rows, tl.int64) + rows
        maxima = maxima + (tl.load(at, mask=mask, other=0.0),)
        sums = sums + (tl.load(at + plane, mask=mask, other=1.0),)
        if SMOOTH:
            distances = distances + (tl.load(at + 2 * plane, mask=mask, other=0.0),)
    m = maxima[0]
    for part in tl.static_range(1, PARTS):
        m = tl.maximum(m, maxima[part])
    total = sums[0] * _weight(maxima[0], m)
    for part in tl.static_range(1, PARTS):
        total += sums[part] * _weight(maxima[part], m)
    log_total = tl.log(total)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, m + log_total, mask=mask)
    loss = m - x
    if SMOOTH:
        base = _finite(m)
        distance = tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(PARTS):
            columns = tl.maximum(tl.minimum(vocab_size - part * SEGMENT, SEGMENT), 0).to(tl.float32)
            distance += distances[part] + columns * (_finite(maxima[part]) - base)
        loss = loss * (1.0 - label_smoothing) - distance * (label_smoothing / vocab_size)
    loss = loss + log_total
    # As torch: where a logit is inf, there is no loss; and out of range, no target.
    loss = tl.where(valid & (m != INFINITY), loss, NAN)
    counts = mask & (target != ignore_index)
    loss = tl.where(counts, loss, 0.0)
    if REDUCTION == "none":
        tl.store(loss_ptr + rows, loss, mask=mask)
    else:
        sum = tl.sum(loss, axis=0)
        count = tl.sum(tl.where(counts, 1.0, 0.0), axis=0)
        if ONE_BLOCK:
            tl.store(loss_ptr, sum / count if REDUCTION == "mean" else sum)
        else:
            at = workspace_ptr + plane * (3 if SMOOTH else 2) + tl.program_id(0)
            tl.store(at, sum)
            tl.store(at + tl.cdiv(num_rows, ROWS), count)


@triton.jit
def reduce_kernel(
    loss_ptr,
    workspace_ptr,
    offset,
    num_blocks,
    SUMS: tl.constexpr,
    REDUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum or the mean of all rows, from those of the blocks, [2, num_blocks] from `offset` on: one program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lanes = tl.arange(0, SUMS)
    block_sums_ptr = workspace_ptr + offset
    block_counts_ptr = block_sums_ptr + num_blocks
    sums = tl.load(block_sums_ptr + lanes, mask=lanes < num_blocks, other=0.0).to(tl.float64)
    counts = tl.load(block_counts_ptr + lanes, mask=lanes < num_blocks, other=0.0).to(tl.float64)
    for start in tl.range(SUMS, num_blocks, SUMS):
        mask = start + lanes < num_blocks
        sums += tl.load(block_sums_ptr + start + lanes, mask=mask, other=0.0)
        counts += tl.load(block_counts_ptr + start + lanes, mask=mask, other=0.0)
    sum, count = tl.sum(sums, axis=0), tl.sum(counts, axis=0)
    tl.store(loss_ptr, (sum / count if REDUCTION == "mean" else sum).to(tl.float32))


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def _skips(desc: Desc, config: Config) -> bool:
    """Whether ignored rows are left out: where nothing is wanted of them, and enough other programs are there to hide
    that a program waits for its target first."""
    return not desc.with_lse and desc.num_rows * config.parts >= MANY_PROGRAMS


def specialize_partial(desc: Desc, config: Config, features: Features) -> tuple[Any, Specialization]:
    """The first kernel and what it is compiled for."""
    target = desc.target_dtype if _skips(desc, config) else None
    types = (
        *(pointer(desc.dtype), pointer(target), pointer(torch.float32)),
        *("i32", "i64", "i64", "i64", "i64", "fp32"),
    )
    multiples = (0, 5) if desc.aligned else ()
    if desc.vocab_size % 16 == 0:
        multiples += (4,)
    shape = (config.chunk, config.chunks, config.steps, config.parts, 16 // desc.dtype.itemsize)
    constants = (*shape, desc.capped, desc.smooth, features.ptx, features.pdl)
    return partial_kernel, Specialization(types, constants, multiples, config.num_warps, features.pdl)


def specialize_combine(desc: Desc, config: Config, features: Features) -> tuple[Any, Specialization]:
    """The second kernel and what it is compiled for."""
    lse = torch.float32 if desc.with_lse else None
    pointers = (desc.dtype, desc.target_dtype, torch.float32, lse, torch.float32)
    types = (*(pointer(t) for t in pointers), "i32", "i64", "i64", "i64", "i64", "fp32", "fp32")
    constants = (
        *(config.segment, config.parts, ROWS, desc.reduction, desc.num_rows <= ROWS),
        *(desc.capped, desc.smooth, features.ptx, features.pdl),
    )
    return combine_kernel, Specialization(types, constants, (), COMBINE_WARPS, features.pdl)


def specialize_reduce(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The third kernel and what it is compiled for."""
    types = (pointer(torch.float32), pointer(torch.float32), "i64", "i32")
    return reduce_kernel, Specialization(types, (SUMS, desc.reduction, features.pdl), (), COMBINE_WARPS, features.pdl)


def prepare(desc: Desc) -> Callable[..., None]:
    config, found = heuristic(desc.vocab_size, desc.dtype.itemsize), features(desc.device)
    first = load(*specialize_partial(desc, config, found), desc.device)
    skips = _skips(desc, config)
    second = load(*specialize_combine(desc, config, found), desc.device)
    num_rows, vocab_size = desc.num_rows, desc.vocab_size
    num_blocks = -(-num_rows // ROWS)
    third = None
    if desc.reduction != "none" and num_blocks > 1:
        third = load(*specialize_reduce(desc, found), desc.device)
    offset = (3 if desc.smooth else 2) * config.parts * num_rows

    def run(
        numbers: Numbers, logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor | None, workspace: Tensor
    ) -> None:
        # The stride of a single row means nothing, and may be no multiple of 16.
        stride = numbers.stride if num_rows > 1 else 0
        softcap = numbers.softcap or 0.0
        sizes = (num_rows, vocab_size, stride, numbers.target_stride, numbers.ignore_index, softcap)
        first(num_rows * config.parts, (logits, target if skips else None, workspace), *sizes)
        second(num_blocks, (logits, target, loss, lse, workspace), *sizes, numbers.label_smoothing)
        if third:
            third(1, (loss, workspace), offset, num_blocks)

    return run
