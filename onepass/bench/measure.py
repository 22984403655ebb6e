"""Timers. A timer is made of calls, takes samples in rounds, and sums them up.

A sweep gives every provider a short round in turn, several times over (A B C A B C), so that a clock that
drifts or a neighbour that wakes hits all of them alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from onepass.bench.record import Times

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

Call = Callable[[], object]

WARM_UP_CALLS = 3
# Long enough that reading the clock (about 0.1 µs) and one lost time slice do not make the figure.
MIN_SAMPLE_US = 50.0
MIN_SAMPLES_A_ROUND = 3


@dataclass(frozen=True)
class Measured:
    """What a timer found. `call` and `host` are None where the kernel and the call are one thing: on a CPU."""

    method: str
    kernel: Times
    call: Times | None
    host: Times | None
    calls_per_sample: int
    page_faults: float | None = None


class Timer(Protocol):
    def round(self, seconds: float) -> None:
        """Take samples for about so long."""

    def result(self) -> Measured:
        """Percentiles over the samples of all rounds."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector out of the samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class WallTimer:
    """Wall-clock time of synchronous calls, for the CPU, where the kernel and the call are one thing.

    `calls` are the same call on different buffers; they are taken in turn.
    """

    def __init__(self, calls: list[Call]) -> None:
        for i in range(max(WARM_UP_CALLS, len(calls))):
            calls[i % len(calls)]()
        estimate_us = min(_elapsed_us([call]) for call in (calls * 3)[:3])
        repeats = max(1, round(MIN_SAMPLE_US / max(estimate_us, 0.05) / len(calls)))
        # A whole number of tours where calls are short; one call at a time where they are long.
        self._samples_of = [calls * repeats] if estimate_us < MIN_SAMPLE_US else [[call] for call in calls]
        self._next = 0
        self._samples_us: list[float] = []
        self._faults = self._calls = 0

    def round(self, seconds: float) -> None:
        with no_garbage_collection():
            _elapsed_us(self._take())  # refills caches and wakes this provider's threads
            faults, end, taken = _page_faults(), time.perf_counter() + seconds, 0
            while taken < MIN_SAMPLES_A_ROUND or time.perf_counter() < end:
                calls = self._take()
                self._samples_us.append(_elapsed_us(calls) / len(calls))
                self._calls += len(calls)
                taken += 1
            self._faults += _page_faults() - faults

    def result(self) -> Measured:
        faults = self._faults / self._calls if resource else None
        return Measured("wall clock", Times.of(self._samples_us), None, None, len(self._samples_of[0]), faults)

    def _take(self) -> list[Call]:
        calls = self._samples_of[self._next % len(self._samples_of)]
        self._next += 1
        return calls


def _elapsed_us(calls: list[Call]) -> float:
    start = time.perf_counter_ns()
    for call in calls:
        call()
    return (time.perf_counter_ns() - start) / 1000


def _page_faults() -> int:
    """Pages the kernel had to map for this process so far, without reading a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0
