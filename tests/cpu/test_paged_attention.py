"""paged_attention on the CPU: wrong arguments, the lse, and what test_ops.py does not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, normal, paged_attention
from torch.nn import functional as F

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")

WITH_LSE: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "fp32": paged_attention.plain((300, 0, 70), dtype=FP32),
    "bf16": paged_attention.plain((300, 0, 70), q_len=3),
    "sinks": paged_attention.plain((300, 0, 70), sinks=normal(CPU, 4)),
    "window": paged_attention.plain((300, 5), q_len=2, window_size=100, softcap=20.0),
}


@pytest.mark.parametrize("name", WITH_LSE)
def test_lse(name: str) -> None:
    paged_attention.check_lse(WITH_LSE[name](CPU))


def test_65536_sequences() -> None:
    paged_attention.check_65536_sequences(CPU)


def test_the_same_as_torch() -> None:
    """The reference, too, is checked: against torch's own attention, in float64."""
    inputs = paged_attention.SPEC.make_inputs((2, 64, 8, 2, 32), torch.float64, CPU, 0)
    keys, values = (
        inputs[name][inputs["block_table"].long()].flatten(1, 2).transpose(1, 2)
        for name in ("key_cache", "value_cache")
    )
    expected = F.scaled_dot_product_attention(inputs["q"].transpose(1, 2), keys, values, enable_gqa=True)
    torch.testing.assert_close(paged_attention.SPEC.reference(**inputs), expected.transpose(1, 2))
    torch.testing.assert_close(paged_attention.SPEC.unfused(**inputs), expected.transpose(1, 2))


def test_page_strides_past_2_31() -> None:
    """A7: pages far apart; what lies between is never touched, so it takes no memory."""
    inputs = paged_attention.plain((40,), (2, 2), 16)(CPU)
    expected = onepass.paged_attention(**inputs)
    pages = inputs["key_cache"].shape[0]
    memory = torch.empty(2**29 * (pages - 1) + 4096, dtype=BF16)
    far = memory.as_strided(inputs["key_cache"].shape, (2**29, 32, 16, 1))
    far.copy_(inputs["key_cache"])
    assert torch.equal(onepass.paged_attention(**{**inputs, "key_cache": far}), expected)


def test_the_width_of_the_table_changes_nothing() -> None:
    inputs = paged_attention.plain((300, 5, 513), q_len=2)(CPU)
    wide = torch.cat((inputs["block_table"], torch.full((3, 500), -5, dtype=torch.int32)), dim=1)
    assert torch.equal(onepass.paged_attention(**{**inputs, "block_table": wide}), onepass.paged_attention(**inputs))


def _call(**changes: Any) -> Any:
    """A call with some arguments replaced, or made from the right one by a function."""
    inputs = paged_attention.plain((40, 7), (4, 2), 16)(CPU)
    changed = {name: value(inputs[name]) if callable(value) else value for name, value in changes.items()}
    return lambda: onepass.paged_attention(**{**inputs, **changed})


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "q-number": (_call(q=1.0), "'q': expected a torch.Tensor, got float"),
    "table-none": (_call(block_table=None), "'block_table': expected a torch.Tensor, got NoneType"),
    "sinks-number": (_call(sinks=1.0), "'sinks': expected a torch.Tensor or None, got float"),
    "q-int": (_call(q=lambda t: t.int()), "'q': expected float32, bfloat16 or float16, got .*int32"),
    "cache-dtype": (_call(key_cache=lambda t: t.half()), "'key_cache': expected the dtype of q, .*float8"),
    "value-cache-dtype": (_call(value_cache=lambda t: t.half()), "'value_cache': expected the dtype of key_cache"),
    "table-int64": (_call(block_table=lambda t: t.long()), "'block_table': expected int32, got .*int64"),
    "lengths-int64": (_call(cache_seqlens=lambda t: t.long()), "'cache_seqlens': expected int32, got .*int64"),
    "sinks-int": (_call(sinks=torch.zeros(4, dtype=torch.int32)), "'sinks': expected float32, bfloat16 or float16"),
    "causal": (_call(causal=1), "'causal': expected a bool, got int"),
    "softmax-scale": (_call(softmax_scale="1"), "'softmax_scale': expected a number or None, got str"),
    "window-float": (_call(window_size=2.0), "'window_size': expected an int or None, got float"),
    "out-dtype": (_call(out=torch.empty(2, 1, 4, 16)), "'out': expected the dtype of q, .*bfloat16"),
    "workspace-dtype": (_call(workspace=torch.empty(9999, dtype=BF16)), "'workspace': expected float32"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "q-rank": (_call(q=lambda t: t[0]), r"'q': expected shape \[batch, q_len, num_q_heads, head_dim\]"),
    "q-heads": (_call(q=lambda t: t[:, :, :3]), "'q': expected a multiple of 2 heads, those of key_cache, got 3"),
    "head-dim": (_call(q=lambda t: t[..., :8]), "'key_cache': expected the head_dim of q, 8, got 16"),
    "cache-rank": (
        _call(key_cache=lambda t: t[0]),
        r"'key_cache': expected shape \[num_pages, page_size, num_kv_heads",
    ),
    "cache-shape": (_call(value_cache=lambda t: t[1:]), "'value_cache': expected the shape of key_cache"),
    "table-rank": (_call(block_table=lambda t: t[0]), r"'block_table': expected shape \[2, max_pages\]"),
    "table-rows": (_call(block_table=lambda t: t[:1]), r"'block_table': expected shape \[2, max_pages\]"),
    "lengths": (_call(cache_seqlens=lambda t: t[:1]), r"'cache_seqlens': expected shape \[2\]"),
    "table-device": (
        _call(block_table=lambda t: t.to("meta")),
        "'block_table': expected the device of q, cpu, got meta",
    ),
    "sinks-shape": (_call(sinks=torch.zeros(2)), r"'sinks': expected shape \[4\], a logit for each head"),
    "layout": (_call(kv_layout="DNH"), "'kv_layout': expected 'NHD' or 'HND', got 'DNH'"),
    "scale": (_call(k_scale=2.0), "'k_scale': expected 1 for a cache that is not .*float8"),
    "softcap": (_call(softcap=0.0), "'softcap': expected a positive number or None, got 0.0"),
    "window": (_call(window_size=0), "'window_size': expected a positive number of keys or None, got 0"),
    "window-not-causal": (_call(window_size=3, causal=False), "'window_size': expected None without causal, got 3"),
    "out-shape": (_call(out=torch.empty(2, 1, 2, 16, dtype=BF16)), "'out': expected the shape of q"),
    "out-expanded": (_call(out=torch.empty(1, 1, 4, 16, dtype=BF16).expand(2, 1, 4, 16)), "'out': .* share memory"),
    "workspace-small": (
        _call(workspace=torch.empty(8)),
        "'workspace': expected at least 144 contiguous elements, got 8",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"paged_attention: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"paged_attention: argument {message}"):
        call()


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    inputs = paged_attention.plain((40, 7), (4, 2), 16, FP16)(CPU)
    before = inputs["key_cache"].clone()
    out = inputs["key_cache"].view(-1)[: 2 * 4 * 16].view(2, 1, 4, 16)
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'key_cache'"):
        onepass.paged_attention(**inputs, out=out)
    assert torch.equal(inputs["key_cache"].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("argument", ["q", "key_cache", "value_cache"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = paged_attention.plain((40, 7), (4, 2), 16)(CPU)
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*scaled_dot_product_attention"):
        onepass.paged_attention(**inputs)


def test_explain_names_what_is_copied() -> None:
    inputs = paged_attention.plain((40, 7), (4, 2), 16)(CPU)
    inputs["value_cache"] = inputs["value_cache"].transpose(-1, -2).contiguous().transpose(-1, -2)
    assert "'value_cache' is not contiguous in its last dimension" in str(onepass.explain("paged_attention", **inputs))
