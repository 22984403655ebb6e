"""add_relu on the CPU: wrong arguments, and what test_ops.py does not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, normal
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def test_row_strides_past_2_31() -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + 100, dtype=BF16)
    x = memory.as_strided((3, 100), (2**30, 1))
    x.copy_(normal(CPU, 3, 100, dtype=BF16))
    y = normal(CPU, 3, 100, dtype=BF16, seed=1)
    expected = torch.relu(x + y)
    assert torch.equal(onepass.add_relu(x, y, out=x), expected)


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype)


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-number": (lambda: onepass.add_relu(1.0, _x()), "'x': expected a torch.Tensor, got float"),
    "y-none": (lambda: onepass.add_relu(_x(), None), "'y': expected a torch.Tensor, got NoneType"),
    "x-int": (
        lambda: onepass.add_relu(_x().int(), _x().int()),
        "'x': expected float32, bfloat16 or float16, got .*int32",
    ),
    "y-dtype": (lambda: onepass.add_relu(_x(), _x(dtype=BF16)), "'y': expected the dtype of x, .*bfloat16"),
    "out-dtype": (
        lambda: onepass.add_relu(_x(), _x(), out=_x(dtype=FP16)),
        "'out': expected the dtype of x, .*float16",
    ),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "y-broadcast": (lambda: onepass.add_relu(_x(), _x(1, 8)), r"'y': expected the shape of x, \[4, 8\], got \[1, 8\]"),
    "y-device": (lambda: onepass.add_relu(_x(), _x().to("meta")), "'y': expected the device of x, cpu, got meta"),
    "out-shape": (lambda: onepass.add_relu(_x(), _x(), out=_x(32)), "'out': expected the shape of x"),
    "out-expanded": (lambda: onepass.add_relu(_x(), _x(), out=_x(1, 8).expand(4, 8)), "'out': .* do not share memory"),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"add_relu: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"add_relu: argument {message}"):
        call()


@pytest.mark.parametrize("argument", ["x", "y"])
def test_overlapping_memory_is_refused_and_nothing_is_written(argument: str) -> None:
    memory = torch.arange(64.0)
    inputs = {"x": torch.ones(4, 8), "y": torch.ones(4, 8), argument: memory[:32].view(4, 8)}
    with pytest.raises(ArgumentValueError, match=f"'out': .* partial overlap with '{argument}'"):
        onepass.add_relu(**inputs, out=memory[1:33].view(4, 8))
    assert torch.equal(memory, torch.arange(64.0))


@pytest.mark.parametrize("argument", ["x", "y", "out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"x": _x(), "y": _x(), "out": _x()}
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*torch\.relu\(x \+ y\)"):
        onepass.add_relu(**inputs)
    with torch.no_grad():
        onepass.add_relu(**inputs)


def test_under_autocast_the_dtype_of_x_decides() -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert onepass.add_relu(_x(), _x()).dtype == torch.float32
