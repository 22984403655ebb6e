"""paged_attention on a GPU: graphs replayed at other lengths, the lse, and the same bits from both cuts of the keys."""

from __future__ import annotations

import pytest
import torch
from cases import paged_attention

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


def test_a_graph_serves_other_lengths() -> None:
    """A15: captured at short lengths with an empty row, replayed at long ones, and back."""
    inputs = paged_attention.plain((5000, 1, 900, 17), (8, 2), 64)(CUDA)
    lengths = inputs["cache_seqlens"]
    long, short = lengths.clone(), torch.tensor([3, 0, 1, 17], dtype=torch.int32, device=CUDA)
    lengths.copy_(short)
    onepass.paged_attention(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = onepass.paged_attention(**inputs)
    for values in (long, short, long):
        lengths.copy_(values)
        graph.replay()
        assert torch.equal(out, onepass.paged_attention(**inputs))


@pytest.mark.parametrize("q_len", [1, 3])
def test_lse(q_len: int) -> None:
    paged_attention.check_lse(paged_attention.plain((3000, 0, 70), (8, 2), 128, q_len=q_len)(CUDA))


def test_65536_sequences() -> None:
    paged_attention.check_65536_sequences(CUDA)


@pytest.mark.parametrize("length", [1000, 9000])
def test_few_and_many_programs_give_the_same_bits(length: int) -> None:
    """A14: a program takes a chunk in a small batch, a run of chunks in a large one."""
    inputs = paged_attention.SPEC.make_inputs((4, length, 32, 8, 128), torch.bfloat16, CUDA, 0)
    repeated = {
        name: inputs[name].repeat(64, *[1] * (inputs[name].ndim - 1)) for name in paged_attention.SPEC.row_inputs
    }
    many = onepass.paged_attention(**{**inputs, **repeated})
    for row in range(4):
        one = {name: inputs[name][row : row + 1] for name in paged_attention.SPEC.row_inputs}
        assert torch.equal(onepass.paged_attention(**{**inputs, **one})[0], many[row + 4 * 33])
