"""What `onepass tune` prints: one table for each N and dtype."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onepass.tuning.search import Outcome, Trial, config_text, row_counts, speedup


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Candidates, fastest first: µs for each number of rows, and the speed against the heuristic's config."""
    counts = row_counts(outcome.n, outcome.dtype)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("config", overflow="fold")
    for rows in counts:
        table.add_column(f"{rows} row{'s' if rows > 1 else ''}, µs", justify="right")
    table.add_column("against the heuristic", justify="right")
    for trial in sorted(outcome.trials, key=lambda trial: _against(outcome, trial)):
        style = "bold" if trial is outcome.best else "dim" if trial.why_not else ""
        times = [f"{trial.time_us[rows]:.2f}" if rows in trial.time_us else "–" for rows in counts]
        table.add_row(config_text(trial.config), *times, _verdict(outcome, trial), style=style)
    console.print(Text(outcome.title, style="bold"))
    console.print(table)
    for trial in outcome.trials:
        if trial.why_not:
            console.print(Text(f"  {config_text(trial.config)}: {trial.why_not}", style="yellow"))


def print_saved(outcome: Outcome, stored: bool, path: Path, console: Console) -> None:
    """What the search changed."""
    if outcome.best is None:
        text = "no candidate runs and gives right results: nothing is kept"
    elif outcome.best is outcome.heuristic:
        text = f"the heuristic's config stays{f'; kept in {path}' if stored else ''}"
    else:
        gain = "" if outcome.gain is None else f", {outcome.gain:.3f} times as fast as the heuristic's"
        text = f"best: {config_text(outcome.best.config)}{gain}; kept in {path}"
    console.print(Text(text), soft_wrap=True)
    console.print()


def _against(outcome: Outcome, trial: Trial) -> float:
    """Time over the heuristic's; what did not run comes last."""
    if trial.why_not:
        return float("inf")
    return 1.0 if outcome.heuristic.why_not else speedup(trial, outcome.heuristic)


def _verdict(outcome: Outcome, trial: Trial) -> str:
    if trial.why_not:
        return "out"
    if trial is outcome.heuristic:
        return "heuristic"
    return "" if outcome.heuristic.why_not else f"{speedup(outcome.heuristic, trial):.3f}×"
