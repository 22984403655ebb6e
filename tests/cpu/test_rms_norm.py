"""rms_norm on the CPU: wrong arguments, castings, the short forms, and what test_ops.py does not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, checks, compiled, normal, rms_norm
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def _x(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype)


@pytest.mark.parametrize("n", [576, 40000])
def test_row_strides_past_2_31(n: int) -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + n, dtype=BF16)
    x = memory.as_strided((3, n), (2**30, 1))
    x.copy_(normal(CPU, 3, n, dtype=BF16))
    inputs = {"x": x.clone(), "weight": rms_norm.weight_of(CPU, n, BF16)}
    results = checks.call(rms_norm, {**inputs, "x": x}, out=x)
    checks.check_values(rms_norm, inputs, tuple(result.contiguous() for result in results))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_castings_are_those_of_the_models(backend: str, dtype: torch.dtype) -> None:
    """N11: nearly all elements have the bits of the model's own code; another casting changes many of them."""
    x, weight = _x(64, 4096, dtype=dtype), normal(CPU, 4096, dtype=dtype, seed=1)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    llama = weight * normed.to(dtype)
    gemma = (normed * (1.0 + weight.float())).to(dtype)
    offset_llama = ((1.0 + weight.float()) * normed.to(dtype).float()).to(dtype)
    no_offset_gemma = (normed * weight.float()).to(dtype)
    assert _same(llama, no_offset_gemma) < 0.9
    assert _same(gemma, offset_llama) < 0.9
    with onepass.backend(backend):
        assert _same(onepass.rms_norm(x, weight), llama) > 0.999
        assert _same(onepass.rms_norm(x, weight, weight_offset=1.0, casting="gemma"), gemma) > 0.999
        assert _same(onepass.rms_norm(x, weight, weight_offset=1.0), offset_llama) > 0.999
        assert _same(onepass.rms_norm(x, weight, casting="gemma"), no_offset_gemma) > 0.999


def _same(a: Tensor, b: Tensor) -> float:
    return float((a == b).float().mean())


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_the_short_forms(weight_offset: float) -> None:
    """An offset takes Gemma's casting with it."""
    x, residual, weight = _x(16, 64, dtype=BF16), normal(CPU, 16, 64, dtype=BF16, seed=1), _x(64)
    casting = "gemma" if weight_offset else "llama"
    expected = onepass.rms_norm(x, weight, 1e-5, residual=residual, weight_offset=weight_offset, casting=casting)
    results = onepass.fused_add_rms_norm(x, residual, weight, 1e-5, weight_offset=weight_offset)
    checks.assert_same_bits(results, expected, "fused_add_rms_norm")
    onepass.fused_add_rms_norm_(x, residual, weight, 1e-5, weight_offset=weight_offset)
    checks.assert_same_bits((x, residual), expected, "fused_add_rms_norm_")


def test_explain_takes_the_short_forms() -> None:
    for form in (onepass.fused_add_rms_norm, onepass.fused_add_rms_norm_, "fused_add_rms_norm"):
        assert onepass.explain(form, _x(), _x(), _x(8)).backend == "cpu"
    assert "copied" in str(onepass.explain(onepass.fused_add_rms_norm_, _x(8, 4).t(), _x(), _x(8)))


def test_zero_is_kept_with_its_sign() -> None:
    x, weight = torch.ones(2, 40), torch.full((40,), -0.0)
    assert bool(torch.signbit(onepass.rms_norm(x, weight)).all())


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-list": (lambda: onepass.rms_norm([1.0]), "'x': expected a torch.Tensor, got list"),
    "x-int": (lambda: onepass.rms_norm(_x().int()), "'x': expected float32, bfloat16 or float16, got torch.int32"),
    "weight-number": (lambda: onepass.rms_norm(_x(), 1.0), "'weight': expected a torch.Tensor or None, got float"),
    "weight-float64": (lambda: onepass.rms_norm(_x(), torch.ones(8).double()), "'weight': expected float32, .*float64"),
    "eps-text": (lambda: onepass.rms_norm(_x(), eps="1e-6"), "'eps': expected a number, got str"),
    "offset-tensor": (
        lambda: onepass.rms_norm(_x(), _x(8), weight_offset=torch.ones(())),
        "'weight_offset': expected a number, got Tensor",
    ),
    "offset-none": (
        lambda: onepass.rms_norm(_x(), _x(8), weight_offset=None),
        "'weight_offset': expected a number, got NoneType",
    ),
    "residual-dtype": (
        lambda: onepass.rms_norm(_x(), residual=_x(dtype=BF16)),
        "'residual': expected the dtype of x, torch.float32, got torch.bfloat16",
    ),
    "residual-none": (
        lambda: onepass.fused_add_rms_norm(_x(), None, _x(8)),
        "'residual': expected a torch.Tensor, got NoneType",
    ),
    "residual-none-in-place": (
        lambda: onepass.fused_add_rms_norm_(_x(), None, _x(8)),
        "'residual': expected a torch.Tensor, got NoneType",
    ),
    "out-dtype": (lambda: onepass.rms_norm(_x(), out=_x(dtype=FP16)), "'out': expected the dtype of x, .*float16"),
    "residual_out-list": (
        lambda: onepass.rms_norm(_x(), residual=_x(), residual_out=[0.0]),
        "'residual_out': expected a torch.Tensor or None",
    ),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-scalar": (
        lambda: onepass.rms_norm(torch.ones(())),
        "'x': expected at least one dimension, got a scalar tensor",
    ),
    "weight-shape": (lambda: onepass.rms_norm(_x(), torch.ones(7)), r"'weight': expected shape \[8\].*, got \[7\]"),
    "weight-device": (
        lambda: onepass.rms_norm(_x(), torch.ones(8, device="meta")),
        "'weight': expected the device of x, cpu, got meta",
    ),
    "residual-shape": (
        lambda: onepass.rms_norm(_x(), residual=_x(1, 8)),
        r"'residual': expected the shape of x, \[4, 8\], got \[1, 8\]",
    ),
    "out-shape": (lambda: onepass.rms_norm(_x(), out=_x(8, 4)), "'out': expected the shape of x"),
    "activation": (
        lambda: onepass.rms_norm(_x(), activation="swish"),
        "'activation': expected one of None, 'silu', 'gelu', 'gelu_tanh', 'relu', got 'swish'",
    ),
    "casting": (
        lambda: onepass.rms_norm(_x(), casting="none"),
        "'casting': expected one of 'llama', 'gemma', got 'none'",
    ),
    "offset-alone": (
        lambda: onepass.rms_norm(_x(), weight_offset=1.0),
        "'weight_offset': expected 0 without 'weight', got 1.0",
    ),
    "residual_out-alone": (
        lambda: onepass.rms_norm(_x(), residual_out=_x()),
        "'residual_out': expected None without 'residual', got a tensor",
    ),
    "out-expanded": (
        lambda: onepass.rms_norm(_x(), out=_x(1, 8).expand(4, 8)),
        "'out': expected .* do not share memory",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"rms_norm: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"rms_norm: argument {message}"):
        call()


OVERLAPS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "x": (lambda m: onepass.rms_norm(m[:32].view(4, 8), out=m[8:40].view(4, 8)), "'out': .* partial overlap with 'x'"),
    "weight": (
        lambda m: onepass.rms_norm(torch.ones(4, 8), m[:8], out=m[:32].view(4, 8)),
        "'out': .* partial overlap with 'weight'",
    ),
    "residual": (
        lambda m: onepass.fused_add_rms_norm_(m[:32].view(4, 8), m[8:40].view(4, 8), None),
        "'out': .* partial overlap with 'residual'",
    ),
    "x-is-residual": (
        lambda m: onepass.fused_add_rms_norm_(m.view(8, 8), m.view(8, 8), None),
        "'residual_out': expected memory apart from 'out'",
    ),
    "outputs": (
        lambda m: onepass.rms_norm(_x(), residual=_x(), out=m[:32].view(4, 8), residual_out=m[31:63].view(4, 8)),
        "'residual_out': expected memory apart from 'out'",
    ),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_memory_is_refused_and_nothing_is_written(name: str) -> None:
    call, message = OVERLAPS[name]
    memory = torch.arange(64.0)
    with pytest.raises(ArgumentValueError, match=message):
        call(memory)
    assert torch.equal(memory, torch.arange(64.0))


def test_nothing_is_written_before_an_error() -> None:
    out, total = torch.full((4, 8), 7.0), torch.full((4, 8), 7.0)
    for wrong in ({"weight": torch.ones(7)}, {"activation": "selu"}, {"casting": 3}, {"eps": None}):
        with pytest.raises(onepass.errors.OnepassError):
            onepass.rms_norm(_x(), residual=_x(), out=out, residual_out=total, **wrong)  # type: ignore[call-overload]
    assert bool((out == 7).all())
    assert bool((total == 7).all())


@pytest.mark.parametrize("argument", ["x", "weight", "residual", "out", "residual_out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"x": _x(), "weight": _x(8), "residual": _x(), "out": _x(), "residual_out": _x()}
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*functional\.rms_norm"):
        onepass.rms_norm(**inputs)
    with torch.no_grad():
        onepass.rms_norm(**inputs)


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(6, 5, 16, device="meta", dtype=BF16).transpose(0, 1)
    for result in onepass.fused_add_rms_norm(x, x, None):
        assert (result.shape, result.stride(), result.dtype) == (x.shape, (96, 16, 1), BF16)


def _rms_norm_twice(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y, total = onepass.fused_add_rms_norm(x * 2, residual, weight)
    return onepass.rms_norm(y + 1, weight, activation="silu"), total


def _rms_norm_in_place(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    onepass.fused_add_rms_norm_(x, residual, weight, weight_offset=1.0)
    return x + 1, residual + 1


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("function", [_rms_norm_twice, _rms_norm_in_place], ids=lambda function: function.__name__)
def test_compile(function: Callable[..., tuple[Tensor, ...]], dynamic: bool | None) -> None:
    compiled.check_compiled(function, CPU, "aot_eager", dynamic)


def test_warmup_takes_the_short_forms_and_no_residual() -> None:
    for op, more in (("fused_add_rms_norm", {}), ("fused_add_rms_norm_", {}), ("rms_norm", {"residual": None})):
        (warmed,) = onepass.warmup(op, [(2, 40)], dtypes=[FP32], device="cpu", **more)
        assert (warmed.op, warmed.backend) == ("rms_norm", "cpu")
