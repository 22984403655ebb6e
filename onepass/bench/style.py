"""How pictures look: colours that colour-blind readers tell apart, a marker each for grey print, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.bench.providers import COMPILE, EAGER, EAGER_WARM, ONEPASS, ONEPASS_OUT
from onepass.bench.record import atomic_file

DPI = 200


@dataclass(frozen=True)
class Theme:
    """`suffix` goes into the file's name."""

    suffix: str
    background: str
    text: str
    faint: str
    colours: dict[str, str]


@dataclass(frozen=True)
class Mark:
    """How one provider is drawn."""

    colour: str
    marker: str
    line: str
    size: float
    layer: int


# Okabe and Ito's palette; on dark the same hues, lighter.
LIGHT = Theme(
    "",
    "#ffffff",
    "#1a1a1a",
    "#8a8a8a",
    {
        ONEPASS: "#0072b2",
        ONEPASS_OUT: "#56b4e9",
        EAGER: "#1a1a1a",
        EAGER_WARM: "#777777",
        COMPILE: "#d55e00",
        "plain triton": "#009e73",
        "flashinfer": "#6f4bb0",
        "": "#cc79a7",
    },
)
DARK = Theme(
    "-dark",
    "#14171c",
    "#e8e8e8",
    "#7d848e",
    {
        ONEPASS: "#4aa8e8",
        ONEPASS_OUT: "#9fd8ff",
        EAGER: "#f2f2f2",
        EAGER_WARM: "#a8a8a8",
        COMPILE: "#ff8a3d",
        "plain triton": "#2fd0a0",
        "flashinfer": "#b79cff",
        "": "#e6a0c8",
    },
)
THEMES = (LIGHT, DARK)
_MARKERS = {
    ONEPASS: ("o", "-"),
    ONEPASS_OUT: ("s", "-"),
    EAGER: ("x", ":"),
    EAGER_WARM: ("P", "--"),
    COMPILE: ("^", "-."),
    "plain triton": ("D", (0, (5, 1))),
    "flashinfer": ("<", (0, (2, 1))),
    "": ("v", (0, (3, 1, 1, 1))),
}


def mark(provider: str, theme: Theme) -> Mark:
    key = provider if provider in _MARKERS else ""
    marker, line = _MARKERS[key]
    # The two forms of ours often coincide: the one below is drawn larger, so that both are seen.
    size = 6.5 if provider == ONEPASS_OUT else 4.5
    return Mark(theme.colours[key], marker, line, size, 4 if provider == ONEPASS else 3)  # type: ignore[arg-type]


def new_figure(theme: Theme, width: float, height: float) -> Any:
    """A figure that belongs to no global state, in the theme's colours."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=theme.background, layout="constrained")


def dress(axes: Any, theme: Theme) -> None:
    """Colours of an axes, and only the spines that carry a scale."""
    axes.set_facecolor(theme.background)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(theme.faint)
    axes.tick_params(colors=theme.text, which="both", labelsize=8)
    axes.tick_params(which="minor", length=0)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(theme.text)
        label.set_fontsize(9)
    axes.grid(visible=True, which="major", color=theme.faint, alpha=0.2, linewidth=0.6)


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions moved apart to at least `gap`, in order, as little as that takes, inside [low, high]."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    placed = [positions[i] for i in order]
    for i, value in enumerate(placed):
        placed[i] = max(value, low if i == 0 else placed[i - 1] + gap)
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = min(placed[i], high if i == len(placed) - 1 else placed[i + 1] - gap)
    result = [0.0] * len(positions)
    for i, value in zip(order, placed, strict=True):
        result[i] = value
    return result


def save(figure: Any, stem: Path, theme: Theme) -> Path:
    """Write `<stem><suffix>.png`."""
    path = stem.with_name(f"{stem.name}{theme.suffix}.png")
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=DPI, facecolor=theme.background)
    return path
