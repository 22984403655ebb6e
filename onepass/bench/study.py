"""A run from start to files: cases, measuring, reading, JSON, CSV and pictures."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onepass.bench import machine as machines
from onepass.bench.ceilings import measure_ceilings
from onepass.bench.reading import read
from onepass.bench.record import Row, Run, write_csv, write_json
from onepass.bench.sweep import Case, OnStep, count_steps, run_case
from onepass.bench.warm_heap import WarmHeap
from onepass.errors import UnknownNameError
from onepass.ops import spec as specs

STUDIES = ("layer_norm_silu",)
# A CPU is slow and may be busy: the last shapes are left out rather than a user kept waiting.
SECONDS_ON_CPU = 110
MAX_ELEMENTS_ON_CPU = 2**24
REAL_DATA = "SmolLM2-135M hidden states"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The headline, a sweep over rows at its N, and a sweep over N.
_GPU_SHAPES = (
    (4, 1024, 4096),
    *((rows, 4096) for rows in (1, 16, 128, 512, 2048, 16384, 65536)),
    *((65536, 768), (65536, 1024), (16384, 16384), (4096, 32768), (4096, 65536)),
)
_CPU_SHAPES = ((4, 1024, 4096), (1, 4096), (16, 4096), (128, 4096), (512, 4096), (8192, 768), (256, 32768))


@dataclass(frozen=True)
class Plan:
    """What a run measures, decided before it starts."""

    name: str
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    cases: tuple[Case, ...]

    @property
    def steps(self) -> int:
        return count_steps(self.cases) + 1


def plan_study(name: str, device: torch.device, dtypes: Sequence[torch.dtype] = ()) -> Plan:
    """The cases of a study.

    Raises:
        UnknownNameError: no study has this name.
    """
    if name not in STUDIES:
        raise UnknownNameError("study", name, STUDIES)
    shapes = _CPU_SHAPES if device.type == "cpu" else _GPU_SHAPES
    return _plan(name, "layer_norm", shapes, device, dtypes)


def plan_bench(op: str, device: torch.device, dtypes: Sequence[torch.dtype] = ()) -> Plan:
    """The sweep that an op's spec names, the largest first; on a CPU its own, or the shapes of up to 16 Mi elements."""
    spec = specs.load(op)
    shapes = sorted(spec.shapes, key=math.prod, reverse=True)
    if device.type == "cpu":
        few = [shape for shape in shapes if math.prod(shape) <= MAX_ELEMENTS_ON_CPU]
        shapes = sorted(spec.cpu_shapes, key=math.prod, reverse=True) or few
    return _plan(op, op, shapes, device, dtypes)


def _plan(
    name: str, op: str, shapes: Sequence[tuple[int, ...]], device: torch.device, dtypes: Sequence[torch.dtype]
) -> Plan:
    spec = specs.load(op)
    chosen = tuple(dtypes) or ((torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16))
    cases = tuple(Case(spec, shape, dtype, device) for shape in shapes for dtype in chosen)
    return Plan(name, device, chosen, cases)


def add_real(plan: Plan, progress: Callable[[str], None] | None = None) -> Plan:
    """The plan, and one more case a dtype: the hidden states of SmolLM2-135M at every layer, taken in turn.

    Raises:
        MissingDependencyError: the package with the model is not installed.
    """
    from onepass.bench.real import hidden_states

    spec = plan.cases[0].spec
    # Run once in float32: the rounding to each dtype is then the only difference.
    states = hidden_states(torch.float32, plan.device, progress)
    shape = tuple(states[0].shape)
    cases = []
    for dtype in plan.dtypes:
        base = spec.make_inputs(shape, dtype, plan.device, 0)
        given = tuple(base | {"x": state.to(dtype, copy=True).contiguous()} for state in states)
        data = f"{REAL_DATA}, {len(states)} layers"
        cases.append(Case(spec, shape, dtype, plan.device, data, given))
    return replace(plan, cases=plan.cases + tuple(cases))


def run_plan(plan: Plan, command: str, on_step: OnStep = lambda text: None) -> Run:
    """Measure everything and read it; writes nothing."""
    start, load = time.monotonic(), machines.load()
    on_step("ceilings of this machine")
    ceilings = measure_ceilings(plan.device, tuple(plan.dtypes))
    rows: list[Row] = []
    left_out: list[str] = []
    with WarmHeap() as heap:
        for case in plan.cases:
            late = plan.device.type == "cpu" and time.monotonic() - start > SECONDS_ON_CPU
            if late and not case.given:
                left_out.append(case.title)
            else:
                rows += run_case(case, heap, on_step)
    run = Run(
        name=plan.name,
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machines.describe(plan.device),
        versions=machines.versions(),
        rows=tuple(rows),
        ceilings=ceilings,
        seconds=time.monotonic() - start,
        load=load,
        left_out=tuple(left_out),
    )
    return replace(run, reading=tuple(read(run)))


def write_files(run: Run, folder: Path, roofline: bool = False) -> list[Path]:
    """Write a run's JSON, CSV and pictures; gives their names."""
    from onepass.bench.plot import draw_run
    from onepass.bench.roofline import draw_roofline

    stem = folder / run.name
    json_path, csv_path = stem.with_suffix(".json"), stem.with_suffix(".csv")
    write_json(run, json_path)
    write_csv(run, csv_path)
    pictures = draw_run(run, stem)
    if roofline:
        pictures += draw_roofline(run, folder / f"{run.name}-roofline")
    return [json_path, csv_path, *pictures]
