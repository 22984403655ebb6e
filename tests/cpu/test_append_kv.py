"""append_kv on the CPU: wrong arguments, and that nothing but the slots changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, Case, append_kv, bits, clone_inputs, whole_storage

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("case", append_kv.CASES, ids=lambda case: case.name)
def test_all_but_the_slots_stays(case: Case) -> None:
    """Bit for bit, the memory beside a strided cache included."""
    inputs = case.build(CPU)
    expected = clone_inputs(inputs)
    append_kv.reference(**expected)
    assert onepass.append_kv(**inputs) is None
    for name in ("k", "v", "key_cache", "value_cache", "slot_mapping"):
        if inputs[name].numel():
            actual, wanted = whole_storage(inputs[name]), whole_storage(expected[name])
            numbers = [t.float() if t.dtype == FP8 else t for t in (actual, wanted)]
            assert torch.equal(bits(actual), bits(wanted)) or torch.allclose(*numbers, 0, 0, equal_nan=True), name


def test_page_strides_past_2_31() -> None:
    """A7: few pages, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + 4096, dtype=BF16)
    key_cache = memory.as_strided((3, 2, 2, 16), (2**30, 32, 16, 1))
    inputs = {**append_kv.plain(3, 2, 16, BF16, page_size=2)(CPU), "slot_mapping": torch.tensor([5, 1, 2])}
    inputs |= {"key_cache": key_cache, "value_cache": torch.zeros(3, 2, 2, 16, dtype=BF16)}
    onepass.append_kv(**inputs)
    assert torch.equal(torch.stack((key_cache[2, 1], key_cache[0, 1], key_cache[1, 0])), inputs["k"])


def _call(**changes: Any) -> Any:
    """A call with some arguments replaced, or made from the right one by a function."""
    inputs = append_kv.plain(4, 2, 16, BF16)(CPU)
    changed = {name: value(inputs[name]) if callable(value) else value for name, value in changes.items()}
    return lambda: onepass.append_kv(**{**inputs, **changed})


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "k-number": (_call(k=1.0), "'k': expected a torch.Tensor, got float"),
    "slots-none": (_call(slot_mapping=None), "'slot_mapping': expected a torch.Tensor, got NoneType"),
    "k-int": (_call(k=lambda t: t.int()), "'k': expected float32, bfloat16 or float16, got .*int32"),
    "v-dtype": (_call(v=lambda t: t.float()), "'v': expected the dtype of k, .*bfloat16"),
    "key-cache-dtype": (_call(key_cache=lambda t: t.half()), "'key_cache': expected the dtype of k, .*float8"),
    "value-cache-dtype": (_call(value_cache=lambda t: t.to(FP8)), "'value_cache': expected the dtype of key_cache"),
    "slots-int32": (_call(slot_mapping=lambda t: t.int()), "'slot_mapping': expected int64, got .*int32"),
    "scale": (_call(k_scale="1"), "'k_scale': expected a number, got str"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "k-rank": (_call(k=lambda t: t[0]), r"'k': expected shape \[num_tokens, num_kv_heads, head_dim\], got \[2, 16\]"),
    "v-shape": (_call(v=lambda t: t[:3]), r"'v': expected the shape of k, \[4, 2, 16\]"),
    "cache-rank": (
        _call(key_cache=lambda t: t[0]),
        r"'key_cache': expected shape \[num_pages, page_size, num_kv_heads",
    ),
    "cache-heads": (
        _call(key_cache=lambda t: t[:, :, :1], value_cache=lambda t: t[:, :, :1]),
        r"'key_cache': expected the num_kv_heads and head_dim of k, \[2, 16\], got \[1, 16\]",
    ),
    "value-cache-shape": (_call(value_cache=lambda t: t[:1]), "'value_cache': expected the shape of key_cache"),
    "slots-shape": (_call(slot_mapping=lambda t: t[:3]), r"'slot_mapping': expected shape \[4\], a slot a token"),
    "layout": (_call(kv_layout="DNH"), "'kv_layout': expected 'NHD' or 'HND', got 'DNH'"),
    "scale": (_call(v_scale=2.0), "'v_scale': expected 1 for a cache that is not .*float8"),
    "device": (_call(v=lambda t: t.to("meta")), "'v': expected the device of k, cpu, got meta"),
    "cache-expanded": (
        _call(key_cache=lambda t: t[:1].expand(t.shape)),
        "'key_cache': expected a tensor whose elements do not share memory",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"append_kv: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"append_kv: argument {message}"):
        call()


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    inputs = append_kv.plain(4, 2, 16, FP16)(CPU)
    before = inputs["key_cache"].clone()
    k = inputs["key_cache"].view(-1)[: 4 * 2 * 16].view(4, 2, 16)
    with pytest.raises(ArgumentValueError, match=r"'key_cache': .* partial overlap with 'k'"):
        onepass.append_kv(**{**inputs, "k": k})
    with pytest.raises(ArgumentValueError, match=r"'value_cache': .* 'key_cache'"):
        onepass.append_kv(**{**inputs, "value_cache": inputs["key_cache"]})
    assert torch.equal(inputs["key_cache"], before)


@pytest.mark.parametrize("argument", ["k", "v", "key_cache"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = append_kv.plain(4, 2, 16, FP16)(CPU)
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*index_put"):
        onepass.append_kv(**inputs)
    with torch.no_grad():
        onepass.append_kv(**inputs)


def test_explain_names_what_is_copied() -> None:
    inputs = append_kv.plain(4, 2, 16, FP16)(CPU)
    inputs["k"] = inputs["k"].transpose(-1, -2).contiguous().transpose(-1, -2)
    assert "'k' is not contiguous in its last dimension" in str(onepass.explain("append_kv", **inputs))
