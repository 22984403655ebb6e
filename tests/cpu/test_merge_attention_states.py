"""merge_attention_states on the CPU: wrong arguments, and that it makes one attention of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP32, merge_attention_states, normal

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")


def test_halves_of_the_keys_make_the_whole() -> None:
    scores, values = normal(CPU, 2, 3, 4, 50), normal(CPU, 2, 3, 50, 16, seed=1)

    def attention(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[..., keys]
        out = part.softmax(-1) @ values[:, :, keys]
        return out.transpose(1, 2), part.logsumexp(-1)

    out, lse = onepass.merge_attention_states(*attention(slice(0, 20)), *attention(slice(20, 50)))
    torch.testing.assert_close((out, lse), attention(slice(0, 50)))


def _call(**changes: Any) -> Any:
    """A call with some arguments replaced, or made from the right one by a function."""
    inputs = merge_attention_states.plain(2, 3, 4, 8, BF16)(CPU)
    inputs |= {"out": torch.empty_like(inputs["out_a"]), "lse": torch.empty_like(inputs["lse_a"])}
    changed = {name: value(inputs[name]) if callable(value) else value for name, value in changes.items()}
    return lambda: onepass.merge_attention_states(**{**inputs, **changed})


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "out-a-number": (_call(out_a=1.0), "'out_a': expected a torch.Tensor, got float"),
    "out-alone": (_call(lse=None), "'lse': expected a torch.Tensor, got NoneType"),
    "out-a-int": (_call(out_a=lambda t: t.int()), "'out_a': expected float32, bfloat16 or float16"),
    "out-b-dtype": (_call(out_b=lambda t: t.float()), "'out_b': expected the dtype of out_a, .*bfloat16"),
    "lse-dtype": (_call(lse_b=lambda t: t.half()), "'lse_b': expected float32, got .*float16"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "rank": (_call(out_a=lambda t: t[0]), r"'out_a': expected shape \[batch, q_len, num_heads, head_dim\]"),
    "out-b-shape": (_call(out_b=lambda t: t[:1]), "'out_b': expected the shape of out_a"),
    "lse-shape": (_call(lse_a=lambda t: t.transpose(1, 2)), r"'lse_a': expected shape \[2, 4, 3\]"),
    "lse-device": (_call(lse_b=lambda t: t.to("meta")), "'lse_b': expected the device of out_a, cpu, got meta"),
    "out-expanded": (_call(out=lambda t: t[:1].expand(2, 3, 4, 8)), "'out': .* do not share memory"),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"merge_attention_states: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"merge_attention_states: argument {message}"):
        call()


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    memory = torch.arange(100.0)
    inputs = merge_attention_states.plain(1, 2, 2, 8, FP32)(CPU)
    inputs["out_b"] = memory[:32].view(1, 2, 2, 8)
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'out_b'"):
        onepass.merge_attention_states(**inputs, out=memory[1:33].view(1, 2, 2, 8), lse=torch.empty(1, 2, 2))
    assert torch.equal(memory, torch.arange(100.0))


@pytest.mark.parametrize("argument", ["out_a", "lse_b"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = merge_attention_states.plain(1, 2, 2, 8, FP32)(CPU)
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*logaddexp"):
        onepass.merge_attention_states(**inputs)
