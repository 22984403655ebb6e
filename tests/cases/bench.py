"""A run with known figures, for tests of what is made of runs."""

from __future__ import annotations

import math
from dataclasses import replace

from onepass.bench.measure import Measured
from onepass.bench.record import Ceilings, Machine, Row, Run, Times
from onepass.bench.sweep import compare_rows

GPU = Machine("cuda", "NVIDIA Test", "nvidia-test", 132, 16, 141 * 2**30, 60 * 2**20, "Linux x86_64")
CPU = Machine("cpu", "Test CPU, 2 cores", "cpu-test-2-cores", 2, 2, 16 * 2**30, 32 * 2**20, "Linux x86_64")
GPU_CEILINGS = Ceilings(4.24, 2**31, 7.5, 15 * 2**20, 4.68, {"bf16": 803.0}, 1.05)
CPU_CEILINGS = Ceilings(0.03, 2**28, 0.18, 2**23, 0.03, {"bf16": 0.4}, 0.9)

# Shape: µs of eager, torch.compile, onepass, onepass out=, and the copy.
GPU_TIMES = {
    (4, 1024, 4096): (50.3, 34.4, 19.7, 19.5, 18.2),
    (1, 4096): (3.0, 2.8, 1.9, 1.9, 1.2),
    (512, 4096): (13.0, 7.7, 4.6, 4.5, 3.6),
    (65536, 4096): (667.0, 502.0, 264.0, 262.0, 258.0),
    (65536, 768): (189.0, 59.6, 61.0, 63.0, 50.0),
}
PROVIDERS = ("eager", "torch.compile", "onepass", "onepass out=")


def times(us: float, spread: float = 0.01) -> Times:
    return Times(us * (1 - 2 * spread), us * (1 - spread), us, us * (1 + spread), us * (1 + 5 * spread), 50)


def measured(us: float) -> Measured:
    return Measured("test", times(us), None, None, 1)


def row(shape: tuple[int, ...], provider: str, us: float, device: str = "cuda", dtype: str = "bf16") -> Row:
    elements = math.prod(shape)
    least = 2 * 2 * elements + 2 * 2 * shape[-1]
    return Row(
        "layer_norm",
        shape,
        dtype,
        device,
        "random",
        provider,
        "ok",
        method="graph replay of 100 calls",
        kernel_us=times(us),
        call_us=times(us + 8) if device == "cuda" else None,
        launches=2 if provider == "eager" else 1,
        tensor_bytes=2 * elements,
        min_bytes=least,
        model_bytes=2 * least if provider.startswith("eager") else least,
        flops=11 * elements,
        checked="all",
        error=0.01,
        error_bound=0.02,
    )


def gpu_run() -> Run:
    rows: list[Row] = []
    for shape, (*own, copy) in GPU_TIMES.items():
        rows += compare_rows([row(shape, p, us) for p, us in zip(PROVIDERS, own, strict=True)], measured(copy))
    return run_of(rows, GPU, GPU_CEILINGS)


def cpu_run() -> Run:
    """The headline with page faults, and a small size without."""
    large = [
        replace(row((4, 1024, 4096), "eager", 36_600.0, "cpu"), page_faults=16_385.0),
        replace(row((4, 1024, 4096), "eager, warm heap", 7_000.0, "cpu"), page_faults=0.0),
        replace(row((4, 1024, 4096), "onepass out=", 4_600.0, "cpu"), page_faults=0.0),
    ]
    small = [row((1, 4096), "eager", 8.0, "cpu"), row((1, 4096), "onepass", 12.0, "cpu")]
    return run_of(compare_rows(large, measured(4_000.0)) + compare_rows(small, measured(0.9)), CPU, CPU_CEILINGS)


def run_of(rows: list[Row], machine: Machine, ceilings: Ceilings) -> Run:
    return Run(
        "layer_norm_silu",
        "onepass study layer_norm_silu",
        "2026-11-30T12:00:00+00:00",
        machine,
        {"onepass": "0.1.0", "torch": "2.11.0"},
        tuple(rows),
        ceilings,
    )
