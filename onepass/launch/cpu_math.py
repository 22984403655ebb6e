"""Functions of float32 vectors for CPU kernels: exp, the logistic function, and the activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba.extending import overload

from onepass.launch.cpu_vector import (
    inline,
    low_bits_to_exponent,
    maximum,
    minimum,
    multiply_add,
    polynomial,
    splat,
    where_less,
)

# e^-x: Cody and Waite's two-part ln 2 (Software Manual for the Elementary Functions, 1980); the high part has 9
# bits, so its product with an integer below 2^8 is exact. Adding 1.5 · 2^23 rounds to an integer and leaves it in
# the low bits; 126 on top of it makes those bits the exponent field of half the power of two, and the polynomial is
# doubled in return, so that results just below overflow stay finite.
_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_ROUND_TO_INTEGER = 1.5 * 2.0**23 + 126.0
# 2 · e^-r for |r| ≤ ln 2 / 2, fitted for the least relative error: 0.05 ulp.
_twice_exp_minus = polynomial(
    2 * 0.0013814583747117483,
    -2 * 0.008368723954318957,
    2 * 0.04166838873544145,
    -2 * 0.16666520573371146,
    2 * 0.49999993443853524,
    -2.0,
    2.0,
)
# 2 · 2^-f for |f| ≤ 1/2, fitted likewise: 2^-18.
_twice_exp2_minus = polynomial(
    2 * 0.009582837668991463,
    -2 * 0.05590658251125794,
    2 * 0.24024099794717838,
    -2 * 0.6931241756775087,
    2.0,
)


@inline
def exp_minus(x: Any) -> Any:
    """e^-x within 2 ulp, infinity up to -128 · ln 2, 0 above 125.5 · ln 2 (below about 1.7e-38), NaN for NaN."""
    x = minimum(maximum(x, splat(-89.0)), splat(87.25))
    shifted = multiply_add(x, splat(-_LOG2_E), splat(_ROUND_TO_INTEGER))
    n = shifted - splat(_ROUND_TO_INTEGER)
    r = multiply_add(n, splat(_LN2_LOW), multiply_add(n, splat(_LN2_HIGH), x))
    return _twice_exp_minus(r) * low_bits_to_exponent(shifted)


@inline
def exp_minus_short(x: Any) -> Any:
    """`exp_minus` with a relative error of 2^-18 + |x| · 2^-24: for results that are rounded to 11 bits or fewer."""
    x = minimum(maximum(x, splat(-89.0)), splat(87.25))
    shifted = multiply_add(x, splat(-_LOG2_E), splat(_ROUND_TO_INTEGER))
    f = multiply_add(x, splat(_LOG2_E), shifted - splat(_ROUND_TO_INTEGER))
    return _twice_exp2_minus(f) * low_bits_to_exponent(shifted)


def exp_minus_for(out: Any, x: Any) -> Any:
    """e^-x as accurate as what the pointer `out` holds; callable inside kernels only."""
    raise NotImplementedError("exp_minus_for() runs inside compiled kernels")


@overload(exp_minus_for, jit_options={"forceinline": True})
def _exp_minus_for(out: Any, x: Any) -> Any:
    function = exp_minus if out.storage == "float32" else exp_minus_short

    # Numba compares this signature with the one above, annotations included.
    def call(out: Any, x: Any) -> Any:
        return function(x)

    return call


@inline
def times_logistic(out: Any, x: Any, logit: Any) -> Any:
    """x / (1 + e^-logit): -inf gives NaN, as torch's SiLU and GELU do."""
    return x / (splat(1.0) + exp_minus_for(out, logit))


@inline
def silu(out: Any, x: Any) -> Any:
    """x · logistic(x)."""
    return times_logistic(out, x, x)


_TANH_1 = 2.0 * math.sqrt(2.0 / math.pi)
_TANH_3 = 0.044715 * _TANH_1


@inline
def gelu_tanh(out: Any, x: Any) -> Any:
    """GELU's tanh form. (1 + tanh u) / 2 is logistic(2u), which keeps its digits where the tanh is near -1."""
    return times_logistic(out, x, x * multiply_add(splat(_TANH_3), x * x, splat(_TANH_1)))


# The normal distribution function Φ is logistic(L) with L(x) = ln Φ(x) - ln Φ(-x) = x · P(x²). P is a Chebyshev fit
# for the least relative error (0.1 ulp) on |x| ≤ 5.5, in s = x² · 2 / 5.5² - 1, highest power first. Beyond it P
# stays at its last value: below -5.5 both x · Φ(x) and what is returned are smaller than 1.1e-7.
_GELU_LAST = 5.5**2
_GELU_SCALE = 2.0 / _GELU_LAST
_gelu_slope = polynomial(
    0.00036615695,
    -0.000787600118,
    -8.36001782e-05,
    0.001442143,
    -0.00183837069,
    0.00253511383,
    -0.0039428887,
    0.00407559285,
    -0.000857105711,
    -0.00926788338,
    0.0371200927,
    -0.128679886,
    0.787658095,
    2.54487395,
)


@inline
def gelu(out: Any, x: Any) -> Any:
    """x · Φ(x), GELU with erf."""
    s = multiply_add(minimum(x * x, splat(_GELU_LAST)), splat(_GELU_SCALE), splat(-1.0))
    return times_logistic(out, x, x * _gelu_slope(s))


# Moshier, Cephes library, tanhf: (tanh x - x) / x^3 below 0.625, highest power of x^2 first.
_tanh_cubic = polynomial(-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


@inline
def tanh(x: Any) -> Any:
    """tanh within 2 ulp; NaN stays."""
    square = x * x
    near = multiply_add(_tanh_cubic(square) * square, x, x)
    far = splat(2.0) / (splat(1.0) + exp_minus(x + x)) - splat(1.0)
    return where_less(square, splat(0.625 * 0.625), near, far)


@inline
def relu(x: Any) -> Any:
    """x where it is not negative, else 0; NaN stays."""
    return maximum(x, splat(0.0))


@inline
def _relu(out: Any, x: Any) -> Any:
    return relu(x)


@inline
def _identity(out: Any, x: Any) -> Any:
    return x


_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": _relu,
    "None": _identity,
}


def activate(activation: Any, out: Any, x: Any) -> Any:
    """The activation named by a `Choice`, as accurate as `out` holds; callable inside kernels only."""
    raise NotImplementedError("activate() runs inside compiled kernels")


@overload(activate, jit_options={"forceinline": True})
def _activate(activation: Any, out: Any, x: Any) -> Any:
    function = _ACTIVATIONS[activation.choice]

    def call(activation: Any, out: Any, x: Any) -> Any:
        return function(out, x)

    return call
