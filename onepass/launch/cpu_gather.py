"""Products of float32 rows with rows that lie anywhere in memory, such as in the pages of a cache.

The rows that lie anywhere are given by their addresses, int64 in memory, and may be of any dtype that cpu_memory.py
knows. A sum's order depends on its length only: the tile and the place in it change nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onepass.launch.cpu_memory import decode_first
from onepass.launch.cpu_vector import F32, I32, I64, LANES, call_llvm, constant, inline, intrinsic, lanes_of, spread

ROWS, KEYS = 4, 4
"""A tile of `dots`: its 16 sums end in the 16 lanes of a vector."""


def _float_pointer(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(builder.add(base, builder.mul(index, ir.Constant(I64, 4))), kind.as_pointer())


def _address(builder: ir.IRBuilder, addresses: ir.Value, index: ir.Value) -> ir.Value:
    at = builder.add(addresses, builder.mul(index, ir.Constant(I64, 8)))
    return builder.load(builder.inttoptr(at, I64.as_pointer()))


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, slot: ir.Value) -> None:
    sum_ = call_llvm(builder, "llvm.fmuladd.v16f32", lanes_of(F32), [a, b, builder.load(slot)])
    builder.store(sum_, slot)


def _sums_of_lanes(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """16 vectors to one: lane i is the sum of vector i's lanes, halves added to halves."""
    width = LANES
    while len(vectors) > 1:
        half, width = len(vectors) // 2, width // 2
        firsts = [lane for start in range(0, LANES, 2 * width) for lane in range(start, start + width)]
        # Groups of `width` lanes, from the one vector and from the other in turn.
        groups = [firsts[i : i + width] for i in range(0, len(firsts), width)]
        low = [lane for group in groups for lane in (*group, *(LANES + n for n in group))]
        high = [lane + width for lane in low]
        vectors = [
            builder.fadd(
                *(
                    builder.shuffle_vector(vectors[i], vectors[i + half], ir.Constant(lanes_of(I32), order))
                    for order in (low, high)
                )
            )
            for i in range(half)
        ]
    return vectors[0]


@intrinsic
def dots(
    typingctx: Any, out: Any, out_stride: Any, a: Any, a_stride: Any, like: Any, addresses: Any, columns: Any
) -> Any:
    """ROWS x KEYS products of rows: out[r, n] = a[r] . the row at addresses[n], each of `columns` elements.

    `a` has zeros up to the next multiple of 16; of the other rows nothing past `columns` is read. `like` is any
    pointer of the other rows' dtype.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        out_base, out_step, a_base, a_step, _, table, count = args
        slots = [cgutils.alloca_once_value(builder, constant(F32, 0.0)) for _ in range(ROWS * KEYS)]
        rows = [_address(builder, table, ir.Constant(I64, n)) for n in range(KEYS)]

        def step(column: ir.Value, lanes: ir.Value) -> None:
            starts = [builder.add(builder.mul(ir.Constant(I64, r), a_step), column) for r in range(ROWS)]
            left = [builder.load(_float_pointer(builder, a_base, s, lanes_of(F32)), align=4) for s in starts]
            for n, row in enumerate(rows):
                right = decode_first(builder, like.storage, row, column, lanes)
                for r in range(ROWS):
                    _multiply_add(builder, left[r], right, slots[r * KEYS + n])

        whole = builder.ashr(count, ir.Constant(I64, 4))
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            step(builder.shl(loop.index, ir.Constant(I64, 4)), ir.Constant(I64, LANES))
        done = builder.shl(whole, ir.Constant(I64, 4))
        with builder.if_then(builder.icmp_signed("<", done, count)):
            step(done, builder.sub(count, done))
        sums = _sums_of_lanes(builder, [builder.load(slot) for slot in slots])
        for r in range(ROWS):
            part = builder.shuffle_vector(
                sums, sums, ir.Constant(ir.VectorType(I32, KEYS), list(range(r * KEYS, (r + 1) * KEYS)))
            )
            at = builder.mul(ir.Constant(I64, r), out_step)
            builder.store(part, _float_pointer(builder, out_base, at, part.type), align=4)
        return context.get_dummy_value()

    return types.void(out, types.int64, a, types.int64, like, types.int64, types.int64), generate


def _weighted_tile(vectors: int, partial: bool) -> Any:
    """A tile of ROWS rows and 16 · `vectors` columns, the last vector with `lanes` of them if `partial`."""

    @intrinsic
    def add(
        typingctx: Any,
        out: Any,
        out_stride: Any,
        weights: Any,
        weight_stride: Any,
        like: Any,
        addresses: Any,
        column: Any,
        lanes: Any,
        steps: Any,
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            out_base, out_step, weight_base, weight_step, _, table, first, last_lanes, count = args
            tile = [(row, vector) for row in range(ROWS) for vector in range(vectors)]

            def place(row: int, vector: int) -> ir.Value:
                start = builder.add(builder.mul(ir.Constant(I64, row), out_step), first)
                index = builder.add(start, ir.Constant(I64, LANES * vector))
                return _float_pointer(builder, out_base, index, lanes_of(F32))

            sums = {at: cgutils.alloca_once_value(builder, builder.load(place(*at), align=4)) for at in tile}
            with cgutils.for_range(builder, count, intp=I64) as loop:
                row_at = _address(builder, table, loop.index)
                values = []
                for vector in range(vectors):
                    lanes_here = last_lanes if partial and vector == vectors - 1 else ir.Constant(I64, LANES)
                    index = builder.add(first, ir.Constant(I64, LANES * vector))
                    values.append(decode_first(builder, like.storage, row_at, index, lanes_here))
                for row in range(ROWS):
                    index = builder.add(builder.mul(ir.Constant(I64, row), weight_step), loop.index)
                    weight = spread(builder, builder.load(_float_pointer(builder, weight_base, index, F32), align=4))
                    for vector in range(vectors):
                        _multiply_add(builder, weight, values[vector], sums[row, vector])
            for at in tile:
                builder.store(builder.load(sums[at]), place(*at), align=4)
            return context.get_dummy_value()

        numbers = (types.int64,) * 4
        return types.void(out, types.int64, weights, types.int64, like, *numbers), generate

    return add


_four_vectors, _one_vector, _part_of_one = _weighted_tile(4, False), _weighted_tile(1, False), _weighted_tile(1, True)


@inline
def add_weighted(
    out: Any, out_stride: int, weights: Any, weight_stride: int, like: Any, addresses: int, columns: int, steps: int
) -> None:
    """out[r] += the sum over n < steps of weights[r, n] · the row at addresses[n], for ROWS rows r.

    `out` has room up to the next multiple of 16 columns.
    """
    wide, whole = columns & ~63, columns & ~15
    for d in range(0, wide, 64):
        _four_vectors(out, out_stride, weights, weight_stride, like, addresses, d, 16, steps)
    for d in range(wide, whole, 16):
        _one_vector(out, out_stride, weights, weight_stride, like, addresses, d, 16, steps)
    if whole < columns:
        _part_of_one(out, out_stride, weights, weight_stride, like, addresses, whole, columns - whole, steps)


@intrinsic
def address_of(typingctx: Any, base: Any) -> Any:
    """A pointer as a number."""
    return types.int64(base), lambda context, builder, sig, args: args[0]


@intrinsic
def store_address(typingctx: Any, table: Any, index: Any, address: Any) -> Any:
    """Write an int64 to a table of addresses."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(I64, 8)))
        builder.store(args[2], builder.inttoptr(at, I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def load_address(typingctx: Any, table: Any, index: Any) -> Any:
    """Read an int64 from a table of addresses."""
    return types.int64(types.int64, types.int64), lambda context, builder, sig, args: _address(builder, *args)


@intrinsic
def prefetch_line(typingctx: Any, address: Any) -> Any:
    """Ask for the line of memory at an address, into the second-level cache; nothing happens where there is none."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        options = [ir.Constant(I32, option) for option in (0, 2, 1)]  # to read, into the second level, data
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *options])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@inline
def prefetch(address: int, num_bytes: int) -> None:
    """Ask for all lines of memory that begin in `num_bytes` bytes from an address on, which is most of them."""
    for i in range(0, num_bytes, 64):
        prefetch_line(address + i)
