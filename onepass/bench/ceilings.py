"""What this machine reaches: the roofs of the roofline, measured in the same run as the rows."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from onepass.bench.copying import copy_calls
from onepass.bench.machine import cache_bytes
from onepass.bench.measure import Call, Timer, WallTimer
from onepass.bench.record import Ceilings, dtype_name

ROUNDS, SECONDS_A_ROUND = 3, 0.1
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


@lru_cache(maxsize=8)
def measure_ceilings(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Ceilings:
    """Copy in memory and in the last-level cache, read, matmul in each dtype, the smallest kernel; once a process."""
    with torch.no_grad():
        large = torch.randn(COPY_BYTES[device.type] // 4, device=device)
        copy_us = _fastest_copy_us(device, large)
        rows = large.view(-1, 4096)
        read_us = _time_us(device, [partial(torch.sum, rows, dim=-1)])
        large_bytes = large.numel() * 4
        del large, rows

        small_bytes = cache_bytes(device) // 8
        small = torch.randn(small_bytes // 4, device=device)
        cache_us = _fastest_copy_us(device, small)

        one = torch.randn(1, device=device)
        tiny_us = _time_us(device, [partial(torch.neg, one)])
        matmul = {}
        for dtype in dtypes:
            n = MATMUL_SIZE[device.type]
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            matmul[dtype_name(dtype)] = 2 * n**3 / _time_us(device, [partial(torch.mm, a, b)]) / 1e6
    return Ceilings(
        copy_tbps=2 * large_bytes / copy_us / 1e6,
        copy_bytes=2 * large_bytes,
        cache_copy_tbps=2 * small_bytes / cache_us / 1e6,
        cache_copy_bytes=2 * small_bytes,
        read_tbps=large_bytes / read_us / 1e6,
        matmul_tflops=matmul,
        tiny_kernel_us=tiny_us,
    )


def _fastest_copy_us(device: torch.device, source: torch.Tensor) -> float:
    return min(_time_us(device, calls) for calls in copy_calls(device, [source]))


def _time_us(device: torch.device, calls: list[Call]) -> float:
    timer: Timer
    if device.type == "cpu":
        timer = WallTimer(calls)
    else:
        from onepass.bench.measure_gpu import GpuTimer

        timer = GpuTimer(calls)
    for _ in range(ROUNDS):
        timer.round(SECONDS_A_ROUND)
    return timer.result().kernel.best  # a ceiling is what can be reached, not what a busy machine gave on average
