"""A run in plain words: what bounds each size, what the floor is, who is faster, and what page faults add.

Every sentence is made of figures of this run; a difference inside the spread of the samples is called none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from onepass.bench.providers import COMPILE, EAGER, EAGER_WARM, ONEPASS, ONEPASS_OUT
from onepass.bench.record import Ceilings, Machine, Row, Run
from onepass.bench.table import bytes_text, figure

LAUNCH, CACHE, MEMORY, OTHER = "launch-bound", "cache-bound", "memory-bound", "compute-bound"
# From this share of a copy's speed on, memory is what a kernel waits for.
MEMORY_SHARE = 0.5
# So many faults a call are more than the odd page: an output is mapped anew each time.
MANY_FAULTS = 100


def read(run: Run) -> Iterator[str]:
    """The sentences, most important first."""
    cases = [list(rows) for _, rows in groupby(run.rows, key=lambda row: row.case)]
    for rows in cases:
        yield from _failures(rows)
    timed = [rows for rows in cases if any(row.kernel_us for row in rows)]
    if not timed or run.ceilings is None:
        return
    yield from _headline(timed[0])
    for dtype, of_dtype in groupby(timed, key=lambda rows: rows[0].dtype):
        random = [rows for rows in of_dtype if rows[0].data == "random"]
        yield from _bounds(dtype, random, run.machine, run.ceilings)
    for rows in timed:
        yield from _slower(rows)
    for rows in timed:
        yield from _page_faults(rows)
    for rows in timed:
        if rows[0].data != "random":
            yield from _headline(rows)
    yield from _odd_methods(run.rows)


def bound(rows: Sequence[Row], machine: Machine, ceilings: Ceilings) -> str:
    """What bounds a case: LAUNCH, CACHE, MEMORY or OTHER.

    Launch-bound: even a copy spends more than half of its time on something else than moving bytes.
    Cache-bound: what is read and written fits the last-level cache. Otherwise memory-bound, unless the best is
    far from a copy: then arithmetic or its order is in the way.
    """
    row = next(row for row in rows if row.kernel_us)
    fits = 0 < row.copy_bytes <= machine.cache_bytes
    in_cache = fits and machine.device == "cpu"
    peak_tbps = ceilings.cache_copy_tbps if in_cache else ceilings.copy_tbps
    if row.copy_us and row.copy_bytes / peak_tbps / 1e6 < 0.5 * row.copy_us:
        return LAUNCH
    if fits:
        return CACHE
    best = max(row.copy_share or 0.0 for row in rows)
    return MEMORY if best >= MEMORY_SHARE else OTHER


def _name(row: Row) -> str:
    return f"{'×'.join(map(str, row.shape))} {row.dtype}" + ("" if row.data == "random" else f" ({row.data})")


def _us(row: Row) -> str:
    assert row.kernel_us is not None
    us = row.kernel_us.p50
    return f"{us / 1000:.3g} ms" if us >= 1000 else f"{figure(us)} µs"


def _best_own(rows: Sequence[Row]) -> Row | None:
    """The faster of ours: with a fresh output or with `out=`."""
    own = [row for row in rows if row.provider in (ONEPASS, ONEPASS_OUT) and row.kernel_us]
    return min(own, key=lambda row: row.kernel_us.p50 if row.kernel_us else 0.0, default=None)


def _find(rows: Sequence[Row], provider: str) -> Row | None:
    return next((row for row in rows if row.provider == provider and row.kernel_us), None)


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.status == "wrong":
            yield f"WRONG: {row.provider} at {_name(row)}: {row.reason}. It was not timed."


def _headline(rows: Sequence[Row]) -> Iterator[str]:
    own, eager, compiled = _best_own(rows), _find(rows, EAGER), _find(rows, COMPILE)
    if own is None or own.kernel_us is None or own.copy_us is None or own.copy_share is None:
        return
    parts = [f"{_name(own)}: {own.provider} takes {_us(own)}"]
    for other in (eager, compiled):
        if other is not None and other.kernel_us is not None:
            ratio = other.kernel_us.p50 / own.kernel_us.p50
            parts.append(f"{other.provider} {_us(other)} ({figure(ratio)}×)")
    floor_us = own.copy_share * own.kernel_us.p50
    text = ", ".join(parts) + f". The floor is {figure(floor_us)} µs, what a copy of the same bytes takes here"
    text += f"; {own.provider} is at {own.copy_share:.0%} of its speed."
    if eager is not None and own.min_bytes:
        text += (
            f" Eager moves {bytes_text(eager.model_bytes)} where {bytes_text(own.min_bytes)} are needed:"
            f" by bytes alone one pass gains {figure(eager.model_bytes / own.min_bytes)}×."
        )
    yield text


def _bounds(dtype: str, cases: list[list[Row]], machine: Machine, ceilings: Ceilings) -> Iterator[str]:
    """One sentence a kind of bound, with its sizes and how far the best of ours is from the floor."""
    kinds: dict[str, list[list[Row]]] = {}
    for rows in cases:
        kinds.setdefault(bound(rows, machine, ceilings), []).append(rows)
    cold = "; measured cold, as after other layers" if machine.device != "cpu" else ""
    start = "a kernel" if machine.device != "cpu" else "a call"
    why = {
        LAUNCH: f"starting {start} takes longer than moving the bytes, also for a copy, "
        f"and the smallest kernel takes {figure(ceilings.tiny_kernel_us)} µs",
        CACHE: f"fits the last-level cache of {bytes_text(machine.cache_bytes)}{cold}",
        MEMORY: f"a copy reaches {figure(ceilings.copy_tbps * 1000)} GB/s here, and no pass can beat it",
        OTHER: "memory is not the limit: no provider reaches half of a copy's speed",
    }
    for kind in (LAUNCH, CACHE, MEMORY, OTHER):
        if kind in kinds:
            sizes = []
            for rows in kinds[kind]:
                own = _best_own(rows)
                at = f" (at {own.copy_share:.0%} of the copy)" if own is not None and own.copy_share else ""
                sizes.append("×".join(map(str, rows[0].shape)) + at)
            yield f"{dtype}, {kind}: {', '.join(sizes)}. {why[kind][0].upper()}{why[kind][1:]}."


def _slower(rows: Sequence[Row]) -> Iterator[str]:
    """Where somebody beats ours by more than the spread."""
    own = _best_own(rows)
    if own is None or own.kernel_us is None:
        return
    for row in rows:
        if row.provider in (ONEPASS, ONEPASS_OUT) or row.kernel_us is None:
            continue
        if row.kernel_us.p80 < own.kernel_us.p20:
            ratio = own.kernel_us.p50 / row.kernel_us.p50
            against = f"{_us(row)} against {_us(own)}, {figure(ratio)}×"
            yield f"{row.provider} is faster than {own.provider} at {_name(row)}: {against}."


def _page_faults(rows: Sequence[Row]) -> Iterator[str]:
    eager, warm, own = _find(rows, EAGER), _find(rows, EAGER_WARM), _find(rows, ONEPASS_OUT)
    if eager is None or warm is None or eager.kernel_us is None or warm.kernel_us is None:
        return
    faults = (eager.page_faults or 0.0) - (warm.page_faults or 0.0)
    lost_us = eager.kernel_us.p50 - warm.kernel_us.p50
    if faults < MANY_FAULTS or lost_us <= 0:
        return
    text = (
        f"Page faults at {_name(eager)}: eager takes {_us(eager)} as users call it and {_us(warm)} on a warm heap. "
        f"The rest, {lost_us / eager.kernel_us.p50:.0%}, is {faults:,.0f} page faults a call "
        f"({figure(lost_us / faults)} µs each): fresh outputs this large come from the system each time."
    )
    if own is not None and own.speedup and own.warm_speedup:
        gains = f"{figure(own.speedup)}× over the first and {figure(own.warm_speedup)}× over the second"
        text += f" {own.provider} gains {gains}: only the second is fusion."
    yield text


def _odd_methods(rows: Sequence[Row]) -> Iterator[str]:
    odd = sorted({f"{row.provider}: {row.method}" for row in rows if "not captured" in row.method})
    if odd:
        yield "Kernel time holds launch costs for " + "; ".join(odd) + "."
