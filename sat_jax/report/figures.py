"""Figures of a run: every function takes runs that were read and returns a matplotlib ``Figure``; no global state."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from sat_jax.losses.window import edges
from sat_jax.report.figure_parts import (
    PALETTE,
    Series,
    bars,
    binned,
    compact,
    draw,
    finish,
    last_numbers,
    limit_to_usual,
    log_scale_if_wide,
    look,
    new_figure,
    number_label,
    panel,
    percent_axis,
    reference_line,
    styled,
    ticks,
)
from sat_jax.runs.reader import Run


@styled
def learning_curve(runs: Sequence[Run]) -> Figure:
    """Held-out avg@k with numbers at the first, best and last; for a single run also pass@k and the training reward."""
    figure, (axes,) = new_figure(1)
    single = len(runs) == 1
    if single:
        draw(axes, runs, [("rollout/reward_mean", "training reward")], colors=PALETTE[1:], faint=True)
        steps, values = runs[0].evaluation_series("pass@k")
        if len(values):
            label = f"held-out {at_k(runs[0], 'pass')}"
            axes.plot(steps, values, color=PALETTE[2], linestyle="--", linewidth=1.1, marker=".", label=label)
    ends: list[tuple[float, float, str]] = []
    for i, run in enumerate(runs):
        steps, values = run.evaluation_series("avg@k")
        if not len(values):
            continue
        color, style = look(i)
        label = f"held-out {at_k(run)}" if single else ""
        axes.plot(steps, values, color=color, linestyle=style, marker="o", markersize=4, label=label, zorder=3)
        ends.append((float(steps[-1]), float(values[-1]), color))
        for j in sorted({0, int(np.argmax(values)), len(values) - 1}) if single else ():
            number_label(axes, steps[j], values[j], color)
    if not any(run.evaluations for run in runs):
        axes.set_title("no evaluations yet")
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.2:
        axes.set_ylim(0, 1.09)
        axes.set_yticks(np.linspace(0, 1, 6))
    if ends and not single:
        last_numbers(axes, ends)
    axes.set_ylabel("accuracy and reward" if single else "held-out accuracy")
    return finish(figure, runs)


@styled
def mismatch(runs: Sequence[Run]) -> Figure:
    """``d_bar`` and SAT's q over training, with the edges of the nominal interval: beyond both SAT changes nothing."""
    figure, (top, bottom) = new_figure(2)
    panel(top, runs, [("train/d_bar", "")], "mismatch d̄: mean |log ratio|")
    panel(bottom, runs, [("sat/q", "")], "SAT's q", colors=PALETTE[1:])
    for axes in (top, bottom):
        log_scale_if_wide(axes)
    ends = {edges(run.setting("loss.eps_low", 0.0), run.setting("loss.eps_high", 0.0)) for run in runs}
    if bottom.lines:
        highest = max((edge for pair in ends for edge in pair if edge < math.inf), default=0.0)
        low, high = bottom.get_ylim()
        bottom.set_ylim(low, max(high, highest * (2.2 if bottom.get_yscale() == "log" else 1.22)))
        for below, above in sorted(ends):
            if above > 0:
                reference_line(bottom, above, f"log(1 + ε) = {above:.3f}")
            if 0 < below < math.inf:
                reference_line(bottom, below, f"−log(1 − ε) = {below:.3f}")
    return finish(figure, runs)


@styled
def radii(runs: Sequence[Run]) -> Figure:
    """Mean clip radii after contraction, and the strongest contraction in each batch."""
    figure, (top, bottom) = new_figure(2)
    panel(top, runs, [("sat/eps_low_mean", "lower"), ("sat/eps_high_mean", "upper")], "mean clip radius ε·c")
    panel(
        bottom,
        runs,
        [("sat/c_low_min", "lower"), ("sat/c_high_min", "upper")],
        "smallest contraction c (1: none)",
    )
    if top.lines:
        for eps in sorted({run.setting(f"loss.eps_{side}") for run in runs for side in ("low", "high")} - {None}):
            reference_line(top, eps, f"nominal ε = {eps:g}")
    if bottom.lines:
        bottom.set_ylim(0, 1.05)
    return finish(figure, runs)


@styled
def rates(runs: Sequence[Run]) -> Figure:
    """Shares of active tokens: gated, clipped at all, and newly cut by SAT."""
    figure, (top, bottom) = new_figure(2)
    series = [("sat/gate_rate", "gated by SAT"), ("train/clip_fraction", "clipped at all")]
    panel(top, runs, series, "gate and clip rate")
    panel(bottom, runs, [("sat/intercept_rate", "")], "intercept rate: newly cut by SAT", colors=PALETTE[2:])
    for axes in (top, bottom):
        percent_axis(axes)
    return finish(figure, runs)


@styled
def staleness(runs: Sequence[Run]) -> Figure:
    """Lag in policy versions: mean and maximum over training, and its distribution over tokens."""
    figure, (top, bottom) = new_figure(2, sharex=False)
    panel(
        top,
        runs,
        [("async/staleness_mean", "mean"), ("async/staleness_max", "maximum")],
        "lag over training",
        smooth=False,
    )
    top.set_xlabel("learner step")
    counted = [staleness_counts(run) for run in runs]
    origin = next((origin for counts, origin in counted if counts), "")
    bars(bottom, [counts for counts, _ in counted], low=-0.7)
    bottom.set_title(f"distribution over {origin}" if origin else "no lags logged")
    bottom.set_xlabel("lag (policy versions)")
    bottom.xaxis.set_major_locator(ticks(integer=True, most=10))
    return finish(figure, runs)


@styled
def optimisation(runs: Sequence[Run]) -> Figure:
    """KL against the reference, entropy and gradient norm."""
    figure, axes = new_figure(3)
    panel(axes[0], runs, [("train/kl_loss", "")], "KL to the reference policy")
    panel(axes[1], runs, [("train/entropy", "")], "entropy of the policy", colors=PALETTE[2:])
    panel(axes[2], runs, [("train/grad_norm", "")], "gradient norm", colors=PALETTE[3:])
    return finish(figure, runs)


@styled
def throughput(runs: Sequence[Run]) -> Figure:
    """Tokens per second of engine and learner, and where the learner's time goes."""
    figure, (top, bottom) = new_figure(2)
    rates_of = [("rollout/tokens_per_s", "sampled"), ("perf/tokens_per_s", "trained on")]
    times_of = [("perf/step_time_s", "learner step"), ("perf/rollout_wait_s", "waiting for rollouts")]
    panel(top, runs, rates_of, "tokens per second", smooth=False)
    limit_to_usual(top, _all_values(runs, rates_of))
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if len(runs) > 1 or not _stack(bottom, runs[0], times_of):
        panel(bottom, runs, times_of, "time per learner step", smooth=False)
        limit_to_usual(bottom, _all_values(runs, times_of))
    return finish(figure, runs)


@styled
def rewards(runs: Sequence[Run]) -> Figure:
    """Distribution of rewards in the first, middle and last third of the run, and groups without a learning signal."""
    figure, (top, bottom) = new_figure(2, sharex=False)
    if len(runs) == 1:
        thirds, origin = reward_thirds(runs[0])
        bars(top, thirds, labels=("first third", "middle", "last third"), colors=(PALETTE[5], PALETTE[4], PALETTE[0]))
    else:
        last = [reward_thirds(run) for run in runs]
        bars(top, [thirds[-1] for thirds, _ in last])
        origin = next((origin for thirds, origin in last if thirds[-1]), "")
    scope = "" if len(runs) == 1 else " in the last third"
    top.set_title(f"rewards of {origin}{scope}" if origin else "no rewards logged")
    top.set_xlabel("reward")
    panel(bottom, runs, [("rollout/zero_std_groups", "")], "groups whose rewards are all equal", colors=PALETTE[3:])
    bottom.set_xlabel("learner step")
    return finish(figure, runs)


@styled
def responses(runs: Sequence[Run]) -> Figure:
    """Response length and the share cut off by the token budget."""
    figure, (top, bottom) = new_figure(2)
    panel(top, runs, [("rollout/response_len_mean", "")], "mean response length")
    panel(bottom, runs, [("rollout/truncated_ratio", "")], "ended by the token budget", colors=PALETTE[1:])
    percent_axis(bottom)
    return finish(figure, runs)


@styled
def asynchrony(runs: Sequence[Run]) -> Figure:
    """Queue level, groups dropped as stale, and how often the learner's router agrees with the engine's."""
    figure, axes = new_figure(3)
    panel(axes[0], runs, [("async/queue_groups", "")], "groups waiting in the queue")
    panel(axes[1], runs, [("async/dropped_stale", "")], "groups dropped as stale", colors=PALETTE[1:])
    panel(axes[2], runs, [("moe/router_agreement", "")], "expert sets learner and engine agree on", colors=PALETTE[2:])
    percent_axis(axes[2], from_zero=False)
    return finish(figure, runs)


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
        return [_total(logged[a:b]) for a, b in itertools.pairwise(cuts)], "all responses"
    values = [float(sample["reward"]) for sample in run.samples if sample.get("reward") is not None]
    cuts = np.linspace(0, len(values), 4).round().astype(int)
    thirds = [dict(Counter(values[a:b])) for a, b in itertools.pairwise(cuts)]
    return [{k: float(v) for k, v in third.items()} for third in thirds], "the logged samples" if values else ""


def at_k(run: Run, kind: str = "avg") -> str:
    """``avg@8``, with the k that the run's last evaluation used."""
    return f"{kind}@{run.evaluations[-1].get('k', 'k')}" if run.evaluations else f"{kind}@k"


def _total(histograms: Iterable[Mapping[str, int]]) -> dict[float, float]:
    total: Counter[float] = Counter()
    for histogram in histograms:
        for value, count in histogram.items():
            total[float(value)] += count
    return {value: float(count) for value, count in total.items()}


def _all_values(runs: Sequence[Run], series: Sequence[Series]) -> np.ndarray:
    return np.concatenate([run.series(key)[1] for run in runs for key, _ in series])


def _stack(axes: Axes, run: Run, series: Sequence[Series]) -> bool:
    """Two times on top of each other, so that their sum shows; False, and nothing drawn, where either is missing."""
    (steps, lower), (other, upper) = (run.series(key) for key, _ in series)
    if not len(steps) or not np.array_equal(steps, other):
        return False
    limit_to_usual(axes, lower + upper)
    x, lower, _, _ = binned(steps, lower)
    _, upper, _, _ = binned(steps, upper)
    axes.fill_between(x, 0, lower, color=PALETTE[4], alpha=0.8, linewidth=0, label=series[0][1])
    axes.fill_between(x, lower, lower + upper, color=PALETTE[5], alpha=0.55, linewidth=0, label=series[1][1])
    axes.set_title("time per learner step")
    axes.set_ylabel("s")
    return True
