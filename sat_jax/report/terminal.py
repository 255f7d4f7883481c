"""What a run shows in the terminal: a live panel where there is a terminal, plain lines where there is none.

The live panel takes a few lines at the bottom and leaves what is printed above it: no screen is switched and no
scrollback cleared. Where standard output is a file or a pipe, one line appears every few steps.
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

from sat_jax.report.contents import FIELDS, duration, facts, shown
from sat_jax.runs.reader import Run

EVERY = 10
"""Steps between two plain lines; the live panel shows every step."""

_LINE_FIELDS = 8
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"


class Display:
    """Progress of one run. A context manager; all methods are for the thread that owns the run.

    ``start_step`` is the learner version at the start, above 0 for a resumed run; ``clock`` gives monotonic seconds. By
    default rich's own view of standard output is the console, which honours ``NO_COLOR`` and ``TERM=dumb``.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        name: str = "sat_jax",
        start_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console or Console()
        self._clock, self._began = clock, clock()
        self._name, self._total, self._start, self._step = name, total_steps, start_step, start_step
        self._shown: dict[str, str] = {}
        self._phase = "starting"
        self._rewards: list[float] = []
        self._evaluations: list[tuple[int, float, str]] = []
        # Recent (time, step): the time left follows the current pace, not that of the first, compiling step.
        self._pace: collections.deque[tuple[float, int]] = collections.deque(maxlen=50)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self.render, vertical_overflow="crop")

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
        known = {label: key for label, key in FIELDS.items() if metrics.get(key) is not None}
        self._shown = {label: shown(key, float(metrics[key])) for label, key in known.items()}
        self._pace.append((self._clock(), step))
        if "reward" in known:
            self._rewards.append(float(metrics[known["reward"]]))
        if self._live is None and (step % EVERY == 0 or step in (self._total, self._start + 1)):
            self.message(self.line())

    def evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """An evaluation is done; ``results`` as they go to evaluations.jsonl."""
        k = results.get("k", "k")
        self._evaluations.append((step, float(results["avg@k"]), f"avg@{k}"))
        passed = results.get("pass@k")
        more = f", pass@{k} {passed:.3f}" if passed is not None else ""
        problems = f" on {results['problems']} held-out problems" if "problems" in results else ""
        self.message(f"evaluation at step {step}: avg@{k} {results['avg@k']:.3f}{more}{problems}")

    def seconds_left(self) -> float | None:
        """Estimate from the pace of the last fifty steps; None before two of them are done."""
        if len(self._pace) < 2:
            return None
        (t0, s0), (t1, s1) = self._pace[0], self._pace[-1]
        return (self._total - self._step) * (t1 - t0) / max(s1 - s0, 1)

    def line(self) -> str:
        """The current step as one plain line."""
        fields = [f"{label} {self._shown[label]}" for label in list(FIELDS)[:_LINE_FIELDS] if label in self._shown]
        left = self.seconds_left()
        if left is not None:
            fields.append(f"left {duration(left)}")
        return "  ".join([f"step {self._step}/{self._total}", *fields])

    def render(self) -> RenderableType:
        """The live panel."""
        width, left = self._console.width, self.seconds_left()
        times = "" if left is None else f"{duration(left)} left"
        if width >= 70:
            times = f"{duration(self._clock() - self._began)} elapsed" + (f", {times}" if times else "")
        bar = ProgressBar(
            total=max(self._total, 1), completed=self._step, complete_style="blue", finished_style="green"
        )
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        head.add_row(f"step [bold]{self._step}[/]/{self._total}", bar, times)
        title = Text.assemble((self._name, "bold"), (f"  {self._phase}", "dim"))
        parts: list[RenderableType] = [head, self._table(max(1, min(4, (width - 4) // 23))), *self._curve(width - 24)]
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim", padding=(0, 1))

    def summary(self, run: Run) -> None:
        """The outcome of the run as a table; the run is read back from its folder, so that resumed parts count too."""
        table = Table(title=f"{run.name}: what came out", title_justify="left", show_header=False, title_style="bold")
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for fact in facts(run):
            value, detail = self._encodable(fact.value), self._encodable(fact.detail)
            style = "bold red" if fact.alarming else "bold"
            table.add_row(fact.label, Text.assemble((value, style), "  ", (detail, "dim")))
        for notice in run.notices:
            table.add_row("[yellow]note[/]", Text(self._encodable(notice)))
        self._console.print(table)

    def _table(self, columns: int) -> Table:
        shown = list(self._shown.items())
        table = Table.grid(padding=(0, 1))
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True, min_width=9)
            # Room for the longest value, so that the columns stand still, and a gap before the next label.
            table.add_column(justify="right", no_wrap=True, min_width=9)
            table.add_column(width=1)
        rows = -(-len(shown) // columns)
        for r in range(rows):
            table.add_row(*(cell for label, value in shown[r::rows] for cell in (label, value, "")))
        return table

    def _curve(self, width: int) -> list[Text]:
        """Rewards so far as bars from 0 to the largest, and the newest evaluation."""
        lines = []
        if len(self._rewards) > 1 and width > 8:
            bars = sparkline(self._rewards, min(width, 60), _BARS if self._speaks_unicode() else _ASCII_BARS)
            lines.append(Text.assemble(("reward ", "dim"), (bars, "green")))
        if self._evaluations:
            step, value, at_k = self._evaluations[-1]
            before = f", {self._evaluations[0][1]:.3f} before" if len(self._evaluations) > 1 else ""
            said = [(f"held-out {at_k} ", "dim"), (f"{value:.3f}", "bold"), (f" at step {step}{before}", "dim")]
            lines.append(Text.assemble(*said))
        return lines

    def _speaks_unicode(self) -> bool:
        return (self._console.encoding or "").lower().startswith("utf")

    def _encodable(self, text: str) -> str:
        return text if self._speaks_unicode() else text.replace("→", "->").encode("ascii", "replace").decode()


def sparkline(values: list[float], width: int, bars: str = _BARS) -> str:
    """``values`` as at most ``width`` bars, neighbours averaged, from 0 (or a negative minimum) to the maximum."""
    array = np.asarray(values, np.float64)
    chunks = np.array([chunk.mean() for chunk in np.array_split(array, min(width, len(array)))])
    chunks = np.nan_to_num(chunks, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = min(0.0, chunks.min()), chunks.max()
    scaled = (chunks - low) / (high - low) if high > low else np.zeros_like(chunks)
    return "".join(bars[min(int(level * len(bars)), len(bars) - 1)] for level in scaled)
