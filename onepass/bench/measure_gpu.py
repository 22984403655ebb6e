"""The timer of a GPU: the kernels alone, and the call as a user makes it.

Kernel time is the replay of a CUDA graph that holds many calls, so that no launch cost of the host is in it.
The calls rotate over inputs and outputs that together exceed the last-level cache twice, so that every byte
comes from memory, as it does in a model whose other layers ran in between.
"""

from __future__ import annotations

import ctypes
import math
import time

import torch

from onepass.bench.measure import MIN_SAMPLES_A_ROUND, WARM_UP_CALLS, Call, Measured, no_garbage_collection
from onepass.bench.record import Times

MIN_REPLAY_US = 1000.0
MAX_GRAPH_CALLS = 8192
# The queue of launches is about 1000 deep; a sample of the host's time must not fill it.
CALLS_A_SAMPLE = 50
REPLAYS_A_BATCH = 10
# Of a round's time, how much goes to the kernels; the rest goes to the calls.
KERNEL_PART = 0.6


class GpuTimer:
    """Kernel time by graph replay, or by events where the calls cannot be captured; call and host time as well."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._kernel_us: list[float] = []
        self._call_us: list[float] = []
        self._host_us: list[float] = []
        _warm_up(calls[0])
        estimate_us = _estimate_us(calls)
        self._user_calls = _rotation(calls, min(CALLS_A_SAMPLE, max(4, math.ceil(MIN_REPLAY_US / estimate_us))))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._why_no_graph = ""
        self._graph_calls = min(MAX_GRAPH_CALLS, max(len(calls), math.ceil(MIN_REPLAY_US / estimate_us)))
        try:
            self._graph = _capture(calls, self._graph_calls)
            replay_us = min(_replay_us(self._graph, 3))
            if replay_us < MIN_REPLAY_US and self._graph_calls < MAX_GRAPH_CALLS:
                # The estimate held the host's time; the kernels alone are shorter, so more of them fit.
                longer = math.ceil(1.2 * self._graph_calls * MIN_REPLAY_US / replay_us)
                self._graph, self._graph_calls = None, min(MAX_GRAPH_CALLS, longer)
                self._graph = _capture(calls, self._graph_calls)
        except RuntimeError as error:  # what CUDA raises for a call that synchronises or allocates in a capture
            self._why_no_graph = str(error).strip().splitlines()[0]
            torch.cuda.synchronize()

    def round(self, seconds: float) -> None:
        with no_garbage_collection():
            if self._graph is not None:
                self._replay_round(seconds * KERNEL_PART)
            self._call_round(seconds * (1 - KERNEL_PART))

    def result(self) -> Measured:
        if self._graph is not None:
            method = f"graph replay of {self._graph_calls} calls"
        else:
            method = f"events over {len(self._user_calls)} calls, not captured: {self._why_no_graph}"
        return Measured(
            method,
            Times.of(self._kernel_us),
            Times.of(self._call_us),
            Times.of(self._host_us),
            self._graph_calls if self._graph is not None else len(self._user_calls),
        )

    def _replay_round(self, seconds: float) -> None:
        assert self._graph is not None
        end, taken = time.perf_counter() + seconds, 0
        while taken < MIN_SAMPLES_A_ROUND or time.perf_counter() < end:
            batch = _replay_us(self._graph, MIN_SAMPLES_A_ROUND if taken == 0 else REPLAYS_A_BATCH)
            self._kernel_us += [us / self._graph_calls for us in batch]
            taken += len(batch)

    def _call_round(self, seconds: float) -> None:
        calls, n = self._user_calls, len(self._user_calls)
        start, stop = _event(), _event()
        end, taken = time.perf_counter() + seconds, 0
        _run(calls)
        torch.cuda.synchronize()
        while taken < MIN_SAMPLES_A_ROUND or time.perf_counter() < end:
            start.record()
            began = time.perf_counter_ns()
            _run(calls)
            queued = time.perf_counter_ns()
            stop.record()
            torch.cuda.synchronize()
            done = time.perf_counter_ns()
            self._host_us.append((queued - began) / 1000 / n)
            self._call_us.append((done - began) / 1000 / n)
            if self._graph is None:
                self._kernel_us.append(start.elapsed_time(stop) * 1000 / n)
            taken += 1


def graph_nodes(call: Call) -> int | None:
    """How many kernels and copies one call launches: the nodes of its CUDA graph. None where it cannot be told.

    A graph is asked, not a profiler: once a profiler has been on, launches stay slower for the whole process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        _warm_up(call)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            result = call()
        count = ctypes.c_size_t(0)
        status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        del result
    except (OSError, RuntimeError, AttributeError):  # no such driver; not capturable; an older torch
        torch.cuda.synchronize()
        return None
    return count.value if status == 0 else None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _rotation(calls: list[Call], n: int) -> list[Call]:
    return [calls[i % len(calls)] for i in range(n)]


def _run(calls: list[Call]) -> None:
    for call in calls:
        call()


def _warm_up(call: Call) -> None:
    """Compile, tune and allocate on a side stream, as capture wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _estimate_us(calls: list[Call]) -> float:
    """Time of one call, host or device, whichever is longer."""
    some = _rotation(calls, 10)
    _run(some)
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    _run(some)
    torch.cuda.synchronize()
    return max((time.perf_counter_ns() - start) / 1000 / len(some), 0.5)


def _capture(calls: list[Call], n: int) -> torch.cuda.CUDAGraph:
    """A graph of n calls. A fresh result lives until its turn comes again, so fresh outputs rotate as inputs do."""
    results: list[object] = [None] * len(calls)
    graph = torch.cuda.CUDAGraph()
    # The outer stream comes back even where a capture fails on its way out.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for i in range(n):
            results[i % len(calls)] = calls[i % len(calls)]()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, n: int) -> list[float]:
    """Time of n replays. One more goes before them: while it runs, the host queues the others without a gap."""
    graph.replay()
    marks = [(_event(), _event()) for _ in range(n)]
    for start, stop in marks:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1000 for start, stop in marks]
