"""Figures of training runs: pure functions from runs that were read to matplotlib figures; nothing is shown."""

from sat_jax.plots.figures import (
    asynchrony,
    at_k,
    learning_curve,
    mismatch,
    optimisation,
    radii,
    rates,
    responses,
    reward_thirds,
    rewards,
    staleness,
    staleness_counts,
    throughput,
)
from sat_jax.plots.parts import GRID, INK, MUTED, PALETTE, Plot, compact, look, to_svg

__all__ = [
    "GRID",
    "INK",
    "MUTED",
    "PALETTE",
    "Plot",
    "asynchrony",
    "at_k",
    "compact",
    "learning_curve",
    "look",
    "mismatch",
    "optimisation",
    "radii",
    "rates",
    "responses",
    "reward_thirds",
    "rewards",
    "staleness",
    "staleness_counts",
    "throughput",
    "to_svg",
]
