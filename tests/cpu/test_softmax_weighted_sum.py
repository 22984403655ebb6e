"""softmax_weighted_sum on the CPU: wrong arguments, and widths that do not divide into tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, checks, normal, softmax_weighted_sum
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(CPU, *shape, dtype=dtype)


def _call(**changes: Any) -> Tensor:
    return onepass.softmax_weighted_sum(**{"logits": _x(3, 5), "values": _x(3, 5, 8), **changes})


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "logits-number": (lambda: _call(logits=1.0), "'logits': expected a torch.Tensor, got float"),
    "values-none": (lambda: _call(values=None), "'values': expected a torch.Tensor, got NoneType"),
    "logits-int": (lambda: _call(logits=_x(3, 5).int()), "'logits': expected float32, bfloat16 or float16"),
    "values-int": (lambda: _call(values=_x(3, 5, 8).int()), "'values': expected float32, bfloat16 or float16"),
    "out-dtype": (lambda: _call(out=_x(3, 8, dtype=FP16)), "'out': expected the dtype of values, .*float32"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "logits-scalar": (lambda: _call(logits=torch.tensor(1.0)), "'logits': expected a last dimension of at least 1"),
    "logits-empty-rows": (lambda: _call(logits=_x(3, 0)), "'logits': expected a last dimension of at least 1"),
    "values-length": (
        lambda: _call(values=_x(3, 6, 8)),
        r"'values': expected shape \[3, 5, 'D'\] or \[5, 'D'\], got \[3, 6, 8\]",
    ),
    "values-shared-length": (lambda: _call(values=_x(3, 8)), r"'values': expected shape .* got \[3, 8\]"),
    "values-vector": (lambda: _call(values=_x(5)), r"'values': expected shape .* got \[5\]"),
    "values-device": (lambda: _call(values=_x(5, 8).to("meta")), "'values': expected the device of logits, cpu"),
    "out-shape": (lambda: _call(out=_x(3, 5)), r"'out': expected shape \[3, 8\], got \[3, 5\]"),
    "out-device": (lambda: _call(out=_x(3, 8).to("meta")), "'out': expected the device of logits, cpu"),
    "out-expanded": (lambda: _call(out=_x(1, 8).expand(3, 8)), "'out': .* do not share memory"),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"softmax_weighted_sum: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"softmax_weighted_sum: argument {message}"):
        call()


def test_the_result_is_not_written_over_an_input() -> None:
    """Other columns still read the logits, which have the result's shape here."""
    logits = _x(4, 8)
    before = logits.clone()
    with pytest.raises(ArgumentValueError, match="'out': expected memory apart from 'logits'"):
        onepass.softmax_weighted_sum(logits, _x(8, 8), out=logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("argument", ["logits", "values", "out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"logits": _x(3, 5), "values": _x(3, 5, 8), "out": _x(3, 8)}
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*torch\.matmul"):
        onepass.softmax_weighted_sum(**inputs)


@pytest.mark.parametrize("width", [1, 16, 127, 128, 129, 1024, 1300])
@pytest.mark.parametrize("n", [16, 257, 300])
def test_tiles(n: int, width: int) -> None:
    inputs = softmax_weighted_sum.own(2, n, width, dtype=BF16)(CPU)
    checks.check_values(softmax_weighted_sum, inputs, checks.call(softmax_weighted_sum, inputs))


def test_explain_names_what_is_copied() -> None:
    notes = onepass.explain("softmax_weighted_sum", _x(3, 5), _x(3, 8, 5).transpose(1, 2)).notes
    assert notes[0].startswith("'values' has no single row stride")
