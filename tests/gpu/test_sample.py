"""sample on a GPU: seeds on the device and in captured graphs, all backends alike, offsets of 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, normal
from cases.sample import seeds

import onepass
from onepass.ops.sample import kernel_cuda
from onepass.ops.sample.op import _parameters, describe
from onepass.ops.sample.spec import VOCAB_LLAMA_3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"temperature": 0.7, "top_k": 900, "top_p": 0.8, "min_p": 0.01},
)


def _needs_cuda_backend() -> None:
    if onepass.explain("sample", normal(CUDA, 1, 1024)).backend != "cuda":
        pytest.skip("the CUDA kernel does not run here")


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_all_backends_draw_the_same(limits: dict[str, Any], dtype: torch.dtype) -> None:
    x = normal(CUDA, 64, VOCAB_LLAMA_3, dtype=dtype)
    drawn = onepass.sample(x, seed=seeds(CUDA, 64), **limits)
    with onepass.backend("triton"):
        assert torch.equal(onepass.sample(x, seed=seeds(CUDA, 64), **limits), drawn)
    on_cpu = onepass.sample(x[:8].cpu(), seed=seeds(torch.device("cpu"), 8), **limits)
    assert torch.equal(on_cpu, drawn[:8].cpu())


@pytest.mark.parametrize("vocab_size", [1000, VOCAB_LLAMA_3, 151936])
def test_the_shape_of_the_cluster_changes_nothing(vocab_size: int) -> None:
    _needs_cuda_backend()
    x = normal(CUDA, 5, vocab_size)
    drawn = []
    for shape in [(16, 512), (16, 1024), (8, 512), (8, 1024), (4, 1024)]:
        ids, valid = torch.empty(5, dtype=torch.int64, device=CUDA), torch.empty(5, dtype=torch.bool, device=CUDA)
        run = kernel_cuda.prepare_shape(describe(x), kernel_cuda.Shape(*shape))
        run(vocab_size, _parameters(0.8, 500, 0.9, 0.001, 7, 8), x, ids, valid)
        assert bool(valid.all())
        drawn.append(ids)
    assert all(torch.equal(ids, drawn[0]) for ids in drawn)


def test_a_captured_graph_draws_fresh_numbers_from_torch_s_generator() -> None:
    x = normal(CUDA, 64, 1000)
    onepass.sample(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = onepass.sample(x)
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append(ids.clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_a_captured_graph_reads_seed_and_offset_on_the_device() -> None:
    """S8: the graph adds 1 to the offset itself."""
    x = normal(CUDA, 64, 1000)
    seed, offset = torch.tensor([5], device=CUDA), torch.tensor([10], device=CUDA)
    expected = [onepass.sample(x, top_p=0.9, seed=5, offset=i) for i in (10, 11, 12)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = onepass.sample(x, top_p=0.9, seed=seed, offset=offset)
        offset += 1
    for drawn in expected:
        graph.replay()
        assert torch.equal(ids, drawn)


def test_without_a_seed_nothing_waits_for_the_device() -> None:
    x = normal(CUDA, 4, 1000)
    onepass.sample(x, top_k=5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        onepass.sample(x, top_k=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_offsets_past_2_31(backend: str) -> None:
    """N1: the last row starts past 2^31 elements."""
    if backend == "cuda":
        _needs_cuda_backend()
    rows = 2**31 // VOCAB_LLAMA_3 + 2
    x = torch.full((rows, VOCAB_LLAMA_3), -torch.inf, dtype=BF16, device=CUDA)
    x[-1, 77] = x[-2, 78] = x[0, 79] = 0.0
    with onepass.backend(backend):
        ids, valid = onepass.sample(x, seed=1, return_valid=True)
    assert (int(ids[-1]), int(ids[-2]), int(ids[0])) == (77, 78, 79)
    assert int(valid.sum()) == 3
