"""What a learner computes: scores, train steps, and those compiled for the devices that are there, or are not."""

from sat_jax.learner.compiled import Programs, abstract
from sat_jax.learner.step import (
    LearnerSpec,
    Metrics,
    Scores,
    adam,
    batch_shardings,
    init_state,
    learning_rate,
    score,
    state_shardings,
    supervised_spec,
    supervised_step,
    train_step,
)

__all__ = [
    "LearnerSpec",
    "Metrics",
    "Programs",
    "Scores",
    "abstract",
    "adam",
    "batch_shardings",
    "init_state",
    "learning_rate",
    "score",
    "state_shardings",
    "supervised_spec",
    "supervised_step",
    "train_step",
]
