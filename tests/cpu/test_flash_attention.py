"""flash_attention on the CPU: wrong arguments, and what test_ops.py does not cover."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, bits, flash_attention, normal
from cases.checks import assert_same_bits
from cases.flash_attention import bounds, packed, qkv
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError
from onepass.ops.flash_attention import config
from onepass.ops.flash_attention.op import describe
from onepass.ops.flash_attention.reference import flash_attention as reference
from onepass.ops.spec import upcast

CPU = torch.device("cpu")


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_sdpa(causal: bool) -> None:
    inputs = upcast(qkv(CPU, 2, 20, 20, (6, 2), 24))
    q, k, v = (t.transpose(1, 2) for t in inputs.values())
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(reference(**inputs, causal=causal), expected)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"window_size": 2, "causal": True}, [[0], [0, 1], [1, 2], [2, 3]]),
        ({"window_size": (2, 0)}, [[0], [0, 1], [0, 1, 2], [1, 2, 3]]),
        ({"window_size": (1, -1), "causal": True}, [[0], [0, 1], [1, 2], [2, 3]]),
        ({"window_size": 2}, [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]),
        ({"window_size": (0, 0)}, [[0], [1], [2], [3]]),
        ({"window_size": (-1, 1)}, [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_which_keys_a_window_shows(options: dict[str, Any], seen: list[list[int]], backend: str) -> None:
    """A10: an int W is W keys up to the query's own; a pair is so many before and after it."""
    q = torch.zeros(1, 4, 1, 4)
    v = torch.eye(4).view(1, 4, 1, 4)
    with onepass.backend(backend):
        out = onepass.flash_attention(q, q, v, **options)
    assert [row.nonzero().flatten().tolist() for row in out[0, :, 0]] == seen


def test_a_bound_that_no_query_meets_is_none() -> None:
    inputs = qkv(CPU, 1, 3, 8, (2, 1), 16)
    one_query = {**inputs, "q": inputs["q"][:, :1]}
    for given, options, expected in (
        (inputs, {"window_size": (7, 2)}, (-1, -1)),
        (inputs, {"window_size": (6, 1)}, (6, 1)),
        (inputs, {"causal": True}, (-1, 0)),
        (one_query, {"causal": True}, (-1, -1)),
    ):
        desc = describe(**given, **options)
        assert (desc.left, desc.right) == expected


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_out_with_lse(varlen: bool, backend: str) -> None:
    inputs = packed(CPU, (5, 2), (3, 9), (4, 2), 16) if varlen else qkv(CPU, 2, 5, 9, (4, 2), 16)
    call = flash_attention.function(inputs)
    with onepass.backend(backend):
        expected = call(**inputs, causal=True, return_lse=True)
        out = torch.full_like(inputs["q"], math.nan)
        results = call(**inputs, causal=True, return_lse=True, out=out)
        assert results[0] is out
        assert_same_bits(results, expected, "with out")
        assert_same_bits((call(**inputs, causal=True),), expected[:1], "without lse")
        strided = torch.empty(*out.shape[:-1], 2 * out.shape[-1], dtype=out.dtype)[..., ::2]
        assert call(**inputs, causal=True, out=strided) is strided
        assert_same_bits((strided.contiguous(),), expected[:1], "into memory with gaps")


def test_rows_of_no_sequence_stay_as_they_are() -> None:
    inputs = packed(CPU, (5, 2), (3, 9), (4, 2), 16)
    expected = onepass.flash_attention_varlen(**inputs)
    longer = {**inputs, "q": torch.cat((inputs["q"], inputs["q"])), "max_seqlen_q": 12, "max_seqlen_k": 99}
    out = torch.full_like(longer["q"], 7.0)
    onepass.flash_attention_varlen(**longer, out=out)
    assert_same_bits((out[:7],), (expected,), "sequences")
    assert bool((out[7:] == 7.0).all())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bounds_are_cut_to_the_tensors(backend: str) -> None:
    inputs = packed(CPU, (5, 2), (3, 9), (4, 2), 16)
    wild = torch.tensor([-4, 5, 90], dtype=torch.int32)
    backwards = torch.tensor([5, 2, 7], dtype=torch.int32)
    with onepass.backend(backend):
        expected = onepass.flash_attention_varlen(**inputs)
        assert_same_bits((onepass.flash_attention_varlen(**{**inputs, "cu_seqlens_q": wild}),), (expected,), "cut")
        onepass.flash_attention_varlen(**{**inputs, "cu_seqlens_q": backwards, "cu_seqlens_k": backwards})


def test_packed_sequences_in_a_compiled_function() -> None:
    """One graph for each of the first two lengths, the second for all others, too."""
    torch._dynamo.reset()
    counters.clear()

    def attend(inputs: dict[str, Any]) -> Tensor:
        out, lse = onepass.flash_attention_varlen(**inputs, causal=True, window_size=9, return_lse=True)
        return out * lse.T.unsqueeze(-1)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for lengths in ((5, 2), (3, 9), (30, 4), (8, 8)):
        inputs = packed(CPU, lengths, lengths, (4, 2), 16)
        with torch.no_grad():
            assert_same_bits((compiled(inputs),), (attend(inputs),), f"compiled, lengths {lengths}")
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_sequence_has_the_same_bits_packed_and_alone(dtype: torch.dtype) -> None:
    """A14, and across both functions: tiles of queries and blocks of keys begin with the sequence."""
    lengths_q, lengths_k = (40, 1, 200, 70), (150, 33, 260, 70)
    inputs = packed(CPU, lengths_q, lengths_k, (6, 2), 32, dtype)
    options: dict[str, Any] = {"causal": True, "window_size": 90}
    whole = onepass.flash_attention_varlen(**inputs, **options)
    q_start = k_start = 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        rows, keys = slice(q_start, q_start + length_q), slice(k_start, k_start + length_k)
        alone = onepass.flash_attention(
            inputs["q"][None, rows], inputs["k"][None, keys], inputs["v"][None, keys], **options
        )
        assert_same_bits((alone[0],), (whole[rows],), f"the sequence from {q_start}")
        q_start, k_start = rows.stop, keys.stop


def test_a_query_has_the_same_bits_among_others_and_alone() -> None:
    inputs = qkv(CPU, 1, 150, 150, (4, 2), 64)
    whole = onepass.flash_attention(**inputs, causal=True)
    last = {**inputs, "q": inputs["q"][:, -3:]}
    assert_same_bits((onepass.flash_attention(**last, causal=True),), (whole[:, -3:],), "the last queries")


def test_token_strides_past_2_31() -> None:
    """A7: few tokens, far apart; what lies between is never touched, so it takes no memory."""
    inputs = qkv(CPU, 1, 3, 3, (2, 2), 16)
    far = {name: _far_apart(t) for name, t in inputs.items()}
    assert_same_bits((onepass.flash_attention(**far),), (onepass.flash_attention(**inputs),), "far apart")


def _far_apart(t: Tensor) -> Tensor:
    memory = torch.empty(2**31 + 100, dtype=t.dtype)
    return memory.as_strided(t.shape, (0, 2**30, t.shape[-1], 1)).copy_(t)


def test_many_threads_call_at_once() -> None:
    inputs = qkv(CPU, 2, 200, 200, (4, 2), 64, FP32)
    expected = onepass.flash_attention(**inputs, causal=True)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: onepass.flash_attention(**inputs, causal=True), range(12)))
    assert all(torch.equal(bits(result), bits(expected)) for result in results)


def test_both_functions_are_warmed_up_and_explained() -> None:
    for name, shape in (("flash_attention", (1, 20, 4, 16)), ("flash_attention_varlen", (20, 4, 16))):
        (warmed,) = onepass.warmup(name, [shape], dtypes=[FP32], device="cpu")
        assert (warmed.op, warmed.backend) == ("flash_attention", "cpu")
    explained = str(onepass.explain("flash_attention_varlen", **packed(CPU, (5, 2), (3, 9), (4, 2), 17)))
    assert "runs on 'cpu'" in explained
    assert "a pointer or a stride is not a multiple of 16 bytes" in explained


def test_configs_are_whole_blocks() -> None:
    for head_dim in (1, 16, 64, 80, 128, 192, 256):
        for element_size in (2, 4):
            for shared_kb, warpgroups in ((64, False), (99, False), (163, False), (227, True)):
                found = config.heuristic(head_dim, element_size, shared_kb << 10, warpgroups)
                assert all(n & (n - 1) == 0 for n in found[:3])
                assert config.block_d(head_dim) >= max(head_dim, 16)


def _inputs(**changes: Any) -> dict[str, Any]:
    return {**qkv(CPU, 2, 3, 5, (4, 2), 16, FP32), **changes}


def _packed(**changes: Any) -> dict[str, Any]:
    return {**packed(CPU, (3, 1), (2, 5), (4, 2), 16, FP32), **changes}


def _x(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return normal(CPU, *shape, dtype=dtype)


TYPE_ERRORS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "q-number": (lambda: _inputs(q=1.0), "'q': expected a torch.Tensor, got float"),
    "v-none": (lambda: _inputs(v=None), "'v': expected a torch.Tensor, got NoneType"),
    "q-int": (lambda: _inputs(q=_x(2, 3, 4, 16).int()), "'q': expected float32, bfloat16 or float16, got .*int32"),
    "k-dtype": (lambda: _inputs(k=_x(2, 5, 2, 16, dtype=BF16)), "'k': expected the dtype of q, .*bfloat16"),
    "v-dtype": (lambda: _inputs(v=_x(2, 5, 2, 16, dtype=BF16)), "'v': expected the dtype of k, .*bfloat16"),
    "out-dtype": (lambda: _inputs(out=_x(2, 3, 4, 16, dtype=FP16)), "'out': expected the dtype of q, .*float16"),
    "window-text": (lambda: _inputs(window_size="4"), "'window_size': expected None, an int or a pair"),
    "window-bool": (lambda: _inputs(window_size=True), "'window_size': expected None, an int or a pair"),
    "window-three": (lambda: _inputs(window_size=(1, 2, 3)), "'window_size': expected None, an int or a pair"),
    "scale-text": (lambda: _inputs(softmax_scale="1"), "'softmax_scale': expected a number or None, got str"),
    "sinks-list": (lambda: _inputs(sinks=[1.0] * 4), "'sinks': expected a torch.Tensor or None, got list"),
    "sinks-int": (lambda: _inputs(sinks=torch.ones(4).int()), "'sinks': expected float32"),
    "bounds-float": (lambda: _packed(cu_seqlens_q=torch.ones(3)), "'cu_seqlens_q': expected int32 or int64"),
    "bounds-dtypes": (
        lambda: _packed(cu_seqlens_k=bounds(CPU, (2, 5), torch.int64)),
        "'cu_seqlens_k': expected the dtype of cu_seqlens_q",
    ),
    "bounds-none": (lambda: _packed(cu_seqlens_k=None), "'cu_seqlens_k': expected a torch.Tensor, got NoneType"),
    "max-float": (lambda: _packed(max_seqlen_q=3.0), "'max_seqlen_q': expected an int, got float"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "q-3d": (lambda: _inputs(q=_x(3, 4, 16)), r"'q': expected shape \[batch, seqlen_q, num_q_heads, head_dim\]"),
    "k-batch": (lambda: _inputs(k=_x(1, 5, 2, 16)), r"'k': expected shape \[2, seqlen_k, num_kv_heads, 16\]"),
    "k-head-dim": (lambda: _inputs(k=_x(2, 5, 2, 8)), r"'k': expected shape \[2, seqlen_k, num_kv_heads, 16\]"),
    "k-heads": (lambda: _inputs(k=_x(2, 5, 3, 16)), "'k': expected a number of heads that divides the 4 heads of q"),
    "v-shape": (lambda: _inputs(v=_x(2, 6, 2, 16)), r"'v': expected the shape of k, \[2, 5, 2, 16\]"),
    "k-device": (lambda: _inputs(k=_x(2, 5, 2, 16).to("meta")), "'k': expected the device of q, cpu, got meta"),
    "out-shape": (lambda: _inputs(out=_x(2, 3, 2, 16)), "'out': expected the shape of q"),
    "out-expanded": (lambda: _inputs(out=_x(1, 3, 4, 16).expand(2, -1, -1, -1)), "'out': .* do not share memory"),
    "window-0": (lambda: _inputs(window_size=0), "'window_size': expected at least 1 key, got 0"),
    "window-below": (lambda: _inputs(window_size=(-2, 0)), "'window_size': expected no number below -1"),
    "softcap-0": (lambda: _inputs(softcap=0.0), "'softcap': expected a finite number above 0, got 0.0"),
    "scale-nan": (lambda: _inputs(softmax_scale=math.nan), "'softmax_scale': expected a finite number, got nan"),
    "sinks-shape": (lambda: _inputs(sinks=torch.ones(2)), r"'sinks': expected shape \[4\]"),
    "packed-4d": (lambda: _packed(q=_x(1, 4, 4, 16)), r"'q': expected shape \[total_q, num_q_heads, head_dim\]"),
    "bounds-shapes": (
        lambda: _packed(cu_seqlens_k=bounds(CPU, (7,))),
        "'cu_seqlens_k': expected the shape of cu_seqlens_q",
    ),
    "bounds-empty": (
        lambda: _packed(cu_seqlens_q=torch.empty(0, dtype=torch.int32)),
        r"'cu_seqlens_q': expected shape \[number of sequences \+ 1\]",
    ),
    "max-negative": (lambda: _packed(max_seqlen_k=-1), "'max_seqlen_k': expected at least 0, got -1"),
}


def _call(inputs: dict[str, Any]) -> None:
    flash_attention.function(inputs)(**inputs)


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    make, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"flash_attention: argument {message}"):
        _call(make())


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    make, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"flash_attention: argument {message}"):
        _call(make())


@pytest.mark.parametrize("argument", ["k", "v"])
def test_out_may_not_be_a_key_or_value(argument: str) -> None:
    inputs = qkv(CPU, 2, 5, 5, (2, 2), 16)
    before = inputs[argument].clone()
    with pytest.raises(ArgumentValueError, match=f"'out': expected memory apart from '{argument}'"):
        onepass.flash_attention(**inputs, out=inputs[argument])
    assert torch.equal(inputs[argument], before)


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    memory = torch.arange(2000.0)
    inputs = {**qkv(CPU, 1, 5, 5, (2, 2), 16, FP32), "q": memory[:160].view(1, 5, 2, 16)}
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'q'"):
        onepass.flash_attention(**inputs, out=memory[1:161].view(1, 5, 2, 16))
    assert torch.equal(memory, torch.arange(2000.0))


@pytest.mark.parametrize("argument", ["q", "k", "v", "sinks"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = _inputs(sinks=torch.ones(4))
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=f"'{argument}' requires grad.*scaled_dot_product_attention"):
        onepass.flash_attention(**inputs)
    with torch.no_grad():
        onepass.flash_attention(**inputs)
