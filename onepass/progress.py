"""The progress bar: on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str], None]


@contextmanager
def progress_bar(enabled: bool = True, after_seconds: float = 0.0) -> Iterator[tuple[Advance, Callable[[int], None]]]:
    """Gives a function that steps on, with the text of the step that begins, and one that sets the total.

    The bar is drawn at the steps only: a thread that draws would take time from what is measured. What is over
    before `after_seconds` have passed draws nothing.
    """
    if not (enabled and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda text: None, lambda total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    progress = Progress(
        BarColumn(bar_width=12),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        expand=True,
        transient=True,
        auto_refresh=False,
    )
    task = progress.add_task("starting", total=None)
    begin = time.monotonic()

    def advance(text: str) -> None:
        progress.update(task, advance=1, description=text)
        if progress.live.is_started:
            progress.refresh()
        elif time.monotonic() - begin >= after_seconds:
            progress.start()

    def set_total(total: int) -> None:
        progress.update(task, total=total, completed=0)

    try:
        yield advance, set_total
    finally:
        if progress.live.is_started:
            progress.stop()
