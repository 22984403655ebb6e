"""Writes tuned configs, into the user's file or into the package's; `onepass/ops/tuned.py` reads them.

Only what changes a call is kept: where the heuristic's config wins there is no entry, except in the user's file to
take the place of one that the package ships.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from onepass.bench import machine
from onepass.bench.record import atomic_file, check_folder
from onepass.errors import OutputFolderError
from onepass.launch.device import architecture
from onepass.ops.tuned import FORMAT, Entry, Key, dtype_key, read, shipped_file, user_file
from onepass.tuning.search import Outcome, Trial

VERSIONS = ("onepass", "torch", "triton", "cuda", "hip")


def file_for(op: str, device: torch.device, ship: bool) -> Path:
    """Where results for this device go; it can be written.

    Raises:
        OutputFolderError: it cannot.
    """
    arch = architecture(device)
    path = shipped_file(op, arch) if ship else user_file(op, arch)
    try:
        check_folder(path.parent)
    except OutputFolderError as error:
        how = "--ship writes into the package's folder." if ship else "Choose another with ONEPASS_CACHE_DIR."
        raise OutputFolderError(path.parent, error.why, how) from error
    return path


def save(outcome: Outcome, path: Path, shipped: Path, device: torch.device) -> bool:
    """Put an outcome into the file `path`; whether it holds an entry for it afterwards.

    `shipped` is the package's file, which may be `path`. An outcome without a best config changes nothing.
    """
    entries = read(path)
    key = Key(outcome.tunable.backend, outcome.n, dtype_key(outcome.dtype))
    if outcome.best is None:
        return key in entries
    below = read(shipped).get(key) if path != shipped else None
    without = below.config if below else outcome.heuristic.config._asdict()
    before = dict(entries)
    entries.pop(key, None)
    if outcome.best.config._asdict() != without:
        entries[key] = _entry(key, outcome, outcome.best, device)
    if entries != before:
        _write(path, sorted(entries.values(), key=lambda entry: entry.key))
    return key in entries


def _entry(key: Key, outcome: Outcome, best: Trial, device: torch.device) -> Entry:
    versions = machine.versions()
    return Entry(
        *key,
        config=best.config._asdict(),
        time_us=_times(best),
        heuristic_us=_times(outcome.heuristic),
        device=machine.describe(device).name,
        versions={name: versions[name] for name in VERSIONS if name in versions},
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _times(trial: Trial) -> dict[str, float]:
    return {str(rows): float(f"{us:.4g}") for rows, us in trial.time_us.items()}


def _write(path: Path, entries: Sequence[Entry]) -> None:
    content = {"format": FORMAT, "entries": [asdict(entry) for entry in entries]}
    with atomic_file(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
