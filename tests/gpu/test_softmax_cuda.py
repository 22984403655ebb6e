"""The CUDA C++ kernel of softmax, for long rows on sm_90."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, normal, softmax
from cases.checks import assert_same_bits, check_values
from torch import Tensor

import onepass

CUDA = torch.device("cuda", 0)


def _runs_here() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    from onepass.launch.cuda import missing

    return not missing()


pytestmark = pytest.mark.skipif(not _runs_here(), reason="needs an sm_90 GPU and cuda-core")


def _softmax(x: Tensor, **more: Any) -> Tensor:
    with onepass.backend("cuda"):
        return onepass.softmax(x, **more)


@pytest.mark.parametrize(
    ("n", "dtype"), [(16392, BF16), (49152, FP16), (128256, FP32), (151936, FP32), (262144, FP32), (262144, BF16)]
)
def test_values(n: int, dtype: torch.dtype) -> None:
    """More rows than fit at once; memory beside the result is left alone; both shapes of a cluster agree."""
    inputs = {"logits": normal(CUDA, 100, n, dtype=dtype, scale=3.0), "temperature": softmax.temperatures(CUDA, 100)}
    memory = torch.full((102, n), float("nan"), device=CUDA, dtype=dtype)
    y = _softmax(**inputs, out=memory[1:-1])
    check_values(softmax, inputs, (y,))
    assert bool(memory[0].isnan().all() and memory[-1].isnan().all())
    assert_same_bits((_softmax(**inputs),), (y,), "again")
    for rows in (1, 3, 8, 9, 40):
        part = {name: value[:rows] for name, value in inputs.items()}
        assert_same_bits((_softmax(**part),), (y[:rows],), f"{rows} rows")
    assert_same_bits(
        (_softmax(**{**inputs, "logits": inputs["logits"].clone()}, out=inputs["logits"]),), (y,), "in place"
    )


def test_special_rows() -> None:
    inputs = {"logits": softmax.special_rows(CUDA, 128256, FP32), "temperature": None}
    check_values(softmax, inputs, (_softmax(**inputs),))
    inputs["temperature"] = 0.0
    check_values(softmax, inputs, (_softmax(**inputs),))


def test_graph_replay_follows_the_input() -> None:
    x = normal(CUDA, 20, 128256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = _softmax(x)
        second = _softmax(first)
    for seed in range(10):
        x.copy_(normal(CUDA, 20, 128256, seed=seed))
        graph.replay()
        assert_same_bits((first, second), (_softmax(x), _softmax(_softmax(x))), f"replay {seed}")


def test_what_it_refuses_runs_on_triton() -> None:
    x = normal(CUDA, 4, 32768, dtype=BF16)
    assert onepass.explain("softmax", x).backend == "cuda"
    assert onepass.explain("softmax", x[:, 1:]).backend == "triton"
    assert onepass.explain("softmax", x[:, :4096]).backend == "triton"
    assert onepass.explain("softmax", normal(CUDA, 1, 300000)).backend == "triton"
