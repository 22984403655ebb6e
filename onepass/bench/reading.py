"""A run in plain words: what bounds each size, what the floor is, who is faster, and what page faults add.

Every sentence is made of figures of this run; a difference inside the spread of the samples is called none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from onepass.bench.providers import COMPILE, EAGER, EAGER_WARM, ONEPASS, ONEPASS_OUT
from onepass.bench.record import Ceilings, Machine, Row, Run, Times
from onepass.bench.table import bytes_text, duration, figure

LAUNCH, CACHE, MEMORY, OTHER = "launch-bound", "cache-bound", "memory-bound", "bound by neither"
# From this share of a copy's speed on, moving bytes is what a kernel waits for.
COPY_SHARE = 0.5
# Up to so many times the smallest kernel, launching is a part of a time that can be seen.
SHORT = 20
# So many faults a call are more than the odd page: an output is mapped anew each time.
MANY_FAULTS = 100
# A quiet machine stays within this from p20 to p80; more than this part of the rows beyond it is a busy one.
QUIET_SPREAD, BUSY_PART = 1.5, 0.2

Case = list[Row]


def read(run: Run) -> Iterator[str]:
    """The sentences, most important first."""
    cases = [list(rows) for _, rows in groupby(run.rows, key=lambda row: row.case)]
    for rows in cases:
        yield from _failures(rows)
    yield from _busy(run)
    timed = [rows for rows in cases if any(row.kernel_us for row in rows)]
    random = [rows for rows in timed if rows[0].data == "random"]
    by_dtype = [[c for c in random if c[0].dtype == dtype] for dtype in dict.fromkeys(c[0].dtype for c in random)]
    for of_dtype in by_dtype:
        yield from _headline(of_dtype[0])
    for of_dtype in by_dtype:
        if run.ceilings is not None:
            yield from _bounds(of_dtype, run.machine, run.ceilings)
    for of_dtype in by_dtype:
        yield from _page_faults(of_dtype)
    for of_dtype in by_dtype:
        yield from _slower(of_dtype)
    for rows in timed:
        if rows[0].data != "random":
            yield from _headline(rows)
            yield from _slower([rows])
    yield from _odd_methods(run.rows)
    if run.left_out:
        yield f"Left out, because the time for a CPU was up: {', '.join(run.left_out)}."


def bound(rows: Sequence[Row], machine: Machine, peak_tbps: float, tiny_us: float) -> str:
    """What bounds a case: LAUNCH, CACHE, MEMORY or OTHER.

    `peak_tbps` is the fastest copy (or read) of its kind in this run, `tiny_us` the smallest kernel. Launch-bound: even
    a copy spends more than half of its time on something else than moving bytes, and is short enough that the
    smallest kernel is felt in it. Otherwise cache-bound where what is read and written fits the last-level cache,
    else memory-bound; but neither where nobody comes near a copy: then arithmetic or latency is in the way.
    """
    row = next(row for row in rows if row.kernel_us)
    if row.copy_us and row.min_bytes / peak_tbps / 1e6 < 0.5 * row.copy_us < 0.5 * SHORT * tiny_us:
        return LAUNCH
    if max(row.copy_share or 0.0 for row in rows) < COPY_SHARE:
        return OTHER
    return CACHE if _fits(row, machine) else MEMORY


def _fits(row: Row, machine: Machine) -> bool:
    """Whether what a case reads and writes fits the last-level cache."""
    return 0 < row.min_bytes <= machine.cache_bytes


def _shape(row: Row) -> str:
    return "×".join(map(str, row.shape))


def _name(row: Row) -> str:
    return f"{_shape(row)} {row.dtype}" + ("" if row.data == "random" else f" ({row.data})")


def _times(row: Row) -> Times:
    assert row.kernel_us is not None
    return row.kernel_us


def _us(row: Row) -> str:
    return duration(_times(row).p50)


def _best_own(rows: Sequence[Row]) -> Row | None:
    """The faster of ours: with a fresh output or with `out=`."""
    own = [row for row in rows if row.provider in (ONEPASS, ONEPASS_OUT) and row.kernel_us]
    return min(own, key=lambda row: _times(row).p50, default=None)


def _find(rows: Sequence[Row], provider: str) -> Row | None:
    return next((row for row in rows if row.provider == provider and row.kernel_us), None)


def _failures(rows: Case) -> Iterator[str]:
    for row in rows:
        if row.status == "wrong":
            yield f"WRONG: {row.provider} at {_name(row)}: {row.reason}. It was not timed."


def _busy(run: Run) -> Iterator[str]:
    """A warning that comes before the figures it concerns."""
    times = [row.kernel_us for row in run.rows if row.kernel_us]
    scattered = sum(t.p80 > QUIET_SPREAD * t.p20 for t in times)
    if scattered > BUSY_PART * len(times):
        cores = f" on {run.machine.cores} cores" if run.machine.device == "cpu" else ""
        yield (
            f"This machine was busy (load {run.load:.1f}{cores} at the start): {scattered} of {len(times)} times "
            f"scatter by more than {QUIET_SPREAD}× between p20 and p80. Take these figures as rough; repeat the run."
        )


def _headline(rows: Case) -> Iterator[str]:
    own, eager, compiled = _best_own(rows), _find(rows, EAGER), _find(rows, COMPILE)
    if own is None or own.copy_share is None or own.copy_us is None:
        return
    parts = [f"{_name(own)}: {own.provider} takes {_us(own)}"]
    for other in (eager, compiled):
        if other is not None:
            parts.append(f"{other.provider} {_us(other)} ({figure(_times(other).p50 / _times(own).p50)}×)")
    text = (
        ", ".join(parts)
        + f". The floor is {duration(own.copy_us)}, what a {own.ceiling} of the same bytes takes here: "
    )
    text += f"{own.provider} is at {own.copy_share:.0%} of a {own.ceiling}'s speed."
    if eager is not None and own.min_bytes:
        text += (
            f" Eager moves {bytes_text(eager.model_bytes)} where {bytes_text(own.min_bytes)} are needed:"
            f" by bytes alone one pass gains {figure(eager.model_bytes / own.min_bytes)}×."
        )
    yield text


def _bounds(cases: list[Case], machine: Machine, ceilings: Ceilings) -> Iterator[str]:
    """One sentence a kind of bound, with its sizes and how far the best of ours is from the floor."""
    # A CPU's small tensors stay in its cache, so their copies are held against copies there.
    copies = [rows[0] for rows in cases if rows[0].copy_us and _fits(rows[0], machine)]
    in_cache = [row.min_bytes / row.copy_us / 1e6 for row in copies if row.copy_us] if machine.device == "cpu" else []
    ceiling = cases[0][0].ceiling
    from_memory = ceilings.read_tbps if ceiling == "read" else ceilings.copy_tbps
    from_cache = ceilings.read_tbps if ceiling == "read" else ceilings.cache_copy_tbps
    peak_tbps = max([from_cache, *in_cache]) if machine.device == "cpu" else from_memory
    kinds: dict[str, list[Case]] = {}
    for rows in cases:
        kinds.setdefault(bound(rows, machine, peak_tbps, ceilings.tiny_kernel_us), []).append(rows)
    gpu = machine.device != "cpu"
    start = "a kernel" if gpu else "a call"
    cold = "; measured cold, as after other layers" if gpu else ""
    why = {
        LAUNCH: f"starting {start} takes longer than moving the bytes, even for a {ceiling}. The floor is the smallest "
        f"{'kernel' if gpu else 'call'}, {duration(ceilings.tiny_kernel_us)}",
        CACHE: f"input and output fit the last-level cache of {bytes_text(machine.cache_bytes)}{cold}",
        MEMORY: f"a {ceiling} reaches {figure(from_memory * 1000)} GB/s here, and one pass cannot beat it",
        OTHER: f"a {ceiling} is more than twice as fast as the best provider: arithmetic or latency is in the way, "
        "not bytes",
    }
    for kind in (LAUNCH, CACHE, MEMORY, OTHER):
        if kind in kinds:
            sizes = [f"{_shape(rows[0])}{_share(_best_own(rows))}" for rows in kinds[kind]]
            yield f"{cases[0][0].dtype}, {kind}: {', '.join(sizes)}: {why[kind]}."


def _share(own: Row | None) -> str:
    return f" ({own.copy_share:.0%} of a {own.ceiling})" if own is not None and own.copy_share else ""


def _page_faults(cases: list[Case]) -> Iterator[str]:
    """What of eager's time is page faults, at the size where they cost most, and the other sizes by name."""
    found = []
    for rows in cases:
        eager, warm = _find(rows, EAGER), _find(rows, EAGER_WARM)
        if eager is None or warm is None:
            continue
        faults = (eager.page_faults or 0.0) - (warm.page_faults or 0.0)
        lost_us = _times(eager).p50 - _times(warm).p50
        if faults >= MANY_FAULTS and lost_us > 0:
            found.append((lost_us, faults, eager, warm, _find(rows, ONEPASS_OUT)))
    if not found:
        return
    lost_us, faults, eager, warm, own = max(found, key=lambda item: item[0])
    text = (
        f"Page faults: at {_name(eager)} eager takes {_us(eager)} as users call it and {_us(warm)} on a warm heap. "
        f"The rest, {lost_us / _times(eager).p50:.0%}, is {faults:,.0f} page faults a call "
        f"({duration(lost_us / faults)} each): a fresh output this large comes from the system each time."
    )
    if own is not None and own.speedup and own.warm_speedup:
        gains = f"{figure(own.speedup)}× over the first and {figure(own.warm_speedup)}× over the second"
        text += f" {own.provider} gains {gains}: only the second is fusion."
    others = [f"{_shape(e)} ({lost / _times(e).p50:.0%})" for lost, _, e, _, _ in found if e is not eager]
    yield text + (f" Page faults also at {', '.join(others)}." if others else "")


def _slower(cases: list[Case]) -> Iterator[str]:
    """Where somebody beats ours by more than the spread, a sentence a provider."""
    faster: dict[str, list[str]] = {}
    for rows in cases:
        own = _best_own(rows)
        for row in rows if own is not None else ():
            if row.provider in (ONEPASS, ONEPASS_OUT, EAGER_WARM) or row.kernel_us is None:
                continue
            assert own is not None
            if row.kernel_us.p80 < _times(own).p20:
                ratio = _times(own).p50 / row.kernel_us.p50
                text = f"{_name(row)} ({_us(row)} against {_us(own)}, {figure(ratio)}×)"
                faster.setdefault(row.provider, []).append(text)
    for provider, where in faster.items():
        yield f"{provider} is faster than {ONEPASS} at {', '.join(where)}."


def _odd_methods(rows: Sequence[Row]) -> Iterator[str]:
    odd = sorted({f"{row.provider}: {row.method}" for row in rows if "not captured" in row.method})
    if odd:
        yield "Kernel time holds launch costs for " + "; ".join(odd) + "."
