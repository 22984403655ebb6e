"""The picture of a run: speed-up over eager against tensor size, and under it the share of the copy ceiling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onepass.bench.providers import EAGER
from onepass.bench.record import Row, Run
from onepass.bench.style import THEMES, Mark, Theme, dress, mark, new_figure, save, spread
from onepass.bench.table import bytes_text

COLUMN_INCHES, HEIGHT_INCHES = 5.4, 6.2
LABEL_GAP = 0.062
TITLES = {"layer_norm_silu": "LayerNorm + SiLU"}

Figure = Callable[[Row], float | None]


def draw_run(run: Run, stem: Path) -> list[Path]:
    """Write `<stem>.png` and `<stem>-dark.png`, one column of panels a dtype. Nothing timed: no picture."""
    rows = [row for row in run.rows if row.speedup and row.data == "random"]
    return [save(_draw(run, rows, theme), stem, theme) for theme in THEMES] if rows else []


def _draw(run: Run, rows: list[Row], theme: Theme) -> Any:
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = new_figure(theme, COLUMN_INCHES * len(dtypes), HEIGHT_INCHES)
    grid = figure.subplots(2, len(dtypes), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 2))
    kind = "kernel time" if run.machine.device != "cpu" else "time"
    title = f"{TITLES.get(run.name, run.name)}: {kind} against eager, {run.machine.name}"
    figure.suptitle(title, color=theme.text, fontsize=10.5)
    for i, dtype in enumerate(dtypes):
        of_dtype = [row for row in rows if row.dtype == dtype]
        upper, lower = grid[0][i], grid[1][i]
        _set_scales(upper, lower, rows, theme)
        _panel(upper, [row for row in of_dtype if row.provider != EAGER], lambda row: row.speedup, theme)
        _panel(lower, of_dtype, lambda row: 100 * row.copy_share if row.copy_share else None, theme)
        for axes in (upper, lower):
            dress(axes, theme)
            _cache_mark(axes, run, theme, labelled=axes is upper)
        upper.set_title(dtype)
        lower.set_xlabel("bytes of x (log scale)")
        if i == 0:
            upper.set_ylabel("speed-up over eager (log scale)")
            lower.set_ylabel("share of the copy's speed, %")
    return figure


def _set_scales(upper: Any, lower: Any, rows: Sequence[Row], theme: Theme) -> None:
    sizes = [row.tensor_bytes for row in rows]
    # Room on the right for the names of the lines.
    upper.set_xscale("log", base=2)
    upper.set_xlim(min(sizes) / 1.6, max(sizes) * (max(sizes) / min(sizes)) ** 0.36 * 1.6)
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    step = max(2, 2 * round((high - low) / 10))
    ticks = [2.0**e for e in range(low, high + 1) if e % step == 0]
    upper.set_xticks(ticks, [bytes_text(t) for t in ticks])
    upper.tick_params(axis="x", labelbottom=False)
    lower.tick_params(axis="x", labelbottom=True)

    ratios = [row.speedup for row in rows if row.speedup]
    bottom, top = min(0.9, *ratios) / 1.15, max(2.3, *ratios) * 1.3
    upper.set_yscale("log", base=2)
    upper.set_ylim(bottom, top)
    powers = [2.0**e for e in range(math.ceil(math.log2(bottom)), math.floor(math.log2(top)) + 1)]
    upper.set_yticks(powers, [f"{p:g}×" for p in powers])
    for ratio in (1, 2):
        upper.axhline(ratio, color=theme.text, linewidth=1.0 if ratio == 1 else 0.8, alpha=0.75, zorder=1)

    shares = [100 * row.copy_share for row in rows if row.copy_share]
    lower.set_ylim(0, max(110, *shares) * 1.05)
    lower.axhline(100, color=theme.text, linewidth=1.0, alpha=0.75, zorder=1)


def _panel(axes: Any, rows: Sequence[Row], figure_of: Figure, theme: Theme) -> None:
    """A line a provider through the sizes that share the commonest N; hollow marks at the other N."""
    widths = Counter(row.shape[-1] for row in rows)
    main_n = widths.most_common(1)[0][0]
    ends = []
    for provider in dict.fromkeys(row.provider for row in rows):
        look = mark(provider, theme)
        points = sorted(
            (row.tensor_bytes, row.shape[-1], y) for row in rows if row.provider == provider and (y := figure_of(row))
        )
        line = [(x, y) for x, n, y in points if n == main_n]
        other = [(x, y) for x, n, y in points if n != main_n]
        style = {"color": look.colour, "marker": look.marker, "markersize": 4.5}
        if line:
            axes.plot(*zip(*line, strict=True), linestyle=look.line, linewidth=1.6, zorder=3, **style)
            ends.append((provider, look, line[-1]))
        if other:
            axes.plot(*zip(*other, strict=True), linestyle="", markerfacecolor="none", alpha=0.8, zorder=2, **style)
    _name_lines(axes, ends)
    if len(widths) > 1:
        note = f"lines: N = {main_n}; hollow: other N"
        axes.text(0.015, 0.03, note, transform=axes.transAxes, fontsize=7, color=theme.faint)


def _name_lines(axes: Any, ends: Sequence[tuple[str, Mark, tuple[float, float]]]) -> None:
    """The provider's name right of its line, moved apart where lines end together, with a thin leader."""
    to_fraction = axes.transData + axes.transAxes.inverted()
    ends_at = [to_fraction.transform(end) for _, _, end in ends]
    right = max((x for x, _ in ends_at), default=0.0) + 0.05
    gap = LABEL_GAP * (1 if axes.get_subplotspec().rowspan.start == 0 else 1.5)
    heights = spread([y for _, y in ends_at], gap, 0.04, 0.97)
    for (provider, look, end), height in zip(ends, heights, strict=True):
        axes.annotate(
            provider,
            xy=end,
            xytext=(right, height),
            textcoords=axes.transAxes,
            fontsize=7.5,
            color=look.colour,
            va="center",
            arrowprops={"arrowstyle": "-", "color": look.colour, "linewidth": 0.5, "alpha": 0.6, "shrinkB": 3},
        )


def _cache_mark(axes: Any, run: Run, theme: Theme, labelled: bool) -> None:
    """Where x and y together fill the last-level cache."""
    if not run.machine.cache_bytes:
        return
    axes.axvline(run.machine.cache_bytes / 2, color=theme.faint, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    if labelled:
        level = "L3" if run.machine.device == "cpu" else "L2"
        axes.annotate(
            f"x and y fill the\n{level} of {bytes_text(run.machine.cache_bytes)}",
            xy=(run.machine.cache_bytes / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -2),
            textcoords="offset points",
            fontsize=7,
            color=theme.faint,
            ha="right",
            va="top",
        )
