"""Figures from declarations: a ``Panel`` says which metrics it shows; how they are drawn follows from their units.

``contents.PANELS`` holds the panels of the page. No global state of matplotlib is touched.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sat_jax.metrics import describe
from sat_jax.report import figure_parts as parts
from sat_jax.report.figure_parts import LINE_STYLES, MUTED, PALETTE, look
from sat_jax.runs.reader import Run

COUNTS = ("groups", "versions")
"""Units drawn from zero with whole numbers on the axis."""

CLOCKED = ("tokens/s", "s")
"""Units drawn from zero to five times the median: the first step compiles, and must not flatten all the others."""

Marks = Callable[[Run], Iterable[tuple[float, str]]]
"""Heights of reference lines, with their names."""


@dataclasses.dataclass(frozen=True)
class Lines:
    """Metrics over learner steps."""

    title: str  # the unit is added
    series: Mapping[str, str]  # label in the legend by metric; a lone one needs none
    log: bool = False  # where the values span more than a factor of 30
    from_zero: bool = False
    marks: Marks = lambda run: ()  # reference lines
    axis: str = "learner step"

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.series)

    @property
    def unit(self) -> str:
        return describe(self.keys[0]).unit

    @property
    def heading(self) -> str:
        said = self.unit in ("", "share", *self.title.split())
        return self.title if said else f"{self.title} ({self.unit})"

    def logged(self, run: Run) -> bool:
        return any(len(run.series(key)[0]) for key in self.series)

    def draw(self, axes: Axes, runs: Sequence[Run], colors: Mapping[str, str]) -> None:
        single = len(runs) == 1
        axes.set_title(self.heading)
        styles = dict(zip(self.series, LINE_STYLES, strict=False))  # never colour alone
        for i, run in enumerate(runs):
            for key, label in self.series.items():
                color, name = (colors[label or key], label) if single else (look(i)[0], "")
                smooth = self.unit not in (*CLOCKED, "versions")
                line = {"color": color, "linestyle": styles[key], "label": name}
                parts.curve(axes, run.series(key), smooth, behind=len(runs) <= 3, **line)
        if len(self.series) > 1 and not single:
            for key, label in self.series.items():
                axes.plot([], [], color=MUTED, linestyle=styles[key], label=label)
        marks = sorted({mark for run in runs for mark in self.marks(run)})
        for i, (height, name) in enumerate(marks):
            parts.reference_line(axes, height, name, dashes=((5, 3), (2, 2))[i % 2])
        logged = [run.series(key)[1] for run in runs for key in self.series]
        self._scale(axes, np.concatenate([*logged, [height for height, _ in marks]]))

    def _scale(self, axes: Axes, values: np.ndarray) -> None:
        unit = self.unit
        parts.ticks(axes.yaxis, parts.percent if unit == "share" else parts.tick_label, integer=unit in COUNTS)
        low, high = axes.dataLim.intervaly
        if unit in CLOCKED:
            axes.set_ylim(0, 1.1 * float(values[values <= 5 * np.median(values)].max()) or 1.0)
        elif unit in COUNTS:
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        elif unit == "share":
            axes.set_ylim(0 if low <= 0.5 else None, min(max(1e-3, axes.get_ylim()[1]), 1.01))
        elif self.from_zero:
            axes.set_ylim(0)
        elif self.log:
            parts.log_scale_if_wide(axes, values)
        elif high - low <= 1e-6 * abs(high):  # the last digits of a constant's running mean are no news
            margin = 0.1 * abs(high) or 0.05
            axes.set_ylim(low - margin, high + margin)


@dataclasses.dataclass(frozen=True)
class Stacked(Lines):
    """Two times: of a single run on top of each other, so that their sum shows."""

    def draw(self, axes: Axes, runs: Sequence[Run], colors: Mapping[str, str]) -> None:
        (steps, lower), (other, upper) = (runs[0].series(key) for key in self.series)
        if len(runs) > 1 or not np.array_equal(steps, other):
            super().draw(axes, runs, colors)
            return
        x, below, _, _ = parts.binned(steps, lower)
        _, above, _, _ = parts.binned(steps, upper)
        first, second = self.series.values()
        axes.set_title(self.heading)
        axes.fill_between(x, 0, below, color=colors[first], alpha=0.8, linewidth=0, label=first)
        axes.fill_between(x, below, below + above, color=colors[second], alpha=0.55, linewidth=0, label=second)
        self._scale(axes, lower + upper)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A histogram metric: of one run in its first, middle and last third, of several in the last."""

    title: str
    key: str
    axis: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def logged(self, run: Run) -> bool:
        return any(run.histograms.get(self.key, ()))

    def draw(self, axes: Axes, runs: Sequence[Run], colors: Mapping[str, str]) -> None:
        if len(runs) == 1:
            axes.set_title(self.title)
            names = ("first third", "middle", "last third")
            parts.bars(axes, self.thirds(runs[0]), (PALETTE[5], PALETTE[4], PALETTE[0]), names)
        else:
            axes.set_title(f"{self.title}, last third")
            last = [self.thirds(run)[-1] for run in runs]
            parts.bars(axes, last, [look(i)[0] for i in range(len(runs))], [""] * len(runs))

    def thirds(self, run: Run) -> list[dict[float, int]]:
        """How often each value occurred in each third of the run."""
        logged = run.histograms.get(self.key, ())
        totals: list[Counter[float]] = [Counter(), Counter(), Counter()]
        for i, histogram in enumerate(logged):
            totals[3 * i // len(logged)].update({float(value): count for value, count in histogram.items()})
        return [dict(total) for total in totals]


@dataclasses.dataclass(frozen=True)
class LearningCurve:
    """Held-out avg@k with its last number; for a single run also first and best, pass@k, and a training metric."""

    title: str
    training: Mapping[str, str]
    axis: str = "learner step"
    keys: tuple[str, ...] = ()

    def logged(self, run: Run) -> bool:
        return bool(run.evaluations)

    def draw(self, axes: Axes, runs: Sequence[Run], colors: Mapping[str, str]) -> None:
        if len(runs) == 1:
            self._single(axes, runs[0])
        else:
            axes.set_title(self.title)
            self._compared(axes, runs)
        low, high = axes.get_ylim()
        if low >= -0.1 and high <= 1.2:
            axes.set_ylim(0, 1.09)
            axes.set_yticks(np.linspace(0, 1, 6))

    def _single(self, axes: Axes, run: Run) -> None:
        for key, label in self.training.items():
            series = run.series(key)
            if len(series[0]):
                parts.curve(axes, series, smooth=True, behind=True, color=PALETTE[1], linewidth=1.0, label=label)
        steps, values = run.evaluation_series("pass@k")
        if len(values):
            label = f"held-out {at_k(run, 'pass')}"
            axes.plot(steps, values, color=PALETTE[2], linestyle="--", linewidth=1.1, marker=".", label=label)
        steps, values = run.evaluation_series("avg@k")
        axes.plot(steps, values, color=PALETTE[0], marker="o", markersize=4, label=f"held-out {at_k(run)}", zorder=3)
        for i in sorted({0, int(np.argmax(values)), len(values) - 1}):
            # Below its marker: the lines that come with an accuracy curve run above it.
            parts.number(axes, steps[i], values[i], f"{values[i]:.2f}", PALETTE[0], (0, -11))

    def _compared(self, axes: Axes, runs: Sequence[Run]) -> None:
        ends = []
        for i, run in enumerate(runs):
            steps, values = run.evaluation_series("avg@k")
            if len(values):
                color, style = look(i)
                axes.plot(steps, values, color=color, linestyle=style, marker="o", markersize=4, zorder=3)
                ends.append((float(values[-1]), float(steps[-1]), color))
        axes.set_xlim(right=1.12 * max(step for _, step, _ in ends) or 1.0)
        if len(ends) <= 4:  # more would stand on each other; the table of runs has them all
            heights = [-np.inf]
            for value, _, _ in sorted(ends):
                heights.append(max(value, heights[-1] + 0.05 * max(1.0, axes.get_ylim()[1])))
            apart = np.array(heights[1:]) - [value for value, _, _ in sorted(ends)]
            for (value, step, color), moved in zip(sorted(ends), apart - apart.mean(), strict=True):
                parts.number(axes, step, value + moved, f"{value:.3f}", color, (7, 0))


@dataclasses.dataclass(frozen=True)
class Panel:
    """One card of the page: a figure of one to three parts, with what it is about in words."""

    title: str
    caption: str
    parts: tuple[Lines | Distribution | LearningCurve, ...]

    def missing(self, runs: Sequence[Run]) -> str:
        """What stands in place of the figure where none of the runs has anything to draw; else empty."""
        return "" if any(part.logged(run) for part in self.parts for run in runs) else _absent(self.parts)


def draw(panel: Panel, runs: Sequence[Run]) -> Figure:
    """The figure of a panel, of one run or of several compared; a part that nobody logged says so."""
    columns = 2 if max(len(run.name) for run in runs) > 16 else 3
    names = runs if len(runs) > 1 else ()
    shared = len({part.axis for part in panel.parts}) == 1
    with matplotlib.rc_context(parts.STYLE):
        head = 0.18 * -(-len(names) // columns)
        figure, all_axes = parts.new_figure(len(panel.parts), gap=0.3 if shared else 0.66, head=head)
        for axes, part in zip(all_axes, panel.parts, strict=True):
            if any(part.logged(run) for run in runs):
                part.draw(axes, runs, _colors(panel))
            else:
                axes.set_title(part.title)
                parts.note(axes, _absent([part]))
            parts.legend(axes)
            if isinstance(part, Lines):
                steps = np.concatenate([run.steps for run in runs]) if any(len(run.steps) for run in runs) else [0]
                room = max(0.03 * np.ptp(steps), 0.5)
                axes.set_xlim(np.min(steps) - room, np.max(steps) + room)
            if not isinstance(part, Distribution):
                parts.ticks(axes.xaxis, integer=True)
            if axes is all_axes[-1] or not shared:
                axes.set_xlabel(part.axis)
            else:
                axes.tick_params(labelbottom=False)
        if names:
            lines = [Line2D([], [], color=look(i)[0], linestyle=look(i)[1]) for i in range(len(runs))]
            figure.legend(lines, [_short(run.name) for run in runs], loc="upper left", ncols=columns, borderaxespad=0.1)
    return figure


def _colors(panel: Panel) -> dict[str, str]:
    """Colour of each series of a single run, by label or metric: those of one label in two parts share theirs."""
    lines = [part.series for part in panel.parts if isinstance(part, Lines)]
    labels = dict.fromkeys(label or key for series in lines for key, label in series.items())
    return dict(zip(labels, itertools.cycle(PALETTE), strict=False))


def at_k(run: Run, kind: str = "avg") -> str:
    """``avg@8``, with the k that the run's last evaluation used."""
    return f"{kind}@{run.evaluations[-1].get('k', 'k')}" if run.evaluations else f"{kind}@k"


def _absent(empty: Sequence[Lines | Distribution | LearningCurve]) -> str:
    keys = [key for part in empty for key in part.keys]
    return f"not logged: {', '.join(keys)}" if keys else "no evaluations yet"


def _short(name: str, limit: int = 28) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
