"""Typed benchmark rows, and the JSON and CSV files that keep them.

A file is written beside its final name and moved into place, so an interrupted run leaves the old file or none.
Rows hold percentiles, not samples: a file stays readable, and small enough to commit.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepass.errors import OutputFolderError

if TYPE_CHECKING:
    import torch

FORMAT = 1
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Times:
    """Percentiles of time per call in microseconds, over `samples` samples; `best` is the shortest."""

    best: float
    p20: float
    p50: float
    p80: float
    p99: float
    samples: int

    @classmethod
    def of(cls, samples_us: list[float]) -> Times:
        """Percentiles with linear interpolation between the sorted samples."""
        ordered = sorted(samples_us)

        def at(fraction: float) -> float:
            position = fraction * (len(ordered) - 1)
            low = int(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

        return cls(ordered[0], at(0.2), at(0.5), at(0.8), at(0.99), len(ordered))


@dataclass(frozen=True)
class Row:
    """One provider at one size.

    `status` is "ok", "wrong" (checked and not timed), "unavailable" or "failed"; `reason` says why when not ok.
    `min_bytes` is what any implementation must move; `model_bytes` is what this one moves if every kernel of it
    reads its inputs and writes its outputs once. `bandwidth_tbps` is model_bytes over the kernel time.
    `copy_us` is a copy that moves min_bytes, read and written together, timed in the same run and the same way;
    `copy_share` is that time over the kernel time: 1 is a copy's speed. Where `ceiling` is "read" both are of a read of
    min_bytes instead. `tensor_bytes` is the size of the main input.
    `call_us` is the time as a user makes it, `host_us` the part of it that Python takes; on a CPU there is only one
    time, `kernel_us`. `page_faults` counts a call's. `speedup` is over 'eager' in kernel time, `call_speedup` in
    call time, `warm_speedup` over 'eager, warm heap'.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    data: str
    provider: str
    status: str
    reason: str = ""
    backend: str = ""
    method: str = ""
    error: float | None = None
    error_bound: float | None = None
    checked: str = ""
    kernel_us: Times | None = None
    call_us: Times | None = None
    host_us: Times | None = None
    calls_per_sample: int = 0
    rotated_bytes: int = 0
    launches: float | None = None
    launches_from: str = ""
    page_faults: float | None = None
    tensor_bytes: int = 0
    min_bytes: int = 0
    model_bytes: int = 0
    flops: int = 0
    bandwidth_tbps: float | None = None
    copy_us: float | None = None
    copy_share: float | None = None
    ceiling: str = "copy"
    speedup: float | None = None
    call_speedup: float | None = None
    warm_speedup: float | None = None

    @property
    def case(self) -> tuple[str, tuple[int, ...], str, str]:
        """What all providers of one comparison share."""
        return self.op, self.shape, self.dtype, self.data


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches in the same run, at best: bandwidths in TB/s (read + written), matmul in TFLOP/s."""

    copy_tbps: float
    copy_bytes: int
    cache_copy_tbps: float
    cache_copy_bytes: int
    read_tbps: float
    matmul_tflops: dict[str, float]
    tiny_kernel_us: float


@dataclass(frozen=True)
class Machine:
    """The facts that a figure depends on. `cache_bytes` is the last-level cache; 0 where it is not known."""

    device: str
    name: str
    slug: str
    cores: int
    threads: int
    memory_bytes: int
    cache_bytes: int
    system: str


@dataclass(frozen=True)
class Run:
    """All rows of one run, with what is needed to repeat and to judge it.

    `load` is how many programs wanted a core in the minute before it began; `left_out` are the cases that its time
    limit left out.
    """

    name: str
    command: str
    date: str
    machine: Machine
    versions: dict[str, str]
    rows: tuple[Row, ...]
    ceilings: Ceilings | None = None
    reading: tuple[str, ...] = ()
    seconds: float = 0.0
    load: float = 0.0
    left_out: tuple[str, ...] = ()
    format: int = field(default=FORMAT)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name that tables and files use."""
    return DTYPE_NAMES[str(dtype).removeprefix("torch.")]


def write_json(run: Run, path: Path) -> None:
    """Write a run as indented JSON, with figures cut to what they can carry."""
    with atomic_file(path) as file:
        file.write(json.dumps(_plain(run), indent=1, ensure_ascii=False).encode() + b"\n")


def write_csv(run: Run, path: Path) -> None:
    """Write one line a row; every line repeats date, machine, versions and command."""
    common: dict[str, Any] = {
        "date": run.date,
        "machine": run.machine.name,
        "versions": " ".join(f"{name}={version}" for name, version in run.versions.items()),
        "command": run.command,
    }
    lines = [common | _flat(row) for row in run.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode())


def load(path: Path) -> Run:
    """Read a run written by `write_json`.

    Raises:
        ValueError: the file is no run, or of another format.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a run of format {FORMAT}")
    raw["machine"] = Machine(**raw["machine"])
    raw["ceilings"] = Ceilings(**raw["ceilings"]) if raw["ceilings"] else None
    raw["reading"], raw["left_out"] = tuple(raw["reading"]), tuple(raw["left_out"])
    raw["rows"] = tuple(_row(r) for r in raw["rows"])
    return Run(**raw)


def _row(raw: dict[str, Any]) -> Row:
    for name in ("kernel_us", "call_us", "host_us"):
        if raw.get(name):
            raw[name] = Times(**raw[name])
    return Row(**(raw | {"shape": tuple(raw["shape"])}))


def check_folder(folder: Path) -> None:
    """Whether files can be written in `folder`, which need not exist yet. Leaves nothing behind.

    Raises:
        OutputFolderError: they cannot, and why.
    """
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise OutputFolderError(folder, f"{nearest} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise OutputFolderError(folder, error.strerror or str(error)) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Any]:
    """A binary file that appears under its name only when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, floats to 5 significant digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Rows are many: what a row leaves at its default is left out, and comes back as the default.
        items = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
        short = isinstance(value, Row)
        return {k: _plain(v) for k, (v, default) in items.items() if not (short and v == default)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _flat(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for f in dataclasses.fields(row):
        value = getattr(row, f.name)
        if f.name in ("kernel_us", "call_us", "host_us"):
            for key in ("best", "p20", "p50", "p80", "p99", "samples"):
                figure = getattr(value, key) if value else None
                line[f"{f.name.removesuffix('_us')}_{key}{'' if key == 'samples' else '_us'}"] = _plain(figure)
        else:
            line[f.name] = "x".join(map(str, value)) if f.name == "shape" else _plain(value)
    return line
