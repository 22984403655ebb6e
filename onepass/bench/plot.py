"""The picture of a run: speed-up over eager against tensor size, and under it the share of the copy ceiling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onepass.bench.record import Row, Run
from onepass.bench.style import THEMES, Mark, Theme, dress, mark, new_figure, save, spread
from onepass.bench.table import bytes_text

COLUMN_INCHES, HEIGHT_INCHES = 5.4, 6.2
# In parts of the panel's width and height.
LABELS_FROM, LABEL_GAP = 0.76, 0.055
# The sizes span at least this factor, so that a run of one size has an axis too.
NARROWEST = 64
# A share far above 100 % comes from a disturbed copy; the panel is for those below.
SHARE_LIMIT = 200
TITLES = {"layer_norm_silu": "LayerNorm + SiLU"}

Figure = Callable[[Row], float | None]
End = tuple[str, Mark, tuple[float, float]]


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
        main_n, note = _main_n(of_dtype)
        ends = _panel(upper, of_dtype, lambda row: row.speedup, main_n, theme)
        _panel(lower, of_dtype, lambda row: 100 * row.copy_share if row.copy_share else None, main_n, theme)
        _name_lines(upper, ends, theme)
        upper.set_title(dtype)
        lower.set_xlabel(f"bytes of x (log scale){note}")
        if i == 0:
            upper.set_ylabel("speed-up over eager (log scale)")
            lower.set_ylabel(f"share of the {rows[0].ceiling}'s speed, %")
        for axes in (upper, lower):
            dress(axes, theme)
            _cache_mark(axes, run, theme, labelled=axes is upper)
    return figure


def _set_scales(upper: Any, lower: Any, rows: Sequence[Row], theme: Theme) -> None:
    sizes = [row.tensor_bytes for row in rows]
    upper.set_xscale("log", base=2)
    # The sizes take the part of the width that the names of the lines leave.
    margin = max(1.6, (NARROWEST / (max(sizes) / min(sizes))) ** 0.5)
    left, right = min(sizes) / margin, max(sizes) * margin
    upper.set_xlim(left, left * (right / left) ** (1 / (LABELS_FROM - 0.03)))
    low, high = math.ceil(math.log2(left)), math.floor(math.log2(right))
    step = max(2, 2 * round((high - low) / 10))
    ticks = [2.0**e for e in range(low, high + 1) if e % step == 0]
    upper.set_xticks(ticks, [bytes_text(t) for t in ticks])
    upper.tick_params(axis="x", labelbottom=False)
    lower.tick_params(axis="x", labelbottom=True)

    ratios = [row.speedup for row in rows if row.speedup]
    bottom, highest = min(0.9, *ratios) / 1.15, max(2.3, *ratios)
    top = bottom * (highest / bottom) ** (1 / 0.87)  # the words on the cache stand above the lines
    upper.set_yscale("log", base=2)
    upper.set_ylim(bottom, top)
    powers = [2.0**e for e in range(math.ceil(math.log2(bottom)), math.floor(math.log2(top)) + 1)]
    upper.set_yticks(powers, [f"{p:g}×" for p in powers])
    for ratio in (1, 2):
        _level(upper, ratio, theme)

    shares = [100 * row.copy_share for row in rows if row.copy_share]
    lower.set_ylim(0, min(SHARE_LIMIT, max(110, *shares) * 1.05))
    _level(lower, 100, theme)


def _level(axes: Any, y: float, theme: Theme) -> None:
    """A line to read the others against; it ends where their names begin."""
    axes.axhline(y, xmax=LABELS_FROM - 0.03, color=theme.text, linewidth=1.0, alpha=0.75, zorder=1)


def _main_n(rows: Sequence[Row]) -> tuple[int, str]:
    """The commonest N, whose sizes a line connects, and the words for that."""
    widths = Counter(row.shape[-1] for row in rows)
    main_n = widths.most_common(1)[0][0]
    return main_n, f". Lines: N = {main_n}; hollow: other N" if len(widths) > 1 else ""


def _panel(axes: Any, rows: Sequence[Row], figure_of: Figure, main_n: int, theme: Theme) -> list[End]:
    """A line a provider through the sizes of the main N, hollow marks at the others; where the lines end."""
    ends: list[End] = []
    for provider in dict.fromkeys(row.provider for row in rows):
        look = mark(provider, theme)
        found = [(row, y) for row in rows if row.provider == provider and (y := figure_of(row))]
        line = sorted((row.tensor_bytes, y) for row, y in found if row.shape[-1] == main_n)
        other = [(row.tensor_bytes, y) for row, y in found if row.shape[-1] != main_n]
        style = {"color": look.colour, "marker": look.marker, "markersize": look.size, "zorder": look.layer}
        if line:
            axes.plot(*zip(*line, strict=True), linestyle=look.line, linewidth=1.6, **style)
            ends.append((provider, look, line[-1]))
        if other:
            axes.plot(*zip(*other, strict=True), linestyle="", markerfacecolor="none", alpha=0.8, **style)
    return ends


def _name_lines(axes: Any, ends: Sequence[End], theme: Theme) -> None:
    """Mark and name of each line right of its end, moved apart where lines end together, with a thin leader."""
    to_fraction = axes.transData + axes.transAxes.inverted()
    heights = spread([to_fraction.transform(end)[1] for _, _, end in ends], LABEL_GAP, 0.03, 0.97)
    for (provider, look, end), height in zip(ends, heights, strict=True):
        axes.annotate(
            "",
            xy=end,
            xytext=(LABELS_FROM, height),
            textcoords=axes.transAxes,
            arrowprops={"arrowstyle": "-", "color": look.colour, "linewidth": 0.5, "alpha": 0.6, "shrinkB": 3},
        )
        axes.plot(LABELS_FROM, height, transform=axes.transAxes, color=look.colour, marker=look.marker, markersize=4)
        axes.text(
            LABELS_FROM + 0.02, height, provider, transform=axes.transAxes, fontsize=7.5, color=theme.text, va="center"
        )


def _cache_mark(axes: Any, run: Run, theme: Theme, labelled: bool) -> None:
    """Where x and y together fill the last-level cache, if that is within the sizes."""
    left, right = axes.get_xlim()
    if not left < run.machine.cache_bytes / 2 < right:
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
