"""The gated activations on the CPU: the public functions, wrong arguments, explain and warmup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, normal
from torch import Tensor
from torch.nn import functional as F

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError
from onepass.ops.gated_activation.op import describe, gated_activation

CPU = torch.device("cpu")

PACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": F.silu,
    "gelu_and_mul": F.gelu,
    "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh"),
    "relu_and_mul": F.relu,
}


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype, seed=seed)


@pytest.mark.parametrize("name", PACKED)
def test_packed_functions(name: str) -> None:
    x, out = _x(5, 64), _x(5, 32)
    expected = PACKED[name](x[:, :32]) * x[:, 32:]
    function = getattr(onepass, name)
    torch.testing.assert_close(function(x), expected)
    assert function(x, out=out) is out
    assert torch.equal(out, function(x))


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        (onepass.swiglu, F.silu),
        (onepass.geglu, F.gelu),
        (lambda gate, up, **more: onepass.geglu(gate, up, approximate="tanh", **more), PACKED["gelu_tanh_and_mul"]),
    ],
)
def test_functions_of_two_tensors(function: Callable[..., Tensor], activation: Callable[[Tensor], Tensor]) -> None:
    gate, up, out = _x(5, 32), _x(5, 32, seed=1), _x(5, 32)
    torch.testing.assert_close(function(gate, up), activation(gate) * up)
    assert function(gate, up, out=out) is out
    assert torch.equal(out, function(gate, up))


def test_halves_of_a_packed_tensor_are_not_copied() -> None:
    x = _x(5, 64, dtype=BF16)
    gate, up = x.chunk(2, -1)
    expected = onepass.silu_and_mul(x)
    assert describe(gate, up).copied == ()
    assert torch.equal(onepass.swiglu(gate, up), expected)
    onepass.swiglu(gate, up, out=gate)
    assert torch.equal(gate, expected)


def test_row_strides_past_2_31() -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + 100, dtype=BF16)
    x = memory.as_strided((3, 100), (2**30, 1))
    x.copy_(normal(CPU, 3, 100, dtype=BF16))
    assert torch.equal(onepass.silu_and_mul(x), onepass.silu_and_mul(x.clone()))


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-number": (lambda: onepass.silu_and_mul(1.0), "silu_and_mul: argument 'x': expected a torch.Tensor, got float"),
    "x-int": (lambda: onepass.gelu_and_mul(_x().int()), "gelu_and_mul: argument 'x': expected float32, bfloat16 or"),
    "out-dtype": (
        lambda: onepass.relu_and_mul(_x(), out=_x(4, 4, dtype=FP16)),
        "relu_and_mul: argument 'out': expected the dtype of x, .*float16",
    ),
    "up-none": (lambda: onepass.swiglu(_x(), None), "swiglu: argument 'up': expected a torch.Tensor, got NoneType"),
    "gate-none": (lambda: onepass.swiglu(None, _x()), "swiglu: argument 'gate': expected a torch.Tensor, got NoneType"),
    "up-dtype": (
        lambda: onepass.geglu(_x(), _x(dtype=BF16)),
        "geglu: argument 'up': expected the dtype of gate, .*bfloat16",
    ),
    "gate-int": (lambda: onepass.geglu(_x().int(), _x().int()), "geglu: argument 'gate': expected float32"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "N17-odd": (
        lambda: onepass.silu_and_mul(_x(4, 7)),
        r"silu_and_mul: argument 'x': expected an even last dimension, gate and up, got \[4, 7\]",
    ),
    "N17-one": (lambda: onepass.relu_and_mul(_x(1)), "relu_and_mul: argument 'x': expected an even last dimension"),
    "x-scalar": (lambda: onepass.gelu_tanh_and_mul(torch.ones(())), "gelu_tanh_and_mul: argument 'x'.*one dimension"),
    "out-shape": (
        lambda: onepass.silu_and_mul(_x(), out=_x()),
        r"'out': expected half the last dimension of x, \[4, 4\], got \[4, 8\]",
    ),
    "out-device": (
        lambda: onepass.silu_and_mul(_x(), out=_x(4, 4).to("meta")),
        "'out': expected the device of x, cpu, got meta",
    ),
    "up-broadcast": (
        lambda: onepass.swiglu(_x(), _x(1, 8)),
        r"'up': expected the shape of gate, \[4, 8\], got \[1, 8\]",
    ),
    "up-device": (lambda: onepass.swiglu(_x(), _x().to("meta")), "'up': expected the device of gate, cpu, got meta"),
    "swiglu-out-shape": (lambda: onepass.swiglu(_x(), _x(), out=_x(32)), "'out': expected the shape of gate"),
    "out-expanded": (
        lambda: onepass.swiglu(_x(), _x(), out=_x(1, 8).expand(4, 8)),
        "swiglu: argument 'out': .* do not share memory",
    ),
    "approximate": (
        lambda: onepass.geglu(_x(), _x(), approximate="fast"),  # type: ignore[arg-type]
        "geglu: argument 'approximate': expected 'none' or 'tanh', got 'fast'",
    ),
    "activation": (lambda: gated_activation(_x(), activation="tanh"), "'activation': expected one of 'silu', 'gelu'"),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=message):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=message):
        call()


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    memory = torch.arange(80.0)
    gate, up = memory[:32].view(4, 8), torch.ones(4, 8)
    for arguments in ((gate, up), (up, gate)):
        with pytest.raises(ArgumentValueError, match=r"swiglu: argument 'out': .* a partial overlap with"):
            onepass.swiglu(*arguments, out=memory[1:33].view(4, 8))
    for out in (memory[:16].view(2, 8), memory[8:24].view(2, 8)):
        with pytest.raises(ArgumentValueError, match=r"silu_and_mul: argument 'out': .* a partial overlap with 'x'"):
            onepass.silu_and_mul(memory[:32].view(2, 16), out=out)
    assert torch.equal(memory, torch.arange(80.0))


@pytest.mark.parametrize("argument", ["gate", "up", "out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"gate": _x(), "up": _x(), "out": _x()}
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*torch\.nn\.functional"):
        onepass.swiglu(**inputs)
    with pytest.raises(GradientsNotSupportedError, match="silu_and_mul: argument 'x' requires grad"):
        onepass.silu_and_mul(_x().requires_grad_())
    with torch.no_grad():
        onepass.swiglu(**inputs)


@pytest.mark.parametrize("name", PACKED)
def test_explain_and_warmup_take_a_packed_function(name: str) -> None:
    for op in (name, getattr(onepass, name)):
        assert onepass.explain(op, _x()).backend == "cpu"
        (warmed,) = onepass.warmup(op, [(2, 16)], dtypes=[BF16])
        assert (warmed.op, warmed.backend) == ("gated_activation", "cpu")


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_explain_and_warmup_take_a_function_of_two_tensors(name: str) -> None:
    for op in (name, getattr(onepass, name)):
        assert onepass.explain(op, gate=_x(), up=_x()).backend == "cpu"
        (warmed,) = onepass.warmup(op, [(2, 16)], dtypes=[BF16])
        assert (warmed.op, warmed.backend) == ("gated_activation", "cpu")
    (note,) = onepass.explain(name, _x(8, 4).t(), _x()).notes
    assert note.startswith("'gate' has no single row stride")
