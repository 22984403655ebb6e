"""The CUDA C++ kernel of layer_norm, for long rows of bfloat16 on sm_90."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, layer_norm, normal
from cases.checks import assert_same_bits, check_values
from torch import Tensor

import onepass

CUDA = torch.device("cuda", 0)
LENGTHS = (16392, 32768, 50000, 65536, 151936)


def _runs_here() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    from onepass.launch.cuda import missing

    return not missing()


pytestmark = pytest.mark.skipif(not _runs_here(), reason="needs an sm_90 GPU and cuda-core")


def _norm(x: Tensor, **more: object) -> Tensor:
    with onepass.backend("cuda"):
        y = onepass.layer_norm(x, **more)  # type: ignore[arg-type]
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("n", LENGTHS)
def test_values(n: int) -> None:
    """More rows than multiprocessors, so that the ring goes round; memory beside the result is left alone."""
    inputs = {"x": normal(CUDA, 300, n, dtype=BF16), **layer_norm.params(CUDA, n, BF16, BF16), "activation": "silu"}
    memory = torch.full((302, n), float("nan"), device=CUDA, dtype=BF16)
    y = _norm(**inputs, out=memory[1:-1])
    check_values(layer_norm, inputs, (y,))
    assert bool(memory[0].isnan().all() and memory[-1].isnan().all())
    assert_same_bits((_norm(**inputs),), (y,), "again")
    for rows in (1, 3, 140):
        assert_same_bits((_norm(**{**inputs, "x": inputs["x"][:rows]}),), (y[:rows],), f"{rows} rows")
    assert_same_bits((_norm(**{**inputs, "x": inputs["x"].clone()}, out=inputs["x"]),), (y,), "in place")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_parts(activation: str | None, weight: bool, bias: bool) -> None:
    params = layer_norm.params(CUDA, 32784, BF16, BF16)
    kept = {"weight": params["weight"] if weight else None, "bias": params["bias"] if bias else None}
    inputs = {"x": normal(CUDA, 7, 32784, dtype=BF16), **kept, "activation": activation}
    check_values(layer_norm, inputs, (_norm(**inputs),))


@pytest.mark.parametrize("n", [20480, 65536])
def test_rows_apart_and_special_rows(n: int) -> None:
    x = normal(CUDA, 16, 2 * n, dtype=BF16)[:, :n]
    x[0], x[1, 5], x[2, -1], x[3] = float("nan"), float("inf"), float("-inf"), 3e38
    x[4, :8], x[5, 100], x[6] = 1e4, 3e3, 0.0
    inputs = {"x": x, **layer_norm.params(CUDA, n, BF16, BF16)}
    check_values(layer_norm, inputs, (_norm(**inputs),))


def test_graph_replay_follows_the_input() -> None:
    x = normal(CUDA, 200, 32768, dtype=BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = _norm(x)
        second = _norm(first)
    for seed in range(20):
        x.copy_(normal(CUDA, 200, 32768, dtype=BF16, seed=seed))
        graph.replay()
        assert_same_bits((first, second), (_norm(x), _norm(_norm(x))), f"replay {seed}")


def test_what_it_refuses_runs_on_triton() -> None:
    x = normal(CUDA, 4, 32768, dtype=BF16)
    assert onepass.explain("layer_norm", x).backend == "cuda"
    refused = onepass.explain("layer_norm", x, residual=x)
    assert (refused.backend, refused.reasons["cuda"]) == ("triton", ("it takes no residual",))
    assert onepass.explain("layer_norm", x.float()).backend == "triton"
    assert onepass.explain("layer_norm", x.half()).backend == "triton"
    assert onepass.explain("layer_norm", x[:, 1:]).backend == "triton"
    assert onepass.explain("layer_norm", x[:, :4096]).backend == "triton"
