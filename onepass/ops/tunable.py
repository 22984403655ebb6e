"""What an op tells the tuner about itself: `ops/<op>/tunable.py` holds one `Tunable` as `TUNABLE`.

An op has one where a kernel of it has a choice of configs, and dispatch's `prepare` takes one from `config.choose`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onepass.ops.spec import Inputs

Config = Any
"""A NamedTuple of integers."""


@dataclass(frozen=True)
class Tunable:
    """A kernel whose config is chosen by N, the length of a row, and x's dtype, and by nothing else.

    It must not depend on the number of rows: a row's bits would then depend on its batch.

    `heuristic(n, dtype)` is the config without tuning, `candidates(n, dtype)` are those to try, the heuristic's among
    them. `bind(config, inputs, out)` compiles the kernel and gives a call of it alone: inputs as the op's spec makes
    them for a shape (rows, n), `out` the keyword arguments of its out-form. `sizes` are the N of well-known models.
    """

    op: str
    backend: str
    heuristic: Callable[[int, torch.dtype], Config]
    candidates: Callable[[int, torch.dtype], list[Config]]
    bind: Callable[[Config, Inputs, Inputs], Callable[[], object]]
    sizes: tuple[int, ...]


def has_tunable(op: str) -> bool:
    """Whether an op of `onepass.dispatch.TABLE` can be tuned."""
    return importlib.util.find_spec(f"onepass.ops.{op}.tunable") is not None


def load(op: str) -> Tunable:
    """The tunable of an op that has one."""
    return importlib.import_module(f"onepass.ops.{op}.tunable").TUNABLE
