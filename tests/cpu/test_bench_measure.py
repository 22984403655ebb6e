"""Timers: the CPU's with real calls, the GPU's against a made-up device that keeps its own clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onepass.bench import measure_gpu
from onepass.bench.measure import WallTimer
from onepass.bench.warm_heap import WarmHeap
from onepass.errors import ProviderUnavailableError


def test_wall_time_of_a_long_call() -> None:
    timer = WallTimer([lambda: time.sleep(0.002)])
    timer.round(0.02)
    result = timer.result()
    assert result.kernel.best >= 2000
    assert result.calls_per_sample == 1
    assert result.call is None


def test_short_calls_are_timed_many_at_a_time_and_in_turn() -> None:
    taken: list[int] = []
    timer = WallTimer([lambda i=i: taken.append(i) for i in range(3)])  # type: ignore[misc]
    timer.round(0.005)
    result = timer.result()
    assert result.calls_per_sample >= 30
    assert result.kernel.p50 < 50
    assert [taken.count(i) for i in range(3)] == [len(taken) // 3] * 3


def test_page_faults_are_counted() -> None:
    def map_fresh_pages() -> None:
        torch.empty(2**24, dtype=torch.float32).fill_(1.0)

    timer = WallTimer([map_fresh_pages])
    timer.round(0.01)
    faults = timer.result().page_faults
    if faults is None:
        pytest.skip("this system does not count page faults")
    assert faults > 100


def test_the_warm_heap_does_not_fault() -> None:
    with WarmHeap() as heap:
        try:
            timer = heap.timer("layer_norm", (2048, 4096), "float32", 1)
        except ProviderUnavailableError as error:
            pytest.skip(str(error))
        timer.round(0.05)
        result = timer.result()
    assert result.page_faults is not None
    assert result.page_faults < 100, "a fresh output of 32 MB is 8192 pages"
    assert "mallopt" in result.method


class Device:
    """Stands in for torch.cuda: calls take `kernel_us` on the device and `host_us` of made-up host time."""

    def __init__(self, kernel_us: float, host_us: float, capturable: bool = True) -> None:
        self.kernel_us, self.host_us, self.capturable = kernel_us, host_us, capturable
        self.device_now = self.host_now = 0.0
        self.capturing: Any = None
        self.order: list[int] = []

    def call(self, index: int) -> None:
        self.host_now += self.host_us
        if self.capturing is not None:
            if not self.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.capturing.calls.append(index)
        else:
            self._work(self.kernel_us)

    def _work(self, us: float) -> None:
        self.device_now = max(self.device_now, self.host_now) + us

    def module(self) -> SimpleNamespace:
        device = self

        class Graph:
            def __init__(self, keep_graph: bool = False) -> None:
                self.calls: list[int] = []

            def replay(self) -> None:
                device.order = self.calls
                device._work(len(self.calls) * device.kernel_us)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(device.device_now, device.host_now)

            def elapsed_time(self, stop: Event) -> float:
                return (stop.at - self.at) / 1000

        @contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            device.capturing = graph
            try:
                yield
            finally:
                device.capturing = None

        @contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            yield

        def synchronize() -> None:
            device.host_now = max(device.host_now, device.device_now)

        stream = SimpleNamespace(wait_stream=lambda other: None)
        return SimpleNamespace(
            cuda=SimpleNamespace(
                CUDAGraph=Graph,
                Event=Event,
                Stream=lambda: stream,
                current_stream=lambda: stream,
                stream=on_stream,
                graph=capture,
                synchronize=synchronize,
            )
        )


def gpu_timer(monkeypatch: pytest.MonkeyPatch, device: Device, sets: int) -> measure_gpu.GpuTimer:
    def perf_counter() -> float:
        device.host_now += 0.1
        return device.host_now / 1e6

    clock = SimpleNamespace(perf_counter=perf_counter, perf_counter_ns=lambda: perf_counter() * 1e9)
    monkeypatch.setattr(measure_gpu, "torch", device.module())
    monkeypatch.setattr(measure_gpu, "time", clock)
    return measure_gpu.GpuTimer([lambda i=i: device.call(i) for i in range(sets)])  # type: ignore[misc]


@pytest.mark.parametrize(("kernel_us", "host_us", "sets"), [(2.0, 8.0, 5), (700.0, 8.0, 2), (1.0, 30.0, 3000)])
def test_kernel_call_and_host_time_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, kernel_us: float, host_us: float, sets: int
) -> None:
    device = Device(kernel_us, host_us)
    timer = gpu_timer(monkeypatch, device, sets)
    for _ in range(3):
        timer.round(0.05)
    result = timer.result()
    assert result.kernel.p50 == pytest.approx(kernel_us, rel=0.01)
    assert result.host is not None
    assert result.call is not None
    assert result.host.p50 == pytest.approx(host_us, rel=0.05)
    assert result.call.p50 == pytest.approx(max(host_us, kernel_us), rel=0.3)
    assert result.method.startswith("graph replay")
    assert result.calls_per_sample * kernel_us >= measure_gpu.MIN_REPLAY_US
    assert set(device.order) == set(range(sets)), "every set of buffers has its turn"
    assert result.kernel.samples >= 9


def test_a_call_that_cannot_be_captured_is_timed_by_events_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = gpu_timer(monkeypatch, Device(20.0, 8.0, capturable=False), 4)
    timer.round(0.05)
    result = timer.result()
    assert "not captured: operation not permitted" in result.method
    assert result.kernel.p50 == pytest.approx(20.0, rel=0.05)
