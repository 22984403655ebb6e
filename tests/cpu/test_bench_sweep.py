"""The sweep: correctness before speed, honest rows, and the figures that compare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import onepass
from onepass.bench import sweep
from onepass.bench.check import Truth
from onepass.bench.providers import EAGER, ONEPASS, ONEPASS_OUT, Provider, providers_for
from onepass.bench.record import Row
from onepass.bench.sweep import Case, compare_rows, count_steps, make_sets, run_case
from onepass.bench.warm_heap import WarmHeap
from onepass.dispatch import TABLE
from onepass.errors import ProviderUnavailableError
from onepass.ops import spec as specs
from onepass.ops.spec import OpSpec
from tests.cases.bench import measured, row

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SECONDS_A_PROVIDER", {"cpu": 0.01})


def only(monkeypatch: pytest.MonkeyPatch, *providers: Provider) -> None:
    monkeypatch.setattr(sweep, "providers_for", lambda spec, device: providers)


def run(case: Case) -> dict[str, Row]:
    with WarmHeap() as heap, onepass.backend("reference"):
        return {row.provider: row for row in run_case(case, heap)}


@pytest.mark.parametrize("op", TABLE)
def test_every_op_is_measured_from_its_spec_alone(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs.load(op)
    chosen = [p for p in providers_for(spec, CPU) if p.name in (EAGER, ONEPASS, ONEPASS_OUT)]
    only(monkeypatch, *chosen)
    rows = run(Case(spec, specs.smallest_shape(spec), torch.float32, CPU))
    assert [r.status for r in rows.values()] == ["ok"] * len(rows)
    assert {EAGER, ONEPASS} <= set(rows)
    eager, own = rows[EAGER], rows[ONEPASS]
    assert eager.speedup == 1.0
    assert own.backend == "reference"
    assert own.model_bytes == own.min_bytes <= eager.model_bytes
    assert (eager.launches, own.launches, own.launches_from) == (spec.unfused_launches, 1, "model")
    assert own.kernel_us is not None
    assert own.copy_us is not None
    assert own.copy_share == pytest.approx(own.copy_us / own.kernel_us.p50)
    assert own.checked == "all"


def broken(name: str, function: Callable[..., Any], **kinds: Any) -> Provider:
    return Provider(name, lambda spec: function, **kinds)


def off_by_a_little(**inputs: Any) -> torch.Tensor:
    result = specs.load("layer_norm").unfused(**inputs)
    result[-1, -1] += 0.5
    return result


def refuses(**inputs: Any) -> torch.Tensor:
    raise RuntimeError("no room\nfor details")


def missing(spec: OpSpec) -> Callable[..., Any]:
    raise ProviderUnavailableError("needs the package 'x'")


def writes_nothing(x: torch.Tensor, out: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return out


def test_a_wrong_result_is_said_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    only(
        monkeypatch,
        broken("wrong", off_by_a_little),
        broken("refuses", refuses),
        broken("lazy", writes_nothing, takes_out=True),
        broken("right", specs.load("layer_norm").unfused),
        Provider("missing", missing),
    )
    rows = run(Case(specs.load("layer_norm"), (8, 128), torch.float32, CPU))
    assert (rows["missing"].status, rows["missing"].reason) == ("unavailable", "needs the package 'x'")
    assert (rows["wrong"].status, rows["wrong"].kernel_us) == ("wrong", None)
    assert "allowed" in rows["wrong"].reason
    assert (rows["refuses"].status, rows["refuses"].reason) == ("failed", "RuntimeError: no room")
    assert rows["lazy"].status == "wrong"
    assert rows["right"].status == "ok"
    assert rows["right"].kernel_us is not None


def test_large_tensors_are_checked_by_rows_with_the_first_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.bench.check.FULL_CHECK_CPU", 1000)
    spec = specs.load("layer_norm")
    inputs = spec.make_inputs((2, 1024, 16), torch.float32, CPU, 0)
    truth = Truth(spec, inputs)
    right = spec.unfused(**inputs)
    assert truth.checked == "256 rows of 2048"
    assert truth.judge(right).ok
    for place in ((0, 0, 3), (1, 1023, 3)):
        wrong = right.clone()
        wrong[place] += 1.0
        assert not truth.judge(wrong).ok


def test_a_result_of_another_dtype_or_shape_is_wrong() -> None:
    spec = specs.load("layer_norm")
    inputs = spec.make_inputs((4, 16), torch.bfloat16, CPU, 0)
    truth, right = Truth(spec, inputs), spec.unfused(**inputs)
    assert truth.judge(right).ok
    assert not truth.judge(right.float()).ok
    assert not truth.judge(right[:2]).ok
    assert not truth.judge((right, right)).ok


def test_sets_have_memory_of_their_own() -> None:
    sets = make_sets(specs.load("layer_norm"), (4, 16), torch.float32, CPU, 7)
    assert len({s["x"].data_ptr() for s in sets}) == 7
    assert not torch.equal(sets[0]["x"], sets[1]["x"])
    assert all(bool(s["x"].abs().sum() > 0) for s in sets)


@pytest.mark.parametrize(("shape", "sets"), [((16, 4096), 1), ((4, 1024, 4096), 2), ((512, 4096), 4)])
def test_buffers_rotate_past_the_cache(shape: tuple[int, ...], sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "cache_bytes", lambda device: 32 * 2**20)
    case = Case(specs.load("layer_norm"), shape, torch.float32, CPU)
    expected = 1 if 2 * sweep._set_bytes(case) <= 32 * 2**20 else max(2, sets)
    assert sweep.count_sets(case) == expected


def test_given_data_is_checked_set_by_set(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs.load("layer_norm")
    only(monkeypatch, broken("right", spec.unfused))
    given = tuple(spec.make_inputs((8, 64), torch.float32, CPU, seed) for seed in range(3))
    rows = run(Case(spec, (8, 64), torch.float32, CPU, "layers", given))
    assert rows["right"].checked == "all of each of 3 tensors"
    assert rows["right"].data == "layers"


def test_a_case_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "free_memory", lambda device: 1000)
    rows = run(Case(specs.load("layer_norm"), (4096, 4096), torch.float32, CPU))
    assert {r.status for r in rows.values()} == {"unavailable"}
    assert "GB" in rows[EAGER].reason


def test_progress_steps_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs.load("layer_norm")
    only(monkeypatch, broken("right", spec.unfused))
    case = Case(spec, (8, 64), torch.float32, CPU)
    steps: list[str] = []
    with WarmHeap() as heap:
        run_case(case, heap, steps.append)
    assert len(steps) == count_steps([case])


def test_ratios_are_within_a_case() -> None:
    slow, fast = row((8, 128), "eager", 40.0), row((8, 128), "onepass", 10.0)
    failed = replace(slow, provider="liger", status="failed", kernel_us=None)
    rows = compare_rows([slow, fast, failed], measured(5.0))
    assert [r.speedup for r in rows] == [1.0, 4.0, None]
    assert [r.copy_share for r in rows] == [0.125, 0.5, None]
    assert rows[1].bandwidth_tbps == pytest.approx(fast.model_bytes / 10.0 / 1e6)
    assert rows[1].warm_speedup is None
