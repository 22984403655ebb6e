"""Elementwise maths that Triton kernels share.

Memory-bound kernels on a fast card are a short step from being bound by instructions: LayerNorm + SiLU at
4096 columns took 28 instructions an element with Triton's own `exp` and division, 18 with the forms below, and
21.2 µs against 19.1 on an H200. Triton's forms cover subnormal inputs that cannot occur here (the sum 1 + exp is
at least 1), so for half-precision results on NVIDIA GPUs (`PTX=True`) the approximate instructions are named
directly; each errs by at most 2 units in the last place of float32. Elsewhere (float32 results, AMD, the interpreter)
the portable form runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onepass import settings

INTERPRETED = tl.constexpr(settings.triton_interpret())
"""Triton's interpreter truncates float32 to bfloat16 and loses some special values: there the bits are done by hand."""


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    """1 / (1 + exp(-x)) in float32."""
    if PTX:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def widen(x, PTX: tl.constexpr):
    """x in float32. Two bfloat16 of one register take one instruction each, not three for both."""
    if x.dtype == tl.bfloat16 and PTX:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif x.dtype == tl.bfloat16 and INTERPRETED:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x rounded to dtype, to nearest, ties to even."""
    if dtype == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def add_rounded(a, b, PTX: tl.constexpr):
    """a + b in their dtype, rounded once. Two halves of one register take one instruction, not seven by way of float32.

    The result is the same: a float32 has more than twice the digits of a half, so that rounding twice changes nothing.
    """
    if PTX and a.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(  # sm_80 has no addition
            "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }",
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif PTX and a.dtype == tl.float16:
        y = tl.inline_asm_elementwise(
            "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        y = narrow(widen(a, PTX) + widen(b, PTX), a.dtype)
    return y


@triton.jit
def multiply_rounded(a, b, PTX: tl.constexpr):
    """a * b in their dtype, rounded once. Two halves of one register take one instruction."""
    if PTX and a.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(  # sm_80 has no multiplication; x + (-0.0) is x
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif PTX and a.dtype == tl.float16:
        y = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        y = narrow(widen(a, PTX) * widen(b, PTX), a.dtype)
    return y


@triton.jit
def _gelu_slope(x):
    """L / x, where logistic(L) is the normal distribution function at x, to 6e-5 of L: for half-precision results.

    A fit in x^2 for |x| <= 5.5. Beyond it the value at 5.5 stands; what that makes of gelu(x) is less than 1.1e-7.
    """
    s = tl.minimum(x * x, 30.25)
    y = s * -3.014533813670912e-11 + 4.0118514110765725e-09
    y = y * s - 2.2075623847340625e-07
    y = y * s + 6.341049858252198e-06
    y = y * s - 9.017652755598693e-05
    y = y * s - 0.00018197156210830831
    y = y * s + 0.07294121047904842
    return y * s + 1.5955878289830363


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, PTX: tl.constexpr):
    """The activation named by ACTIVATION, of x in float32; NaN goes through."""
    if ACTIVATION == "silu" and PTX:
        y = x * sigmoid(x, PTX)
    elif ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu" and PTX:
        y = x * sigmoid(x * _gelu_slope(x), PTX)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x), PTX)
    elif ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    else:
        y = x
    return y
