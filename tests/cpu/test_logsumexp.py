"""logsumexp on the CPU: wrong arguments, and outputs of any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, normal
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype)


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-number": (lambda: onepass.logsumexp(1.0), "'x': expected a torch.Tensor, got float"),
    "x-int": (lambda: onepass.logsumexp(_x().int()), "'x': expected float32, bfloat16 or float16, got .*int32"),
    "out-dtype": (lambda: onepass.logsumexp(_x(dtype=BF16), out=_x(4, dtype=BF16)), "'out': expected float32, got"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-scalar": (lambda: onepass.logsumexp(torch.tensor(1.0)), "'x': expected at least one dimension"),
    "out-shape": (lambda: onepass.logsumexp(_x(), out=_x(4, 1)), r"'out': expected shape \[4\], .* got \[4, 1\]"),
    "out-device": (lambda: onepass.logsumexp(_x(), out=_x(4).to("meta")), "'out': expected the device of x, cpu"),
    "out-expanded": (lambda: onepass.logsumexp(_x(), out=_x(1).expand(4)), "'out': .* do not share memory"),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"logsumexp: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"logsumexp: argument {message}"):
        call()


def test_an_output_inside_x_is_refused() -> None:
    x = _x(4, 8)
    before = x.clone()
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'x'"):
        onepass.logsumexp(x, out=x[:, 3])
    assert torch.equal(x, before)


def test_outputs_of_any_layout() -> None:
    x = _x(3, 4, 50, dtype=BF16)
    expected = onepass.logsumexp(x)
    assert expected.dtype == torch.float32
    for out in (torch.empty(4, 3).t(), torch.empty(3, 4, 2)[..., 1], torch.empty(3, 9)[:, 2:6]):
        assert onepass.logsumexp(x, out=out) is out
        assert torch.equal(out, expected)


def test_the_sum_of_nothing() -> None:
    assert torch.equal(onepass.logsumexp(torch.empty(3, 0)), torch.full((3,), -float("inf")))


@pytest.mark.parametrize("argument", ["x", "out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"x": _x(), "out": _x(4)}
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*torch\.logsumexp"):
        onepass.logsumexp(**inputs)
