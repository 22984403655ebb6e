"""The table of a run in the terminal: one block a case, the least important columns dropped where it is narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onepass.bench.providers import EAGER_WARM
from onepass.bench.record import Row, Run, Times

PADDING = 2


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[Row], str]
    importance: int


def print_run(run: Run, console: Console) -> None:
    """All cases of a run, then who was not measured anywhere, then what the columns mean."""
    absent = _absent(run.rows)
    for _, rows in groupby(run.rows, key=lambda row: row.case):
        present = [row for row in rows if (row.provider, row.reason) not in absent]
        if present:
            print_case(present, console)
    for provider, reason in absent:
        console.print(Text(f"not measured: {provider}: {reason}", style="yellow"))
    gpu = run.machine.device != "cpu"
    kernel = "kernel: the device's time, from a CUDA graph. call: as Python makes it, back to back. " if gpu else ""
    baseline = "" if gpu else " vs warm: over eager on a warm heap."
    ceilings = dict.fromkeys(row.ceiling for row in run.rows)
    legend = f"{kernel}Medians in µs. vs eager: speed-up in {'kernel time' if gpu else 'time'}.{baseline} " + " ".join(
        f"of {c}: share of a {c}'s speed, measured in the same run." for c in ceilings
    )
    console.print(Text(legend, style="dim"))


def _absent(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Providers that are missing everywhere for one reason, which is then said once."""
    reasons: dict[str, set[str]] = {}
    for row in rows:
        reasons.setdefault(row.provider, set()).add(row.reason)
    return [(provider, found.pop()) for provider, found in reasons.items() if len(found) == 1 and "" not in found]


def print_case(rows: Sequence[Row], console: Console) -> None:
    """One block: a title line, a line a provider, and the reasons of those without a figure."""
    timed = [row for row in rows if row.kernel_us]
    console.print(Text(case_title(rows[0]), style="bold"))
    if timed:
        columns = _fitting(_columns(timed), timed, console.width)
        table = Table(box=None, padding=(0, PADDING, 0, 0), pad_edge=False, header_style="dim")
        for i, column in enumerate(columns):
            table.add_column(column.title, justify="left" if i == 0 else "right", no_wrap=True)
        fastest = min(row.kernel_us.p50 for row in timed if row.kernel_us)
        for row in timed:
            style = "green" if row.kernel_us and row.kernel_us.p50 == fastest else ""
            table.add_row(*(column.cell(row) for column in columns), style=style)
        console.print(table)
    for row in rows:
        if row.status != "ok":
            style = "bold red" if row.status == "wrong" else "yellow"
            console.print(Text(f"{row.provider}: {row.status}: {row.reason}", style=style))
    console.print()


def case_title(row: Row) -> str:
    """Shape, dtype, size of the main tensor and the copy or read it is held against."""
    shape = "×".join(map(str, row.shape))
    data = "" if row.data == "random" else f", {row.data}"
    size = f", {bytes_text(row.tensor_bytes)}" if row.tensor_bytes else ""
    copy = f", {row.ceiling} {duration(row.copy_us)}" if row.copy_us else ""
    return f"{shape} {row.dtype}{size}{copy}{data}"


def figure(value: float | None, suffix: str = "") -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return "–"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{suffix}"


def duration(us: float) -> str:
    """Three significant digits with the unit that suits."""
    return f"{figure(us)} µs" if us < 1000 else f"{figure(us / 1000)} ms"


def bytes_text(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GB"


def _columns(rows: Sequence[Row]) -> list[_Column]:
    gpu = rows[0].device != "cpu"

    def spread(times: Times | None) -> str:
        return f"{figure(times.p20)}–{figure(times.p80)}" if times else "–"

    columns = [
        _Column("", lambda r: f"{r.provider} ({r.backend})" if r.backend else r.provider, 0),
        _Column("kernel" if gpu else "time", lambda r: figure(r.kernel_us.p50 if r.kernel_us else None), 0),
        _Column("p20–p80", lambda r: spread(r.kernel_us), 6),
        _Column("p99", lambda r: figure(r.kernel_us.p99 if r.kernel_us else None), 7),
        _Column("vs eager", lambda r: figure(r.speedup, "×"), 1),
        _Column(f"of {rows[0].ceiling}", lambda r: f"{r.copy_share:.0%}" if r.copy_share else "–", 2),
    ]
    if gpu:
        columns += [
            _Column("call", lambda r: figure(r.call_us.p50 if r.call_us else None), 3),
            _Column("host", lambda r: figure(r.host_us.p50 if r.host_us else None), 8),
        ]
    elif any(row.provider == EAGER_WARM for row in rows):
        columns += [
            _Column("vs warm", lambda r: figure(r.warm_speedup, "×"), 3),
            _Column("faults", lambda r: figure(round(r.page_faults) if r.page_faults is not None else None), 5),
        ]
    return [
        *columns,
        _Column("moved", lambda r: bytes_text(r.model_bytes), 9),
        _Column("GB/s", lambda r: figure(r.bandwidth_tbps * 1000 if r.bandwidth_tbps else None), 4),
        _Column("launches", lambda r: f"{r.launches:.0f}" if r.launches is not None else "–", 10),
    ]


def _fitting(columns: list[_Column], rows: Sequence[Row], width: int) -> list[_Column]:
    """The columns that fit, by importance (0 always stays)."""

    def needed(kept: list[_Column]) -> int:
        return sum(max(len(c.title), *(len(c.cell(row)) for row in rows)) + PADDING for c in kept) - PADDING

    while needed(columns) > width and any(c.importance for c in columns):
        columns = [c for c in columns if c is not max(columns, key=lambda c: c.importance)]
    return columns
