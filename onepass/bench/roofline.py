"""The roofline of this machine: its measured ceilings, and every provider's kernels as points under them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from onepass.bench.plot import TITLES
from onepass.bench.record import Ceilings, Row, Run
from onepass.bench.style import THEMES, Theme, dress, mark, new_figure, save
from onepass.bench.table import bytes_text, figure

WIDTH_INCHES, HEIGHT_INCHES = 7.0, 4.8
# Kernels of one op have one intensity and would hide each other: neighbours stand this factor apart.
SIDESTEP = 1.07


def draw_roofline(run: Run, stem: Path) -> list[Path]:
    """Write `<stem>.png` and `<stem>-dark.png`. Nothing timed: no picture."""
    rows = [row for row in run.rows if row.kernel_us and row.flops and row.data == "random"]
    return [save(_draw(run, rows, theme), stem, theme) for theme in THEMES] if rows and run.ceilings else []


def _draw(run: Run, rows: list[Row], theme: Theme) -> Any:
    sheet = new_figure(theme, WIDTH_INCHES, HEIGHT_INCHES)
    axes = sheet.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    _roofs(axes, run, rows, theme)
    providers = list(dict.fromkeys(row.provider for row in rows))
    for i, provider in enumerate(providers):
        look = mark(provider, theme)
        own = [row for row in rows if row.provider == provider]
        step = SIDESTEP ** (i - (len(providers) - 1) / 2)
        axes.plot(
            [row.flops / row.model_bytes * step for row in own],
            [_gflops(row) for row in own],
            linestyle="",
            color=look.colour,
            marker=look.marker,
            markersize=look.size,
            alpha=0.85,
            label=provider,
            zorder=look.layer,
        )
    axes.set_title(f"{TITLES.get(run.name, run.name)} under the roofline of {run.machine.name}")
    axes.set_xlabel("flops a byte moved, by the model (points of one intensity stand side by side)")
    axes.set_ylabel("GFLOP/s (log scale)")
    dress(axes, theme)
    legend = axes.legend(loc="lower right", fontsize=7.5, frameon=False)
    for text in legend.get_texts():
        text.set_color(theme.text)
    sheet.draw_without_rendering()  # lays the figure out: the slope of the roofs on paper is known from here on
    assert run.ceilings is not None
    _name_slanted(axes, run.ceilings, theme)
    return sheet


def _gflops(row: Row) -> float:
    assert row.kernel_us is not None
    return row.flops / row.kernel_us.p50 / 1e3


def _roofs(axes: Any, run: Run, rows: list[Row], theme: Theme) -> None:
    """Slanted: bandwidth of memory and of the cache. Level: matmul, which only products can reach."""
    ceilings = run.ceilings
    assert ceilings is not None
    peak = max(ceilings.matmul_tflops.values()) * 1e3
    low = min(row.flops / row.model_bytes for row in rows) / 8
    high = max(4 * peak / (ceilings.copy_tbps * 1e3), 40 * low)
    bottom = min(_gflops(row) for row in rows) / 2
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, peak * 3)
    for _, tbps, _, line in _bandwidths(ceilings):
        ridge = min(peak / (tbps * 1e3), high)
        axes.plot([low, ridge], [low * tbps * 1e3, ridge * tbps * 1e3], color=theme.text, linestyle=line, linewidth=1.3)
    for dtype, tflops in ceilings.matmul_tflops.items():
        level = tflops * 1e3
        axes.plot([level / (ceilings.copy_tbps * 1e3), high], [level, level], color=theme.text, linewidth=1.3)
        axes.annotate(
            f"matmul {dtype}, {figure(tflops)} TFLOP/s",
            xy=(high, level),
            xytext=(-2, 3),
            textcoords="offset points",
            fontsize=7,
            color=theme.text,
            ha="right",
            va="bottom",
        )


def _bandwidths(ceilings: Ceilings) -> list[tuple[str, float, int, str]]:
    """The slanted roofs: name, TB/s, bytes of the copy, line style."""
    return [
        ("memory", ceilings.copy_tbps, ceilings.copy_bytes, "-"),
        ("cache", ceilings.cache_copy_tbps, ceilings.cache_copy_bytes, "--"),
    ]


def _name_slanted(axes: Any, ceilings: Ceilings, theme: Theme) -> None:
    """Words along the slanted roofs, above the higher and below the lower; for a laid-out figure."""
    highest = max(tbps for _, tbps, _, _ in _bandwidths(ceilings))
    (low, high), (_, top) = axes.get_xlim(), axes.get_ylim()
    for name, tbps, size, _ in _bandwidths(ceilings):
        slope = tbps * 1e3
        # Left of the points, where the roofs stand free.
        x = low * (min(high, top / slope) / low) ** 0.16
        (x0, y0), (x1, y1) = axes.transData.transform([(x, x * slope), (2 * x, 2 * x * slope)])
        above = tbps == highest
        axes.annotate(
            f"{name}: copy of {bytes_text(size)}, {figure(slope)} GB/s",
            xy=(x, x * slope),
            xytext=(0, 3 if above else -3),
            textcoords="offset points",
            fontsize=7,
            color=theme.text,
            rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
            rotation_mode="anchor",
            ha="center",
            va="bottom" if above else "top",
        )
