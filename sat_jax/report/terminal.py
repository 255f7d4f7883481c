"""What a run shows in the terminal: a live panel where there is a terminal, plain lines where there is none.

The live panel takes a few lines at the bottom and leaves what was printed before, and what is printed meanwhile, above
it: no screen is switched and no scrollback cleared. Where standard output is a file or a pipe, one line appears every
few steps.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sat_jax.report.contents import windows
from sat_jax.runs.reader import Run, outcome

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"

# label, metric, format; {} gets the value. Percentages are of active tokens.
_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward_mean", "{:.3f}"),
    ("accuracy", "rollout/accuracy", "{:.1%}"),
    ("d_bar", "train/d_bar", "{:.3g}"),
    ("q", "sat/q", "{:.3g}"),
    ("gate", "sat/gate_rate", "{:.1%}"),
    ("intercept", "sat/intercept_rate", "{:.2%}"),
    ("clip", "train/clip_fraction", "{:.1%}"),
    ("KL", "train/kl_loss", "{:.4f}"),
    ("entropy", "train/entropy", "{:.3f}"),
    ("grad norm", "train/grad_norm", "{:.3g}"),
    ("lag", "async/staleness_mean", "{:.1f}"),
    ("lag max", "async/staleness_max", "{:.0f}"),
    ("queue", "async/queue_groups", "{:.0f}"),
    ("dropped", "async/dropped_stale", "{:.0f}"),
    ("tokens/s", "rollout/tokens_per_s", "{:,.0f}"),
)

_LINE_FIELDS = ("reward", "accuracy", "d_bar", "q", "gate", "lag", "queue", "tokens/s")


class Display:
    """Progress of one run. A context manager; all methods are for the thread that owns the run.

    Args:
        total_steps: learner steps of the whole run.
        name: what the panel is headed with.
        start_step: the learner version at the start; above 0 for a resumed run.
        every: steps between two plain lines; the live panel shows every step.
        console: where to; by default rich's own view of standard output, which honours ``NO_COLOR`` and ``TERM=dumb``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        name: str = "",
        start_step: int = 0,
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console if console is not None else Console()
        self._clock = clock
        self._total, self._start, self._step = total_steps, start_step, start_step
        self._name, self._every = name, max(1, every)
        self._began = clock()
        self._metrics: dict[str, float] = {}
        self._phase = "starting"
        self._rewards: list[float] = []
        self._evaluations: list[tuple[int, float, str]] = []
        # Recent (time, step): the time left follows the current pace, not that of the first, compiling step.
        self._pace: collections.deque[tuple[float, int]] = collections.deque(maxlen=50)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=4,
                screen=False,
                vertical_overflow="crop",
            )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """What is happening outside learner steps: ``warm start, step 120 of 500``, ``evaluating``, ``compiling``."""
        changed = text.partition(",")[0] != self._phase.partition(",")[0]
        self._phase = text
        if self._live is None and changed:
            self.message(text)

    def message(self, text: str) -> None:
        """A line that stays: above the live panel, or plainly printed."""
        self._console.print(Text(text), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A learner step is done; ``metrics`` as they go to metrics.jsonl, other keys are ignored."""
        self._step, self._phase = step, "training"
        self._metrics = {key: float(metrics[key]) for _, key, _ in _FIELDS if metrics.get(key) is not None}
        self._pace.append((self._clock(), step))
        if "rollout/reward_mean" in self._metrics:
            self._rewards.append(self._metrics["rollout/reward_mean"])
        if self._live is None and (step % self._every == 0 or step == self._total or step == self._start + 1):
            self.message(self.line())

    def evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """An evaluation is done; ``results`` as they go to evaluations.jsonl."""
        at_k = f"avg@{results.get('k', 'k')}"
        self._evaluations.append((step, float(results["avg@k"]), at_k))
        passed = results.get("pass@k")
        more = f", pass@{results.get('k', 'k')} {passed:.3f}" if passed is not None else ""
        problems = f" on {results['problems']} held-out problems" if "problems" in results else ""
        self.message(f"evaluation at step {step}: {at_k} {results['avg@k']:.3f}{more}{problems}")

    def seconds_left(self) -> float | None:
        """Estimate from the pace of the last fifty steps; None before two of them are done."""
        if len(self._pace) < 2:
            return None
        (t0, s0), (t1, s1) = self._pace[0], self._pace[-1]
        return (self._total - self._step) * (t1 - t0) / max(s1 - s0, 1)

    def line(self) -> str:
        """The current step as one plain line."""
        shown = {label: text.format(self._metrics[key]) for label, key, text in _FIELDS if key in self._metrics}
        parts = [
            f"step {self._step}/{self._total}",
            *(f"{name} {shown[name]}" for name in _LINE_FIELDS if name in shown),
        ]
        left = self.seconds_left()
        return "  ".join([*parts, *([] if left is None else [f"left {duration(left)}"])])

    def render(self) -> RenderableType:
        """The live panel."""
        width = self._console.width
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        left = self.seconds_left()
        times = f"{duration(self._clock() - self._began)} elapsed" + (
            "" if left is None else f", {duration(left)} left"
        )
        head.add_row(
            f"step [bold]{self._step}[/]/{self._total}",
            ProgressBar(total=max(self._total, 1), completed=self._step, complete_style="blue", finished_style="green"),
            times if width >= 60 else "" if left is None else duration(left),
        )
        parts: list[RenderableType] = [head]
        if self._metrics:
            parts.append(self._table(max(1, min(4, (width - 4) // 23))))
        curve = self._curve(width - 24)
        if curve is not None:
            parts.append(curve)
        title = Text.assemble((self._name or "sat_jax", "bold"), (f"  {self._phase}", "dim"))
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim", padding=(0, 1))

    def summary(self, run: Run) -> None:
        """The outcome of the run as a table; the run is read back from its folder, so that resumed parts count too."""
        self._console.print(summary_table(run))

    def _table(self, columns: int) -> Table:
        shown = [(label, text.format(self._metrics[key])) for label, key, text in _FIELDS if key in self._metrics]
        table = Table.grid(padding=(0, 1))
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True, min_width=9)
            # Room for the longest value, so that the columns stand still, and a gap before the next label.
            table.add_column(justify="right", no_wrap=True, min_width=9)
            table.add_column(width=1)
        rows = -(-len(shown) // columns)
        for r in range(rows):
            picked = [shown[i] if i < len(shown) else ("", "") for i in range(r, rows * columns, rows)]
            table.add_row(*(cell for label, value in picked for cell in (label, value, "")))
        return table

    def _curve(self, width: int) -> Text | None:
        """Rewards so far as bars from 0 to the largest, and the newest evaluation."""
        text = Text()
        if len(self._rewards) > 1 and width > 8:
            unicode = (self._console.encoding or "").lower().startswith("utf")
            text.append("reward ", "dim")
            text.append(sparkline(self._rewards, min(width, 60), _BARS if unicode else _ASCII_BARS), "green")
        if self._evaluations:
            step, value, at_k = self._evaluations[-1]
            before = self._evaluations[0][1]
            text.append("\n" if text else "")
            text.append(f"held-out {at_k} ", "dim")
            text.append(f"{value:.3f}", "bold")
            text.append(f" at step {step}" + (f", {before:.3f} before" if len(self._evaluations) > 1 else ""), "dim")
        return text if text else None


def sparkline(values: list[float], width: int, bars: str = _BARS) -> str:
    """``values`` as at most ``width`` bars, neighbours averaged, from 0 (or a negative minimum) to the maximum."""
    array = np.asarray(values, np.float64)
    chunks = np.array([chunk.mean() for chunk in np.array_split(array, min(width, len(array)))])
    chunks = np.nan_to_num(chunks, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = min(0.0, chunks.min()), chunks.max()
    scaled = (chunks - low) / (high - low) if high > low else np.zeros_like(chunks)
    return "".join(bars[min(int(level * len(bars)), len(bars) - 1)] for level in scaled)


def duration(seconds: float) -> str:
    """``0:42``, ``12:05`` or ``3:04:05``."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary_table(run: Run) -> Table:
    """What came out: held-out accuracy with its best and its largest fall, mismatch, SAT's window, speed, notices."""
    table = Table(title=f"{run.name}: what came out", title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    result = outcome(run)
    if result is None:
        table.add_row("held-out accuracy", "no evaluations yet")
    else:
        at_k = f"avg@{run.evaluations[-1].get('k', 'k')}"
        gain = 100 * (result.final - result.before)
        table.add_row(f"held-out {at_k}", f"{result.before:.3f} -> [bold]{result.final:.3f}[/] ({gain:+.1f} points)")
        fell = ", fell below half its peak" if result.below_half_peak else ""
        table.add_row(
            "best", f"{result.best:.3f} at step {result.best_step}, largest fall {result.max_drawdown:.3f}{fell}"
        )
    table.add_row("learner steps", f"{run.steps[-1] if len(run.steps) else 0}")
    _, d_bar = run.series("train/d_bar")
    if len(d_bar):
        table.add_row("mismatch d_bar", f"{d_bar[-max(1, len(d_bar) // 10) :].mean():.3g} over the last tenth")
    stands = windows(run)
    if stands:
        active = np.mean([window.acts for window in stands])
        table.add_row("SAT", f"could act at {active:.0%} of steps; at the end {stands[-1].text}")
    _, lag = run.series("async/staleness_max")
    if len(lag):
        table.add_row("staleness", f"at most {lag.max():.0f} versions")
    _, speed = run.series("rollout/tokens_per_s")
    if len(speed):
        table.add_row("tokens sampled", f"{np.median(speed):,.0f} per second")
    if run.groups:
        table.add_row("groups", ", ".join(f"{count} {state}" for state, count in run.groups.items()))
    for notice in run.notices:
        table.add_row("[yellow]note[/]", Text(notice))
    return table
