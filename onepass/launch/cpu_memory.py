"""Pointers of CPU kernels, which convert to float32 as they load and round to the tensor's dtype as they store.

A pointer reaches a kernel as a plain address. Its storage is one of the three dtypes, or a stand-in for an absent
tensor: "ones" and "zeros" read as a constant, what is stored to "nowhere" is dropped. A kernel is then written once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import NativeValue, models, register_model, unbox

from onepass.launch.cpu_vector import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    call_llvm,
    constant,
    first_lanes,
    intrinsic,
    lanes_of,
    vector32,
)

# How a lane lies in memory, its size in bytes, and the name LLVM's intrinsics give a vector of it.
_STORAGE = {
    "float32": (F32, 4, "v16f32"),
    "bfloat16": (I16, 2, "v16i16"),
    "float16": (F16, 2, "v16f16"),
    "float8_e4m3": (I8, 1, "v16i8"),
}
_INDEX_STORAGE = {"int32": I32, "int64": I64}
# x + (-0.0) is x whatever x is, so that LLVM drops the addition of an absent bias or residual.
_CONSTANT_STORAGE = {"ones": 1.0, "zeros": -0.0}


class Pointer(types.Type):
    """The address of a tensor's first element, with how the elements are stored."""

    def __init__(self, storage: str) -> None:
        self.storage = storage
        super().__init__(f"onepass.Pointer({storage})")


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Pointer) -> None:
        super().__init__(manager, fe_type, I64)


@unbox(Pointer)
def _unbox_pointer(typ: Pointer, obj: ir.Value, c: Any) -> NativeValue:
    return NativeValue(c.pyapi.long_as_ulonglong(obj), is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


def _address(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, storage: str) -> ir.Value:
    lane, size, _ = _STORAGE[storage]
    byte = builder.add(base, builder.mul(index, ir.Constant(I64, size)))
    return builder.inttoptr(byte, lanes_of(lane).as_pointer())


def _decode(builder: ir.IRBuilder, storage: str, raw: ir.Value) -> ir.Value:
    if storage == "bfloat16":
        bits = builder.shl(builder.zext(raw, lanes_of(I32)), constant(I32, 16))
        return builder.bitcast(bits, lanes_of(F32))
    if storage == "float8_e4m3":
        return _decode_float8(builder, raw)
    return builder.fpext(raw, lanes_of(F32)) if storage == "float16" else raw


def _decode_float8(builder: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    """Exact. The bits of a float16 with 4 of its 5 bits of exponent are the value over 2^8, subnormal ones included."""
    bits = builder.zext(raw, lanes_of(I16))
    sign = builder.shl(builder.and_(bits, constant(I16, 0x80)), constant(I16, 8))
    magnitude = builder.and_(bits, constant(I16, 0x7F))
    half = builder.bitcast(builder.or_(sign, builder.shl(magnitude, constant(I16, 7))), lanes_of(F16))
    value = builder.fmul(builder.fpext(half, lanes_of(F32)), constant(F32, 256.0))
    nan = builder.icmp_unsigned("==", magnitude, constant(I16, 0x7F))
    return builder.select(nan, constant(F32, float("nan")), value)


def _encode_float8(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """To nearest, ties to even; values past the range become the largest, 448."""
    bits = builder.bitcast(value, lanes_of(I32))
    magnitude = builder.and_(bits, constant(I32, 0x7FFFFFFF))
    largest = constant(I32, 0x43E00000)
    capped = builder.select(builder.icmp_unsigned(">", magnitude, largest), largest, magnitude)
    # Normal numbers keep 3 bits after the point, and their exponent is counted from 2^-7, not 2^-127.
    odd = builder.and_(builder.lshr(capped, constant(I32, 20)), constant(I32, 1))
    rounded = builder.lshr(builder.add(builder.add(capped, constant(I32, 0x7FFFF)), odd), constant(I32, 20))
    normal = builder.sub(rounded, constant(I32, 120 << 3))
    # Below 2^-6 the values are multiples of 2^-9, the unit of float32 at 2^14: the addition rounds to it.
    shifted = builder.fadd(builder.bitcast(capped, lanes_of(F32)), constant(F32, 2.0**14))
    small = builder.sub(builder.bitcast(shifted, lanes_of(I32)), constant(I32, 0x46800000))
    is_small = builder.icmp_unsigned("<", capped, constant(I32, 0x3C800000))
    code = builder.select(is_small, small, normal)
    nan = builder.icmp_unsigned(">", magnitude, constant(I32, 0x7F800000))
    code = builder.select(nan, constant(I32, 0x7F), code)
    sign = builder.and_(builder.lshr(bits, constant(I32, 24)), constant(I32, 0x80))
    return builder.trunc(builder.or_(code, sign), lanes_of(I8))


def decode_first(builder: ir.IRBuilder, storage: str, base: ir.Value, index: ir.Value, count: ir.Value) -> ir.Value:
    """`count` elements from `index` on in float32 lanes; the others are not read, and are 0."""
    lane, size, name = _STORAGE[storage]
    zero = ir.Constant(lanes_of(lane), None)
    masked = [_address(builder, base, index, storage), ir.Constant(I32, size), first_lanes(builder, count), zero]
    return _decode(builder, storage, call_llvm(builder, f"llvm.masked.load.{name}.p0", zero.type, masked))


def _round_to_high_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The bits of float32 lanes with the bfloat16 in the upper half; the lower half is not cleared.

    To nearest, ties to even. The machine's own conversion, where there is one, flushes subnormals.
    """
    bits = builder.bitcast(value, lanes_of(I32))
    odd = builder.and_(builder.lshr(bits, constant(I32, 16)), constant(I32, 1))
    rounded = builder.add(builder.add(bits, constant(I32, 0x7FFF)), odd)
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(nan, constant(I32, 0x7FC00000), rounded)


def _encode(builder: ir.IRBuilder, storage: str, value: ir.Value) -> ir.Value:
    if storage == "bfloat16":
        high = builder.lshr(_round_to_high_half(builder, value), constant(I32, 16))
        return builder.trunc(high, lanes_of(I16))
    if storage == "float8_e4m3":
        return _encode_float8(builder, value)
    return builder.fptrunc(value, lanes_of(F16)) if storage == "float16" else value


def _halves(builder: ir.IRBuilder, raw: ir.Value, alternating: bool) -> list[ir.Value]:
    """32 lanes as two times 16: the even and the odd ones, or the first and the last."""
    step, second = (2, 1) if alternating else (1, LANES)
    undefined = ir.Constant(raw.type, ir.Undefined)
    return [
        builder.shuffle_vector(
            raw, undefined, ir.Constant(lanes_of(I32), [first + step * lane for lane in range(LANES)])
        )
        for first in (0, second)
    ]


@intrinsic
def row_start(typingctx: Any, base: Any, row: Any, stride: Any) -> Any:
    """The pointer to row `row`, `stride` elements a row."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage not in _STORAGE:
            return args[0]
        size = ir.Constant(I64, _STORAGE[base.storage][1])
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
            pair = [constant(F32, _CONSTANT_STORAGE[base.storage])] * 2
        else:
            lane, size, _ = _STORAGE[base.storage]
            address = _address(builder, args[0], args[1], base.storage)
            alternating = order.storage == "bfloat16"
            if alternating and base.storage == "bfloat16":
                bits = builder.load(builder.bitcast(address, lanes_of(I32).as_pointer()), align=size)
                even = builder.shl(bits, constant(I32, 16))
                odd = builder.and_(bits, constant(I32, 0xFFFF0000))
                pair = [builder.bitcast(half, lanes_of(F32)) for half in (even, odd)]
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
            return constant(F32, _CONSTANT_STORAGE[base.storage])
        return decode_first(builder, base.storage, *args)

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
            low = builder.lshr(even, constant(I32, 16))
            parts = [builder.or_(low, builder.and_(odd, constant(I32, 0xFFFF0000)))]
        else:
            parts = [_encode(builder, base.storage, v) for v in args[2:4]]
        with builder.if_else(args[4]) as (past_caches, ordinary):
            for branch, align in ((past_caches, None), (ordinary, size)):
                with branch:
                    for number, raw in enumerate(parts):
                        to = builder.bitcast(address, raw.type.as_pointer())
                        to = builder.gep(to, [ir.Constant(I64, number)])
                        whole = raw.type.count * (size if len(parts) > 1 else 2 * size)
                        instruction = builder.store(raw, to, align=align or whole)
                        if align is None:
                            always = builder.module.add_metadata([ir.Constant(I32, 1)])
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
        masked = [raw, address, ir.Constant(I32, size), first_lanes(builder, args[3])]
        call_llvm(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), masked)
        return context.get_dummy_value()

    return types.void(base, types.int64, vector32, types.int64), generate


@intrinsic
def stack_float32(typingctx: Any, count: Any) -> Any:
    """The pointer to `count` float32 (a constant) on the thread's stack. They hold nothing yet."""
    if not isinstance(count, types.IntegerLiteral):
        return None  # Numba then asks with the literal

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        memory = cgutils.alloca_once(builder, ir.ArrayType(F32, count.literal_value))
        memory.align = 64
        return builder.ptrtoint(memory, I64)

    return Pointer("float32")(count), generate


@intrinsic
def rounded_as(typingctx: Any, base: Any, value: Any) -> Any:
    """`value` rounded to what `base` can hold, in float32 again."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if base.storage not in _STORAGE:
            return args[1]
        return _decode(builder, base.storage, _encode(builder, base.storage, args[1]))

    return vector32(base, vector32), generate


@intrinsic
def load_index(typingctx: Any, base: Any, index: Any) -> Any:
    """Element `index` of integers, such as positions or targets."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        element = _INDEX_STORAGE[base.storage]
        size = ir.Constant(I64, element.width // 8)
        address = builder.inttoptr(builder.add(args[0], builder.mul(args[1], size)), element.as_pointer())
        return builder.sext(builder.load(address), I64)

    return types.int64(base, types.int64), generate


@intrinsic
def move(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` elements as they are, NaN bit for bit. Both pointers have the same storage."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        element, size, _ = _STORAGE[source.storage]
        to, origin = (builder.inttoptr(address, element.as_pointer()) for address in args[:2])
        cgutils.raw_memmove(builder, to, origin, args[2], size)
        return context.get_dummy_value()

    return types.void(target, source, types.int64), generate


@intrinsic
def take(typingctx: Any, counter: Any, count: Any) -> Any:
    """Add `count` to the int64 at the address `counter`, atomically; its value before."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def publish(typingctx: Any) -> Any:
    """Order stores that went past the caches before whatever tells another thread of them. A kernel's last step."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
