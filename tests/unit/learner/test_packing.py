"""A learner step on packed rows is the step on one sequence a row: routes, segments, loss, gradient, metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from sat_jax import learner, losses, model
from sat_jax.data.batching import make_batch
from sat_jax.data.records import Routes
from sat_jax.types import Batch, Group, Prompt, Trajectory
from tests.unit.learner.test_step import CONFIG, _spec

pytestmark = pytest.mark.slow

LENGTHS = ((2, 6), (3, 2), (1, 4), (4, 3), (2, 2), (3, 5), (1, 1), (2, 3))
ROUTES = Routes(len(CONFIG.moe_layers), CONFIG.num_experts_per_tok, CONFIG.num_experts)
WIDTH = 16


def _groups(params: Any) -> list[Group]:
    """Two groups of four, sampled by a policy a little off the learner's."""
    rng = np.random.default_rng(3)
    members = []
    for i, (n_prompt, n) in enumerate(LENGTHS):
        experts = np.argsort(rng.random((n_prompt + n - 1, ROUTES.n_layers, ROUTES.n_experts)), -1)
        members.append(
            Trajectory(
                prompt_id="p",
                sample_index=i % 4,
                prompt_ids=rng.integers(0, CONFIG.vocab_size, n_prompt).astype(np.int32),
                response_ids=rng.integers(0, CONFIG.vocab_size, n).astype(np.int32),
                log_probs=np.full(n, -1, np.float32),
                policy_versions=rng.integers(0, 3, n).astype(np.int32),
                routed_experts=experts[..., : ROUTES.top_k],
                finish_reason="stop",
            )
        )
    scores = np.asarray(jax.jit(partial(learner.score, _spec()))(params, make(_grouped(members), False)).log_probs)
    off = [
        replace(t, log_probs=np.minimum(0, own + 0.05 * rng.normal(size=len(own))).astype(np.float32))
        for row, t in zip(scores, members, strict=True)
        for own in [row[len(t.prompt_ids) : len(t.prompt_ids) + len(t.response_ids)]]
    ]
    return _grouped(off)


def _grouped(members: list[Trajectory]) -> list[Group]:
    prompt = Prompt("p", "?", np.zeros(2, np.int32), "", "test")
    advantages = np.array([1.0, -0.5, 0.3, -0.8], np.float32)
    return [Group(f"{i}", prompt, tuple(members[i : i + 4]), advantages * (1 + i)) for i in (0, 4)]


def make(groups: list[Group], packing: bool, rows_multiple: int = 1) -> Batch:
    return make_batch(groups, widths=(WIDTH,), routes=ROUTES, packing=packing, rows_multiple=rows_multiple)


def test_packing_changes_no_number() -> None:
    """With the sequence as the unit, and in micro-batches: what depends on segments most."""
    params = model.init_params(jax.random.key(0), CONFIG, "float32")
    groups = _groups(params)
    loss = losses.make_loss(replace(losses.method("sat-gspo"), eps_low=0.05, eps_high=0.05))
    apart, packed = make(groups, False), make(groups, True, rows_multiple=2)
    assert len(packed.tokens) <= 4 < len(apart.tokens)
    assert packed.segment_ids.max() >= 3

    def step(spec: learner.LearnerSpec, batch: Batch) -> Any:
        return jax.jit(partial(learner.train_step, spec))(learner.init_state(spec, params), batch)

    alone, expected = step(replace(_spec(), loss=loss), apart)
    together, metrics = step(replace(_spec(packed=True, micro_batches=2), loss=loss), packed)
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        # A contraction amplifies the rounding of its log-ratio.
        np.testing.assert_allclose(
            metrics[name], value, rtol=3e-5 if "sat/c_" in name else 1e-5, atol=1e-6, err_msg=name
        )
    assert 0 < float(metrics["sat/gate_rate"]) < 1
    assert float(metrics["moe/router_agreement"]) < 1  # routes were replayed, each under its own token
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(alone.opt_state[0].mu))
    for a, b in zip(jax.tree.leaves(alone.opt_state[0].mu), jax.tree.leaves(together.opt_state[0].mu), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * largest)
