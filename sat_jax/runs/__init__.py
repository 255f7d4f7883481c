"""A run's disk: its folder and lock, its lines, its checkpoints, and reading all of that back."""

from sat_jax.runs.reader import Run, read_run

__all__ = ["Run", "read_run"]
