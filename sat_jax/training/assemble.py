"""From groups to the batches that the learner trains on, and what other policies say about their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax.config import ExperimentConfig
from sat_jax.data.batching import make_batch, width_buckets
from sat_jax.learner import Programs
from sat_jax.rollout.weights import copy_params
from sat_jax.training import build
from sat_jax.training.rollout_metrics import shown
from sat_jax.types import Batch, Group

_PACKED_SIZES = 8
"""How many numbers of rows a packed batch can have, each of which is compiled once."""


class Assembler:
    """Lays out batches, places them on the mesh and scores them under every policy that the loss asks for.

    ``context`` is the longest sequence in tokens. ``reference`` are the weights of the frozen reference policy, if any;
    ``keeps_sampler`` says whether ``keep`` keeps the weights that sampled, for they are needed again.
    """

    def __init__(self, config: ExperimentConfig, policy: build.Policy, programs: Programs, context: int) -> None:
        self._config, self._programs = config, programs
        self.support = build.recorded_support(config, policy.config)
        routes, pad_id = build.recorded_routes(policy.config), policy.tokenizer.pad_id
        self._make = partial(make_batch, routes=routes, support=self.support, pad_id=pad_id)
        self.reference: Any = None
        self._sampler_weights: dict[int, Any] = {}
        self.keeps_sampler = config.learner.log_delta or "rollout_policy_log_probs" in config.loss.needs()
        self.widths = width_buckets(context)

    def split(self, groups: Sequence[Group]) -> list[Sequence[Group]]:
        """The groups of each update of a batch, in order; a short one, at the end of the prompts, fills the first."""
        n = self._config.groups_per_update
        return [groups[i * n : (i + 1) * n] for i in range(self._config.learner.updates_per_batch)]

    def make(self, groups: Sequence[Group], params: Any) -> Batch:
        """The rows of one update; ``params`` are the learner's at the start of the batch, its proximal policy."""
        batch = self._lay_out(groups)
        scores: dict[str, Any] = {}
        if self.reference is not None:
            scores["reference_log_probs"] = self._programs.score_native(self.reference, batch).log_probs
        if self.keeps_sampler:
            scores["rollout_policy_log_probs"] = self._sampler_log_probs(batch)
        if "proximal_log_probs" in self._config.loss.needs():
            scores["proximal_log_probs"] = self._programs.score_sampler(params, batch).log_probs
        return batch.replace(**scores)  # type: ignore[attr-defined]  # flax.struct adds it at run time

    def shown_log_probs(self, groups: Sequence[Group], batch: Batch, params: Any) -> list[np.ndarray]:
        """Log-probs under ``params`` over the response tokens of the members of ``groups`` that are shown."""
        groups = groups[: self._config.samples_per_step]
        if not groups:
            return []
        members = [dataclasses.replace(g, trajectories=(shown(g),), advantages=g.advantages[:1]) for g in groups]
        part = self._make(members, widths=(batch.tokens.shape[1],), rows_multiple=self._programs.row_ways)
        scores = np.asarray(self._programs.score_replayed(params, self._programs.place(part)).log_probs)
        return [
            scores[i, len(t.prompt_ids) : len(t.prompt_ids) + len(t.response_ids)]
            for i, t in enumerate(map(shown, groups))
        ]

    def check(self, groups: Sequence[Group]) -> None:
        """Raises ``ValueError`` where waiting groups cannot be trained on, having been sampled under other settings."""
        for group in groups:
            self._make([group], widths=self.widths, packing=self._config.learner.packing)

    def keep(self, params: Any, version: int) -> None:
        """Weights that were published, where they are needed again: waiting groups may have been sampled with them."""
        if not self.keeps_sampler:
            return
        oldest = version - self._config.rollout.max_staleness
        self._sampler_weights = {v: p for v, p in self._sampler_weights.items() if v >= oldest}
        self._sampler_weights[version] = copy_params(params)

    def _lay_out(self, groups: Sequence[Group]) -> Batch:
        learner, responses = self._config.learner, self._config.rows_per_update
        multiple = self._programs.row_ways * learner.micro_batches
        if learner.packing:
            multiple *= max(1, responses // (_PACKED_SIZES * multiple))
        rows = None if learner.packing else responses
        batch = self._make(groups, widths=self.widths, rows=rows, rows_multiple=multiple, packing=learner.packing)
        return self._programs.place(batch)

    def _sampler_log_probs(self, batch: Batch) -> jax.Array:
        """The learner's recomputation at the weights that sampled each token (``rollout_policy_log_probs``)."""
        versions, mask = np.asarray(batch.policy_versions), np.asarray(batch.loss_mask)
        total = jnp.zeros(versions.shape, jnp.float32)
        for version in np.unique(versions[mask]).tolist():
            scores = self._programs.score_sampler(self._sampler_weights[version], batch).log_probs
            total = jnp.where(mask & (versions == version), scores, total)
        return total
