"""rms_norm_rope on the CPU: wrong arguments and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16
from cases.checks import assert_same_bits
from cases.rope_inputs import heads, positions, table, weight

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def arguments(**changes: Any) -> dict[str, Any]:
    """3 tokens, 4 heads of 16 elements, 8 of them rotated."""
    inputs = {
        "x": heads(CPU, 3, 4, 16, dtype=torch.float32),
        "weight": weight(CPU, 16, torch.float32),
        "cos_sin_cache": table(CPU, 8),
        "positions": positions(CPU, 3),
    }
    return {**inputs, **changes}


TYPE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "x-number": ({"x": 1.0}, "'x': expected a torch.Tensor, got float"),
    "x-float64": ({"x": torch.ones(3, 4, 16).double()}, "'x': expected float32, .*float64"),
    "weight-none": ({"weight": None}, "'weight': expected a torch.Tensor, got NoneType"),
    "weight-int": ({"weight": torch.ones(16).int()}, "'weight': expected float32, .*int32"),
    "positions-dtype": ({"positions": torch.ones(3)}, "'positions': expected int32 or int64, got .*float32"),
    "eps-text": ({"eps": "1e-6"}, "'eps': expected a number, got str"),
    "weight_offset-tensor": ({"weight_offset": torch.ones(())}, "'weight_offset': expected a number, got Tensor"),
    "out-dtype": ({"out": torch.ones(3, 4, 16, dtype=BF16)}, "'out': expected the dtype of x, .*bfloat16"),
}

VALUE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "x-2d": ({"x": torch.ones(3, 64)}, r"'x': expected shape \[num_tokens, heads, head_dim\], got \[3, 64\]"),
    "weight-shape": ({"weight": torch.ones(8)}, r"'weight': expected shape \[16\], a head's, got \[8\]"),
    "weight-device": ({"weight": torch.ones(16, device="meta")}, "'weight': expected the device of x, cpu, got meta"),
    "table-wide": ({"cos_sin_cache": table(CPU, 18)}, "'cos_sin_cache': expected an even rotary_dim"),
    "positions-shape": ({"positions": torch.arange(4)}, r"'positions': expected shape \[3\], .*, got \[4\]"),
    "out-shape": ({"out": torch.ones(3, 16, 4)}, r"'out': expected shape \[3, 4, 16\], got \[3, 16, 4\]"),
    "position": (
        {"positions": torch.tensor([0, 1, 600]), "validate": True},
        "'positions': expected positions from 0 to 599, got 600 at token 2",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    changes, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"rms_norm_rope: argument {message}"):
        onepass.rms_norm_rope(**arguments(**changes))


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    changes, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"rms_norm_rope: argument {message}"):
        onepass.rms_norm_rope(**arguments(**changes))


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    memory = torch.arange(208.0)
    x, out = memory[:192].view(3, 4, 16), memory[16:].view(3, 4, 16)
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'x'"):
        onepass.rms_norm_rope(**arguments(x=x, out=out))
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'weight'"):
        onepass.rms_norm_rope(**arguments(weight=memory[:16], out=x))
    assert torch.equal(memory, torch.arange(208.0))


def test_the_first_elements_are_normed_with_the_others() -> None:
    """The mean is over the whole head, not over what is rotated."""
    x = torch.zeros(3, 1, 16)
    x[..., 12] = 4.0
    y = onepass.rms_norm_rope(**arguments(x=x, weight=torch.ones(16), eps=0.0))
    torch.testing.assert_close(y, x)
    assert_same_bits((onepass.rms_norm_rope(**arguments(x=x), out=x),), (x,), "in place")


@pytest.mark.parametrize("argument", ["x", "weight", "out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = arguments(out=torch.ones(3, 4, 16))
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*rms_norm followed by"):
        onepass.rms_norm_rope(**inputs)
    with torch.no_grad():
        onepass.rms_norm_rope(**inputs)
