"""From a step's groups to the batch that it trains on, and what other policies say about its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax.config import ExperimentConfig
from sat_jax.data.batching import make_batch, width_buckets
from sat_jax.learner.compiled import Programs
from sat_jax.rollout.weights import copy_params
from sat_jax.training import build
from sat_jax.training.rollout_metrics import shown
from sat_jax.types import Batch, Group

_PACKED_SIZES = 8
"""How many numbers of rows a packed batch can have, each of which is compiled once."""


class Batches:
    """Lays out batches, places them on the mesh and scores them under every policy that the loss asks for.

    Args:
        config: the run.
        policy: whose rollouts are laid out.
        programs: the compiled passes.
        context: tokens of the longest sequence.

    Attributes:
        reference: weights of the frozen reference policy, or None.
        keeps_sampler: whether the weights that sampled are needed again, so that ``keep`` keeps them.
        support: what the engine must record of the tokens that each one was drawn from, or None.
        widths: row widths that occur.
    """

    def __init__(self, config: ExperimentConfig, policy: build.Policy, programs: Programs, context: int) -> None:
        self._config, self._programs = config, programs
        self._pad_id = policy.tokenizer.pad_id
        self._routes = build.recorded_routes(policy.config)
        self.support = build.recorded_support(config, policy.config)
        self._sampler_weights: dict[int, Any] = {}
        self.reference: Any = None
        self.keeps_sampler = config.learner.log_delta or "rollout_policy_log_probs" in config.loss.needs()
        self.widths = width_buckets(context)

    def make(self, groups: Sequence[Group], params: Any) -> tuple[Batch, list[np.ndarray]]:
        """The learner's batch of ``groups``, and its log-probs under ``params`` of the responses that are shown."""
        batch = self._lay_out(groups)
        updates: dict[str, Any] = {}
        if self.reference is not None:
            updates["reference_log_probs"] = self._programs.score_native(self.reference, batch).log_probs
        if self.keeps_sampler:
            updates["rollout_policy_log_probs"] = self._sampler_log_probs(batch)
        if self._config.learner.log_delta or "proximal_log_probs" in self._config.loss.needs():
            updates["proximal_log_probs"] = self._programs.score_sampler(params, batch).log_probs
        shown_log_probs = self._shown_log_probs(groups[: self._config.samples_per_step], batch.tokens.shape[1], params)
        return batch.replace(**updates), shown_log_probs  # type: ignore[attr-defined]  # flax.struct adds replace at run time

    def check(self, groups: Sequence[Group]) -> None:
        """Raises ``ValueError`` where waiting groups cannot be trained on, having been sampled under other settings."""
        for group in groups:
            self._make([group], rows=None, multiple=1)

    def keep(self, params: Any, version: int) -> None:
        """Weights of versions that waiting groups may still have been sampled with, where they are needed again."""
        if not self.keeps_sampler:
            return
        oldest = version - self._config.rollout.max_staleness
        self._sampler_weights = {v: p for v, p in self._sampler_weights.items() if v >= oldest}
        self._sampler_weights[version] = copy_params(params)

    def delta_metrics(self, batch: Batch) -> dict[str, float]:
        """The two halves of d (2): ``mean |log pi_j - log pi_l|`` and ``mean |log pi_l - log mu|`` over active
        tokens."""
        if not self._config.learner.log_delta:
            return {}
        mask = np.asarray(batch.loss_mask)
        sampler, now = np.asarray(batch.rollout_policy_log_probs), np.asarray(batch.proximal_log_probs)
        return {
            "async/delta_pi": float(np.mean(np.abs(now - sampler)[mask])),
            "async/delta_impl": float(np.mean(np.abs(sampler - np.asarray(batch.behavior_log_probs))[mask])),
        }

    def _lay_out(self, groups: Sequence[Group]) -> Batch:
        rollout, learner = self._config.rollout, self._config.learner
        rows = rollout.prompts_per_step * rollout.n_samples_per_prompt
        multiple = self._programs.row_ways * learner.micro_batches
        if learner.packing:
            multiple *= max(1, rows // (_PACKED_SIZES * multiple))
        return self._programs.place(self._make(groups, None if learner.packing else rows, multiple))

    def _make(self, groups: Sequence[Group], rows: int | None, multiple: int) -> Batch:
        return make_batch(
            groups,
            widths=self.widths,
            rows=rows,
            rows_multiple=multiple,
            routes=self._routes,
            support=self.support,
            packing=self._config.learner.packing,
            pad_id=self._pad_id,
        )

    def _shown_log_probs(self, groups: Sequence[Group], width: int, params: Any) -> list[np.ndarray]:
        """Learner log-probs over the response tokens of each group's shown member."""
        if not groups:
            return []
        members = [dataclasses.replace(g, trajectories=(shown(g),), advantages=g.advantages[:1]) for g in groups]
        part = make_batch(
            members,
            widths=(width,),
            rows_multiple=self._programs.row_ways,
            routes=self._routes,
            support=self.support,
            pad_id=self._pad_id,
        )
        scores = np.asarray(self._programs.score_replayed(params, self._programs.place(part)).log_probs)
        return [
            scores[i, len(t.prompt_ids) : len(t.prompt_ids) + len(t.response_ids)]
            for i, t in enumerate(map(shown, groups))
        ]

    def _sampler_log_probs(self, batch: Batch) -> jax.Array:
        """The learner's recomputation at the weights that sampled each token (``rollout_policy_log_probs``)."""
        versions, mask = np.asarray(batch.policy_versions), np.asarray(batch.loss_mask)
        total = jnp.zeros(versions.shape, jnp.float32)
        for version in np.unique(versions[mask]).tolist():
            scores = self._programs.score_sampler(self._sampler_weights[version], batch).log_probs
            total = jnp.where(mask & (versions == version), scores, total)
        return total
