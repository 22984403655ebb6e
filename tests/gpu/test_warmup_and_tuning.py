"""warmup and the tuner with the GPU's own kernels and timer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import BF16, normal

import onepass
from onepass.launch.device import default_device
from onepass.ops import tuned
from onepass.tuning import search, store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_after_warmup_nothing_is_loaded() -> None:
    """No other test uses this N."""
    from onepass.launch import triton

    (warmed,) = onepass.warmup("layer_norm", [(5, 1112)], activation="silu", residual=torch.zeros_like)
    assert (warmed.backend, warmed.dtype) == ("triton", BF16)
    loaded = len(triton._loaded)
    x, weight = normal(default_device(), 5, 1112, dtype=BF16), normal(default_device(), 1112, dtype=BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        onepass.layer_norm(x, weight, weight, activation="silu", residual=x)
    assert len(triton._loaded) == loaded


def test_a_search_times_every_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.ops.layer_norm.tunable import TUNABLE

    monkeypatch.setattr(search, "FEW_ROWS", (1,))
    monkeypatch.setattr(search, "MANY_BYTES", 2**20)
    outcome = search.search(TUNABLE, 1112, BF16, default_device())
    assert {trial.why_not for trial in outcome.trials} == {""}
    assert all(us > 0.1 for trial in outcome.trials for us in trial.time_us.values())
    kept = store.save(outcome, tmp_path / "user.json", tmp_path / "shipped.json", default_device())
    assert kept == (outcome.best is not outcome.heuristic) == (len(tuned.read(tmp_path / "user.json")) == 1)
