"""The nouns that everything else passes around.

Axis letters, used in every docstring of the project:

    B rows, T tokens (prompt and response), P prompt tokens, R response tokens, G responses of a group,
    L mixture-of-experts layers, E experts, K experts per token (top-k), V vocabulary, D width.

Alignment, decided once: every ``[B, T]`` array is aligned with ``tokens``. Entry ``t`` belongs to the token at position
``t``; its log-prob is ``log p(tokens[t] | tokens[<t])``, so entry 0 of a sequence is never a target. Routed experts
follow the same rule from the other side: row ``t`` holds the experts that processed token ``t`` as an *input*.

Host records (``Prompt``, ``Trajectory``, ``Group``) are numpy and plain Python; device records (``Batch``,
``TrainState``) are pytrees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import struct

__all__ = ["MIN_TEMPERATURE", "NATIVE_ROUTE", "NO_TOKEN", "Batch", "Group", "Prompt", "TrainState", "Trajectory"]

FinishReason = Literal["stop", "length", "abort"]
"""Why a response ended: an EOS or stop string was sampled, the budget ran out, or the engine was told to abort."""

NATIVE_ROUTE = -1
"""In ``routed_experts``: this token has no recorded experts and routes by the learner's own top-k."""

NO_TOKEN = -1
"""In ``support``: no token here. A position with nothing else was drawn from the whole vocabulary."""

MIN_TEMPERATURE = 1e-4
"""The lowest temperature above 0 (greedy decoding): logits are float32 and are divided by it. With logits of up to ten
thousand, log-probs and their gradients are finite from here on. Below, the rounding of the quotient (a fused
multiply-add in one place, not in another) is large enough for its exponential to overflow."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem. Made by ``data``, read by ``rollout``, ``rewards`` and ``evaluation``.

    Attributes:
        prompt_id: stable identity of the problem: the same in every run and after every resume.
        text: the rendered prompt, chat template applied, exactly what ``token_ids`` encode.
        token_ids: int32 [P].
        answer: reference answer handed to the reward; empty where the source has none.
        source: name of the data source, one key of the evaluation table.
    """

    prompt_id: str
    text: str
    token_ids: np.ndarray
    answer: str
    source: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One sampled response. Made by an engine, graded by ``rewards``, turned into a row by ``data.batching``.

    Attributes:
        sample_index: 0 .. G-1 within its group.
        prompt_ids: int32 [P].
        response_ids: int32 [R]; the end-of-sequence token is part of it where one was sampled.
        log_probs: float32 [R], nats: the engine's own log-probs of ``response_ids``, at the sampling temperature.
        policy_versions: int32 [R]: the learner version whose weights sampled each token.
        routed_experts: int [P + R - 1 or P + R, L, K]: experts that processed each input token, or None for dense
            models and engines that do not report them. The last sampled token is never fed back, so its row may be
            missing.
        finish_reason: ``stop``, ``length`` (truncated) or ``abort``.
        text: the decoded response, special tokens removed.
        reward_info: what the grader said beside the number (``verdict``, ``parsed`` ...).
        request_id: the request that it answers, as the engine was given it: one problem may be in flight twice.
        support: int [R, S]: the tokens that each of ``response_ids`` was drawn from, itself among them, in any order,
            ``NO_TOKEN`` behind them; None where sampling does not truncate.
    """

    prompt_id: str
    sample_index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray
    routed_experts: np.ndarray | None
    finish_reason: FinishReason
    text: str = ""
    reward: float | None = None
    reward_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    request_id: str = ""
    support: np.ndarray | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclasses.dataclass(frozen=True)
class Group:
    """The G responses to one prompt: the unit that is issued, queued, trained on and accounted for.

    Attributes:
        group_id: unique within a run: ``<epoch>:<prompt_id>``-like, assigned when the group is issued.
        advantages: float32 [G], filled once every member is graded; empty before.
    """

    group_id: str
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    advantages: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def rewards(self) -> np.ndarray:
        """float32 [G]; NaN for members that have not been graded."""
        return np.array([np.nan if t.reward is None else t.reward for t in self.trajectories], np.float32)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among all tokens: what the staleness bound looks at. Empty groups are an error."""
        return int(min(t.policy_versions.min() for t in self.trajectories if len(t.policy_versions)))


@struct.dataclass
class Batch:
    """What the learner trains on: right-padded or packed rows, all arrays aligned with ``tokens``.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T]; 0 is padding, 1, 2, ... are the sequences packed into the row. Tokens attend within
            their own segment only.
        positions: int32 [B, T]; position within the segment, from 0.
        loss_mask: bool [B, T]; True on response tokens, end-of-sequence included; False on prompt, padding, the first
            token of a segment and text that the policy did not sample.
        behavior_log_probs: float32 [B, T], nats; the engine's. Anything under a False mask.
        advantages: float32 [B, T].
        policy_versions: int32 [B, T]; version that sampled the token. Anything under a False mask.
        routed_experts: int32 [B, T, L, K] with ``NATIVE_ROUTE`` where unknown, or None (no replay).
        support: int32 [B, T, S]: the tokens that ``tokens`` was drawn from, filled up with ``NO_TOKEN``; nothing else
            where it was not sampled. None: sampling does not truncate.
        reference_log_probs: float32 [B, T] or None; frozen reference policy, for the KL term.
        rollout_policy_log_probs: float32 [B, T] or None; the learner's recomputation at the weights that sampled.
        proximal_log_probs: float32 [B, T] or None; the learner's recomputation at the start of the step.
    """

    tokens: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    loss_mask: jax.Array
    behavior_log_probs: jax.Array
    advantages: jax.Array
    policy_versions: jax.Array
    routed_experts: jax.Array | None = None
    support: jax.Array | None = None
    reference_log_probs: jax.Array | None = None
    rollout_policy_log_probs: jax.Array | None = None
    proximal_log_probs: jax.Array | None = None


@struct.dataclass
class TrainState:
    """Everything that a learner step reads and writes.

    Attributes:
        step: int32 scalar: the learner's version; the number of optimizer updates applied so far.
        params: pytree of the policy's parameters.
    """

    step: jax.Array
    params: Any
    opt_state: Any
