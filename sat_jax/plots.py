"""Figures of a run: every function takes runs that were read and returns a matplotlib ``Figure``; no global state.

Colour says which run, line style says which series; with a single run, colour says which series. The palette is Okabe and
Ito's, which stays apart under the common colour-vision deficiencies. Long runs are binned so that a figure stays small
while spikes stay visible: a line of means inside a band from minimum to maximum.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from sat_jax.metrics import describe
from sat_jax.run_folder import Run

INK, MUTED, GRID = "#1f2a37", "#5c6773", "#d5dae1"
"""Text, secondary text and grid lines. The report replaces these and ``PALETTE`` by its own light and dark variants."""

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#a65392", "#1795c5", "#b07900", "#5b4fbb", "#7a7a00")
"""Okabe and Ito's hues, the light ones darkened to at least 3:1 against white."""

LINE_STYLES = ("-", "--", ":", "-.")

_STYLE: dict[str, Any] = {
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
    """Neighbouring points merged into at most ``bins``: mean step, mean, minimum and maximum, each [<= bins].

    Args:
        steps: [N], rising.
        values: [N], finite.
    """
    if len(steps) <= bins:
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


@styled
def learning_curve(runs: Sequence[Run]) -> Figure:
    """Held-out avg@k at every evaluation, numbers at the first, best and last; for a single run also pass@k and training reward."""
    figure, (axes,) = _figure(1)
    single = len(runs) == 1
    if single:
        _draw(axes, runs, [("rollout/reward_mean", "training reward")], colors=PALETTE[1:], faint=True)
        steps, values = runs[0].evaluation_series("pass@k")
        if len(values):
            label = f"held-out {at_k(runs[0], 'pass')}"
            axes.plot(steps, values, color=PALETTE[2], linestyle="--", linewidth=1.1, marker=".", label=label)
    for i, run in enumerate(runs):
        steps, values = run.evaluation_series("avg@k")
        if not len(values):
            continue
        color, style = _look(i)
        label = f"held-out {at_k(run)}" if single else ""
        axes.plot(steps, values, color=color, linestyle=style, marker="o", markersize=4, label=label, zorder=3)
        labelled = {0, int(np.argmax(values)), len(values) - 1} if single else {len(values) - 1}
        for j in sorted(labelled):
            _number(axes, steps[j], values[j], color, below=single and j == 0)
    if not any(run.evaluations for run in runs):
        axes.set_title("no evaluations yet")
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.2:
        axes.set_ylim(0, 1.09)
        axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel("accuracy and reward" if single else "held-out accuracy")
    return _finish(figure, runs)


@styled
def mismatch(runs: Sequence[Run]) -> Figure:
    """``d_bar`` and SAT's q over training, with the edge ``log(1 + eps)`` beyond which SAT changes nothing."""
    figure, (top, bottom) = _figure(2)
    _panel(top, runs, [("train/d_bar", "")], "mismatch d̄: mean |log ratio|")
    _panel(bottom, runs, [("sat/q", "")], "SAT reference q: quantile of |log ratio|", colors=PALETTE[1:])
    for axes in (top, bottom):
        _log_scale_if_wide(axes)
    edges = sorted({math.log1p(eps) for run in runs if (eps := run.setting("loss.eps_high")) is not None})
    if edges and bottom.lines:
        low, high = bottom.get_ylim()
        room = 2.2 if bottom.get_yscale() == "log" else 1.22
        bottom.set_ylim(low, max(high, edges[-1] * room))
        for edge in edges:
            bottom.axhline(edge, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
        _note(bottom, edges[-1], f"log(1 + ε) = {edges[-1]:.3f}: SAT is inert above")
    return _finish(figure, runs)


@styled
def radii(runs: Sequence[Run]) -> Figure:
    """Mean clip radii after contraction, and the strongest contraction in each batch."""
    figure, (top, bottom) = _figure(2)
    _panel(top, runs, [("sat/eps_low_mean", "lower"), ("sat/eps_high_mean", "upper")], "mean clip radius ε·c")
    _panel(
        bottom,
        runs,
        [("sat/c_low_min", "lower"), ("sat/c_high_min", "upper")],
        "smallest c of the batch (1: no contraction)",
    )
    if top.lines:
        nominal = {run.setting(f"loss.eps_{side}") for run in runs for side in ("low", "high")} - {None}
        low, high = top.get_ylim()
        top.set_ylim(
            min([low, *nominal]), max([high, *nominal]) + 0.18 * (max([high, *nominal]) - min([low, *nominal]))
        )
        for eps in sorted(nominal):
            top.axhline(eps, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
            _note(top, eps, f"nominal ε = {eps:g}")
    if bottom.lines:
        bottom.set_ylim(0, 1.05)
    return _finish(figure, runs)


@styled
def rates(runs: Sequence[Run]) -> Figure:
    """Shares of active tokens: gated, clipped at all, and newly cut by SAT."""
    figure, (top, bottom) = _figure(2)
    series = [("sat/gate_rate", "gated by SAT"), ("train/clip_fraction", "clipped at all")]
    _panel(top, runs, series, "gate and clip rate")
    _panel(bottom, runs, [("sat/intercept_rate", "")], "intercept rate: newly cut by SAT", colors=PALETTE[2:])
    for axes in (top, bottom):
        _percent(axes)
    return _finish(figure, runs)


@styled
def staleness(runs: Sequence[Run]) -> Figure:
    """Lag in policy versions: mean and maximum over training, and its distribution over tokens."""
    figure, (top, bottom) = _figure(2, sharex=False)
    _panel(top, runs, [("async/staleness_mean", "mean"), ("async/staleness_max", "maximum")], "lag over training")
    top.set_ylim(0, max(1.0, top.get_ylim()[1]))
    top.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    top.set_xlabel("learner step")
    counted = [staleness_counts(run) for run in runs]
    origin = next((origin for counts, origin in counted if counts), "")
    _bars(bottom, [counts for counts, _ in counted])
    bottom.set_title(f"distribution over {origin}" if origin else "no lags logged")
    bottom.set_xlabel("lag (policy versions)")
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    return _finish(figure, runs)


@styled
def optimisation(runs: Sequence[Run]) -> Figure:
    """KL against the reference, entropy and gradient norm."""
    figure, axes = _figure(3)
    _panel(axes[0], runs, [("train/kl_loss", "")], "KL to the reference policy")
    _panel(axes[1], runs, [("train/entropy", "")], "entropy of the policy", colors=PALETTE[2:])
    _panel(axes[2], runs, [("train/grad_norm", "")], "gradient norm", colors=PALETTE[3:])
    return _finish(figure, runs)


@styled
def throughput(runs: Sequence[Run]) -> Figure:
    """Tokens per second of engine and learner, and where the learner's time goes."""
    figure, (top, bottom) = _figure(2)
    _panel(top, runs, [("rollout/tokens_per_s", "sampled"), ("perf/tokens_per_s", "trained on")], "tokens per second")
    _log_scale_if_wide(top)
    if top.get_yscale() == "linear":
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    series = [("perf/step_time_s", "learner step"), ("perf/rollout_wait_s", "waiting for rollouts")]
    if len(runs) == 1 and all(len(runs[0].series(key)[0]) for key, _ in series):
        (steps, busy), (other, wait) = (runs[0].series(key) for key, _ in series)
        if np.array_equal(steps, other):
            x, busy, _, _ = binned(steps, busy)
            _, wait, _, _ = binned(steps, wait)
            bottom.fill_between(x, 0, busy, color=PALETTE[4], alpha=0.75, linewidth=0, label=series[0][1])
            bottom.fill_between(x, busy, busy + wait, color=PALETTE[5], alpha=0.6, linewidth=0, label=series[1][1])
            # The first step compiles for seconds; it must not flatten all the others.
            bottom.set_ylim(0, 1.25 * float(np.quantile(busy + wait, 0.98)))
            bottom.set_xlim(x[0], x[-1])
            bottom.set_title("time per learner step")
            bottom.set_ylabel("s")
            bottom.legend(loc="upper right", ncols=2)
            return _finish(figure, runs)
    _panel(bottom, runs, series, "time per learner step")
    return _finish(figure, runs)


@styled
def rewards(runs: Sequence[Run]) -> Figure:
    """Distribution of rewards in the first, middle and last third of the run, and groups without a learning signal."""
    figure, (top, bottom) = _figure(2, sharex=False)
    if len(runs) == 1:
        thirds, origin = reward_thirds(runs[0])
        _bars(top, thirds, labels=("first third", "middle", "last third"), colors=(PALETTE[5], PALETTE[4], PALETTE[0]))
    else:
        last = [reward_thirds(run) for run in runs]
        _bars(top, [thirds[-1] for thirds, _ in last])
        origin = next((origin for thirds, origin in last if thirds[-1]), "")
    scope = "" if len(runs) == 1 else " in the last third"
    top.set_title(f"rewards of {origin}{scope}" if origin else "no rewards logged")
    top.set_xlabel("reward")
    _panel(bottom, runs, [("rollout/zero_std_groups", "")], "groups whose rewards are all equal", colors=PALETTE[3:])
    bottom.set_xlabel("learner step")
    return _finish(figure, runs)


@styled
def responses(runs: Sequence[Run]) -> Figure:
    """Response length and the share cut off by the token budget."""
    figure, (top, bottom) = _figure(2)
    _panel(top, runs, [("rollout/response_len_mean", "")], "mean response length")
    _panel(bottom, runs, [("rollout/truncated_ratio", "")], "ended by the token budget", colors=PALETTE[1:])
    _percent(bottom)
    return _finish(figure, runs)


@styled
def asynchrony(runs: Sequence[Run]) -> Figure:
    """Queue level, groups dropped as stale, and how often the learner's router agrees with the engine's."""
    figure, axes = _figure(3)
    _panel(axes[0], runs, [("async/queue_groups", "")], "groups waiting in the queue")
    _panel(axes[1], runs, [("async/dropped_stale", "")], "groups dropped as stale", colors=PALETTE[1:])
    _panel(axes[2], runs, [("moe/router_agreement", "")], "expert sets learner and engine agree on", colors=PALETTE[2:])
    _percent(axes[2])
    return _finish(figure, runs)


def staleness_counts(run: Run) -> tuple[dict[float, float], str]:
    """Tokens by lag over the whole run, and where they come from: every batch's histogram, else the logged samples."""
    logged = [h for h in run.histograms.get("async/staleness_histogram", ()) if h]
    if logged:
        return _total(logged), "all active tokens"
    counts: Counter[float] = Counter()
    for sample in run.samples:
        # A sample's step is the learner version after training on it, so the version trained was one less.
        counts.update(float(sample["step"] - 1 - version) for version in sample.get("policy_versions") or ())
    return dict(counts), "tokens of the logged samples" if counts else ""


def reward_thirds(run: Run) -> tuple[list[dict[float, float]], str]:
    """Responses by reward in the three thirds of the run, and where they come from, as in ``staleness_counts``."""
    logged = [h for h in run.histograms.get("rollout/reward_histogram", ()) if h]
    if logged:
        cuts = np.linspace(0, len(logged), 4).round().astype(int)
        return [_total(logged[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)], "all responses"
    values = [float(sample["reward"]) for sample in run.samples if sample.get("reward") is not None]
    cuts = np.linspace(0, len(values), 4).round().astype(int)
    thirds = [dict(Counter(values[a:b])) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    return [{k: float(v) for k, v in third.items()} for third in thirds], "the logged samples" if values else ""


def at_k(run: Run, kind: str = "avg") -> str:
    """``avg@8``, with the k that the run's last evaluation used."""
    return f"{kind}@{run.evaluations[-1].get('k', 'k')}" if run.evaluations else f"{kind}@k"


def compact(value: float) -> str:
    """A large number in few characters: 950, 37.6k, 1.2M."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _figure(rows: int, sharex: bool = True) -> tuple[Figure, list[Axes]]:
    height = {1: 3.0, 2: 3.9, 3: 4.6}[rows]
    figure = Figure(figsize=(5.0, height))
    axes = figure.subplots(rows, 1, sharex=sharex, squeeze=False)[:, 0]
    axes[-1].set_xlabel("learner step")
    return figure, list(axes)


def _finish(figure: Figure, runs: Sequence[Run]) -> Figure:
    """One legend for the runs of a comparison above everything; for a single run, one beside each panel's title."""
    if len(runs) > 1:
        handles = [
            Line2D([], [], color=_look(i)[0], linestyle=_look(i)[1], label=_short(r.name)) for i, r in enumerate(runs)
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=2 if max(len(r.name) for r in runs) > 16 else 3)
        return figure
    for axes in figure.axes:
        handles, _ = axes.get_legend_handles_labels()
        if len(handles) > 1 and axes.get_legend() is None:
            _legend(axes, handles)
    return figure


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    """On the title's line, at the right: never over the data."""
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), borderaxespad=0.1)


def _look(i: int) -> tuple[str, Any]:
    """Colour of run i; its line style changes once the colours are used up."""
    return PALETTE[i % len(PALETTE)], LINE_STYLES[i // len(PALETTE) % len(LINE_STYLES)]


def _short(name: str, limit: int = 28) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _draw(
    axes: Axes, runs: Sequence[Run], series: Sequence[Series], colors: Sequence[str], faint: bool = False
) -> None:
    """Lines of the given metrics: smoothed, with the raw values (or their range, where binned) behind them."""
    for i, run in enumerate(runs):
        for j, (key, label) in enumerate(series):
            steps, values = run.series(key)
            if not len(steps):
                continue
            single = len(runs) == 1
            color = colors[j % len(colors)] if single else _look(i)[0]
            style = "-" if single else LINE_STYLES[j % len(LINE_STYLES)]
            x, mean, low, high = binned(steps, values)
            if len(x) < len(steps):
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
            elif len(x) >= 40 and len(runs) <= 3:
                axes.plot(x, mean, color=color, alpha=0.3, linewidth=0.8)
            marker = "." if len(x) == 1 else None
            width = 1.0 if faint else 1.5
            label = label if single else ""
            axes.plot(x, smoothed(mean), color=color, linestyle=style, linewidth=width, marker=marker, label=label)


def _panel(
    axes: Axes, runs: Sequence[Run], series: Sequence[Series], title: str, colors: Sequence[str] = PALETTE
) -> None:
    """One titled panel with its unit; says so where none of its metrics was logged."""
    _draw(axes, runs, series, colors)
    axes.set_title(title)
    if axes.lines:
        unit = describe(series[0][0]).unit
        axes.set_ylabel("" if unit == "share" else unit)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if len(runs) > 1 and len(series) > 1:
            styles = zip(series, LINE_STYLES, strict=False)
            _legend(axes, [Line2D([], [], color=MUTED, linestyle=style, label=label) for (_, label), style in styles])
        return
    names = ", ".join(key for key, _ in series)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.text(0.5, 0.5, f"not logged: {names}", transform=axes.transAxes, ha="center", va="center", color=MUTED)


def _bars(
    axes: Axes, counts: Sequence[Mapping[float, float]], labels: Sequence[str] = (), colors: Sequence[str] = PALETTE
) -> None:
    """Shares by value, one bar per series side by side; values that are too many are put into twenty equal bins."""
    values = sorted({value for series in counts for value in series})
    if not values:
        axes.set_yticks([])
        axes.grid(visible=False)
        return
    if len(values) > 24:
        edges = np.linspace(values[0], values[-1], 21)
        centres, step = (edges[:-1] + edges[1:]) / 2, float(edges[1] - edges[0])
    else:
        centres = np.array(values)
        step = float(np.diff(centres).min()) if len(values) > 1 else 1.0
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
    if step == 1.0:
        # One or two integer values would otherwise become bars as wide as the panel.
        middle, half = (centres[0] + centres[-1]) / 2, max(3.0, (centres[-1] - centres[0]) / 2 + 0.7)
        axes.set_xlim(max(-0.7, middle - half), max(-0.7, middle - half) + 2 * half)
    _percent(axes)


def _total(histograms: Iterable[Mapping[str, int]]) -> dict[float, float]:
    total: Counter[float] = Counter()
    for histogram in histograms:
        for value, count in histogram.items():
            total[float(value)] += count
    return {value: float(count) for value, count in total.items()}


def _percent(axes: Axes) -> None:
    if axes.lines or axes.patches:
        axes.set_ylim(0, max(axes.get_ylim()[1], 1e-3))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def _log_scale_if_wide(axes: Axes) -> None:
    """A logarithmic axis where the lines span more than a factor of 30 and nothing is negative."""
    values = np.concatenate([line.get_ydata() for line in axes.lines] or [np.zeros(0)])
    positive = values[values > 0]
    if len(positive) and (values >= 0).all() and positive.max() > 30 * positive.min():
        axes.set_yscale("log")


def _note(axes: Axes, y: float, text: str) -> None:
    """A remark right above the horizontal line at ``y``."""
    where, offset = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}, (0, 2.5)
    axes.annotate(text, (0.995, y), xytext=offset, ha="right", va="bottom", fontsize=7.5, color=INK, **where)


def _number(axes: Axes, step: float, value: float, color: str, below: bool = False) -> None:
    """The value beside its marker."""
    axes.annotate(
        f"{value:.2f}",
        (step, value),
        xytext=(0, -6 if below else 6),
        textcoords="offset points",
        ha="center",
        va="top" if below else "bottom",
        fontsize=8,
        fontweight="bold",
        color=color,
        zorder=4,
    )
