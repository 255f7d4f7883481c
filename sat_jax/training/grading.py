"""Finished groups -> rewards and advantages; finished trajectories -> rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sat_jax import losses
from sat_jax.config import ExperimentConfig
from sat_jax.rewards.functions import FAILED_VERDICTS
from sat_jax.rewards.grader import Grader
from sat_jax.types import Group, Prompt, Trajectory


def graded_with_advantages(config: ExperimentConfig, grader: Grader) -> Callable[[Sequence[Group]], list[Group]]:
    """What the rollout thread does with finished groups: rewards first, then advantages over the whole group.

    A response whose grading failed (not one that is wrong) is left out of its group's baseline; its own advantage is 0.
    """

    def grade(groups: Sequence[Group]) -> list[Group]:
        graded = grader.grade_groups(groups)
        if not graded:
            return []
        rewards = np.stack([group.rewards for group in graded])
        failed = np.array([[t.reward_info["verdict"] in FAILED_VERDICTS for t in g.trajectories] for g in graded])
        advantages = losses.group_advantages(rewards, kind=config.advantage, failed=failed)
        return [dataclasses.replace(g, advantages=row) for g, row in zip(graded, advantages, strict=True)]

    return grade


def graded(grader: Grader, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories with their rewards, outside of any group: what an evaluation needs."""
    groups = [Group(f"eval:{i}", p, (t,)) for i, (p, t) in enumerate(zip(prompts, trajectories, strict=True))]
    return [group.trajectories[0] for group in grader.grade_groups(groups)]
