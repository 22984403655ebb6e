"""apply_rope on the CPU: wrong arguments, memory, and what test_ops.py does not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, FP16, normal
from cases.checks import assert_same_bits
from cases.rope_inputs import heads, positions, table
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def arguments(**changes: Any) -> dict[str, Any]:
    """3 tokens, 4 heads of q and 2 of k of 16 elements, 8 of them rotated."""
    inputs = {
        "q": heads(CPU, 3, 4, 16, dtype=torch.float32),
        "k": heads(CPU, 3, 2, 16, dtype=torch.float32, seed=1),
        "cos_sin_cache": table(CPU, 8),
        "positions": positions(CPU, 3),
    }
    return {**inputs, **changes}


TYPE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q-list": ({"q": [1.0]}, "'q': expected a torch.Tensor, got list"),
    "k-none": ({"k": None}, "'k': expected a torch.Tensor, got NoneType"),
    "q-int": ({"q": torch.ones(3, 4, 16).int()}, "'q': expected float32, .*int32"),
    "k-dtype": ({"k": torch.ones(3, 2, 16, dtype=BF16)}, "'k': expected the dtype of q, .*bfloat16"),
    "table-dtype": ({"cos_sin_cache": table(CPU, 8).to(BF16)}, "'cos_sin_cache': expected float32, got .*bfloat16"),
    "positions-dtype": ({"positions": torch.ones(3)}, "'positions': expected int32 or int64, got .*float32"),
    "positions-list": ({"positions": [0, 1, 2]}, "'positions': expected a torch.Tensor, got list"),
    "interleaved": ({"interleaved": None}, "'interleaved': expected a bool, got NoneType"),
    "validate": ({"validate": "yes"}, "'validate': expected a bool, got str"),
    "q_out-dtype": ({"q_out": torch.ones(3, 4, 16, dtype=FP16)}, "'q_out': expected the dtype of q, .*float16"),
    "k_out-number": ({"k_out": 1}, "'k_out': expected a torch.Tensor or None, got int"),
}

VALUE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q-2d": ({"q": torch.ones(3, 64)}, r"'q': expected shape \[num_tokens, heads, head_dim\], got \[3, 64\]"),
    "k-tokens": ({"k": torch.ones(2, 2, 16)}, r"'k': expected shape \[3, num_kv_heads, 16\].*, got \[2, 2, 16\]"),
    "k-head_dim": ({"k": torch.ones(3, 2, 8)}, r"'k': expected shape .*, got \[3, 2, 8\]"),
    "k-device": ({"k": torch.ones(3, 2, 16, device="meta")}, "'k': expected the device of q, cpu, got meta"),
    "table-1d": ({"cos_sin_cache": torch.ones(8)}, r"'cos_sin_cache': expected shape \[max_position, rotary_dim\]"),
    "table-odd": (
        {"cos_sin_cache": torch.ones(9, 7)},
        r"'cos_sin_cache': expected an even rotary_dim .*, got \[9, 7\]",
    ),
    "table-wide": ({"cos_sin_cache": table(CPU, 18)}, "'cos_sin_cache': expected an even rotary_dim from 2 to .* 16"),
    "table-empty": ({"cos_sin_cache": torch.ones(9, 0)}, "'cos_sin_cache': expected an even rotary_dim"),
    "table-device": (
        {"cos_sin_cache": table(CPU, 8).to("meta")},
        "'cos_sin_cache': expected the device of q, cpu, got meta",
    ),
    "positions-shape": ({"positions": torch.arange(2)}, r"'positions': expected shape \[3\], .*, got \[2\]"),
    "positions-2d": ({"positions": torch.ones(1, 3).int()}, r"'positions': expected shape \[3\], .*, got \[1, 3\]"),
    "q_out-shape": ({"q_out": torch.ones(3, 2, 16)}, r"'q_out': expected shape \[3, 4, 16\], got \[3, 2, 16\]"),
    "k_out-device": ({"k_out": torch.ones(3, 2, 16, device="meta")}, "'k_out': expected the device of k, cpu"),
    "q_out-expanded": ({"q_out": torch.ones(1, 4, 16).expand(3, 4, 16)}, "'q_out': .* do not share memory"),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    changes, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"apply_rope: argument {message}"):
        onepass.apply_rope(**arguments(**changes))


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    changes, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"apply_rope: argument {message}"):
        onepass.apply_rope(**arguments(**changes))


@pytest.mark.parametrize("values", [[0, 600, 1], [-1, 0, 1], [0, 1, 2**40]])
def test_validate_names_the_first_position_outside_the_table(values: list[int]) -> None:
    wrong = torch.tensor(values)
    outside = next(i for i, v in enumerate(values) if not 0 <= v < 600)
    message = rf"'positions': expected positions from 0 to 599, got {values[outside]} at token {outside}"
    out = torch.full((3, 4, 16), 7.0)
    for more in ({}, {"q_out": out}):
        with pytest.raises(ArgumentValueError, match=message):
            onepass.apply_rope(**arguments(positions=wrong, validate=True, **more))
    assert bool((out == 7.0).all())
    onepass.apply_rope(**arguments(validate=True))


def _in(memory: Tensor, tokens: int, count: int, first: int) -> Tensor:
    return memory[:, first : first + count * 16].unflatten(1, (count, 16))[:tokens]


OVERLAPS: dict[str, tuple[dict[str, tuple[int, int]], str]] = {
    "q_out-on-a-part-of-q": ({"q": (4, 0), "q_out": (4, 16)}, "'q_out': .* partial overlap with 'q'"),
    "q_out-on-k": ({"k": (2, 0), "q_out": (4, 0)}, "'q_out': .* overlap with 'k'"),
    "k_out-on-q": ({"q": (4, 0), "k_out": (2, 32)}, "'k_out': .* overlap with 'q'"),
    "outputs": ({"q_out": (4, 0), "k_out": (2, 48)}, "'k_out': .* overlap with 'q_out'"),
    "outputs-start-together": ({"q_out": (4, 0), "k_out": (2, 0)}, "'k_out': .* overlap with 'q_out'"),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_memory_is_refused_and_nothing_is_written(name: str) -> None:
    where, message = OVERLAPS[name]
    memory = normal(CPU, 3, 160)
    before = memory.clone()
    with pytest.raises(ArgumentValueError, match=message):
        onepass.apply_rope(**arguments(**{n: _in(memory, 3, *place) for n, place in where.items()}))
    assert torch.equal(memory, before)


def test_k_exactly_on_q_is_refused_as_its_output() -> None:
    """Equal shapes: even exactly the other's memory is read and written in any order."""
    q, k = heads(CPU, 3, 2, 16), heads(CPU, 3, 2, 16, seed=1)
    with pytest.raises(ArgumentValueError, match=r"'q_out': .* overlap with 'k'"):
        onepass.apply_rope(q, k, table(CPU, 16), positions(CPU, 3), q_out=k)


def test_slices_of_one_buffer_are_turned_in_place() -> None:
    qkv = heads(CPU, 5, 8 * 64)
    before = qkv.clone()
    q, k = qkv[:, :256].unflatten(1, (4, 64)), qkv[:, 256:384].unflatten(1, (2, 64))
    expected = onepass.apply_rope(q, k, table(CPU, 64), positions(CPU, 5))
    assert_same_bits(
        onepass.apply_rope(q, k, table(CPU, 64), positions(CPU, 5), q_out=q, k_out=k), expected, "in place"
    )
    assert_same_bits((q, k), expected, "the buffer")
    assert torch.equal(qkv[:, 384:], before[:, 384:])


def test_one_output_alone() -> None:
    inputs = arguments()
    expected = onepass.apply_rope(**inputs)
    out = torch.empty_like(inputs["k"])
    q, k = onepass.apply_rope(**inputs, k_out=out)
    assert k is out
    assert_same_bits((q, k), expected, "with k_out")


def test_a_rotation_as_complex_numbers() -> None:
    """R6: interleaved pairs are the real and imaginary parts that GPT-J's and Llama's own code multiply."""
    q, k = heads(CPU, 3, 4, 16, dtype=torch.float32), heads(CPU, 3, 2, 16, dtype=torch.float32)
    cache, at = table(CPU, 16), positions(CPU, 3)
    cos, sin = cache[at].double().chunk(2, dim=-1)
    turn = torch.complex(cos, sin)[:, None]
    turned = onepass.apply_rope(q, k, cache, at, interleaved=True)
    halves = onepass.apply_rope(q, k, cache, at)
    for x, y, z in zip((q, k), turned, halves, strict=True):
        pairs = torch.view_as_complex(x.double().unflatten(-1, (8, 2)))
        torch.testing.assert_close(y.double(), torch.view_as_real(pairs * turn).flatten(-2), rtol=0, atol=1e-6)
        pairs = torch.complex(x[..., :8].double(), x[..., 8:].double()) * turn
        torch.testing.assert_close(z.double(), torch.cat((pairs.real, pairs.imag), dim=-1), rtol=0, atol=1e-6)


def test_row_strides_past_2_31() -> None:
    """Few tokens, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + 64, dtype=BF16)
    q = memory.as_strided((3, 1, 64), (2**30, 64, 1))
    q.copy_(heads(CPU, 3, 1, 64))
    k = heads(CPU, 3, 1, 64, seed=1)
    expected = onepass.apply_rope(q.clone(), k, table(CPU, 64), positions(CPU, 3))
    assert_same_bits(onepass.apply_rope(q, k, table(CPU, 64), positions(CPU, 3), q_out=q), expected, "far apart")


@pytest.mark.parametrize("argument", ["q", "k", "cos_sin_cache", "q_out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = arguments(q_out=torch.ones(3, 4, 16))
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*rotate_half"):
        onepass.apply_rope(**inputs)
    with torch.no_grad():
        onepass.apply_rope(**inputs)


def test_explain_names_what_is_copied() -> None:
    inputs = arguments(q=heads(CPU, 3, 4, 32, dtype=torch.float32)[..., ::2])
    assert "'q' has no single row stride" in str(onepass.explain("apply_rope", **inputs))
