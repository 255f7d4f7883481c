"""What ``figures`` are made of: style, palette, lines, bars, ticks, and SVG for the page.

Colour says which run, line style which series; with a single run, colour says which series. Long runs are binned so
that a figure stays small while spikes stay visible: a line of means inside a band from minimum to maximum.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

INK, MUTED, GRID = "#1f2a37", "#5c6773", "#d5dae1"
"""Text, secondary text and grid lines. The page replaces these and ``PALETTE`` by its own light and dark variants."""

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#a65392", "#1795c5", "#b07900", "#5b4fbb", "#7a7a00")
"""Okabe and Ito's hues, which the common colour-vision deficiencies keep apart; the light ones darkened to 3:1."""

LINE_STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")

BINS = 240

# Any: matplotlib 3.11 types its settings as a Literal of all their names, earlier releases as strings.
STYLE: Any = {
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.titley": 1.0,
    "axes.titlecolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "sat_jax",
}

# Inches. Fixed margins cost nothing; measuring every label for a layout took half of the drawing time.
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 5.0, 0.56, 0.14, 0.28, 0.46
_HEIGHTS = {1: 3.9, 2: 3.9, 3: 4.6}


def new_figure(rows: int, gap: float, head: float) -> tuple[Figure, list[Axes]]:
    """One to three panels, one above the other, as wide as a phone's screen at the font's natural size.

    ``gap`` inches between two of them take their titles and ticks; ``head`` inches stay free above everything.
    """
    height = _HEIGHTS[rows] + head
    panel = (height - head - _TOP - _BOTTOM - gap * (rows - 1)) / rows
    figure = Figure(figsize=(_WIDTH, height))
    figure.subplots_adjust(
        left=_LEFT / _WIDTH,
        right=1 - _RIGHT / _WIDTH,
        top=1 - (head + _TOP) / height,
        bottom=_BOTTOM / height,
        hspace=gap / panel,
    )
    return figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def look(i: int) -> tuple[str, Any]:
    """Colour of run i; its line style changes once the colours are used up."""
    return PALETTE[i % len(PALETTE)], LINE_STYLES[i // len(PALETTE) % len(LINE_STYLES)]


def binned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Neighbouring points, [N] by rising steps, merged into ``BINS``: mean step, mean, minimum and maximum.

    Up to four times as many points stay as they are: with one or two points a bin, the range between minimum and
    maximum would be a line with a spike here and there.
    """
    if len(steps) <= 4 * BINS:
        return steps.astype(np.float64), values, values, values
    starts = np.unique(np.linspace(0, len(steps), BINS, endpoint=False).astype(int))
    counts = np.diff(np.append(starts, len(steps)))
    mean_step = np.add.reduceat(steps.astype(np.float64), starts) / counts
    mean = np.add.reduceat(values, starts) / counts
    return mean_step, mean, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred running mean over about a twentieth of the points, shorter at the ends; [N] -> [N]."""
    half = len(values) // 40
    total = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def curve(axes: Axes, series: tuple[np.ndarray, np.ndarray], smooth: bool, behind: bool, **line: Any) -> None:
    """One metric: smoothed or as it is, with its range, where binned, or its raw values ``behind`` it."""
    steps, values = series
    if not len(steps):
        return
    x, mean, low, high = binned(steps, values)
    if len(x) < len(steps):
        axes.fill_between(x, low, high, color=line["color"], alpha=0.2, linewidth=0)
    elif smooth and behind and len(x) >= 40:
        axes.plot(x, mean, color=line["color"], alpha=0.3, linewidth=0.8)
    axes.plot(x, smoothed(mean) if smooth else mean, marker="." if len(x) == 1 else None, **line)


def bars(axes: Axes, counts: Sequence[Mapping[float, float]], colors: Sequence[str], labels: Sequence[str]) -> None:
    """Shares by value, one bar per series side by side; values too close for that are put into twenty equal bins."""
    values = sorted({value for series in counts for value in series})
    span = values[-1] - values[0]
    step = min((b - a for a, b in itertools.pairwise(values)), default=1.0)
    if step < span / 24:  # many values, or some too close together for bars that can be seen
        edges = np.linspace(values[0], values[-1], 21)
        centres, step = (edges[:-1] + edges[1:]) / 2, span / 20
    else:
        centres = np.array(values)
        edges = np.append(centres - step / 2, centres[-1] + step / 2)
    width = 0.86 * step / len(counts)
    for i, (series, color, label) in enumerate(zip(counts, colors, labels, strict=True)):
        if series:
            keys, weights = np.array(list(series)), np.array(list(series.values()), np.float64)
            shares = np.histogram(keys, bins=edges, weights=weights)[0] / weights.sum()
            offset = (i - (len(counts) - 1) / 2) * width
            axes.bar(centres + offset, shares, width=0.94 * width, color=color, label=label)
    axes.grid(visible=False, axis="x")
    room = step * max(0.7, 3 - len(centres) / 2)  # a bar or two would otherwise be as wide as the panel
    axes.set_xlim(centres[0] - room, centres[-1] + room)
    if len(centres) <= 10:
        axes.set_xticks(centres)
    axes.set_ylim(0)
    ticks(axes.yaxis, percent)


def compact(value: float, digits: int = 3) -> str:
    """A number in few characters: 0.95, 37.6k, 1.2M."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * (1 - 0.5 * 10**-digits):
            return f"{value / limit:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def percent(share: float) -> str:
    """``0.0123`` as 1.23%."""
    return f"{100 * share:.4g}%"


def tick_label(value: float) -> str:
    """Digits enough to tell neighbouring ticks apart."""
    return compact(value, 6)


def ticks(axis: Any, text: Any = tick_label, integer: bool = False) -> None:
    """At most five intervals at steps of 1, 2 or 5, with ``text`` for labels."""
    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=integer))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_scale_if_wide(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic axis where the values span more than a factor of 30 and none is negative.

    Values below a three-hundredth of the median fall off its lower end: at lag 0 a mismatch is rounding error, seven
    decades below all that follows.
    """
    positive = values[values > 0]
    if not len(positive) or (values < 0).any():
        return
    shown = positive[positive >= np.median(positive) / 300]
    if shown.max() > 30 * shown.min():
        axes.set_yscale("log")
        axes.set_ylim(shown.min() / 1.3, shown.max() * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if shown.max() < 300 * shown.min() else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))


def reference_line(axes: Axes, y: float, label: str, dashes: tuple[int, int] = (5, 3)) -> None:
    """A dashed horizontal line, named in the legend."""
    axes.axhline(y, color=INK, linewidth=0.9, linestyle=(0, dashes), label=label)


def legend(axes: Axes) -> None:
    """Of what is labelled, on the title's line at the right: never over the data."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), borderaxespad=0.1
        )


def note(axes: Axes, text: str) -> None:
    """An empty panel that says why."""
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)


def number(axes: Axes, x: float, y: float, text: str, color: str, shift: tuple[float, float]) -> None:
    """A number beside a point, ``shift`` points away from it."""
    label = axes.annotate(text, (x, y), xytext=shift, textcoords="offset points")
    label.set(va="center", ha="left" if shift[0] else "center", fontsize=8, fontweight="bold", color=color)
    label.set_annotation_clip(False)


def to_svg(figure: Figure, prefix: str) -> str:
    """The figure as an ``<svg>`` element for a page; text stays text, and the same figure gives the same bytes.

    Colours are variables of the page's style sheet, so that figures follow the reader's light or dark theme.
    ``prefix`` goes in front of every id, so that several figures can stand in one page.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg[svg.index("<svg") :])
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    # A hundredth of a point is far below a pixel, and most of the file would be further digits. Only inside tags: text
    # between them is what the reader sees.
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg).replace("\n", " ").strip()
    variables = {INK: "ink", MUTED: "muted", GRID: "grid"} | {color: f"c{i}" for i, color in enumerate(PALETTE)}
    return re.sub("|".join(variables), lambda color: f"var(--{variables[color[0]]})", svg)
