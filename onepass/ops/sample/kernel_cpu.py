"""sample on the CPU: a row is read a few times from the core's own caches, 16 logits at a time.

Limits are found by counting: how many tokens, or how much weight, each of the upper bits of the codes
(`fixed_point.py`) has. The tokens of the one value where the limit lies are put aside, and the lower bits are found
among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_memory import load_first, row_start, take
from onepass.launch.cpu_vector import (
    F32,
    I32,
    I64,
    call_llvm,
    constant,
    first_lanes,
    inline,
    intrinsic,
    lanes_of,
    maximum,
    polynomial,
    splat,
    vector32,
)
from onepass.ops.sample import fixed_point
from onepass.ops.sample.fixed_point import CODE_BITS, CODE_END

if TYPE_CHECKING:
    from onepass.ops.sample.op import Desc, Parameters

# Logits whose codes and weights are worked out together: 12 KB, which stay in the first cache.
_BLOCK = 1024

# Codes have 30 bits: 9, 11 and 10. The first part of CODE_END is 328.
_FIRST_SHIFT, _SECOND_SHIFT = 21, 10
_FIRST_BINS, _BINS = 512, 2048

# Called in many places: compiled once, not into each of them.
_function: Any = njit(error_model="numpy")

_LOG2_E = np.float32(1.0 / math.log(2.0))
_power = polynomial(*fixed_point.POLYNOMIAL)
_MASK = 0xFFFFFFFF


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype)


@intrinsic
def _below_infinity(typingctx: Any, x: Any, count: Any) -> Any:
    """`x` with -inf for NaN, and in every lane from `count` on."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        number = builder.fcmp_ordered("ord", args[0], args[0])
        kept = builder.and_(number, first_lanes(builder, args[1]))
        return builder.select(kept, args[0], constant(F32, -math.inf))

    return vector32(vector32, types.int64), generate


@intrinsic
def _largest_lane(typingctx: Any, x: Any) -> Any:
    """The largest lane; none is NaN."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return call_llvm(builder, "llvm.vector.reduce.fmax.v16f32", F32, [args[0]])

    return types.float32(vector32), generate


@intrinsic
def _codes(typingctx: Any, octaves: Any, x: Any, largest: Any, address: Any) -> Any:
    """Store the codes of 16 logits as int32; returns their fractions, less 1/2, as float32."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        octaves, x, largest, address = args
        near = builder.fcmp_ordered("<", octaves, constant(F32, 41.0))
        scaled = builder.fmul(builder.select(near, octaves, constant(F32, 41.0)), constant(F32, 2.0**CODE_BITS))
        code = builder.fptosi(scaled, lanes_of(I32))
        code = builder.select(builder.fcmp_ordered("==", x, largest), constant(I32, 0), code)
        builder.store(code, builder.inttoptr(address, code.type.as_pointer()), align=4)
        # The bits of a float in [1, 2) are those of its fraction.
        fraction = builder.and_(builder.lshr(code, constant(I32, 1)), constant(I32, 2 ** (CODE_BITS - 1) - 1))
        upper = builder.bitcast(builder.or_(fraction, constant(I32, 0x3F800000)), lanes_of(F32))
        return builder.fsub(upper, constant(F32, 1.5))

    return vector32(vector32, vector32, vector32, types.int64), generate


@intrinsic
def _weights(typingctx: Any, power: Any, codes: Any, address: Any, dropped: Any) -> Any:
    """Store the weights of 16 codes at the address `codes` as int64, `power` being those of their fractions."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        power, codes, address, dropped = args
        # The bits of a power in [1/2, 1] count up from 1/2.
        mantissa = builder.sub(builder.bitcast(power, lanes_of(I32)), constant(I32, 0x3E800000))
        code = builder.load(builder.inttoptr(codes, lanes_of(I32).as_pointer()), align=4)
        octave = builder.zext(builder.lshr(code, constant(I32, CODE_BITS)), lanes_of(I64))
        undefined = ir.Constant(lanes_of(I64), ir.Undefined)
        one = builder.insert_element(undefined, dropped, ir.Constant(I32, 0))
        shift = builder.add(octave, builder.shuffle_vector(one, undefined, constant(I32, 0)))
        weight = builder.lshr(builder.shl(builder.zext(mantissa, lanes_of(I64)), constant(I64, 16)), shift)
        builder.store(weight, builder.inttoptr(address, weight.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(vector32, types.int64, types.int64, types.int64), generate


@intrinsic
def _int64_at(typingctx: Any, address: Any, index: Any) -> Any:
    return _number_at(I64, types.int64)


@intrinsic
def _int32_at(typingctx: Any, address: Any, index: Any) -> Any:
    return _number_at(I32, types.int32)


@intrinsic
def _float32_at(typingctx: Any, address: Any, index: Any) -> Any:
    return _number_at(F32, types.float32)


def _number_at(kind: ir.Type, result: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.load(builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]]))

    return result(types.int64, types.int64), generate


@intrinsic
def _store_result(typingctx: Any, ids: Any, valid: Any, row: Any, drawn: Any, is_valid: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        ids, valid, row, drawn, is_valid = args
        builder.store(drawn, builder.gep(builder.inttoptr(ids, I64.as_pointer()), [row]))
        byte = ir.IntType(8)
        builder.store(builder.zext(is_valid, byte), builder.gep(builder.inttoptr(valid, byte.as_pointer()), [row]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.boolean), generate


@inline
def _largest(x_row: Any, n: int) -> Any:
    a = b = splat(-np.inf)
    for i in range(0, n, 32):
        a = maximum(a, _below_infinity(load_first(x_row, i, min(n - i, 16)), n - i))
        if i + 16 < n:
            b = maximum(b, _below_infinity(load_first(x_row, i + 16, min(n - i - 16, 16)), n - i - 16))
    return _largest_lane(maximum(a, b))


@inline
def _encode(x_row: Any, start: int, end: int, largest: Any, scale: Any, dropped: int, codes: int, weights: int) -> None:
    """The codes and weights of logits start … end - 1, at these addresses; up to 15 more are written."""
    top, factor = splat(largest), splat(scale)
    for i in range(start, end, 16):
        x = _below_infinity(load_first(x_row, i, min(end - i, 16)), 16)
        at = i - start
        power = _power(_codes((top - x) * factor, x, top, codes + 4 * at))
        _weights(power, codes + 4 * at, weights + 8 * at, dropped)


@inline
def _times_fraction(total: Any, fraction: Any) -> Any:
    """floor(total · min(fraction, 1)), the fraction cut to a multiple of 2^-30 (NaN: 0)."""
    parts = np.int64(0)
    if fraction > 0.0:
        parts = np.int64(min(fraction, np.float32(1.0)) * np.float32(1 << fixed_point.LIMIT_BITS))
    return (((total >> 32) * parts) << 2) + (((total & _MASK) * parts) >> 30)


@inline
def _random_part(total: Any, seed: Any, row: Any, offset: Any) -> Any:
    """floor(u · total), u of 64 random bits."""
    mask, half = np.uint64(_MASK), np.uint64(32)
    k0, k1 = np.uint64(seed) & mask, np.uint64(seed) >> half
    c0, c1 = np.uint64(row) & mask, np.uint64(row) >> half
    c2, c3 = np.uint64(offset) & mask, np.uint64(offset) >> half
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (second >> half) ^ c1 ^ k0, second & mask, (first >> half) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    high, low = np.uint64(total) >> half, np.uint64(total) & mask
    across, other = c0 * low, c1 * high
    carry = (((c1 * low) >> half) + (across & mask) + (other & mask)) >> half
    return np.int64(c0 * high + (across >> half) + (other >> half) + carry)


@inline
def _weight_of(code: int, row: Any, buffers: Any) -> Any:
    """One code's weight, by way of the buffers."""
    codes, weights = buffers[0], buffers[1]
    codes[:16] = code
    power = _power(splat(((code & (2**CODE_BITS - 1)) >> 1) * 2.0 ** (1 - CODE_BITS) - 0.5))
    _weights(power, codes.ctypes.data, weights.ctypes.data, row[4])
    return weights[0]


@_function
def _block(row: Any, block: int, buffers: Any) -> Any:
    """Fill the buffers with the codes and weights of a block of the row; where it begins and ends."""
    x_row, n, largest, scale, dropped = row
    start = block * _BLOCK
    end = min(start + _BLOCK, n)
    _encode(x_row, start, end, largest, scale, dropped, buffers[0].ctypes.data, buffers[1].ctypes.data)
    return start, end


@inline
def _reach(bins: Any, target: int, below: int) -> Any:
    """The first bin with which the sum reaches the target, and the sum before it."""
    at = 0
    while below + bins[at] < target:
        below += bins[at]
        at += 1
    return at, below


@_function
def _find(row: Any, num_blocks: int, buffers: Any, by_weight: bool, target: int, limit: int, tie_weight: int) -> Any:
    """The smallest code with at least `target` tokens (or weight) at or below it, and how many (how much) lie below it.

    Only codes below `limit` count; by weight, `tie_weight` more counts as of the code `limit`.
    """
    codes, weights, bins, near_codes, near_amounts = buffers
    bins[:_FIRST_BINS] = 0
    bins[limit >> _FIRST_SHIFT] = tie_weight
    for block in range(num_blocks):
        start, end = _block(row, block, buffers)
        for i in range(end - start):
            if codes[i] < limit:
                bins[codes[i] >> _FIRST_SHIFT] += weights[i] if by_weight else 1
    first, below = _reach(bins, target, 0)

    near_codes[0], near_amounts[0] = limit, tie_weight
    num_near = 1 if limit >> _FIRST_SHIFT == first else 0
    for block in range(num_blocks):
        start, end = _block(row, block, buffers)
        for i in range(end - start):
            # Always written, kept only where it is wanted: no branch to guess.
            near_codes[num_near], near_amounts[num_near] = codes[i], weights[i] if by_weight else 1
            num_near += (codes[i] < limit) & (codes[i] >> _FIRST_SHIFT == first)

    bins[:] = 0
    for i in range(num_near):
        bins[(near_codes[i] >> _SECOND_SHIFT) & (_BINS - 1)] += near_amounts[i]
    second, below = _reach(bins, target, below)
    prefix = (first << (_FIRST_SHIFT - _SECOND_SHIFT)) + second
    bins[:] = 0
    for i in range(num_near):
        if near_codes[i] >> _SECOND_SHIFT == prefix:
            bins[near_codes[i] & ((1 << _SECOND_SHIFT) - 1)] += near_amounts[i]
    third, below = _reach(bins, target, below)
    return (prefix << _SECOND_SHIFT) + third, below


@inline
def _limit(row: Any, num_blocks: int, buffers: Any, top_k: int, top_p: Any) -> Any:
    """Kept are the codes below `limit`, and of those equal to it the first `ties`; one of them weighs `tie_weight`."""
    codes, weights = buffers[0], buffers[1]
    limit, ties, tie_weight = CODE_END + 1, 0, 0
    if 1 < top_k < row[1]:
        limit, below = _find(row, num_blocks, buffers, False, top_k, limit, 0)
        ties = top_k - below
        tie_weight = _weight_of(limit, row, buffers)
    if not top_p >= 1.0:
        total = ties * tie_weight
        for block in range(num_blocks):
            start, end = _block(row, block, buffers)
            for i in range(end - start):
                total += weights[i] if codes[i] < limit else 0
        target = _times_fraction(total, top_p)
        found, below = _find(row, num_blocks, buffers, True, target, limit, ties * tie_weight)
        tie_weight = _weight_of(found, row, buffers)
        wanted = max((target - below + tie_weight - 1) // max(tie_weight, 1), 1)
        ties = min(wanted, ties) if found == limit else wanted
        limit = found
    return limit, ties, tie_weight


@inline
def _kept(
    row: Any, buffers: Any, sums: Any, seen_before: Any, limit: int, ties: int, tie_weight: int, least: int
) -> Any:
    """The weight of all that is kept; block by block to `sums`, with the ties before each in `seen_before`."""
    codes, weights = buffers[0], buffers[1]
    total, seen = 0, 0
    for block in range(len(sums)):
        start, end = _block(row, block, buffers)
        amount, equal = 0, 0
        for i in range(end - start):
            amount += weights[i] if (codes[i] < limit) & (weights[i] >= least) else 0
            equal += codes[i] == limit
        amount += min(equal, max(ties - seen, 0)) * tie_weight
        sums[block], seen_before[block] = amount, seen
        total += amount
        seen += equal
    return total


@inline
def _drawn(
    row: Any, buffers: Any, sums: Any, seen_before: Any, limit: int, ties: int, tie_weight: int, least: int, part: int
) -> Any:
    """The first index where the running sum of what is kept exceeds `part`."""
    codes, weights = buffers[0], buffers[1]
    before, block = 0, 0
    while before + sums[block] <= part:
        before += sums[block]
        block += 1
    start, end = _block(row, block, buffers)
    seen = seen_before[block]
    for i in range(end - start):
        if codes[i] < limit:
            before += weights[i] if weights[i] >= least else 0
        elif codes[i] == limit:
            before += tie_weight if seen < ties else 0
            seen += 1
        if before > part:
            return start + i
    return 0


@inline
def _float_of(address: int, at: int, number: float) -> Any:
    return _float32_at(address, at) if address != 0 else np.float32(number)


@inline
def _integer_of(address: int, at: int, number: int) -> Any:
    return _int64_at(address, at) if address != 0 else number


@cpu.kernel
def sample_kernel(
    x: Any,
    ids: int,
    valid: int,
    temperatures: int,
    top_ks: int,
    top_ps: int,
    min_ps: int,
    seeds: int,
    offsets: int,
    temperature_step: int,
    top_k_step: int,
    top_p_step: int,
    min_p_step: int,
    seed_step: int,
    offset_step: int,
    wide_top_k: bool,
    counts_rows: int,
    temperature_number: float,
    top_k_number: int,
    top_p_number: float,
    min_p_number: float,
    seed_number: int,
    offset_number: int,
    stride: int,
    n: int,
    dropped: int,
    num_rows: int,
    chunk: int,
    counter: int,
) -> None:
    """Addresses of absent tensors are 0."""
    num_blocks = -(-n // _BLOCK)
    sums, seen_before = np.empty(num_blocks, np.int64), np.empty(num_blocks, np.int64)
    # Codes and weights of a block, bins, and what is put aside: memory that is touched only where a row has a limit.
    buffers = (
        np.empty(_BLOCK + 16, np.int32),
        np.empty(_BLOCK + 16, np.int64),
        np.empty(_BINS, np.int64),
        np.empty(n + 2, np.int32),
        np.empty(n + 2, np.int64),
    )
    one = (1 << fixed_point.WEIGHT_BITS) >> dropped
    number = take(counter, chunk)
    last = number + chunk
    while number < num_rows:
        temperature = _float_of(temperatures, number * temperature_step, temperature_number)
        top_k = _integer_of(top_ks if wide_top_k else 0, number * top_k_step, top_k_number)
        if top_ks != 0 and not wide_top_k:
            top_k = int(_int32_at(top_ks, number * top_k_step))
        top_p = _float_of(top_ps, number * top_p_step, top_p_number)
        min_p = _float_of(min_ps, number * min_p_step, min_p_number)
        seed = _integer_of(seeds, number * seed_step, seed_number)
        offset = _integer_of(offsets, number * offset_step, offset_number)

        x_row = row_start(x, number, stride)
        largest = _largest(x_row, n)
        is_valid = (largest > -np.inf) & (temperature >= 0.0) & (temperature < np.inf)
        drawn = 0
        if is_valid:
            greedy = (temperature == 0.0) | (top_k == 1)
            # An infinite scale gives the largest logits the code 0 and all others weight 0.
            row = (x_row, n, largest, np.float32(np.inf) if greedy else _LOG2_E / temperature, dropped)
            limit, ties, tie_weight = 0, 1, one
            if not greedy:
                limit, ties, tie_weight = _limit(row, num_blocks, buffers, top_k, top_p)
            least = _times_fraction(one, min_p)
            tie_weight = tie_weight if tie_weight >= least else 0
            total = _kept(row, buffers, sums, seen_before, limit, ties, tie_weight, least)
            part = _random_part(total, seed, number * counts_rows, offset)
            drawn = _drawn(row, buffers, sums, seen_before, limit, ties, tie_weight, least, part)
        _store_result(ids, valid, number, drawn, is_valid)
        number += 1
        if number == last:
            number = take(counter, chunk)
            last = number + chunk


@lru_cache(maxsize=8)
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    numbers = (float, int, float, float, int, int)
    return sample_kernel.compiled(cpu.pointer(dtype), *(int,) * 14, bool, int, *numbers, *(int,) * 6)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    wide_top_k = desc.top_k_dtype == torch.int64
    return partial(_launch, _compiled(desc.dtype), desc.num_rows, desc.vocab_size, wide_top_k)


def _launch(
    kernel: Callable[..., None],
    num_rows: int,
    n: int,
    wide_top_k: bool,
    stride: int,
    p: Parameters,
    logits: Tensor,
    ids: Tensor,
    valid: Tensor,
) -> None:
    addresses = [0 if t is None else t.data_ptr() for t in p.tensors()]
    args = (
        logits.data_ptr(),
        ids.data_ptr(),
        valid.data_ptr(),
        *addresses,
        *p.steps(),
        wide_top_k,
        int(p.counts_rows),
        *p.numbers(),
        stride,
        n,
        fixed_point.dropped_bits(n),
    )
    cpu.run_rows(kernel, args, num_rows, n, cost=16.0)
