"""A learner step on a tiny mixture of experts: micro-batches, replay, withheld updates."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import learner, losses, model
from sat_jax.learner import LearnerSpec, step
from sat_jax.types import NATIVE_ROUTE, NO_TOKEN, Batch

CONFIG = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=24,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.4,
)
B, T, P = 8, 10, 4


@lru_cache
def _spec(**changes: Any) -> LearnerSpec:
    """One object per setting, so that equal steps are compiled once."""
    schedule = learner.learning_rate(1e-3)
    loss = replace(losses.method("sat-grpo"), eps_low=0.05, eps_high=0.05)
    adam = learner.adam(schedule, 0.9, 0.98, 1e-8)
    router = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}
    return LearnerSpec(CONFIG, losses.make_loss(loss), adam, schedule, **(router | changes))


@pytest.fixture(scope="module")
def params() -> Any:
    return model.init_params(jax.random.key(0), CONFIG, "float32")


@pytest.fixture(scope="module")
def batch(params: Any) -> Batch:
    """Rows of different lengths, one of them empty, sampled by a policy a little off the learner's."""
    rng = np.random.default_rng(0)
    lengths = np.array([10, 9, 8, 10, 6, 7, 10, 0])
    columns = np.arange(T)
    tokens = rng.integers(0, CONFIG.vocab_size, (B, T)).astype(np.int32)
    segments = (columns < lengths[:, None]).astype(np.int32)
    raw = Batch(
        tokens=jnp.asarray(tokens),
        segment_ids=jnp.asarray(segments),
        positions=jnp.asarray(np.broadcast_to(columns, (B, T)).astype(np.int32)),
        loss_mask=jnp.asarray((columns >= P) & (segments > 0)),
        behavior_log_probs=jnp.zeros((B, T)),
        advantages=jnp.asarray(np.broadcast_to(rng.normal(size=(B, 1)), (B, T)).astype(np.float32)),
        policy_versions=jnp.asarray(rng.integers(0, 3, (B, T)).astype(np.int32)),
        routed_experts=jnp.full((B, T, 1, 2), NATIVE_ROUTE, jnp.int32),
    )
    log_probs = _log_probs(_spec(), params, raw)
    noise = rng.normal(size=(B, T)) * 0.05
    # What stands under the mask must not matter.
    behavior = np.where(np.asarray(raw.loss_mask), log_probs - noise, np.nan)
    return raw.replace(behavior_log_probs=jnp.asarray(behavior, jnp.float32))  # type: ignore[attr-defined]


@lru_cache
def _jitted(function: Any, spec: LearnerSpec) -> Any:
    return jax.jit(partial(function, spec))


def _step(spec: LearnerSpec, params: Any, batch: Batch) -> Any:
    state = learner.init_state(spec, params)
    return _jitted(learner.train_step, spec)(state.replace(step=jnp.int32(3)), batch)


def _log_probs(spec: LearnerSpec, params: Any, batch: Batch) -> np.ndarray:
    return np.asarray(_jitted(learner.score, spec)(params, batch).log_probs)


@pytest.mark.slow
def test_four_micro_batches_are_one(params: Any, batch: Batch) -> None:
    one, metrics_one = _step(_spec(), params, batch)
    four, metrics_four = _step(_spec(micro_batches=4), params, batch)
    assert set(metrics_one) == set(metrics_four)
    for name, value in metrics_one.items():
        np.testing.assert_allclose(value, metrics_four[name], rtol=2e-4, atol=1e-5, err_msg=name)
    assert float(metrics_one["sat/gate_rate"]) > 0
    # Adam's first step moves every weight by the learning rate whatever its gradient: compare the moments.
    chex.assert_trees_all_close(one.opt_state[0].mu, four.opt_state[0].mu, atol=1e-6, rtol=1e-4)
    assert int(one.step) == int(four.step) == 4


@pytest.mark.slow
def test_gates_of_micro_batches_are_those_of_the_whole_batch(params: Any, batch: Batch) -> None:
    """Given the same log-probs, quantile, gates and loss are the same bits however the rows are split."""
    spec = _spec()
    inputs = losses.LossInputs(
        log_probs=jnp.asarray(_log_probs(spec, params, batch)),
        behavior_log_probs=batch.behavior_log_probs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
    )
    summary = jax.jit(spec.loss.summarize)(inputs)
    rows = jax.jit(spec.loss.rows)
    whole = rows(inputs, summary)
    parts = [rows(jax.tree.map(lambda x, i=i: x[i : i + 2], inputs), summary) for i in range(0, B, 2)]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    chex.assert_trees_all_equal(whole, joined)
    chex.assert_trees_all_equal(spec.loss.metrics(whole, summary), spec.loss.metrics(joined, summary))


def test_rows_come_back_in_their_order(params: Any, batch: Batch) -> None:
    whole, parts = (jax.jit(partial(step.score, _spec(micro_batches=n)))(params, batch) for n in (1, B // 2))
    np.testing.assert_allclose(parts.log_probs, whole.log_probs, atol=1e-5)
    with pytest.raises(ValueError, match=f"{B} rows are not a multiple of micro_batches = 5"):
        jax.eval_shape(partial(step.score, _spec(micro_batches=5)), params, batch)


@pytest.mark.slow
def test_replayed_experts_decide_and_their_agreement_is_reported(params: Any, batch: Batch) -> None:
    native = model.forward(params, CONFIG, batch.tokens, batch.segment_ids, batch.positions).router.indices
    same = batch.replace(routed_experts=native)  # type: ignore[attr-defined]
    other = batch.replace(routed_experts=(native + 1) % 4)  # type: ignore[attr-defined]
    plain = _log_probs(_spec(routing_replay=False), params, batch)
    mask = np.asarray(batch.loss_mask)
    np.testing.assert_allclose(_log_probs(_spec(), params, same)[mask], plain[mask], atol=1e-5)
    assert np.abs(_log_probs(_spec(), params, other) - plain)[mask].max() > 1e-2
    for replay in (True, False):
        _, agreeing = _step(_spec(routing_replay=replay), params, same)
        _, disagreeing = _step(_spec(routing_replay=replay), params, other)
        assert float(agreeing["moe/router_agreement"]) == 1.0
        assert float(disagreeing["moe/router_agreement"]) < 0.5


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_batch_without_an_active_token_changes_nothing(params: Any, batch: Batch, micro_batches: int) -> None:
    empty = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))  # type: ignore[attr-defined]
    spec = _spec(micro_batches=4) if micro_batches == 4 else _spec()
    state, metrics = _step(spec, params, empty)
    chex.assert_trees_all_equal(state.params, params)
    assert float(metrics["train/valid_tokens"]) == 0
    assert float(metrics["train/update_skipped"]) == 1
    assert float(metrics["train/pg_loss"]) == 0
    assert all(np.isfinite(v) for v in metrics.values())
    assert int(state.step) == 4


def test_a_gradient_that_is_not_finite_is_withheld(params: Any, batch: Batch) -> None:
    broken = batch.replace(advantages=jnp.full((B, T), jnp.inf, jnp.float32))  # type: ignore[attr-defined]
    state, metrics = _step(_spec(), params, broken)
    chex.assert_trees_all_equal(state.params, params)
    assert not np.isfinite(metrics["train/grad_norm"])
    assert float(metrics["train/update_skipped"]) == 1


def test_staleness_counts_versions_of_active_tokens(params: Any, batch: Batch) -> None:
    _, metrics = _step(_spec(), params, batch)
    lag = (3 - np.asarray(batch.policy_versions))[np.asarray(batch.loss_mask)]
    assert float(metrics["async/staleness_mean"]) == pytest.approx(lag.mean())
    assert float(metrics["async/staleness_max"]) == lag.max()


def test_supervised_steps_lower_the_loss(params: Any, batch: Batch) -> None:
    spec = _spec(routing_replay=False)
    step = _jitted(learner.supervised_step, spec)
    state = learner.init_state(spec, params)
    values = []
    for _ in range(20):
        state, metrics = step(state, batch)
        values.append(float(metrics["sft/loss"]))
    assert values[-1] < values[0] - 0.05
    assert values[0] > -_log_probs(spec, params, batch)[np.asarray(batch.loss_mask)].mean()  # router losses are in it


def test_schedules_warm_up_and_decay() -> None:
    """Fault 38: linear 1e-6 -> 0 over 10 steps gives 4e-7 at step 6, counted in optimizer steps."""
    assert float(learner.learning_rate(1e-6, 0, 10)(6)) == pytest.approx(4e-7)
    warm = learner.learning_rate(1e-3, 4)
    assert [float(warm(i)) for i in (0, 2, 4, 9)] == pytest.approx([0, 5e-4, 1e-3, 1e-3])


def _with_supports(batch: Batch) -> Batch:
    """Every response token was drawn from itself and some of the others."""
    rng = np.random.default_rng(3)
    support = np.where(rng.random((B, T, 6)) < 0.8, rng.integers(0, CONFIG.vocab_size, (B, T, 6)), NO_TOKEN)
    support[..., 2] = batch.tokens
    support[~np.asarray(batch.loss_mask)] = NO_TOKEN
    changed: Batch = batch.replace(support=jnp.asarray(support, jnp.int32))  # type: ignore[attr-defined]
    return changed


@pytest.mark.slow
def test_supports_are_replayed_by_every_pass(params: Any, batch: Batch) -> None:
    """At the weights that sampled, over the supports that were sampled from, every ratio is 1 and no clip acts; one
    micro-batch is four."""
    supported = _with_supports(batch)
    log_probs = _log_probs(_spec(), params, supported)
    mask = np.asarray(batch.loss_mask)
    assert (log_probs - _log_probs(_spec(), params, batch))[mask].min() > 0.05  # fewer tokens share the probability
    same = supported.replace(behavior_log_probs=jnp.asarray(log_probs))  # type: ignore[attr-defined]
    _, metrics = _step(_spec(), params, same)
    assert float(metrics["train/d_bar"]) < 1e-6
    assert 0.1 < float(metrics["train/outside_support"]) < 0.9
    _, without = _step(_spec(), params, batch)
    assert "train/outside_support" not in without
    assert float(metrics["train/entropy"]) < float(without["train/entropy"]) - 0.5

    one, metrics_one = _step(_spec(), params, supported)
    four, metrics_four = _step(_spec(micro_batches=4), params, supported)
    for name, value in metrics_one.items():
        np.testing.assert_allclose(value, metrics_four[name], rtol=2e-4, atol=1e-5, err_msg=name)
    chex.assert_trees_all_close(one.opt_state[0].mu, four.opt_state[0].mu, atol=1e-6, rtol=1e-4)


def test_supervised_steps_are_over_the_whole_vocabulary(params: Any, batch: Batch) -> None:
    spec = _spec(routing_replay=False)
    losses_of = [
        _jitted(learner.supervised_step, spec)(learner.init_state(spec, params), b)[1]["sft/loss"]
        for b in (batch, _with_supports(batch))
    ]
    assert losses_of[0] == losses_of[1]
