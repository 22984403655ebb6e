"""Products of small matrices in CPU kernels: a tile of the result stays in registers.

All three matrices are float32 in memory. `product(rows, vectors)` makes a function for a tile of the result of that
many rows and 16 times that many columns: each step of the sum loads one row of B, and spreads one element of each row
of A over a vector (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). An
element is summed in the order of the steps, whatever tile it is in.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onepass.launch.cpu_memory import decode_first
from onepass.launch.cpu_vector import F32, I32, I64, LANES, call_llvm, constant, intrinsic, lanes_of, spread


def _pointer(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(builder.add(base, builder.mul(index, ir.Constant(I64, 4))), kind.as_pointer())


def product(rows: int, vectors: int, add: bool) -> Any:
    """A function (c, c_stride, a, a_stride, b, b_stride, steps): C = A B for one tile; with `add`, C += A B."""

    @intrinsic
    def multiply(
        typingctx: Any, c: Any, c_stride: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, steps: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            c_base, c_step, a_base, a_step, b_base, b_step, count = args
            tile = [(row, vector) for row in range(rows) for vector in range(vectors)]

            def address(row: int, vector: int) -> ir.Value:
                index = builder.mul(ir.Constant(I64, row), c_step)
                return _pointer(builder, c_base, builder.add(index, ir.Constant(I64, LANES * vector)), lanes_of(F32))

            sums = {}
            for place in tile:
                first = builder.load(address(*place), align=4) if add else constant(F32, 0.0)
                sums[place] = cgutils.alloca_once_value(builder, first)
            with cgutils.for_range(builder, count, intp=I64) as loop:
                start = builder.mul(loop.index, b_step)
                columns = [
                    builder.load(
                        _pointer(builder, b_base, builder.add(start, ir.Constant(I64, LANES * v)), lanes_of(F32)),
                        align=4,
                    )
                    for v in range(vectors)
                ]
                for row in range(rows):
                    index = builder.add(builder.mul(ir.Constant(I64, row), a_step), loop.index)
                    element = spread(builder, builder.load(_pointer(builder, a_base, index, F32), align=4))
                    for vector in range(vectors):
                        slot = sums[row, vector]
                        operands = [element, columns[vector], builder.load(slot)]
                        builder.store(call_llvm(builder, "llvm.fmuladd.v16f32", lanes_of(F32), operands), slot)
            for place in tile:
                builder.store(builder.load(sums[place]), address(*place), align=4)
            return context.get_dummy_value()

        return types.void(c, types.int64, a, types.int64, b, types.int64, types.int64), generate

    return multiply


@intrinsic
def transpose(
    typingctx: Any, target: Any, target_stride: Any, source: Any, source_stride: Any, rows: Any, columns: Any
) -> Any:
    """16 rows of `source` become 16 columns of `target`, in float32.

    Only the first `rows` rows and `columns` columns are read; the others are zeros. All 256 elements are written.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        target_base, target_step, source_base, source_step, num_rows, num_columns = args
        lines = []
        for row in range(LANES):
            number = ir.Constant(I64, row)
            inside = builder.icmp_signed("<", number, num_rows)
            count = builder.select(inside, num_columns, ir.Constant(I64, 0))
            lines.append(decode_first(builder, source.storage, source_base, builder.mul(number, source_step), count))
        # Eklundh, "A Fast Computer Method for Matrix Transposing", 1972: blocks of half the size change places.
        distance = LANES // 2
        while distance:
            for i in range(LANES):
                if i & distance:
                    continue
                pair = lines[i], lines[i + distance]
                upper = [n if not n & distance else LANES + n - distance for n in range(LANES)]
                lower = [n + distance if not n & distance else LANES + n for n in range(LANES)]
                lines[i], lines[i + distance] = (
                    builder.shuffle_vector(*pair, ir.Constant(lanes_of(I32), order)) for order in (upper, lower)
                )
            distance //= 2
        for row, line in enumerate(lines):
            index = builder.mul(ir.Constant(I64, row), target_step)
            builder.store(line, _pointer(builder, target_base, index, lanes_of(F32)), align=4)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64, types.int64), generate
