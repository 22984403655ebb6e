"""`onepass tune`, from its arguments to the file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console

from onepass import dispatch
from onepass.errors import NoBackendError, UnknownNameError
from onepass.launch.device import architecture, default_device
from onepass.ops import spec as specs
from onepass.ops.tunable import Tunable, has_tunable, load
from onepass.ops.tuned import shipped_file
from onepass.progress import progress_bar
from onepass.tuning.report import print_outcome, print_saved
from onepass.tuning.search import count_steps, search
from onepass.tuning.store import file_for, save


def tune(
    op: str, sizes: Sequence[int], dtypes: Sequence[torch.dtype], ship: bool, console: Console, draw: bool
) -> None:
    """Search for each N and dtype, print, and keep each result at once: what is interrupted loses one search.

    Raises:
        UnknownNameError: no op that can be tuned has this name.
        NoBackendError: there is no GPU.
        OutputFolderError: results could not be kept.
    """
    known = tuple(name for name in dispatch.TABLE if has_tunable(name))
    if op not in known:
        raise UnknownNameError("op to tune", op, known)
    device = default_device()
    if device.type != "cuda":
        raise NoBackendError("tuning times kernels on a GPU, and torch finds none here")
    path, shipped = file_for(op, device, ship), shipped_file(op, architecture(device))
    tunable = load(op)
    cases = [(n, dtype) for n in sizes or tunable.sizes for dtype in dtypes or (torch.bfloat16,)]
    for i, (n, dtype) in enumerate(cases):
        # A bar for each search: the tables between them stay on the screen.
        with progress_bar(draw) as (advance, set_total):
            set_total(count_steps(tunable, n, dtype))
            outcome = search(
                tunable,
                n,
                dtype,
                device,
                lambda text, i=i: advance(f"{i + 1} of {len(cases)}, {text}"),  # type: ignore[misc]
            )
        print_outcome(outcome, console)
        other = _other_backend(tunable, n, dtype, device)
        if other:
            console.print(f"Plain calls of this size run on '{other}'; '{tunable.backend}' runs what it refuses.")
        print_saved(outcome, save(outcome, path, shipped, device), path, console)


def _other_backend(tunable: Tunable, n: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """The backend that runs plain calls, where it is not the tuned one."""
    found = dispatch.explain(tunable.op, **specs.load(tunable.op).make_inputs((1, n), dtype, device, 0)).backend
    return found if found != tunable.backend else None
