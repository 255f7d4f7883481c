"""What people look at: the panels of the page, the facts of a run, the fields of the terminal.

The one place of ``report`` that names metrics; units and meanings are the register's (``sat_jax.metrics``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sat_jax.losses.window import Window, edges, window
from sat_jax.metrics import describe
from sat_jax.report.figure_parts import compact
from sat_jax.report.figures import Distribution, LearningCurve, Lines, Panel, Stacked, at_k
from sat_jax.runs.reader import Run, outcome

FIELDS: dict[str, str] = {
    "reward": "rollout/reward_mean",
    "accuracy": "rollout/accuracy",
    "d_bar": "train/d_bar",
    "q": "sat/q",
    "gate": "sat/gate_rate",
    "lag": "async/staleness_mean",
    "queue": "async/queue_groups",
    "tokens/s": "rollout/tokens_per_s",
    "clip": "train/clip_fraction",
    "intercept": "sat/intercept_rate",
    "KL": "train/kl_loss",
    "entropy": "train/entropy",
    "grad norm": "train/grad_norm",
    "lag max": "async/staleness_max",
    "dropped": "async/dropped_stale",
}
"""Label and metric of the live display; a plain line has room for the first eight."""


def shown(metric: str, value: float) -> str:
    """A value in few characters, as its unit is read: shares as percentages."""
    return f"{100 * value:.3g}%" if describe(metric).unit == "share" else compact(value)


def radii(run: Run) -> tuple[float, float] | None:
    """The nominal ``eps_low`` and ``eps_high`` of a run."""
    low, high = run.setting("loss.eps_low"), run.setting("loss.eps_high")
    return None if low is None or high is None else (low, high)


def windows(run: Run) -> list[Window]:
    """Where the batch of each step stands in SAT's window; empty without SAT."""
    nominal, (_, q) = radii(run), run.series("sat/q")
    if nominal is None:
        return []
    exponent, cap = run.setting("loss.sat.exponent", 2.0), run.setting("loss.sat.q_cap")
    floor = run.setting("loss.sat.q_floor", 0.0)
    return [window(float(value), *nominal, exponent, floor, cap) for value in q]


def _window_edges(run: Run) -> Iterator[tuple[float, str]]:
    low, high = edges(*(radii(run) or (0.0, 0.0)))
    if high > 0:
        yield high, f"log(1 + ε) = {high:.3f}"
    if 0 < low < math.inf:
        yield low, f"−log(1 − ε) = {low:.3f}"


def _nominal_radii(run: Run) -> Iterator[tuple[float, str]]:
    for eps in radii(run) or ():
        yield eps, f"nominal ε = {eps:g}"


PANELS = (
    Panel(
        "Learning curve",
        "Held-out accuracy before, during and after training: mean over k samples of every problem.",
        (LearningCurve("held-out accuracy", {"rollout/reward_mean": "training reward"}),),
    ),
    Panel(
        "Mismatch",
        "How far learner and rollout engine disagree on the sampled tokens. With q beyond log(1 + ε) SAT is inert for "
        "d > 0, beyond −log(1 − ε) for d < 0: there the nominal interval clips every gated token already.",
        (
            Lines("mismatch d̄: mean |log ratio|", {"train/d_bar": ""}, log=True),
            Lines("SAT's q", {"sat/q": ""}, log=True, marks=_window_edges),
        ),
    ),
    Panel(
        "SAT radii",
        "Clip radii after contraction, averaged over active tokens, and the strongest contraction of each batch.",
        (
            Lines(
                "mean clip radius ε·c",
                {"sat/eps_low_mean": "lower", "sat/eps_high_mean": "upper"},
                marks=_nominal_radii,
            ),
            Lines(
                "smallest contraction c (1: none)",
                {"sat/c_low_min": "lower", "sat/c_high_min": "upper"},
                from_zero=True,
            ),
        ),
    ),
    Panel(
        "Gate, clip and intercept rate",
        "The gate rate is close to 1 − α by construction. What SAT changes is the intercept rate: gradients that the "
        "nominal interval would have kept.",
        (
            Lines("gate and clip rate", {"sat/gate_rate": "gated by SAT", "train/clip_fraction": "clipped at all"}),
            Lines("intercept rate: newly cut by SAT", {"sat/intercept_rate": ""}),
        ),
    ),
    Panel(
        "Staleness",
        "Policy versions between sampling a token and training on it.",
        (
            Lines("lag over training", {"async/staleness_mean": "mean", "async/staleness_max": "maximum"}),
            Distribution("lag of active tokens", "async/staleness_histogram", "lag (policy versions)"),
        ),
    ),
    Panel(
        "Rewards",
        "Distribution over responses, and groups without a learning signal.",
        (
            Distribution("rewards of responses", "rollout/reward_histogram", "reward"),
            Lines("groups whose rewards are all equal", {"rollout/zero_std_groups": ""}),
        ),
    ),
    Panel(
        "Optimisation",
        "KL and entropy in nats per token; gradient norm before clipping.",
        (
            Lines("KL to the reference policy", {"train/kl_loss": ""}),
            Lines("entropy of the policy", {"train/entropy": ""}),
            Lines("gradient norm", {"train/grad_norm": ""}),
        ),
    ),
    Panel(
        "Queue and routing",
        "Finished groups waiting, groups that became too old, and how often the learner's router would have chosen the "
        "engine's experts.",
        (
            Lines("groups waiting in the queue", {"async/queue_groups": ""}),
            Lines("groups dropped as stale", {"async/dropped_stale": ""}),
            Lines("expert sets learner and engine agree on", {"moe/router_agreement": ""}),
        ),
    ),
    Panel(
        "Throughput",
        "Tokens per second, and where the time of a learner step goes. Compilation in the first step is cut off.",
        (
            Lines("speed", {"rollout/tokens_per_s": "sampled", "perf/tokens_per_s": "trained on"}),
            Stacked(
                "time per learner step",
                {"perf/step_time_s": "learner step", "perf/rollout_wait_s": "waiting for rollouts"},
            ),
        ),
    ),
    Panel(
        "Responses",
        "Length, and the share that the token budget cut off.",
        (
            Lines("mean response length", {"rollout/response_len_mean": ""}),
            Lines("ended by the token budget", {"rollout/truncated_ratio": ""}),
        ),
    ),
)
"""The figures of the page, in their order."""


class Fact(NamedTuple):
    """One thing to know about a run: a tile of its page, a row of its summary, a cell where runs are compared."""

    label: str
    value: str
    detail: str
    alarming: bool = False


def facts(run: Run) -> list[Fact]:
    """What came out, in few numbers: accuracy, mismatch, SAT's window, staleness, speed."""
    planned, done = run.setting("steps"), int(run.steps[-1]) if len(run.steps) else 0
    _, times = run.series("time")
    _, oldest = run.series("async/staleness_max")
    never_over = f"; never over {oldest.max():.0f}" if len(oldest) else ""
    found = [
        *_accuracy(run),
        Fact("learner steps", f"{done:,}", f"of {planned:,}" if planned else ""),
        Fact("time", duration(times[-1] - times[0]) if len(times) else "–", "from the first step to the last"),
        _reduced("tokens/s", run, "rollout/tokens_per_s", np.median, "sampled, median over steps"),
        _reduced("mean mismatch", run, "train/d_bar", _recent, "mean |log ratio| in nats, last tenth of the run"),
        _window(run),
        _reduced("staleness", run, "async/staleness_mean", _recent, f"mean in versions, last tenth{never_over}"),
    ]
    if run.groups:
        others = ", ".join(f"{count:,} {state}" for state, count in run.groups.items() if state != "trained")
        found.append(
            Fact("groups trained on", f"{run.groups.get('trained', 0):,}", others or "none lost, none dropped")
        )
    return found


def _accuracy(run: Run) -> list[Fact]:
    result = outcome(run)
    if result is None:
        labels = ("held-out accuracy", "best (step)", "largest fall")
        return [Fact(label, "–", "no evaluations yet") for label in labels]
    problems = run.evaluations[-1].get("problems", "?")
    gain = f"{100 * (result.final - result.before):+.1f} points, {at_k(run)} of {problems} problems"
    fell = "fell below half its peak" if result.below_half_peak else "from an earlier evaluation"
    return [
        Fact("held-out accuracy", f"{result.before:.3f} → {result.final:.3f}", gain),
        Fact("best (step)", f"{result.best:.3f} ({result.best_step:,})", "highest held-out accuracy, and when"),
        Fact("largest fall", f"{100 * result.max_drawdown:.1f} points", fell, result.below_half_peak),
    ]


def _window(run: Run) -> Fact:
    """Share of steps at which SAT could act, and where the last tenth of the run stands."""
    label, stands = "SAT can act at", windows(run)
    if not stands:
        return Fact(label, "–", "sat/q is not logged: a method without SAT" if len(run.steps) else "no steps yet")
    recent = sorted(stands[-max(1, len(stands) // 10) :], key=lambda stand: stand.q)
    share = np.mean([stand.acts for stand in stands])
    return Fact(label, f"{100 * share:.0f}% of steps", f"lately {recent[len(recent) // 2].text}")


def _reduced(label: str, run: Run, metric: str, reduce: Callable[[np.ndarray], Any], detail: str) -> Fact:
    _, values = run.series(metric)
    if not len(values):
        return Fact(label, "–", f"not logged: {metric}")
    return Fact(label, shown(metric, float(reduce(values))), detail)


def _recent(values: np.ndarray) -> float:
    return float(values[-max(1, len(values) // 10) :].mean())


def duration(seconds: float) -> str:
    """``42 s``, ``12 min 05 s`` or ``3 h 04 min``."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
