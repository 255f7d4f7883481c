"""What ``figures`` are made of: style, palette, panels, bars, legends.

Colour says which run, line style which series; with a single run, colour says which series. The palette is Okabe and
Ito's, which stays apart under the common colour-vision deficiencies. Long runs are binned so that a figure stays small
while spikes stay visible: a line of means inside a band from minimum to maximum.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sat_jax.metrics import describe
from sat_jax.runs.reader import Run

INK, MUTED, GRID = "#1f2a37", "#5c6773", "#d5dae1"
"""Text, secondary text and grid lines. The report replaces these and ``PALETTE`` by its own light and dark variants."""

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#a65392", "#1795c5", "#b07900", "#5b4fbb", "#7a7a00")
"""Okabe and Ito's hues, the light ones darkened to at least 3:1 against white."""

LINE_STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")

# Any: matplotlib 3.11 types its settings as a Literal of all their names, earlier releases as strings.
_STYLE: Any = {
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
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
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "axes.formatter.useoffset": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "sat_jax",
}

Series = tuple[str, str]
"""Metric name and the short label it has in a legend."""

Plot = Callable[[Sequence[Run]], Figure]


def styled(plot: Plot) -> Plot:
    """Run a plot function under this module's style, whatever the process's own settings are."""

    @functools.wraps(plot)
    def wrapper(runs: Sequence[Run]) -> Figure:
        if not runs:
            raise ValueError("nothing to draw: 0 runs were given; give at least one")
        with matplotlib.rc_context(_STYLE):
            return plot(runs)

    return wrapper


def binned(
    steps: np.ndarray, values: np.ndarray, bins: int = 240
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Neighbouring points merged into ``bins``: mean step, mean, minimum and maximum, each [bins].

    Up to four times as many points stay as they are: with one or two points a bin, the range between minimum and
    maximum would be a line with a spike here and there.

    Args:
        steps: [N], rising.
        values: [N], finite.
    """
    if len(steps) <= 4 * bins:
        return steps.astype(np.float64), values, values, values
    starts = np.unique(np.linspace(0, len(steps), bins, endpoint=False).astype(int))
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


def compact(value: float) -> str:
    """A large number in few characters: 950, 37.6k, 1.2M."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def new_figure(rows: int, sharex: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure of one to three panels, one above the other, as wide as a phone's screen at the font's natural size."""
    height = {1: 3.9, 2: 3.9, 3: 4.6}[rows]
    figure = Figure(figsize=(5.0, height))
    axes = figure.subplots(rows, 1, sharex=sharex, squeeze=False)[:, 0]
    axes[-1].set_xlabel("learner step")
    return figure, list(axes)


def finish(figure: Figure, runs: Sequence[Run]) -> Figure:
    """One legend for the runs of a comparison above everything; for a single run, one beside each panel's title."""
    if len(runs) > 1:
        styles = [look(i) for i in range(len(runs))]
        proxies = [
            Line2D([], [], color=c, linestyle=s, label=_short(r.name)) for r, (c, s) in zip(runs, styles, strict=True)
        ]
        columns = 2 if max(len(run.name) for run in runs) > 16 else 3
        figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(runs) // columns))
        figure.legend(handles=proxies, loc="outside upper left", ncols=columns)
    for axes in figure.axes:
        handles, _ = axes.get_legend_handles_labels()
        # A panel's only line is named by its title; a lone dashed line is a reference, which nothing else explains.
        lone_reference = any(isinstance(handle, Line2D) and handle.get_linestyle() == "--" for handle in handles)
        if axes.get_legend() is None and (len(handles) > 1 or lone_reference):
            _legend(axes, handles)
    return figure


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    """On the title's line, at the right: never over the data."""
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), borderaxespad=0.1)


def look(i: int) -> tuple[str, Any]:
    """Colour of run i; its line style changes once the colours are used up."""
    return PALETTE[i % len(PALETTE)], LINE_STYLES[i // len(PALETTE) % len(LINE_STYLES)]


def _short(name: str, limit: int = 28) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def draw(
    axes: Axes,
    runs: Sequence[Run],
    series: Sequence[Series],
    colors: Sequence[str],
    faint: bool = False,
    smooth: bool = True,
) -> None:
    """Lines of the given metrics: smoothed, with the raw values (or their range, where binned) behind them."""
    for i, run in enumerate(runs):
        for j, (key, label) in enumerate(series):
            steps, values = run.series(key)
            if not len(steps):
                continue
            single = len(runs) == 1
            color = colors[j % len(colors)] if single else look(i)[0]
            # Never colour alone: a second series of the same panel is dashed as well.
            style = LINE_STYLES[j % len(LINE_STYLES)]
            x, mean, low, high = binned(steps, values)
            if len(x) < len(steps):
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
            elif smooth and len(x) >= 40 and len(runs) <= 3:
                axes.plot(x, mean, color=color, alpha=0.3, linewidth=0.8)
            marker = "." if len(x) == 1 else None
            width = 1.0 if faint else 1.5
            label = label if single else ""
            line = smoothed(mean) if smooth else mean
            axes.plot(x, line, color=color, linestyle=style, linewidth=width, marker=marker, label=label)


def panel(
    axes: Axes,
    runs: Sequence[Run],
    series: Sequence[Series],
    title: str,
    colors: Sequence[str] = PALETTE,
    smooth: bool = True,
) -> None:
    """One titled panel with its unit; says so where none of its metrics was logged."""
    draw(axes, runs, series, colors, smooth=smooth)
    axes.set_title(title)
    if axes.lines:
        unit = describe(series[0][0]).unit
        counted = unit in ("groups", "versions")
        axes.set_ylabel("" if unit == "share" else unit)
        axes.yaxis.set_major_locator(ticks(integer=counted))
        if counted:
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        else:
            _widen_if_flat(axes)
        if len(runs) > 1 and len(series) > 1:
            styles = zip(series, LINE_STYLES, strict=False)
            _legend(axes, [Line2D([], [], color=MUTED, linestyle=style, label=label) for (_, label), style in styles])
        return
    names = ", ".join(key for key, _ in series)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.text(0.5, 0.5, f"not logged: {names}", transform=axes.transAxes, ha="center", va="center", color=MUTED)


def _widen_if_flat(axes: Axes) -> None:
    """A constant gets a tenth of itself on either side; the last digits of its running mean are no news."""
    low, high = axes.dataLim.intervaly
    if high - low <= 1e-6 * abs(high):
        margin = 0.1 * abs(high) or 0.05
        axes.set_ylim(low - margin, high + margin)


def bars(
    axes: Axes,
    counts: Sequence[Mapping[float, float]],
    labels: Sequence[str] = (),
    colors: Sequence[str] = PALETTE,
    low: float | None = None,
) -> None:
    """Shares by value, one bar per series side by side; values too close for that are put into twenty equal bins.

    ``low`` is the smallest abscissa to show, where nothing can lie below it.
    """
    values = sorted({value for series in counts for value in series})
    if not values:
        axes.set_yticks([])
        axes.grid(visible=False)
        return
    span = values[-1] - values[0]
    step = min((b - a for a, b in itertools.pairwise(values)), default=1.0)
    if step < span / 24:  # many values, or some too close together for bars that can be seen
        edges = np.linspace(values[0], values[-1], 21)
        centres, step = (edges[:-1] + edges[1:]) / 2, span / 20
    else:
        centres = np.array(values)
        edges = np.append(centres - step / 2, centres[-1] + step / 2)
    width = 0.86 * step / len(counts)
    for i, series in enumerate(counts):
        if not series:
            continue
        keys, weights = np.array(list(series)), np.array(list(series.values()), np.float64)
        shares = np.histogram(keys, bins=edges, weights=weights)[0] / weights.sum()
        offset = (i - (len(counts) - 1) / 2) * width
        axes.bar(
            centres + offset,
            shares,
            width=0.94 * width,
            color=colors[i % len(colors)],
            label=labels[i] if labels else "",
        )
    axes.grid(visible=False, axis="x")
    # One or two values would otherwise become bars as wide as the panel.
    middle, half = (centres[0] + centres[-1]) / 2, max(3.0 * step, (centres[-1] - centres[0]) / 2 + 0.7 * step)
    left = middle - half if low is None else max(low, middle - half)
    axes.set_xlim(left, left + 2 * half)
    if len(centres) <= 9 and low is None:
        axes.set_xticks(centres)
    percent_axis(axes)


def percent_axis(axes: Axes, from_zero: bool = True) -> None:
    """Shares as percentages; an empty panel is left alone."""
    if axes.lines or axes.patches:
        axes.set_ylim(0 if from_zero else None, max(axes.get_ylim()[1], 1e-3))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
        axes.yaxis.set_major_locator(ticks())


def ticks(integer: bool = False, most: int = 5) -> MaxNLocator:
    """At most ``most`` intervals, at steps of 1, 2 or 5."""
    return MaxNLocator(nbins=most, steps=[1, 2, 5, 10], integer=integer)


def limit_to_usual(axes: Axes, values: np.ndarray) -> None:
    """From zero to five times the median at most: the first step compiles, and must not flatten all the others."""
    if len(values):
        axes.set_ylim(0, 1.1 * float(values[values <= 5 * np.median(values)].max()))


def log_scale_if_wide(axes: Axes) -> None:
    """A logarithmic axis where the lines span more than a factor of 30 and nothing is negative.

    Values below a three-hundredth of the median fall off its lower end: at lag 0 a mismatch is rounding error, seven
    decades below all that follows.
    """
    values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines] or [np.zeros(0)])
    positive = values[values > 0]
    if not len(positive) or (values < 0).any():
        return
    shown = positive[positive >= np.median(positive) / 300]
    if shown.max() > 30 * shown.min():
        axes.set_yscale("log")
        axes.set_ylim(shown.min() / 1.3, shown.max() * 1.3)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def reference_line(axes: Axes, y: float, label: str = "") -> None:
    """A dashed horizontal line, named in the legend."""
    axes.axhline(y, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), label=label)


def last_numbers(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """The last value of each line at its right end; values that are close are moved apart. ``ends``: x, y, colour."""
    low, high = axes.get_ylim()
    gap = 0.075 * (high - low)
    ends = sorted(ends, key=lambda end: end[1])
    heights: list[float] = []
    for _, y, _ in ends:
        heights.append(max(y, heights[-1] + gap) if heights else y)
    overflow = max(0.0, heights[-1] - (high - gap / 2))
    for (x, y, color), height in zip(ends, heights, strict=True):
        text = axes.annotate(f"{y:.3f}", (x, height - overflow), xytext=(6, 0), textcoords="offset points")
        text.set(va="center", fontsize=8, color=color, annotation_clip=False)
    right = max(x for x, _, _ in ends)
    axes.set_xlim(right=right + 0.1 * max(right - axes.get_xlim()[0], 1.0))


def number_label(axes: Axes, step: float, value: float, color: str) -> None:
    """The value below its marker: the lines that come with an accuracy curve run above it."""
    axes.annotate(
        f"{value:.2f}",
        (step, value),
        xytext=(0, -6),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=8,
        fontweight="bold",
        color=color,
        zorder=4,
    )


def to_svg(figure: Figure, prefix: str) -> str:
    """The figure as an ``<svg>`` element for a page; text stays text, and the same figure gives the same bytes.

    ``prefix`` goes in front of every id, so that several figures can stand in one page.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg[svg.index("<svg") :])
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    # A hundredth of a point is far below a pixel, and most of the file would be further digits. Only inside tags: text
    # between them is what the reader sees.
    return re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg).replace("\n", " ").strip()
