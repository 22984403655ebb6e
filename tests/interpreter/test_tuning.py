"""Every candidate of the tuner computes the right rows, in Triton's interpreter with a timer that knows nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, FP32

from onepass.bench.measure import Measured
from onepass.bench.record import Times
from onepass.ops.layer_norm.tunable import TUNABLE
from onepass.tuning import search


class NoTimer:
    def __init__(self, device: torch.device, calls: list[Any]) -> None: ...

    def round(self, seconds: float) -> None: ...

    def result(self) -> Measured:
        return Measured("none", Times(1, 1, 1, 1, 1, 1), None, None, 1)


@pytest.mark.parametrize(("n", "dtype"), [(96, BF16), (1100, BF16), (1100, FP32), (16400, BF16)])
def test_candidates_are_right(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MANY_BYTES", 3 * n * dtype.itemsize)
    outcome = search.search(TUNABLE, n, dtype, torch.device("cpu"), timer_of=NoTimer)
    assert len(outcome.trials) > 1
    assert {trial.why_not for trial in outcome.trials} == {""}
    assert all(set(trial.time_us) == {1, 3} for trial in outcome.trials)
    assert outcome.best is outcome.heuristic
