"""Vectors of 16 float32 lanes inside Numba kernels, and pointers that convert as they load and store.

Numba knows neither bfloat16 nor float16 arithmetic, and whether LLVM vectorises a scalar loop depends on its
alias checks, so that the same row could be summed in another order when the output is the input. Kernels
therefore say which lanes they mean: `load` gives 16 float32 lanes whatever the tensor holds, arithmetic is
written with the usual operators, and `store` rounds once to the tensor's dtype. LLVM maps 16 lanes to whatever
registers the machine has (one zmm, two ymm, four NEON registers) without changing the order of a sum.

Two types exist only here: `Vector` (of float32, or of float64 for sums) and `Pointer`. A pointer reaches the
kernel as a plain address. Its storage is one of the three dtypes, or a stand-in for an absent tensor: "ones" and
"zeros" read as a constant, what is stored to "nowhere" is dropped. The kernel is then written once.
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

_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_I1, _I16, _I32, _I64 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64)

# How a lane lies in memory, its size in bytes, and the name LLVM's intrinsics give a vector of it.
_STORAGE = {"float32": (_F32, 4, "v16f32"), "bfloat16": (_I16, 2, "v16i16"), "float16": (_F16, 2, "v16f16")}
# x + (-0.0) is x whatever x is, so that LLVM drops the addition of an absent bias or residual.
_CONSTANT_STORAGE = {"ones": 1.0, "zeros": -0.0}

# Only contraction to a fused multiply-add is allowed: reassociation would undo the two-part constants of exp and
# the compensation of the mean, and the flags that assume no NaN or infinity would change results.
_FLAGS = ("contract",)


class Vector(types.Type):
    """16 lanes of "float32" or "float64"."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        super().__init__(f"onepass.Vector({lane})")


class Pointer(types.Type):
    """The address of a tensor's first element, with how the elements are stored."""

    def __init__(self, storage: str) -> None:
        self.storage = storage
        super().__init__(f"onepass.Pointer({storage})")


class Choice(types.Type):
    """A name fixed when the kernel is compiled, such as an activation's. The argument's value is ignored."""

    def __init__(self, name: str) -> None:
        self.choice = name
        super().__init__(f"onepass.Choice({name})")


vector32, vector64 = Vector("float32"), Vector("float64")


def _lanes(lane: ir.Type) -> ir.VectorType:
    return ir.VectorType(lane, LANES)


def _constant(lane: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(_lanes(lane), [value] * LANES)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, _lanes(_F32 if fe_type.lane == "float32" else _F64))


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Pointer) -> None:
        super().__init__(manager, fe_type, _I64)


register_model(Choice)(models.OpaqueModel)


@unbox(Pointer)
def _unbox_pointer(typ: Pointer, obj: ir.Value, c: Any) -> NativeValue:
    return NativeValue(c.pyapi.long_as_ulonglong(obj), is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


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


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    undefined = ir.Constant(_lanes(scalar.type), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _constant(_I32, 0))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _address(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, storage: str) -> ir.Value:
    lane, size, _ = _STORAGE[storage]
    byte = builder.add(base, builder.mul(index, ir.Constant(_I64, size)))
    return builder.inttoptr(byte, _lanes(lane).as_pointer())


def _first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """The mask of the first `count` lanes."""
    order = ir.Constant(_lanes(_I32), list(range(LANES)))
    return builder.icmp_unsigned("<", order, _splat(builder, builder.trunc(count, _I32)))


def _decode(builder: ir.IRBuilder, storage: str, raw: ir.Value) -> ir.Value:
    if storage == "bfloat16":
        bits = builder.shl(builder.zext(raw, _lanes(_I32)), _constant(_I32, 16))
        return builder.bitcast(bits, _lanes(_F32))
    return builder.fpext(raw, _lanes(_F32)) if storage == "float16" else raw


def _round_to_high_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The bits of float32 lanes with the bfloat16 in the upper half; the lower half is not cleared.

    To nearest, ties to even. The machine's own conversion, where there is one, flushes subnormals.
    """
    bits = builder.bitcast(value, _lanes(_I32))
    odd = builder.and_(builder.lshr(bits, _constant(_I32, 16)), _constant(_I32, 1))
    rounded = builder.add(builder.add(bits, _constant(_I32, 0x7FFF)), odd)
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(nan, _constant(_I32, 0x7FC00000), rounded)


def _encode(builder: ir.IRBuilder, storage: str, value: ir.Value) -> ir.Value:
    if storage == "bfloat16":
        high = builder.lshr(_round_to_high_half(builder, value), _constant(_I32, 16))
        return builder.trunc(high, _lanes(_I16))
    return builder.fptrunc(value, _lanes(_F16)) if storage == "float16" else value


def _halves(builder: ir.IRBuilder, raw: ir.Value, alternating: bool) -> list[ir.Value]:
    """32 lanes as two times 16: the even and the odd ones, or the first and the last."""
    step, second = (2, 1) if alternating else (1, LANES)
    undefined = ir.Constant(raw.type, ir.Undefined)
    return [
        builder.shuffle_vector(
            raw, undefined, ir.Constant(_lanes(_I32), [first + step * lane for lane in range(LANES)])
        )
        for first in (0, second)
    ]


@intrinsic
def row_start(typingctx: Any, base: Any, row: Any, stride: Any) -> Any:
    """The pointer to row `row`, `stride` elements a row."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage not in _STORAGE:
            return args[0]
        size = ir.Constant(_I64, _STORAGE[base.storage][1])
        return builder.add(args[0], builder.mul(builder.mul(args[1], args[2]), size))

    return base(base, types.int64, types.int64), generate


@intrinsic
def load_pair(typingctx: Any, base: Any, index: Any, order: Any) -> Any:
    """Elements index … index + 31 in float32, as two vectors.

    Where the pointer `order` is to bfloat16 these are the even and the odd elements, which a shift and a mask
    separate; else the first and the last 16. Operands of one expression are loaded in the same order.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage in _CONSTANT_STORAGE:
            pair = [_constant(_F32, _CONSTANT_STORAGE[base.storage])] * 2
        else:
            lane, size, _ = _STORAGE[base.storage]
            address = _address(builder, args[0], args[1], base.storage)
            alternating = order.storage == "bfloat16"
            if alternating and base.storage == "bfloat16":
                bits = builder.load(builder.bitcast(address, _lanes(_I32).as_pointer()), align=size)
                even = builder.shl(bits, _constant(_I32, 16))
                odd = builder.and_(bits, _constant(_I32, 0xFFFF0000))
                pair = [builder.bitcast(half, _lanes(_F32)) for half in (even, odd)]
            else:
                whole = ir.VectorType(lane, 2 * LANES)
                raw = builder.load(builder.bitcast(address, whole.as_pointer()), align=size)
                pair = [_decode(builder, base.storage, half) for half in _halves(builder, raw, alternating)]
        return context.make_tuple(builder, sig.return_type, pair)

    return types.UniTuple(vector32, 2)(base, types.int64, order), generate


@intrinsic
def load_first(typingctx: Any, base: Any, index: Any, count: Any) -> Any:
    """`load` of `count` elements; the other lanes are not read, and are 0 (for a stand-in: its constant)."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage in _CONSTANT_STORAGE:
            return _constant(_F32, _CONSTANT_STORAGE[base.storage])
        lane, size, name = _STORAGE[base.storage]
        address = _address(builder, args[0], args[1], base.storage)
        zero = ir.Constant(_lanes(lane), None)
        masked = [address, ir.Constant(_I32, size), _first_lanes(builder, args[2]), zero]
        raw = _call(builder, f"llvm.masked.load.{name}.p0", zero.type, masked)
        return _decode(builder, base.storage, raw)

    return vector32(base, types.int64, types.int64), generate


@intrinsic
def store_pair(typingctx: Any, base: Any, index: Any, first: Any, second: Any, streaming: Any) -> Any:
    """Round two vectors, in the order of `load_pair(base, index, base)`, to elements index … index + 31.

    With `streaming` the address must be a multiple of 64 bytes, and the stores go past the caches: an output
    larger than the last-level cache is then not read from memory before it is overwritten.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage == "nowhere":
            return context.get_dummy_value()
        size = _STORAGE[base.storage][1]
        address = _address(builder, args[0], args[1], base.storage)
        if base.storage == "bfloat16":
            even, odd = (_round_to_high_half(builder, v) for v in args[2:4])
            low = builder.lshr(even, _constant(_I32, 16))
            parts = [builder.or_(low, builder.and_(odd, _constant(_I32, 0xFFFF0000)))]
        else:
            parts = [_encode(builder, base.storage, v) for v in args[2:4]]
        with builder.if_else(args[4]) as (past_caches, ordinary):
            for branch, align in ((past_caches, None), (ordinary, size)):
                with branch:
                    for number, raw in enumerate(parts):
                        to = builder.bitcast(address, raw.type.as_pointer())
                        to = builder.gep(to, [ir.Constant(_I64, number)])
                        whole = raw.type.count * (size if len(parts) > 1 else 2 * size)
                        instruction = builder.store(raw, to, align=align or whole)
                        if align is None:
                            always = builder.module.add_metadata([ir.Constant(_I32, 1)])
                            instruction.set_metadata("nontemporal", always)
        return context.get_dummy_value()

    return types.void(base, types.int64, vector32, vector32, types.boolean), generate


@intrinsic
def store_first(typingctx: Any, base: Any, index: Any, value: Any, count: Any) -> Any:
    """Round the first `count` lanes to memory; nothing else is written."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage == "nowhere":
            return context.get_dummy_value()
        _, size, name = _STORAGE[base.storage]
        raw = _encode(builder, base.storage, args[2])
        address = _address(builder, args[0], args[1], base.storage)
        masked = [raw, address, ir.Constant(_I32, size), _first_lanes(builder, args[3])]
        _call(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), masked)
        return context.get_dummy_value()

    return types.void(base, types.int64, vector32, types.int64), generate


@intrinsic
def rounded_as(typingctx: Any, base: Any, value: Any) -> Any:
    """`value` rounded to what `base` can hold, in float32 again."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage not in _STORAGE:
            return args[1]
        return _decode(builder, base.storage, _encode(builder, base.storage, args[1]))

    return vector32(base, vector32), generate


@intrinsic
def keep_first(typingctx: Any, value: Any, count: Any) -> Any:
    """`value` with every lane from `count` on set to 0."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(_first_lanes(builder, args[1]), args[0], _constant(_F32, 0.0))

    return vector32(vector32, types.int64), generate


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A number, rounded to float32, in all lanes."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _splat(builder, builder.fptrunc(args[0], _F32))

    return vector32(types.float64), generate


@intrinsic
def zero64(typingctx: Any) -> Any:
    """Float64 lanes of 0, to sum into."""
    return vector64(), lambda context, builder, sig, args: _constant(_F64, 0.0)


@intrinsic
def widen(typingctx: Any, value: Any) -> Any:
    """Float32 lanes in float64."""
    return vector64(vector32), lambda context, builder, sig, args: builder.fpext(args[0], _lanes(_F64))


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
                    total, undefined, ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width)))
                )
                for first in (0, width)
            ]
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.Constant(_I32, 0))

    return types.float64(vector64), generate


@intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once where the machine can."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _call(builder, "llvm.fmuladd.v16f32", _lanes(_F32), list(args))

    return vector32(vector32, vector32, vector32), generate


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
def low_bits_to_exponent(typingctx: Any, value: Any) -> Any:
    """The float32 whose exponent field is the low 8 bits of `value`'s bits: 2^(those - 127)."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        bits = builder.shl(builder.bitcast(args[0], _lanes(_I32)), _constant(_I32, 23))
        return builder.bitcast(bits, _lanes(_F32))

    return vector32(vector32), generate


@intrinsic
def take(typingctx: Any, counter: Any, count: Any) -> Any:
    """Add `count` to the int64 at the address `counter`, atomically; its value before."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate
