"""Vectors of 16 float32 lanes inside Numba kernels.

Numba knows neither bfloat16 nor float16 arithmetic, and whether LLVM vectorises a scalar loop depends on its
alias checks, so that the same row could be summed in another order when the output is the input. Kernels
therefore say which lanes they mean: what cpu_memory.py loads is 16 float32 lanes whatever the tensor holds, and
arithmetic on it is written with the usual operators. LLVM maps 16 lanes to whatever registers the machine has (one
zmm, two ymm, four NEON registers) without changing the order of a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import NativeValue, lower_builtin, models, register_model, unbox
from numba.extending import intrinsic as _intrinsic

LANES = 16

inline: Any = njit(forceinline=True, error_model="numpy")
"""Mark a function that kernels call: it is compiled into each of them."""

# Numba's type of an intrinsic counts the typing context as a parameter of the call.
intrinsic: Any = _intrinsic

F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

# Only contraction to a fused multiply-add is allowed: reassociation would undo the two-part constants of exp and
# the compensation of the mean, and the flags that assume no NaN or infinity would change results.
_FLAGS = ("contract",)


class Vector(types.Type):
    """16 lanes of "float32" or "float64"."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        super().__init__(f"onepass.Vector({lane})")


class Choice(types.Type):
    """A name fixed when the kernel is compiled, such as an activation's. The argument's value is ignored."""

    def __init__(self, name: str) -> None:
        self.choice = name
        super().__init__(f"onepass.Choice({name})")


vector32, vector64 = Vector("float32"), Vector("float64")


def lanes_of(lane: ir.Type) -> ir.VectorType:
    return ir.VectorType(lane, LANES)


def constant(lane: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(lanes_of(lane), [value] * LANES)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, lanes_of(F32 if fe_type.lane == "float32" else F64))


register_model(Choice)(models.OpaqueModel)


@unbox(Choice)
def _unbox_choice(typ: Choice, obj: ir.Value, c: Any) -> NativeValue:
    return NativeValue(c.context.get_dummy_value())


def _register_operator(function: Callable[..., Any], instruction: str) -> None:
    @infer_global(function)
    class _Template(ConcreteTemplate):
        cases: ClassVar = [signature(v, v, v) for v in (vector32, vector64)]

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return getattr(builder, instruction)(*args, flags=_FLAGS)

    for v in (vector32, vector64):
        lower_builtin(function, v, v)(lower)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.iadd, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _register_operator(_function, _instruction)


def spread(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """A scalar in all lanes."""
    undefined = ir.Constant(lanes_of(scalar.type), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(I32, 0))


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_llvm(builder, "llvm.fmuladd.v16f32", lanes_of(F32), [a, b, c])


def first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """The mask of the first `count` lanes."""
    order = ir.Constant(lanes_of(I32), list(range(LANES)))
    return builder.icmp_unsigned("<", order, spread(builder, builder.trunc(count, I32)))


@intrinsic
def keep_first(typingctx: Any, value: Any, count: Any) -> Any:
    """`value` with every lane from `count` on set to 0."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(first_lanes(builder, args[1]), args[0], constant(F32, 0.0))

    return vector32(vector32, types.int64), generate


@intrinsic
def fill_rest(typingctx: Any, value: Any, count: Any, rest: Any) -> Any:
    """`value` with every lane from `count` on taken from `rest`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(first_lanes(builder, args[1]), args[0], args[2])

    return vector32(vector32, types.int64, vector32), generate


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A number, rounded to float32, in all lanes."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return spread(builder, builder.fptrunc(args[0], F32))

    return vector32(types.float64), generate


@intrinsic
def zero64(typingctx: Any) -> Any:
    """Float64 lanes of 0, to sum into."""
    return vector64(), lambda context, builder, sig, args: constant(F64, 0.0)


@intrinsic
def widen(typingctx: Any, value: Any) -> Any:
    """Float32 lanes in float64."""
    return vector64(vector32), lambda context, builder, sig, args: builder.fpext(args[0], lanes_of(F64))


@intrinsic
def sum_lanes(typingctx: Any, value: Any) -> Any:
    """The sum of float64 lanes, halves added to halves."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        total, width = args[0], LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(total.type, ir.Undefined)
            halves = [
                builder.shuffle_vector(
                    total, undefined, ir.Constant(ir.VectorType(I32, width), list(range(first, first + width)))
                )
                for first in (0, width)
            ]
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.Constant(I32, 0))

    return types.float64(vector64), generate


@intrinsic
def max_lanes(typingctx: Any, value: Any) -> Any:
    """The largest of float32 lanes; NaN counts only where there is nothing else."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        largest = call_llvm(builder, "llvm.vector.reduce.fmax.v16f32", F32, [args[0]])
        return builder.fpext(largest, F64)

    return types.float64(vector32), generate


@intrinsic
def lane(typingctx: Any, value: Any, index: Any) -> Any:
    """One of float32 lanes, as a number."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.fpext(builder.extract_element(args[0], builder.trunc(args[1], I32)), F64)

    return types.float64(vector32, types.int64), generate


@intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once where the machine can."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _multiply_add(builder, *args)

    return vector32(vector32, vector32, vector32), generate


def polynomial(*coefficients: float) -> Any:
    """A function of a vector: the polynomial with these coefficients, highest power first, by Horner's rule."""

    @intrinsic
    def evaluate(typingctx: Any, x: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            value, *rest = (spread(builder, builder.fptrunc(ir.Constant(F64, c), F32)) for c in coefficients)
            for coefficient in rest:
                value = _multiply_add(builder, value, args[0], coefficient)
            return value

        return vector32(vector32), generate

    return evaluate


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of `a` and `b`; NaN where `a` is NaN."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered("<", *args), args[1], args[0])

    return vector32(vector32, vector32), generate


@intrinsic
def minimum(typingctx: Any, a: Any, b: Any) -> Any:
    """The smaller of `a` and `b`; NaN where `a` is NaN."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered(">", *args), args[1], args[0])

    return vector32(vector32, vector32), generate


@intrinsic
def where_less(typingctx: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """`then` in the lanes where a < b, else `otherwise`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered("<", *args[:2]), *args[2:])

    return vector32(vector32, vector32, vector32, vector32), generate


@intrinsic
def low_bits_to_exponent(typingctx: Any, value: Any) -> Any:
    """The float32 whose exponent field is the low 8 bits of `value`'s bits: 2^(those - 127)."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        bits = builder.shl(builder.bitcast(args[0], lanes_of(I32)), constant(I32, 23))
        return builder.bitcast(bits, lanes_of(F32))

    return vector32(vector32), generate


def _shuffle(builder: ir.IRBuilder, pair: Any, order: list[int]) -> ir.Value:
    """Lanes of the first (0 to 15) and of the second (16 to 31)."""
    return builder.shuffle_vector(*pair, ir.Constant(lanes_of(I32), order))


@intrinsic
def even_odd(typingctx: Any, first: Any, last: Any) -> Any:
    """The lanes with even and those with odd index of 32 lanes, given as the first and the last 16."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        parts = [_shuffle(builder, args, list(range(start, 2 * LANES, 2))) for start in (0, 1)]
        return context.make_tuple(builder, sig.return_type, parts)

    return types.UniTuple(vector32, 2)(vector32, vector32), generate


@intrinsic
def interleave(typingctx: Any, even: Any, odd: Any) -> Any:
    """The first and the last 16 of the 32 lanes that `even_odd` took apart."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        order = [lane // 2 + lane % 2 * LANES for lane in range(2 * LANES)]
        parts = [_shuffle(builder, args, order[:LANES]), _shuffle(builder, args, order[LANES:])]
        return context.make_tuple(builder, sig.return_type, parts)

    return types.UniTuple(vector32, 2)(vector32, vector32), generate
