"""sample in Triton: one program a row, which reads the row from the L2 again and again.

Limits are found by bisection of the codes (`fixed_point.py`), two bits a pass over the row: how many tokens, or how
much weight, lie below each of three thresholds. It runs everywhere; `kernel_cuda.cu` keeps the row on chip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.sample import fixed_point
from onepass.ops.triton_math import widen

if TYPE_CHECKING:
    from onepass.ops.sample.op import Desc, Parameters

NUM_WARPS = 16
BLOCK = 4096
SHORT_BLOCK = 256
"""For rows of at most so many tokens, with half the warps."""

CODE_BITS = tl.constexpr(fixed_point.CODE_BITS)
CODE_END = tl.constexpr(fixed_point.CODE_END)
CODE_BEYOND = tl.constexpr(fixed_point.CODE_BEYOND)
C6, C5, C4, C3, C2, C1, C0 = (tl.constexpr(c) for c in fixed_point.POLYNOMIAL)


@triton.jit
def _parameter(ptr, step, row, number, DTYPE: tl.constexpr):
    """A row's number: from the tensor, or `number` where the step is negative."""
    given = step >= 0
    value = tl.load(ptr + row * step, mask=given, other=0).to(DTYPE)
    return tl.where(given, value, number).to(DTYPE)


@triton.jit
def _logits(x_ptr, start, vocab_size, BLOCK: tl.constexpr):
    """BLOCK logits in float32; NaN, and what lies past the row's end, is -inf."""
    cols = start + tl.arange(0, BLOCK)
    x = widen(tl.load(x_ptr + cols, mask=cols < vocab_size, other=float("-inf")), False)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _codes(x_ptr, start, vocab_size, largest, scale, BLOCK: tl.constexpr):
    x = _logits(x_ptr, start, vocab_size, BLOCK)
    octaves = (largest - x) * scale
    code = tl.where(octaves < 41.0, octaves * 16777216.0, 687865856.0).to(tl.int32)
    code = tl.where(x == largest, 0, code)
    return tl.where(start + tl.arange(0, BLOCK) < vocab_size, code, CODE_BEYOND)


@triton.jit
def _weights(code, dropped):
    # The bits of a float in [1, 2) are those of its fraction, and those of a power in [1/2, 1] count up from 1/2.
    g = (((code >> 1) & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
    p = tl.fma(g, g * 0.0 + C6, C5)
    p = tl.fma(p, g, C4)
    p = tl.fma(p, g, C3)
    p = tl.fma(p, g, C2)
    p = tl.fma(p, g, C1)
    p = tl.fma(p, g, C0)
    mantissa = (p.to(tl.int32, bitcast=True) - 0x3E800000).to(tl.int64)
    return (mantissa << 16) >> ((code >> CODE_BITS) + dropped).to(tl.int64)


@triton.jit
def _weight(code, dropped):
    """The weight of one code."""
    return tl.sum(tl.where(tl.arange(0, 32) == 0, _weights(tl.full([32], 0, tl.int32) + code, dropped), 0))


@triton.jit
def _kept_weight(x_ptr, vocab_size, largest, scale, limit, smallest, dropped, BLOCK: tl.constexpr):
    """The weight of the codes below `limit` that is at least `smallest` each."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, vocab_size, BLOCK):
        code = _codes(x_ptr, start, vocab_size, largest, scale, BLOCK)
        weight = _weights(code, dropped)
        total += tl.where((code < limit) & (weight >= smallest), weight, 0)
    return tl.sum(total)


@triton.jit
def _find(
    x_ptr, vocab_size, largest, scale, dropped, target, limit, ties, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest code with at least `target` tokens (or weight) at or below it, and how many (how much) lie below.

    By weight, only codes below `limit` count, and `ties` of those equal to it.
    """
    found = limit * 0
    below = target * 0
    tie_weight = target * 0
    if BY_WEIGHT:
        tie_weight = ties * _weight(limit, dropped)
    for step in tl.range(0, 15):
        shift = 28 - 2 * step
        one = found + (1 << shift)
        two = found + (2 << shift)
        three = found + (3 << shift)
        sum_one = tl.zeros([BLOCK], tl.int64)
        sum_two = tl.zeros([BLOCK], tl.int64)
        sum_three = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, vocab_size, BLOCK):
            code = _codes(x_ptr, start, vocab_size, largest, scale, BLOCK)
            if BY_WEIGHT:
                amount = tl.where(code < limit, _weights(code, dropped), 0)
            else:
                amount = (code < CODE_BEYOND).to(tl.int64)
            sum_one += tl.where(code < one, amount, 0)
            sum_two += tl.where(code < two, amount, 0)
            sum_three += tl.where(code < three, amount, 0)
        below_one = tl.sum(sum_one) + tl.where(limit < one, tie_weight, 0)
        below_two = tl.sum(sum_two) + tl.where(limit < two, tie_weight, 0)
        below_three = tl.sum(sum_three) + tl.where(limit < three, tie_weight, 0)
        found = tl.where(
            below_three < target, three, tl.where(below_two < target, two, tl.where(below_one < target, one, found))
        )
        below = tl.where(
            below_three < target,
            below_three,
            tl.where(below_two < target, below_two, tl.where(below_one < target, below_one, below)),
        )
    return found, below


@triton.jit
def _times_fraction(total, fraction, ONE: tl.constexpr):
    """floor(total · min(fraction, 1)) for 0 ≤ total < 2^63, the fraction cut to a multiple of 2^-30 (NaN: 0)."""
    bounded = tl.where(fraction > 0.0, tl.minimum(fraction, 1.0), 0.0)
    parts = (bounded * ONE).to(tl.int64)
    high = total >> 32
    low = total & 0xFFFFFFFF
    return ((high * parts) << 2) + ((low * parts) >> 30)


@triton.jit
def _random_part(total, seed, row, offset):
    """floor(u · total), u of 64 random bits."""
    mask = 0xFFFFFFFF
    key0, key1 = seed & mask, (seed >> 32) & mask
    c0, c1 = row & mask, (row >> 32) & mask
    c2, c3 = offset & mask, (offset >> 32) & mask
    for _ in tl.static_range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = (key0 + 0x9E3779B9) & mask
        key1 = (key1 + 0xBB67AE85) & mask
    # The upper half of the product of (c0, c1) and total, in 32-bit halves.
    high, low = total >> 32, total & mask
    low_low = _product_high(c1, low)
    cross_high, cross_low = _product(c0, low)
    other_high, other_low = _product(c1, high)
    carry = (low_low + cross_low + other_low) >> 32
    return c0 * high + cross_high + other_high + carry


@triton.jit
def _product_high(a, b):
    """The upper 32 bits of a · b, of 32-bit numbers in int64."""
    return ((a >> 16) * b + (((a & 0xFFFF) * b) >> 16)) >> 16


@triton.jit
def _product(a, b):
    """The upper and the lower 32 bits of a · b, of 32-bit numbers in int64."""
    low = ((a & 0xFFFF) * b + ((((a >> 16) * b) & 0xFFFF) << 16)) & 0xFFFFFFFF
    return _product_high(a, b), low


@triton.jit
def sample_kernel(
    logits_ptr,
    ids_ptr,
    valid_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    offset_ptr,
    vocab_size,
    stride,
    dropped,
    temperature_step,
    top_k_step,
    top_p_step,
    min_p_step,
    seed_step,
    offset_step,
    counts_rows,
    top_k,
    seed,
    offset,
    temperature,
    top_p,
    min_p,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * stride
    temperature = _parameter(temperature_ptr, temperature_step, row, temperature, tl.float32)
    top_k = _parameter(top_k_ptr, top_k_step, row, top_k, tl.int64)
    top_p = _parameter(top_p_ptr, top_p_step, row, top_p, tl.float32)
    min_p = _parameter(min_p_ptr, min_p_step, row, min_p, tl.float32)
    seed = _parameter(seed_ptr, seed_step, row, seed, tl.int64)
    offset = _parameter(offset_ptr, offset_step, row, offset, tl.int64)

    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        lanes = tl.maximum(lanes, _logits(x_ptr, start, vocab_size, BLOCK))
    largest = tl.max(lanes)
    valid = (largest > float("-inf")) & (temperature >= 0.0) & (temperature < float("inf"))
    greedy = (temperature == 0.0) | (top_k == 1)
    # An infinite scale gives the largest logits the code 0 and all others weight 0.
    scale = tl.where(greedy, float("inf"), tl.div_rn(1.4426950408889634, tl.where(greedy, 1.0, temperature)))

    # Kept are the codes below `limit`, and of those equal to it the first `ties`.
    limit = tl.where(greedy, 0, CODE_END + 1).to(tl.int32)
    ties = tl.where(greedy, 1, 0).to(tl.int64)
    if (top_k > 1) & (top_k < vocab_size) & (temperature != 0.0):
        found, below = _find(x_ptr, vocab_size, largest, scale, dropped, top_k, limit, ties, False, BLOCK)
        limit = found
        ties = top_k - below
    in_nucleus = (top_p < 1.0) | (top_p != top_p)
    if in_nucleus & (temperature != 0.0) & (top_k != 1):
        total = _kept_weight(x_ptr, vocab_size, largest, scale, limit, 0, dropped, BLOCK)
        total += ties * _weight(limit, dropped)
        target = _times_fraction(total, top_p, 1073741824.0)
        found, below = _find(x_ptr, vocab_size, largest, scale, dropped, target, limit, ties, True, BLOCK)
        weight = tl.maximum(_weight(found, dropped), 1)
        wanted = tl.maximum((target - below + weight - 1) // weight, 1)
        ties = tl.where(found == limit, tl.minimum(wanted, ties), wanted)
        limit = found

    one = tl.full([], 1099511627776, tl.int64) >> dropped
    smallest = _times_fraction(one, min_p, 1073741824.0)
    tie_weight = _weight(limit, dropped)
    tie_weight = tl.where(tie_weight >= smallest, tie_weight, 0)
    # With no limit, or more ties wanted than there are: what is drawn from is counted, not computed.
    total = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int64)
    for start in tl.range(0, vocab_size, BLOCK):
        amount, num_ties = _block_weight(x_ptr, start, vocab_size, largest, scale, limit, smallest, dropped, BLOCK)
        total += amount + tl.minimum(num_ties, tl.maximum(ties - seen, 0)) * tie_weight
        seen += num_ties
    part = _random_part(total, seed, row * counts_rows, offset)

    before = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int64)
    drawn_start = tl.full([], 0, tl.int64)
    drawn_before = tl.full([], 0, tl.int64)
    drawn_seen = tl.full([], 0, tl.int64)
    for start in tl.range(0, vocab_size, BLOCK):
        amount, num_ties = _block_weight(x_ptr, start, vocab_size, largest, scale, limit, smallest, dropped, BLOCK)
        amount += tl.minimum(num_ties, tl.maximum(ties - seen, 0)) * tie_weight
        here = (before <= part) & (part < before + amount)
        drawn_start = tl.where(here, start, drawn_start)
        drawn_before = tl.where(here, before, drawn_before)
        drawn_seen = tl.where(here, seen, drawn_seen)
        before += amount
        seen += num_ties

    code = _codes(x_ptr, drawn_start, vocab_size, largest, scale, BLOCK)
    weight = _weights(code, dropped)
    is_tie = (code == limit).to(tl.int64)
    rank = drawn_seen + tl.cumsum(is_tie) - is_tie
    kept = ((code < limit) | ((code == limit) & (rank < ties))) & (weight >= smallest)
    upto = drawn_before + tl.cumsum(tl.where(kept, weight, 0))
    drawn = drawn_start + tl.sum((upto <= part).to(tl.int64))
    tl.store(ids_ptr + row, tl.where(valid, drawn, 0))
    tl.store(valid_ptr + row, valid)


@triton.jit
def _block_weight(x_ptr, start, vocab_size, largest, scale, limit, smallest, dropped, BLOCK: tl.constexpr):
    """The weight of a block's codes below `limit`, and how many are equal to it."""
    code = _codes(x_ptr, start, vocab_size, largest, scale, BLOCK)
    weight = _weights(code, dropped)
    amount = tl.sum(tl.where((code < limit) & (weight >= smallest), weight, 0))
    return amount, tl.sum((code == limit).to(tl.int64))


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    top_k = pointer(desc.top_k_dtype)
    pointers = (pointer(desc.dtype), "*i64", "*i1", "*fp32", top_k, "*fp32", "*fp32", "*i64", "*i64")
    numbers = ("i64", "i64", "i32", *("i64",) * 6, "i64", "i64", "i64", "i64", "fp32", "fp32", "fp32")
    multiples = (0, 10) if desc.aligned else ()
    if desc.vocab_size % 16 == 0:
        multiples += (9,)
    short = desc.vocab_size <= SHORT_BLOCK
    block, warps = (SHORT_BLOCK, NUM_WARPS // 2) if short else (BLOCK, NUM_WARPS)
    return sample_kernel, Specialization((*pointers, *numbers), (block, features.pdl), multiples, warps, features.pdl)


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(*specialize(desc, features(desc.device)), desc.device)
    num_rows, vocab_size = desc.num_rows, desc.vocab_size
    dropped = fixed_point.dropped_bits(vocab_size)

    def run(stride: int, p: Parameters, logits: Tensor, ids: Tensor, valid: Tensor) -> None:
        # An absent tensor is never read: any pointer will do.
        tensors = [logits if t is None else t for t in p.tensors()]
        steps = [-1 if t is None else step for t, step in zip(p.tensors(), p.steps(), strict=True)]
        integers = (vocab_size, stride, dropped, *steps, int(p.counts_rows), p.top_k, p.seed, p.offset)
        launch(num_rows, (logits, ids, valid, *tensors), *integers, p.temperature, p.top_p, p.min_p)

    return run
