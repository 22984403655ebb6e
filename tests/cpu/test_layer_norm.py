"""layer_norm on the CPU: wrong arguments, torch.compile, and what test_ops.py does not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, checks, compiled, layer_norm, normal
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def test_largest_constant_rows() -> None:
    with onepass.backend("cpu"):
        layer_norm.check_largest_constant_rows(CPU, 576)


@pytest.mark.parametrize("n", [576, 40000])
def test_row_strides_past_2_31(n: int) -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + n, dtype=BF16)
    x = memory.as_strided((3, n), (2**30, 1))
    x.copy_(normal(CPU, 3, n, dtype=BF16))
    inputs = {"x": x.clone(), **layer_norm.params(CPU, n, BF16, BF16)}
    results = checks.call(layer_norm, {**inputs, "x": x}, out=x)
    checks.check_values(layer_norm, inputs, tuple(result.contiguous() for result in results))


def test_the_short_form() -> None:
    x, weight = normal(CPU, 16, 64), normal(CPU, 64, seed=1)
    out = torch.empty_like(x)
    assert onepass.layer_norm_silu(x, weight, out=out) is out
    assert torch.equal(out, onepass.layer_norm(x, weight, activation="silu"))


def _x(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype)


def _memory() -> Tensor:
    return torch.zeros(64)


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-list": (lambda: onepass.layer_norm([1.0]), "'x': expected a torch.Tensor, got list"),
    "x-int": (lambda: onepass.layer_norm(_x().int()), "'x': expected float32, bfloat16 or float16, got torch.int32"),
    "x-float64": (lambda: onepass.layer_norm(_x().double()), "'x': expected float32, .*, got torch.float64"),
    "weight-number": (lambda: onepass.layer_norm(_x(), 1.0), "'weight': expected a torch.Tensor or None, got float"),
    "weight-float64": (
        lambda: onepass.layer_norm(_x(), torch.ones(8).double()),
        "'weight': expected float32, .*float64",
    ),
    "bias-int": (lambda: onepass.layer_norm(_x(), bias=torch.ones(8).int()), "'bias': expected float32, .*int32"),
    "eps-text": (lambda: onepass.layer_norm(_x(), eps="1e-5"), "'eps': expected a number, got str"),
    "eps-tensor": (lambda: onepass.layer_norm(_x(), eps=torch.ones(())), "'eps': expected a number, got Tensor"),
    "residual-dtype": (
        lambda: onepass.layer_norm(_x(), residual=_x(dtype=BF16)),
        "'residual': expected the dtype of x, torch.float32, got torch.bfloat16",
    ),
    "residual-list": (lambda: onepass.layer_norm(_x(), residual=[0.0]), "'residual': expected a torch.Tensor or None"),
    "out-dtype": (lambda: onepass.layer_norm(_x(), out=_x(dtype=FP16)), "'out': expected the dtype of x, .*float16"),
    "residual_out-dtype": (
        lambda: onepass.layer_norm(_x(), residual=_x(), residual_out=_x(dtype=BF16)),
        "'residual_out': expected the dtype of x, .*bfloat16",
    ),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-scalar": (
        lambda: onepass.layer_norm(torch.ones(())),
        "'x': expected at least one dimension, got a scalar tensor",
    ),
    "weight-shape": (lambda: onepass.layer_norm(_x(), torch.ones(7)), r"'weight': expected shape \[8\].*, got \[7\]"),
    "weight-2d": (
        lambda: onepass.layer_norm(_x(), torch.ones(1, 8)),
        r"'weight': expected shape \[8\].*, got \[1, 8\]",
    ),
    "bias-shape": (lambda: onepass.layer_norm(_x(), bias=torch.ones(9)), r"'bias': expected shape \[8\].*, got \[9\]"),
    "weight-device": (
        lambda: onepass.layer_norm(_x(), torch.ones(8, device="meta")),
        "'weight': expected the device of x, cpu, got meta",
    ),
    "residual-shape": (
        lambda: onepass.layer_norm(_x(), residual=_x(1, 8)),
        r"'residual': expected the shape of x, \[4, 8\], got \[1, 8\]",
    ),
    "residual-device": (
        lambda: onepass.layer_norm(_x(), residual=_x().to("meta")),
        "'residual': expected the device of x, cpu, got meta",
    ),
    "out-shape": (lambda: onepass.layer_norm(_x(), out=_x(8, 4)), "'out': expected the shape of x"),
    "out-device": (
        lambda: onepass.layer_norm(_x(), out=_x().to("meta")),
        "'out': expected the device of x, cpu, got meta",
    ),
    "activation": (
        lambda: onepass.layer_norm(_x(), activation="swish"),
        "'activation': expected one of None, 'silu', 'gelu', 'gelu_tanh', 'relu', got 'swish'",
    ),
    "activation-function": (lambda: onepass.layer_norm(_x(), activation=torch.relu), "'activation': expected one of"),
    "residual_out-alone": (
        lambda: onepass.layer_norm(_x(), residual_out=_x()),
        "'residual_out': expected None without 'residual', got a tensor",
    ),
    "out-expanded": (
        lambda: onepass.layer_norm(_x(), out=_x(1, 8).expand(4, 8)),
        "'out': expected .* do not share memory",
    ),
    "out-sliding-windows": (
        lambda: onepass.layer_norm(_x(), out=_memory().as_strided((4, 8), (4, 1))),
        r"'out': expected .* do not share memory, got shape \[4, 8\] with strides \[4, 1\]",
    ),
    "residual_out-expanded": (
        lambda: onepass.layer_norm(_x(), residual=_x(), residual_out=_x(1, 8).expand(4, 8)),
        "'residual_out': expected .* do not share memory",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(TypeError, match=f"layer_norm: argument {message}") as caught:
        call()
    assert isinstance(caught.value, ArgumentTypeError)


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ValueError, match=f"layer_norm: argument {message}") as caught:
        call()
    assert isinstance(caught.value, ArgumentValueError)


OVERLAPS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], str]] = {
    "shifted": (lambda m: {"x": m[:32].view(4, 8), "out": m[8:40].view(4, 8)}, "'out': .* partial overlap with 'x'"),
    "one-element": (
        lambda m: {"x": m[:32].view(4, 8), "out": m[31:63].view(4, 8)},
        "'out': .* partial overlap with 'x'",
    ),
    "transposed": (lambda m: {"x": m.view(8, 8), "out": m.view(8, 8).t()}, "'out': .* partial overlap with 'x'"),
    "weight": (
        lambda m: {"x": torch.ones(4, 8), "weight": m[:8], "out": m[:32].view(4, 8)},
        "'out': .* partial overlap with 'weight'",
    ),
    "weight-of-another-dtype": (
        lambda m: {"x": torch.ones(8, dtype=BF16), "weight": m[:8], "out": m.view(BF16)[:8]},
        "'out': .* partial overlap with 'weight'",
    ),
    "bias": (
        lambda m: {"x": torch.ones(1, 8), "bias": m[4:12], "out": m[:8].view(1, 8)},
        "'out': .* overlap with 'bias'",
    ),
    "residual": (
        lambda m: {"x": torch.ones(4, 8), "residual": m[:32].view(4, 8), "out": m[1:33].view(4, 8)},
        "'out': .* partial overlap with 'residual'",
    ),
    "residual_out": (
        lambda m: {"x": m[:32].view(4, 8), "residual": torch.ones(4, 8), "residual_out": m[1:33].view(4, 8)},
        "'residual_out': .* partial overlap with 'x'",
    ),
    "both-outputs-the-same": (
        lambda m: {
            "x": torch.ones(4, 8),
            "residual": torch.ones(4, 8),
            "out": m[:32].view(4, 8),
            "residual_out": m[:32].view(4, 8),
        },
        "'residual_out': expected memory apart from 'out'",
    ),
    "outputs-overlap": (
        lambda m: {
            "x": torch.ones(4, 8),
            "residual": torch.ones(4, 8),
            "out": m[:32].view(4, 8),
            "residual_out": m[31:63].view(4, 8),
        },
        "'residual_out': expected memory apart from 'out'",
    ),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_memory_is_refused_and_nothing_is_written(name: str) -> None:
    make, message = OVERLAPS[name]
    memory = torch.arange(64.0)
    with pytest.raises(ArgumentValueError, match=message):
        onepass.layer_norm(**make(memory))  # type: ignore[arg-type]
    assert torch.equal(memory, torch.arange(64.0))


def test_outputs_beside_inputs_in_one_memory() -> None:
    """Disjoint columns of the same rows, and the same row under another stride, are no overlap."""
    memory = normal(CPU, 1000, 24)
    expected = onepass.layer_norm(memory[:, :8].clone())
    assert torch.equal(onepass.layer_norm(memory[:, :8], out=memory[:, 8:16]), expected)  # type: ignore[arg-type]
    row = memory[0, :8]
    onepass.layer_norm(memory[:1, :8], out=row.unsqueeze(0))
    assert torch.equal(row, expected[0])


def test_nothing_is_written_before_an_error() -> None:
    out, total = torch.full((4, 8), 7.0), torch.full((4, 8), 7.0)
    x, residual = _x(), _x()
    for wrong in ({"weight": torch.ones(7)}, {"bias": torch.ones(8).double()}, {"activation": "selu"}, {"eps": None}):
        with pytest.raises(onepass.errors.OnepassError):
            onepass.layer_norm(x, residual=residual, out=out, residual_out=total, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError):
        onepass.layer_norm(x, residual=residual, out=out, residual_out=out[:1].expand(4, 8))
    assert bool((out == 7).all())
    assert bool((total == 7).all())


@pytest.mark.parametrize("argument", ["x", "weight", "bias", "residual", "out", "residual_out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"x": _x(), "weight": _x(8), "bias": _x(8), "residual": _x(), "out": _x(), "residual_out": _x()}
    inputs[argument].requires_grad_()
    with pytest.raises(
        NotImplementedError, match=rf"'{argument}' requires grad.*torch\.nn\.functional\.layer_norm"
    ) as e:
        onepass.layer_norm(**inputs)  # type: ignore[arg-type]
    assert isinstance(e.value, GradientsNotSupportedError)
    with torch.no_grad():
        onepass.layer_norm(**inputs)  # type: ignore[arg-type]
    with torch.inference_mode():
        onepass.layer_norm(inputs["x"], inputs["weight"])


def test_inference_mode_makes_inference_tensors() -> None:
    x = _x()
    with torch.inference_mode():
        y = onepass.layer_norm(x)
        assert isinstance(y, Tensor)
        assert y.is_inference()
        assert torch.equal(y, onepass.layer_norm(x, out=torch.empty_like(x)))
    assert torch.equal(y, onepass.layer_norm(x))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_under_autocast_the_dtype_of_x_decides(dtype: torch.dtype) -> None:
    x, weight = _x(dtype=dtype), _x(8)
    expected = onepass.layer_norm(x, weight)
    with torch.autocast("cpu", dtype=BF16):
        y = onepass.layer_norm(x, weight)
    assert isinstance(y, Tensor)
    assert y.dtype == dtype
    assert torch.equal(y, expected)


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(6, 5, 16, device="meta", dtype=BF16).transpose(0, 1)
    y, total = onepass.layer_norm(x, residual=x)
    for result in (y, total):
        assert (result.shape, result.stride(), result.dtype) == (x.shape, (96, 16, 1), BF16)
        assert result.device.type == "meta"


@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("function", compiled.FUNCTIONS, ids=lambda function: function.__name__)
def test_compile(function: Callable[..., tuple[Tensor, ...]], dynamic: bool | None) -> None:
    compiled.check_compiled(function, CPU, "aot_eager", dynamic)


def test_compile_with_inductor() -> None:
    compiled.check_compiled(compiled.norm_in_place, CPU, "inductor", dynamic=True)


def test_wrong_arguments_are_named_inside_compile() -> None:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        y = onepass.layer_norm(x, weight)
        assert isinstance(y, Tensor)
        return y

    with pytest.raises(Exception, match=r"'weight': expected shape \[8\]"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(_x(), torch.ones(7))
