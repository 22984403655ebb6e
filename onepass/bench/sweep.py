"""Runs cases × providers and gives rows: check first, then time all providers in turn, then compare."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from onepass import dispatch
from onepass.bench.check import Truth, Verdict, main_tensor
from onepass.bench.copying import copy_calls, read_calls
from onepass.bench.machine import cache_bytes, free_memory
from onepass.bench.measure import Call, Measured, Timer, WallTimer
from onepass.bench.providers import EAGER, EAGER_WARM, Function, Provider, failures, providers_for, short_reason
from onepass.bench.record import Row, Times, dtype_name
from onepass.bench.warm_heap import WarmHeap
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

ROUNDS = 5
SECONDS_A_PROVIDER = {"cpu": 0.4, "cuda": 0.1}
MAX_SETS = 4096
# Different random data for so many sets; more are copies of these, which is enough against caches.
DRAWN_SETS = 4
RANDOM = "random"

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One comparison: an op at one shape and dtype, on random inputs or on those given."""

    spec: OpSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    data: str = RANDOM
    given: tuple[Inputs, ...] = field(default=(), repr=False)

    @property
    def title(self) -> str:
        return f"{'×'.join(map(str, self.shape))} {dtype_name(self.dtype)}"


def count_steps(cases: Sequence[Case]) -> int:
    """How often `run_case` reports progress, for all cases."""
    return sum(len(_providers(c)) + ROUNDS + 2 for c in cases)


def run_case(case: Case, heap: WarmHeap, on_step: OnStep = lambda text: None) -> list[Row]:
    """Rows of all providers for one case; the memory is free again afterwards.

    A provider that cannot run, or whose result is wrong, has a row that says so and is not timed.
    """
    providers = _providers(case)
    too_large = _too_large(case)
    if too_large:
        return [replace(_blank(case, p), status="unavailable", reason=too_large) for p in providers]
    with torch.no_grad(), _on(case.device):
        try:
            return _Comparison(case, providers, heap, on_step).rows()
        finally:
            gc.collect()  # compiled functions and graphs hold tensors in cycles
            if case.device.type == "cuda":
                torch.cuda.empty_cache()


class _Comparison:
    """The providers of one case, their buffers, and their timers while they run."""

    def __init__(self, case: Case, providers: Sequence[Provider], heap: WarmHeap, on_step: OnStep) -> None:
        self._case, self._providers, self._heap, self._on_step = case, providers, heap, on_step
        on_step(f"{case.title}: inputs")
        if case.given:
            self._inputs = _rotated(case.given, count_sets(case))
        else:
            self._inputs = make_sets(case.spec, case.shape, case.dtype, case.device, count_sets(case))
        self._outs = [case.spec.allocate_out(inputs) for inputs in self._inputs]
        # Real data is checked set by set, since every set has its own; of random sets one is enough.
        checked = case.given or self._inputs[:1]
        self._truths = [Truth(case.spec, inputs) for inputs in checked]
        self._functions: dict[str, Function] = {}

    def rows(self) -> list[Row]:
        case = self._case
        rows: dict[str, Row] = {}
        timers: dict[str, Timer] = {}
        for provider in self._providers:
            self._on_step(f"{case.title}: {provider.name}, check")
            row = _blank(case, provider, self._inputs[0])
            try:
                function = self._functions[provider.name] = provider.build(case.spec)
                verdict = self._check(provider, function)
                row = replace(row, error=verdict.error, error_bound=verdict.bound, checked=verdict.checked)
                if verdict.ok:
                    timers[provider.name] = self._timer(provider, function)
                else:
                    row = replace(row, status="wrong", reason=verdict.reason)
            except ProviderUnavailableError as error:
                row = replace(row, status="unavailable", reason=str(error))
            except failures() as error:
                row = replace(row, status="failed", reason=short_reason(error))
            if provider.name.startswith("onepass") and row.status == "ok":
                row = replace(row, backend=self._backend())
            rows[provider.name] = row
        copies = self._ceiling_timers()
        self._measure(timers, copies)
        rotated = sum(tensor_bytes(*_tensors(i), *_tensors(o)) for i, o in zip(self._inputs, self._outs, strict=True))
        for name, timer in timers.items():
            rows[name] = _filled(rows[name], timer.result(), rotated if len(self._inputs) > 1 else 0)
        self._on_step(f"{case.title}: launches")
        for provider in self._providers:
            if provider.name in timers:
                rows[provider.name] = self._with_launches(rows[provider.name], provider)
        copy = min((timer.result() for timer in copies), key=lambda measured: measured.kernel.p50)
        return compare_rows(list(rows.values()), copy)

    def _check(self, provider: Provider, function: Function) -> Verdict:
        verdict: Verdict | None = None
        for truth, given, out in zip(self._truths, self._inputs, self._outs, strict=False):
            (inputs,) = _own([given], provider)
            if provider.takes_out:
                for tensor in _tensors(out):
                    tensor.fill_(math.nan)  # what is not written shows
            found = truth.judge(bind(function, inputs, out if provider.takes_out else {})())
            if verdict is None or not found.ok or (verdict.ok and found.error > verdict.error):
                verdict = found
        assert verdict is not None
        if len(self._truths) > 1:
            verdict = replace(verdict, checked=f"{verdict.checked} of each of {len(self._truths)} tensors")
        return verdict

    def _timer(self, provider: Provider, function: Function) -> Timer:
        case = self._case
        if provider.warm_heap:
            dtype = str(case.dtype).removeprefix("torch.")
            return self._heap.timer(case.spec.op, case.shape, dtype, len(self._inputs))
        outs = self._outs if provider.takes_out else [{} for _ in self._outs]
        return make_timer(
            case.device, [bind(function, i, o) for i, o in zip(_own(self._inputs, provider), outs, strict=True)]
        )

    def _ceiling_timers(self) -> list[Timer]:
        """Copies that move as many bytes as the op must, half of them read, half of them written; or reads of them."""
        spec, device, sources = self._case.spec, self._case.device, []
        for inputs in self._inputs:
            main = main_tensor(inputs).reshape(-1)
            count = spec.bytes_moved(inputs) // (2 if spec.ceiling == "copy" else 1) // main.element_size()
            sources.append(main.repeat(math.ceil(max(1, count) / main.numel()))[: max(1, count)])
        of_kind = copy_calls if spec.ceiling == "copy" else read_calls
        return [make_timer(device, calls) for calls in of_kind(device, sources)]

    def _measure(self, timers: dict[str, Timer], copies: list[Timer]) -> None:
        seconds = SECONDS_A_PROVIDER.get(self._case.device.type, 0.3) / ROUNDS
        for i in range(ROUNDS):
            self._on_step(f"{self._case.title}: round {i + 1} of {ROUNDS}")
            for timer in (*copies, *timers.values()):
                timer.round(seconds)

    def _with_launches(self, row: Row, provider: Provider) -> Row:
        if self._case.device.type == "cuda":
            from onepass.bench.measure_gpu import graph_nodes

            out = self._outs[0] if provider.takes_out else {}
            (inputs,) = _own(self._inputs[:1], provider)
            counted = graph_nodes(bind(self._functions[provider.name], inputs, out))
            if counted is not None:
                return replace(row, launches=counted, launches_from="CUDA graph nodes")
        modelled = provider.launches(self._case.spec)
        return row if modelled is None else replace(row, launches=modelled, launches_from="model")

    def _backend(self) -> str:
        return dispatch.explain(self._case.spec.op, **self._inputs[0]).backend or ""


def make_sets(
    spec: OpSpec, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, count: int
) -> list[Inputs]:
    """Random inputs in memory of their own, `count` times."""
    drawn = [spec.make_inputs(shape, dtype, device, seed) for seed in range(min(count, DRAWN_SETS))]
    return _rotated(drawn, count)


def _rotated(sets: Sequence[Inputs], count: int) -> list[Inputs]:
    """At least `count` sets: those given, then copies of them in memory of their own."""
    return [*sets, *(_clone(sets[i % len(sets)]) for i in range(len(sets), count))]


def _own(sets: list[Inputs], provider: Provider) -> list[Inputs]:
    """The sets, or copies of them where the provider overwrites its inputs."""
    return [_clone(inputs) for inputs in sets] if provider.in_place else sets


def _clone(inputs: Inputs) -> Inputs:
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}


def bind(function: Function, inputs: Inputs, out: Inputs) -> Call:
    """A call without arguments: as little Python around the op as there can be."""
    return partial(function, **inputs, **out)


def compare_rows(rows: list[Row], copy: Measured) -> list[Row]:
    """Fill in what a row owes to the others of its case: the share of the copy and the speed-ups."""
    by_name = {row.provider: row for row in rows}
    eager, warm = by_name.get(EAGER), by_name.get(EAGER_WARM)

    def ratio(baseline: Row | None, row: Row, times: Callable[[Row], Times | None]) -> float | None:
        ours, theirs = times(row), times(baseline) if baseline else None
        return theirs.p50 / ours.p50 if ours and theirs else None

    compared = []
    for row in rows:
        kernel = row.kernel_us
        compared.append(
            replace(
                row,
                copy_us=copy.kernel.p50,
                copy_share=copy.kernel.p50 / kernel.p50 if kernel else None,
                bandwidth_tbps=row.model_bytes / kernel.p50 / 1e6 if kernel else None,
                speedup=ratio(eager, row, lambda r: r.kernel_us),
                call_speedup=ratio(eager, row, lambda r: r.call_us),
                warm_speedup=ratio(warm, row, lambda r: r.kernel_us),
            )
        )
    return compared


def _filled(row: Row, measured: Measured, rotated_bytes: int) -> Row:
    return replace(
        row,
        method=measured.method,
        kernel_us=measured.kernel,
        call_us=measured.call,
        host_us=measured.host,
        calls_per_sample=measured.calls_per_sample,
        page_faults=measured.page_faults,
        rotated_bytes=rotated_bytes,
    )


def _blank(case: Case, provider: Provider, inputs: Inputs | None = None) -> Row:
    spec = case.spec
    shape, dtype = case.shape, dtype_name(case.dtype)
    row = Row(spec.op, shape, dtype, case.device.type, case.data, provider.name, "ok", ceiling=spec.ceiling)
    if inputs is None:
        return row
    least = spec.bytes_moved(inputs)
    return replace(
        row,
        tensor_bytes=tensor_bytes(inputs[spec.row_inputs[0]] if spec.row_inputs else main_tensor(inputs)),
        min_bytes=least,
        model_bytes=least if provider.one_pass else spec.unfused_bytes(inputs),
        flops=spec.flops(inputs),
    )


def _providers(case: Case) -> tuple[Provider, ...]:
    """Given inputs stay in this process, so there is no warm heap for them; below 32 MB it changes nothing."""
    has_out = bool(_fake_set(case)[1])
    found = providers_for(case.spec, case.device)
    return tuple(p for p in found if not (p.warm_heap and case.given) and (has_out or not p.takes_out))


def make_timer(device: torch.device, calls: list[Call]) -> Timer:
    if device.type == "cpu":
        return WallTimer(calls)
    from onepass.bench.measure_gpu import GpuTimer

    return GpuTimer(calls)


def count_sets(case: Case) -> int:
    """How many sets of buffers the calls rotate over.

    On a GPU so many that they exceed the last-level cache twice. On a CPU the same for tensors that do not fit
    it; smaller ones stay in it, as a model's activations do between two of its ops.
    """
    set_bytes, cache = _set_bytes(case), cache_bytes(case.device)
    if case.device.type == "cpu" and 2 * set_bytes <= cache:
        return 1
    return min(MAX_SETS, max(2, math.ceil(2 * cache / set_bytes)))


def _set_bytes(case: Case) -> int:
    """Bytes of the inputs and outputs of one call."""
    inputs, outputs = _fake_set(case)
    return tensor_bytes(*_tensors(inputs), *_tensors(outputs))


def _fake_set(case: Case) -> tuple[Inputs, Inputs]:
    """Inputs and outputs of one call, in tensors that hold no memory."""
    with FakeTensorMode():
        inputs = case.spec.make_inputs(case.shape, case.dtype, torch.device("cpu"), 0)
        return inputs, case.spec.allocate_out(inputs)


def _too_large(case: Case) -> str:
    """Why the case does not fit the free memory, or an empty string."""
    if case.given:
        return ""
    # Each provider keeps fresh results of all sets; inputs are drawn in float32 first.
    need = _set_bytes(case) * (count_sets(case) + 2) * (6 if case.device.type == "cuda" else 3)
    free = free_memory(case.device)
    return f"needs about {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free" if need > free else ""


def _tensors(values: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in values.values() if isinstance(v, torch.Tensor)]


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield
