"""What the report shows of a run."""

from __future__ import annotations

from sat_jax.losses.window import Window, window
from sat_jax.runs.reader import Run


def windows(run: Run) -> list[Window]:
    """Where the batch of each step stands in SAT's window; empty without SAT."""
    _, q = run.series("sat/q")
    low, high = run.setting("loss.eps_low"), run.setting("loss.eps_high")
    if low is None or high is None:
        return []
    settings = (
        run.setting("loss.sat.exponent", 2.0),
        run.setting("loss.sat.q_floor", 0.0),
        run.setting("loss.sat.q_cap"),
    )
    return [window(float(value), low, high, *settings) for value in q]
