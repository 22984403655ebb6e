"""flash_attention on a GPU: graphs of packed sequences, far strides, long sequences, memory, and both kernels' bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import BF16, flash_attention
from cases.checks import assert_same_bits, check_values
from cases.flash_attention import bounds, packed, qkv
from torch import Tensor

import onepass
from onepass.errors import NoBackendError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
BACKENDS = pytest.mark.parametrize("backend", ["cuda", "triton"])


def _call(backend: str, inputs: dict[str, Any], **options: Any) -> Any:
    """The op on one backend; skips the test where that does not take the call."""
    try:
        with onepass.backend(backend):
            return flash_attention.function(inputs)(**inputs, **options)
    except NoBackendError as error:
        pytest.skip(str(error))


@BACKENDS
def test_a_captured_graph_reads_the_lengths_of_each_replay(backend: str) -> None:
    """A15: captured with short sequences, replayed with long ones and with empty ones at the end."""
    inputs = packed(CUDA, (3, 2, 1), (3, 2, 1), (4, 2), 64)
    room = {
        name: torch.zeros(900, t.shape[1], 64, dtype=BF16, device=CUDA) for name, t in inputs.items() if name in "qkv"
    }
    static = {**inputs, **room, "max_seqlen_q": 700, "max_seqlen_k": 700}
    _call(backend, static, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _call(backend, static, causal=True)
    for lengths in ((700, 60, 140), (333, 0, 0), (0, 0, 5)):
        now = packed(CUDA, lengths, lengths, (4, 2), 64)
        for name in ("q", "k", "v"):
            static[name].fill_(math.nan)[: sum(lengths)] = now[name]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            static[name].copy_(now[name])
        out.zero_()
        graph.replay()
        expected = _call(backend, now, causal=True)
        assert_same_bits((out[: sum(lengths)],), (expected,), f"replayed with {lengths}")
        check_values(flash_attention, {**now, "causal": True}, (expected,))


@BACKENDS
def test_token_strides_past_2_31(backend: str) -> None:
    """A7."""
    inputs = qkv(CUDA, 1, 3, 3, (2, 2), 64)
    far = {name: _far_apart(t) for name, t in inputs.items()}
    assert_same_bits((_call(backend, far),), (_call(backend, inputs),), "far apart")


def _far_apart(t: Tensor) -> Tensor:
    memory = torch.empty(2**31 + 1024, dtype=t.dtype, device=t.device)
    return memory.as_strided(t.shape, (0, 2**30, t.shape[-1], 1)).copy_(t)


@BACKENDS
def test_a_long_sequence_takes_no_memory_but_its_result(backend: str) -> None:
    """A7: 33,728 tokens; the matrix of scores would be 4.5 GB."""
    inputs = qkv(CUDA, 1, 33728, 33728, (2, 1), 64)
    _call(backend, inputs, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = _call(backend, inputs, causal=True)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + (1 << 20)
    last = {**inputs, "q": inputs["q"][:, -5:], "causal": True}
    check_values(flash_attention, last, (out[:, -5:].contiguous(),))


@BACKENDS
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_a_sequence_has_the_same_bits_packed_and_alone(backend: str, head_dim: int) -> None:
    """A14: what else is in the packed batch changes nothing."""
    lengths = (40, 1, 500, 70)
    inputs = packed(CUDA, lengths, lengths, (6, 2), head_dim)
    whole = _call(backend, inputs, causal=True)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = {name: inputs[name][rows] for name in ("q", "k", "v")}
        one = {"cu_seqlens_q": bounds(CUDA, (length,)), "cu_seqlens_k": bounds(CUDA, (length,))}
        alone |= {**one, "max_seqlen_q": length, "max_seqlen_k": length}
        assert_same_bits((_call(backend, alone, causal=True),), (whole[rows],), f"the sequence from {start}")
        start = rows.stop


@BACKENDS
@pytest.mark.parametrize("head_dim", [64, 128])
def test_out_with_lse(backend: str, head_dim: int) -> None:
    inputs = qkv(CUDA, 2, 300, 300, (4, 2), head_dim)
    expected = _call(backend, inputs, causal=True, return_lse=True)
    out = torch.full_like(inputs["q"], math.nan)
    results = _call(backend, inputs, causal=True, return_lse=True, out=out)
    assert results[0] is out
    assert_same_bits(results, expected, "with out")
