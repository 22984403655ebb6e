"""qkv_proj on the CPU: wrong arguments, the caches, what a call leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP32, clone_inputs, qkv_proj
from cases.checks import assert_same_bits, check_values
from cases.rope_inputs import Model
from torch import Tensor

import onepass
from onepass.bench import copying
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

CPU = torch.device("cpu")
MODEL = Model(4, 2, 8, 8)


def _inputs(**changes: Any) -> dict[str, Any]:
    """Everything the op takes, with some of it changed."""
    inputs = qkv_proj.make(CPU, MODEL, 24, 3, FP32, bias=True, qk_norm=True)
    return {**inputs, **changes}


def _call(**changes: Any) -> Callable[[], Any]:
    return lambda: onepass.qkv_proj(**_inputs(**changes))


def _out(heads: int, tokens: int = 3, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(tokens, heads, 8, dtype=dtype)


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-none": (_call(x=None), "'x': expected a torch.Tensor, got NoneType"),
    "bias-number": (_call(bias=1.0), "'bias': expected a torch.Tensor or None, got float"),
    "x-int": (_call(x=torch.ones(3, 24, dtype=torch.int32)), "'x': expected float32, bfloat16 or float16, got .*int32"),
    "w-dtype": (_call(w_qkv=torch.ones(64, 24, dtype=BF16)), "'w_qkv': expected the dtype of x, .*bfloat16"),
    "bias-int": (_call(bias=torch.ones(64, dtype=torch.int64)), "'bias': expected float32, bfloat16 or float16"),
    "heads-float": (_call(num_q_heads=4.0), "'num_q_heads': expected an int, got float"),
    "head-dim-bool": (_call(head_dim=True), "'head_dim': expected an int, got bool"),
    "eps": (_call(norm_eps="1e-6"), "'norm_eps': expected a number, got str"),
    "interleaved": (_call(interleaved=1), "'interleaved': expected a bool, got int"),
    "validate": (_call(validate=None), "'validate': expected a bool, got NoneType"),
    "positions": (_call(positions=torch.zeros(3)), "'positions': expected int32 or int64, got .*float32"),
    "slots-int32": (
        _call(slot_mapping=torch.zeros(3, dtype=torch.int32)),
        "'slot_mapping': expected int64, got .*int32",
    ),
    "table": (_call(cos_sin_cache=torch.ones(4, 8, dtype=BF16)), "'cos_sin_cache': expected float32, got .*bfloat16"),
    "cache": (_call(value_cache=torch.ones(2, 4, 2, 8, dtype=BF16)), "'value_cache': expected the dtype of x"),
    "k-out": (_call(k_out=_out(2, dtype=BF16)), "'k_out': expected the dtype of x, .*bfloat16"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "x-1d": (_call(x=torch.ones(24)), r"'x': expected shape \[num_tokens, hidden_size\], got \[24\]"),
    "x-empty-rows": (_call(x=torch.ones(3, 0)), r"'x': expected shape \[num_tokens, hidden_size\], got \[3, 0\]"),
    "w-shape": (_call(w_qkv=torch.ones(24, 64)), r"'w_qkv': expected shape \[64, 24\].*got \[24, 64\]"),
    "w-heads": (_call(num_kv_heads=1), r"'w_qkv': expected shape \[48, 24\].*got \[64, 24\]"),
    "no-heads": (_call(num_kv_heads=0), "'num_kv_heads': expected at least 1, got 0"),
    "bias-shape": (_call(bias=torch.ones(32)), r"'bias': expected shape \[64\], got \[32\]"),
    "norm-shape": (_call(norm_weight=torch.ones(8)), r"'norm_weight': expected shape \[24\], got \[8\]"),
    "q-norm-shape": (
        _call(q_norm_weight=torch.ones(32)),
        r"'q_norm_weight': expected shape \[8\], a head's, got \[32\]",
    ),
    "q-norm-alone": (_call(k_norm_weight=None), "'k_norm_weight': expected a tensor, together with 'q_norm_weight'"),
    "table-alone": (_call(positions=None), "'positions': expected a tensor, together with 'cos_sin_cache', got None"),
    "positions-alone": (_call(cos_sin_cache=None), "'cos_sin_cache': expected a tensor, together with 'positions'"),
    "cache-alone": (_call(value_cache=None), "'value_cache': expected a tensor, together with 'key_cache' and 'slot_m"),
    "slots-alone": (_call(slot_mapping=None), "'slot_mapping': expected a tensor, together with 'key_cache' and"),
    "table-odd": (_call(cos_sin_cache=torch.ones(4, 7)), "'cos_sin_cache': expected an even rotary_dim"),
    "table-wide": (_call(cos_sin_cache=torch.ones(4, 16)), "'cos_sin_cache': expected .* from 2 to head_dim = 8"),
    "positions-shape": (_call(positions=torch.zeros(4, dtype=torch.int64)), r"'positions': expected shape \[3\]"),
    "slots-shape": (
        _call(slot_mapping=torch.zeros(1, dtype=torch.int64)),
        r"'slot_mapping': expected shape \[3\], x's",
    ),
    "cache-shape": (
        _call(key_cache=torch.ones(2, 4, 8, 2)),
        r"'key_cache': expected shape \[num_pages, page_size, 2, 8\], got \[2, 4, 8, 2\]",
    ),
    "cache-shapes": (
        _call(key_cache=torch.ones(2, 4, 2, 8), value_cache=torch.ones(3, 4, 2, 8)),
        r"'value_cache': expected the shape of key_cache, \[2, 4, 2, 8\], got \[3, 4, 2, 8\]",
    ),
    "cache-transposed": (
        _call(key_cache=torch.ones(2, 4, 8, 2).transpose(2, 3), value_cache=torch.ones(2, 4, 2, 8)),
        "'key_cache': expected a contiguous last dimension, got strides",
    ),
    "cache-expanded": (
        _call(key_cache=torch.ones(1, 4, 2, 8).expand(2, 4, 2, 8), value_cache=torch.ones(2, 4, 2, 8)),
        "'key_cache': .* do not share memory",
    ),
    "w-device": (_call(w_qkv=torch.ones(64, 24, device="meta")), "'w_qkv': expected the device of x, cpu, got meta"),
    "q-out-shape": (_call(q_out=_out(2)), r"'q_out': expected shape \[3, 4, 8\], got \[3, 2, 8\]"),
    "out-tokens": (_call(v_out=_out(2, tokens=1)), r"'v_out': expected shape \[3, 2, 8\], got \[1, 2, 8\]"),
    "position-past": (
        _call(positions=torch.tensor([0, 600, 1]), validate=True),
        "'positions': expected positions from 0 to 599, got 600 at token 1",
    ),
    "position-negative": (
        _call(positions=torch.tensor([0, 1, -1], dtype=torch.int32), validate=True),
        "'positions': expected positions from 0 to 599, got -1 at token 2",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"qkv_proj: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"qkv_proj: argument {message}"):
        call()


@pytest.mark.parametrize(
    "argument", ["x", "w_qkv", "bias", "norm_weight", "q_norm_weight", "cos_sin_cache", "key_cache"]
)
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = _inputs()
    inputs[argument].requires_grad_()
    message = f"'{argument}' requires grad.*rms_norm, torch.nn.functional.linear and apply_rope"
    with pytest.raises(GradientsNotSupportedError, match=message):
        onepass.qkv_proj(**inputs)
    with torch.no_grad():
        onepass.qkv_proj(**inputs)


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    memory = torch.zeros(1000)
    q_out, k_out = memory[:96].view(3, 4, 8), memory[90:138].view(3, 2, 8)
    inputs = _inputs()
    before = clone_inputs(inputs)
    with pytest.raises(ArgumentValueError, match=r"'k_out': .* an overlap with 'q_out'"):
        onepass.qkv_proj(**inputs, q_out=q_out, k_out=k_out)
    with pytest.raises(ArgumentValueError, match=r"'v_out': .* 'key_cache'"):
        onepass.qkv_proj(**inputs, v_out=inputs["key_cache"].view(-1)[:48].view(3, 2, 8))
    with pytest.raises(ArgumentValueError, match=r"'value_cache': .*'key_cache'"):
        onepass.qkv_proj(**{**inputs, "value_cache": inputs["key_cache"]})
    with pytest.raises(ArgumentValueError, match=r"'q_out': .* 'x'"):
        onepass.qkv_proj(**{**inputs, "x": memory[:72].view(3, 24)}, q_out=q_out)
    assert not bool(memory.any())
    for name in ("key_cache", "value_cache"):
        assert torch.equal(inputs[name], before[name])


@pytest.mark.parametrize("num_tokens", [1, 7, 20])
def test_only_the_slots_of_the_call_are_written(num_tokens: int) -> None:
    inputs = qkv_proj.make(CPU, MODEL, 24, num_tokens, BF16)
    inputs["slot_mapping"][0] = -1
    before = clone_inputs(inputs)
    _, k, v = onepass.qkv_proj(**inputs)
    slots = inputs["slot_mapping"][1:]
    for name, values in (("key_cache", k), ("value_cache", v)):
        expected = before[name].view(-1, 2, 8).clone()
        expected[slots] = values[1:]
        assert torch.equal(inputs[name].view(-1, 2, 8), expected), name


def test_some_outputs_given() -> None:
    inputs = qkv_proj.make(CPU, MODEL, 24, 3, FP32, cache=False)
    expected = onepass.qkv_proj(**inputs)
    k_out = _out(2)
    results = onepass.qkv_proj(**inputs, k_out=k_out)
    assert results[1] is k_out
    assert_same_bits(results, expected, "with k_out")


def test_validate_changes_nothing_where_positions_are_good() -> None:
    inputs = _inputs()
    assert_same_bits(onepass.qkv_proj(**inputs, validate=True), onepass.qkv_proj(**inputs), "validate=True")


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_the_append_is_kept_by_torch_compile(num_tokens: int) -> None:
    inputs, expected = (qkv_proj.make(CPU, MODEL, 24, num_tokens, BF16, bias=True) for _ in range(2))
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(**inputs: Any) -> Any:
        q, _, _ = onepass.qkv_proj(**inputs)
        return q, inputs["key_cache"] + 1

    with torch.no_grad():
        q, cache = step(**inputs)
    assert_same_bits((q,), onepass.qkv_proj(**expected)[:1], "q compiled")
    for name in qkv_proj.CACHES:
        assert_same_bits((inputs[name],), (expected[name],), f"{name} after the compiled call")
    assert torch.equal(cache, expected["key_cache"] + 1)


def test_many_features_and_an_odd_hidden_size() -> None:
    """Features that are no multiple of what the kernel sums together."""
    inputs = qkv_proj.make(CPU, Model(3, 1, 3, 2), 37, 6, BF16, bias=True)
    check_values(qkv_proj, inputs, qkv_proj.SPEC.fused(**inputs))


def test_explain_names_the_slower_path() -> None:
    inputs = _inputs()
    inputs["w_qkv"] = inputs["w_qkv"].t().contiguous().t()
    assert "'w_qkv' has no single row stride" in str(onepass.explain("qkv_proj", **inputs))


def test_its_ceiling_is_a_read() -> None:
    assert qkv_proj.SPEC.ceiling == "read"
    source = torch.arange(7, dtype=BF16)
    (call,), *more = copying.read_calls(CPU, [source])
    assert more == []
    assert call() == source[:6].view(FP32).sum()


@pytest.mark.parametrize("num_tokens", [8, 17])
def test_strides_past_2_31(num_tokens: int) -> None:
    """Pages and rows far apart; what lies between is never touched, so it takes no memory."""
    inputs = qkv_proj.make(CPU, MODEL, 24, num_tokens, BF16)
    inputs["slot_mapping"][-1] = 3 * 4 - 1
    near = clone_inputs(inputs)
    near["key_cache"], near["value_cache"] = (near[name][:3].clone() for name in qkv_proj.CACHES)
    expected = onepass.qkv_proj(**near)
    x = torch.empty(2**31 + 24, dtype=BF16).as_strided((num_tokens, 24), (2**31 // num_tokens // 8 * 8, 1))
    far = {**inputs, "x": x.copy_(inputs["x"])}
    for name in qkv_proj.CACHES:
        far[name] = torch.empty(2**31 + 64, dtype=BF16).as_strided((3, 4, 2, 8), (2**30, 16, 8, 1))
        far[name].copy_(inputs[name][:3])
    assert_same_bits(onepass.qkv_proj(**far), expected, "far apart")
    for name in qkv_proj.CACHES:
        assert torch.equal(far[name], near[name]), name
