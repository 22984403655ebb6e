"""qk_norm_rope on the CPU: wrong arguments, v, and outputs within qkv."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16
from cases.checks import assert_same_bits
from cases.rope_inputs import heads, positions, table, weight
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def arguments(**changes: Any) -> dict[str, Any]:
    """3 tokens, 4 heads of q, 2 of k and of v, of 16 elements, 8 of them rotated."""
    inputs = {
        "qkv": heads(CPU, 3, 128, dtype=torch.float32),
        "q_weight": weight(CPU, 16, torch.float32),
        "k_weight": weight(CPU, 16, torch.float32, seed=102),
        "cos_sin_cache": table(CPU, 8),
        "positions": positions(CPU, 3),
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    return {**inputs, **changes}


def parts(qkv: Tensor) -> list[Tensor]:
    return list(qkv.unflatten(1, (8, 16)).split((4, 2, 2), dim=1))


TYPE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "qkv-list": ({"qkv": [1.0]}, "'qkv': expected a torch.Tensor, got list"),
    "qkv-int": ({"qkv": torch.ones(3, 128).int()}, "'qkv': expected float32, .*int32"),
    "k_weight-float64": ({"k_weight": torch.ones(16).double()}, "'k_weight': expected float32, .*float64"),
    "heads-float": ({"num_q_heads": 4.0}, "'num_q_heads': expected an int, got float"),
    "head_dim-bool": ({"head_dim": True}, "'head_dim': expected an int, got bool"),
    "v_out-dtype": ({"v_out": torch.ones(3, 2, 16, dtype=BF16)}, "'v_out': expected the dtype of qkv, .*bfloat16"),
    "q_out-list": ({"q_out": []}, "'q_out': expected a torch.Tensor or None, got list"),
}

VALUE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "qkv-width": ({"qkv": torch.ones(3, 120)}, r"'qkv': expected shape .* head_dim = 128\], got \[3, 120\]"),
    "qkv-3d": ({"qkv": torch.ones(3, 8, 16)}, r"'qkv': expected shape .*, got \[3, 8, 16\]"),
    "heads": ({"num_kv_heads": 3}, r"'qkv': expected shape .* head_dim = 160\], got \[3, 128\]"),
    "negative": ({"num_q_heads": -4}, "'num_q_heads': expected a number from 0 on, got -4"),
    "q_weight": ({"q_weight": torch.ones(8)}, r"'q_weight': expected shape \[16\], a head's, got \[8\]"),
    "table": ({"cos_sin_cache": table(CPU, 18)}, "'cos_sin_cache': expected an even rotary_dim"),
    "k_out": ({"k_out": torch.ones(3, 4, 16)}, r"'k_out': expected shape \[3, 2, 16\], got \[3, 4, 16\]"),
    "position": (
        {"positions": torch.tensor([0, -5, 1]), "validate": True},
        "'positions': expected positions from 0 to 599, got -5 at token 1",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    changes, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"qk_norm_rope: argument {message}"):
        onepass.qk_norm_rope(**arguments(**changes))


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    changes, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"qk_norm_rope: argument {message}"):
        onepass.qk_norm_rope(**arguments(**changes))


def test_v_is_a_view_unless_it_has_an_output() -> None:
    inputs = arguments()
    _, _, v = onepass.qk_norm_rope(**inputs)
    assert v.data_ptr() == parts(inputs["qkv"])[2].data_ptr()
    out = torch.empty(3, 2, 16)
    _, _, v = onepass.qk_norm_rope(**inputs, v_out=out)
    assert v is out
    assert torch.equal(out, parts(inputs["qkv"])[2])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_v_is_moved_bit_for_bit(dtype: torch.dtype) -> None:
    """NaN that carries bits of its own, too."""
    qkv = heads(CPU, 3, 128, dtype=dtype)
    integers = torch.int16 if dtype == BF16 else torch.int32
    qkv.view(integers)[:, 100:110] = -1  # every bit
    out = torch.empty(3, 2, 16, dtype=dtype)
    onepass.qk_norm_rope(**arguments(qkv=qkv), v_out=out)
    assert_same_bits((out,), (parts(qkv)[2],), "v")


@pytest.mark.parametrize("names", [("q_out",), ("k_out",), ("q_out", "k_out"), ("q_out", "k_out", "v_out")])
def test_outputs_that_are_parts_of_qkv(names: tuple[str, ...]) -> None:
    inputs = arguments()
    expected = onepass.qk_norm_rope(**arguments())
    places = dict(zip(("q_out", "k_out", "v_out"), parts(inputs["qkv"]), strict=True))
    outputs = {name: places[name] for name in names}
    results = onepass.qk_norm_rope(**inputs, **outputs)
    assert_same_bits(results, expected, f"in place: {names}")
    for place, (name, before) in zip(expected, zip(places, parts(arguments()["qkv"]), strict=True), strict=True):
        assert torch.equal(places[name], place if name in names else before)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("q_out", slice(16, 80), "'q_out': .* overlap with 'q of qkv'"),
        ("k_out", slice(0, 32), "'k_out': .* overlap with 'q of qkv'"),
        ("q_out", slice(64, 128), "'q_out': .* overlap with 'k of qkv'"),
        ("v_out", slice(64, 96), "'v_out': .* overlap with 'k of qkv'"),
        ("k_out", slice(96, 128), "'k_out': .* overlap with 'v of qkv'"),
    ],
)
def test_overlapping_memory_is_refused_and_nothing_is_written(name: str, part: slice, message: str) -> None:
    inputs = arguments()
    before = inputs["qkv"].clone()
    out = inputs["qkv"][:, part].unflatten(1, (-1, 16))
    with pytest.raises(ArgumentValueError, match=message):
        onepass.qk_norm_rope(**inputs, **{name: out})
    assert torch.equal(inputs["qkv"], before)


@pytest.mark.parametrize("argument", ["qkv", "q_weight", "k_out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = arguments(k_out=torch.ones(3, 2, 16))
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*rms_norm and"):
        onepass.qk_norm_rope(**inputs)
    with torch.no_grad():
        onepass.qk_norm_rope(**inputs)
