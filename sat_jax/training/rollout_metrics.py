"""What the host knows about a step: numbers and readable samples of the groups that it trained on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sat_jax.data.tokenizer import Tokenizer
from sat_jax.losses import zero_variance
from sat_jax.metrics import value_counts
from sat_jax.rewards.functions import FAILED_VERDICTS
from sat_jax.types import Group, Trajectory

CORRECT = 0.5
"""A reward of at least this counts as correct."""


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """``rollout/*`` and the staleness histogram of one batch, trained on by learner ``version``.

    A batch without a response gives an empty dict: there is nothing to average.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    if not trajectories:
        return {}
    rewards = np.array([t.reward for t in trajectories], np.float64)
    lags = np.concatenate([version - t.policy_versions for t in trajectories])
    verdicts = [str(t.reward_info.get("verdict", "")) for t in trajectories]
    return {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_histogram": value_counts(rewards),
        "rollout/accuracy": float(np.mean(rewards >= CORRECT)),
        "rollout/response_len_mean": float(np.mean([len(t.response_ids) for t in trajectories])),
        "rollout/truncated_ratio": float(np.mean([t.truncated for t in trajectories])),
        "rollout/zero_std_groups": int(sum(bool(zero_variance(group.rewards)) for group in groups)),
        "rollout/unparsed_ratio": verdicts.count("unparsed") / len(verdicts),
        "rollout/ungraded": sum(v in FAILED_VERDICTS for v in verdicts),
        "async/staleness_histogram": value_counts(lags, decimals=0),
    }


def sample_records(
    groups: Sequence[Group], log_probs: Iterable[np.ndarray], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Readable rollouts for ``samples.jsonl``: one of a group, for as many groups as there are rows of log-probs, the
    learner's own, over the response tokens of each shown trajectory."""
    return [_sample(group, shown(group), learner, tokenizer) for group, learner in zip(groups, log_probs, strict=False)]


def shown(group: Group) -> Trajectory:
    """The member of a group that stands for it: the first, so that what is shown is not chosen by its reward."""
    return group.trajectories[0]


def _sample(group: Group, t: Trajectory, learner: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "sample_index": t.sample_index,
        "prompt": group.prompt.text,
        "response": t.text,
        "answer": group.prompt.answer,
        "reward": t.reward,
        "verdict": t.reward_info.get("verdict"),
        "advantage": float(group.advantages[t.sample_index]),
        "policy_versions": t.policy_versions.tolist(),
        "tokens": [tokenizer.decode([i], skip_special_tokens=False) for i in t.response_ids],
        "behavior_log_probs": [round(float(x), 6) for x in t.log_probs],
        "log_ratio": [round(float(x), 6) for x in np.asarray(learner) - t.log_probs],
        "finish_reason": t.finish_reason,
    }
