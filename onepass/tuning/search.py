"""Finds the fastest config of a kernel for one N and dtype: every candidate is checked, then timed alone.

One config serves all numbers of rows, so that a row's bits do not depend on its batch. A candidate's score is the
geometric mean, over a few numbers of rows, of its time over the best time there; one that loses to the heuristic's
config at any of them is out, however much it gains elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from onepass.bench.check import Truth
from onepass.bench.measure import Call, Timer
from onepass.bench.providers import failures, short_reason
from onepass.bench.record import dtype_name
from onepass.bench.sweep import Case, OnStep, count_sets, make_sets, make_timer
from onepass.ops import spec as specs
from onepass.ops.spec import Inputs
from onepass.ops.tunable import Config, Tunable

FEW_ROWS = (1, 512, 4096)
MANY_BYTES = 128 * 2**20
"""Size of x at the largest number of rows."""

ROUNDS = 3
SECONDS_A_ROUND = 0.03

NEEDED_GAIN = 1.01
"""How many times faster than the heuristic's config another must be to take its place: less is noise."""

ALLOWED_LOSS = 1.03
"""How many times slower than the heuristic's config another may be at one number of rows."""

MakeTimer = Callable[[torch.device, list[Call]], Timer]


@dataclass
class Trial:
    """One candidate: kernel times in µs by number of rows, or why it is out of the race."""

    config: Config
    time_us: dict[int, float] = field(default_factory=dict)
    why_not: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a search found. `best` is None where no candidate gives right results."""

    tunable: Tunable
    n: int
    dtype: torch.dtype
    trials: tuple[Trial, ...]
    heuristic: Trial
    best: Trial | None

    @property
    def title(self) -> str:
        return f"{self.tunable.op} n={self.n} {dtype_name(self.dtype)}"

    @property
    def gain(self) -> float | None:
        """How many times faster the best config is than the heuristic's, over all numbers of rows."""
        return None if self.best is None or self.heuristic.why_not else speedup(self.heuristic, self.best)


def row_counts(n: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of rows that a candidate is timed at."""
    many = max(1, MANY_BYTES // (n * dtype.itemsize))
    return (*(rows for rows in FEW_ROWS if rows < many), many)


def count_steps(tunable: Tunable, n: int, dtype: torch.dtype) -> int:
    """How often `search` reports progress."""
    return (len(tunable.candidates(n, dtype)) + ROUNDS) * len(row_counts(n, dtype))


def search(
    tunable: Tunable,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    on_step: OnStep = lambda text: None,
    timer_of: MakeTimer = make_timer,
) -> Outcome:
    """Check and time every candidate; changes and writes nothing."""
    trials = [Trial(config) for config in tunable.candidates(n, dtype)]
    heuristic = next(trial for trial in trials if trial.config == tunable.heuristic(n, dtype))
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for rows in row_counts(n, dtype):
            _race(tunable, Case(specs.load(tunable.op), (rows, n), dtype, device), trials, on_step, timer_of)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return Outcome(tunable, n, dtype, tuple(trials), heuristic, _best(trials, heuristic))


def _race(tunable: Tunable, case: Case, trials: Sequence[Trial], on_step: OnStep, timer_of: MakeTimer) -> None:
    """All candidates at one number of rows: a short round each in turn, so that a drifting clock hits all alike."""
    inputs = make_sets(case.spec, case.shape, case.dtype, case.device, count_sets(case))
    outs = [case.spec.allocate_out(values) for values in inputs]
    truth = Truth(case.spec, inputs[0])
    timers: list[tuple[Trial, Timer]] = []
    for trial in trials:
        on_step(f"{case.title}: check {config_text(trial.config)}")
        if trial.why_not:
            continue
        try:
            calls = [tunable.bind(trial.config, i, o) for i, o in zip(inputs, outs, strict=True)]
            trial.why_not = _why_wrong(calls[0], outs[0], truth)
            if not trial.why_not:
                timers.append((trial, timer_of(case.device, calls)))
        except failures() as error:
            trial.why_not = short_reason(error)
    for i in range(ROUNDS):
        on_step(f"{case.title}: round {i + 1} of {ROUNDS}")
        for _, timer in timers:
            timer.round(SECONDS_A_ROUND)
    for trial, timer in timers:
        trial.time_us[case.shape[0]] = timer.result().kernel.p50


def _why_wrong(call: Call, out: Inputs, truth: Truth) -> str:
    for tensor in out.values():
        tensor.fill_(math.nan)  # what is not written shows
    call()
    verdict = truth.judge(tuple(out.values()))
    return "" if verdict.ok else f"wrong result: {verdict.reason}"


def _best(trials: Sequence[Trial], heuristic: Trial) -> Trial | None:
    running = [trial for trial in trials if not trial.why_not]
    if not running:
        return None
    least = {rows: min(trial.time_us[rows] for trial in running) for rows in running[0].time_us}
    if not heuristic.why_not:
        running = [trial for trial in running if _loses_nowhere(trial, heuristic)]
    best = min(running, key=lambda trial: _mean(trial.time_us[rows] / us for rows, us in least.items()))
    if not heuristic.why_not and speedup(heuristic, best) < NEEDED_GAIN:
        return heuristic
    return best


def _loses_nowhere(trial: Trial, heuristic: Trial) -> bool:
    return all(us <= ALLOWED_LOSS * heuristic.time_us[rows] for rows, us in trial.time_us.items())


def speedup(slow: Trial, fast: Trial) -> float:
    """How many times faster, as a geometric mean over the numbers of rows."""
    return _mean(us / fast.time_us[rows] for rows, us in slow.time_us.items())


def _mean(ratios: Iterator[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def config_text(config: Config) -> str:
    """A config on one line."""
    return " ".join(f"{name}={value}" for name, value in config._asdict().items())
