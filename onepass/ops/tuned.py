"""Tuned configs: kernel configs that were measured to be faster than the heuristic's, and the files that keep them.

An op and a GPU architecture have two files: one that the package ships, `ops/<op>/tuned/<arch>.json`, and the user's
own in the cache folder, whose entries win. `onepass tune` writes them; here they are only read, when a call's plan is
made, and once a process: a row's bits depend on the config, so all calls of a process use the same one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from onepass import settings
from onepass.errors import TunedConfigWarning
from onepass.launch.device import architecture

if TYPE_CHECKING:
    import torch

FORMAT = 1

C = TypeVar("C")


class Key(NamedTuple):
    """What an entry holds for, exactly."""

    backend: str
    n: int
    dtype: str


@dataclass(frozen=True)
class Entry:
    """The fastest config for one N and dtype, and how that was found: kernel times by number of rows."""

    backend: str
    n: int
    dtype: str
    config: dict[str, int]
    time_us: dict[str, float]
    heuristic_us: dict[str, float]
    device: str
    versions: dict[str, str]
    date: str

    @property
    def key(self) -> Key:
        return Key(self.backend, self.n, self.dtype)


def dtype_key(dtype: torch.dtype) -> str:
    """The dtype's name in the files: torch's own."""
    return str(dtype).removeprefix("torch.")


def shipped_file(op: str, arch: str) -> Path:
    """The file that comes with the package."""
    return Path(__file__).parent / op / "tuned" / f"{arch}.json"


def user_file(op: str, arch: str) -> Path:
    """The file of this machine's user."""
    return settings.cache_dir() / "tuned" / op / f"{arch}.json"


def read(path: Path) -> dict[Key, Entry]:
    """The entries of a file; none, with a warning that names it, where it cannot be used. It need not exist."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']}, not {FORMAT}")
        entries = [Entry(**entry) for entry in raw["entries"]]
        for entry in entries:
            if not all(isinstance(value, int) for value in (entry.n, *entry.config.values())):
                raise ValueError(f"a size that is no integer at n = {entry.n}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _warn(path, f"{type(error).__name__}: {error}")
        return {}
    return {entry.key: entry for entry in entries}


@cache
def _entries(op: str, arch: str) -> dict[Key, tuple[Entry, Path]]:
    found: dict[Key, tuple[Entry, Path]] = {}
    for path in (shipped_file(op, arch), user_file(op, arch)):
        found.update({key: (entry, path) for key, entry in read(path).items()})
    return found


def lookup(
    op: str,
    backend: str,
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    make: Callable[[dict[str, int]], C | None],
) -> C | None:
    """The tuned config for exactly this N and dtype on a GPU, or None.

    `make` turns the stored numbers into a config, or says None where the kernel of this version takes no such config.
    """
    arch = architecture(device)
    found = _entries(op, arch).get(Key(backend, n, dtype_key(dtype)))
    if found is None:
        return None
    entry, path = found
    config = make(entry.config)
    if config is None:
        _warn(path, f"{entry.config} is no config of this version's kernel at n = {n}, {entry.dtype}")
    return config


def forget() -> None:
    """Read the files again at the next look-up. For tests: plans that exist keep their config."""
    _entries.cache_clear()


def _warn(path: Path, why: str) -> None:
    warnings.warn(
        f"tuned configs of {path} are not used, default configs are ({why}). `onepass tune` measures them anew.",
        TunedConfigWarning,
        stacklevel=2,
    )
