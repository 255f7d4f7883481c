"""Finite values, finite gradients and right values at the edges."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import losses
from sat_jax.losses import LossConfig, LossInputs

pytestmark = pytest.mark.slow

SAT = ("sat-grpo", "sat-gspo")


def run(name: str, log_probs, behavior, advantages, mask) -> tuple[float, np.ndarray, dict[str, float]]:
    loss_fn = losses.make_loss(losses.method(name))
    mu = jnp.asarray(behavior, jnp.float32)
    inputs = LossInputs(
        jnp.asarray(log_probs, jnp.float32), mu, jnp.asarray(advantages, jnp.float32), jnp.asarray(mask)
    )
    (value, metrics), gradient = jax.value_and_grad(lambda lp: loss_fn(inputs.replace(log_probs=lp)), has_aux=True)(
        inputs.log_probs
    )
    return float(value), np.asarray(gradient), {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize("name", SAT)
def test_debug_nans_is_clean(name: str) -> None:
    nan, inf = np.nan, np.inf
    arrays = (
        [[-0.5, nan, -200.0, -1.0], [inf, -inf, nan, 0.0]],
        [[-0.4, -inf, 0.0, -1.0], [nan, inf, -inf, 0.0]],
        [[1.0, inf, -1.0, 0.5], [nan, nan, nan, nan]],
        [[1, 0, 1, 1], [0, 0, 0, 0]],
    )
    arrays = tuple(jnp.asarray(x, jnp.float32) for x in arrays)
    with jax.debug_nans(True):
        value, gradient, metrics = run(name, *arrays)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert (gradient[1] == 0).all()
    assert all(np.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize("name", SAT)
def test_all_equal_mismatch_gates_nothing(name: str) -> None:
    value, gradient, metrics = run(name, [[-1.125] * 4] * 2, [[-1.0] * 4] * 2, [[1.0] * 4, [-1.0] * 4], [[1] * 4] * 2)
    assert metrics["sat/q"] == 0.125
    assert metrics["sat/gate_rate"] == 0
    assert metrics["sat/c_low_min"] == 1
    base = run(name.removeprefix("sat-"), [[-1.125] * 4] * 2, [[-1.0] * 4] * 2, [[1.0] * 4, [-1.0] * 4], [[1] * 4] * 2)
    assert value == base[0]
    assert (gradient == base[1]).all()


@pytest.mark.parametrize("name", SAT)
def test_zero_quantile_gates_nothing(name: str) -> None:
    far = -4.0 if name == "sat-grpo" else -1.0
    value, _, metrics = run(name, [[-1.0] * 19 + [far]], [[-1.0] * 20], [[1.0] * 20], [[1] * 20])
    assert metrics["sat/q"] == 0
    assert metrics["sat/gate_rate"] == 0
    assert np.isfinite(value)


def test_one_token_is_its_own_quantile() -> None:
    _, _, metrics = run("sat-grpo", [[-1.5]], [[-1.0]], [[1.0]], [[1]])
    assert metrics["sat/q"] == 0.5
    assert metrics["sat/gate_rate"] == 0
    assert metrics["train/clip_fraction"] == 0


def test_ties_at_the_quantile_gate_fewer() -> None:
    d = np.array([0.01] * 8 + [0.3] * 2)
    _, _, metrics = run("sat-grpo", [-1 - d], [[-1.0] * 10], [[1.0] * 10], [[1] * 10])
    assert metrics["sat/q"] == pytest.approx(0.3)
    assert metrics["sat/gate_rate"] == 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_arrays(shape: tuple[int, int]) -> None:
    for name in (*SAT, "grpo"):
        zeros = np.zeros(shape)
        value, gradient, metrics = run(name, zeros, zeros, zeros, zeros)
        assert value == 0
        assert gradient.shape == shape
        assert all(np.isfinite(x) for x in metrics.values())


def test_boundary_ratio_keeps_its_whole_gradient() -> None:
    # Automatic differentiation of min(r A, clip(r) A) would halve it (22).
    config = LossConfig(eps_low=0.5, eps_high=1.0)
    loss_fn = losses.make_loss(config)
    inputs = LossInputs(
        jnp.log(jnp.asarray([[2.0, 0.5]])), jnp.zeros((1, 2)), jnp.asarray([[1.0, -1.0]]), jnp.ones((1, 2))
    )
    gradient = jax.grad(lambda lp: loss_fn(inputs.replace(log_probs=lp))[0])(inputs.log_probs)
    np.testing.assert_allclose(gradient, [[-1.0, 0.25]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_accumulates_in_float32(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    log_probs = jnp.asarray(-rng.random((2, 4096)), dtype)
    mu = jnp.asarray(log_probs + 0.01 * rng.normal(size=(2, 4096)), dtype)
    advantages = jnp.asarray(rng.normal(size=(2, 4096)), dtype)
    low = LossInputs(log_probs, mu, advantages, jnp.ones((2, 4096), bool))
    high = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, low)
    loss_fn = jax.jit(losses.make_loss(losses.method("sat-grpo")))
    (value, metrics), (want, want_metrics) = loss_fn(low), loss_fn(high)
    assert value.dtype == jnp.float32
    assert value == want
    assert metrics.keys() == want_metrics.keys()
    assert all(metrics[k] == want_metrics[k] for k in metrics)


def test_scoring_pass_decides() -> None:
    # The same weights, but the scored log-probs put one token on the other side of the boundary.
    mu = jnp.zeros((1, 2))
    log_probs = jnp.log(jnp.asarray([[1.19999, 1.0]]))
    scored = jnp.log(jnp.asarray([[1.20001, 1.0]]))
    loss_fn = losses.make_loss(losses.method("grpo"))
    inputs = LossInputs(log_probs, mu, jnp.ones((1, 2)), jnp.ones((1, 2)), scored_log_probs=scored)
    gradient = jax.grad(lambda lp: loss_fn(inputs.replace(log_probs=lp))[0])(log_probs)
    assert gradient[0, 0] == 0
    gradient = jax.grad(lambda lp: loss_fn(inputs.replace(log_probs=lp, scored_log_probs=None))[0])(log_probs)
    assert gradient[0, 0] != 0


@pytest.mark.parametrize("name", [*SAT, "grpo-tis"])
def test_micro_batches_give_the_same_bits(name: str) -> None:
    rng = np.random.default_rng(1)
    B, T = 8, 37
    log_probs = -rng.gamma(1.0, 1.0, (B, T)).astype(np.float32)
    noise = rng.normal(0, 0.15, (2, B, T)).astype(np.float32)
    batch = LossInputs(
        *map(
            jnp.asarray,
            (log_probs, log_probs + noise[0], rng.normal(size=(B, T)).astype(np.float32), rng.random((B, T)) < 0.7),
        ),
        rollout_policy_log_probs=jnp.asarray(log_probs + noise[1]),
        reference_log_probs=jnp.asarray(log_probs + noise[1]),
    )
    batch = batch.replace(scored_log_probs=batch.log_probs)
    loss_fn = losses.make_loss(dataclasses.replace(losses.method(name), kl_loss_coef=1e-3))

    def total(parts: int):
        def step(batch: LossInputs):
            summary = loss_fn.summarize(batch)
            sliced = jax.tree.map(lambda x: x.reshape(parts, B // parts, *x.shape[1:]), batch)
            rows = jax.lax.map(lambda part: loss_fn.rows(part, summary), sliced)
            rows = jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), rows)
            return loss_fn.metrics(rows, summary)

        return jax.jit(step)(batch)

    one = total(1)
    assert one["train/loss"] != 0
    for parts in (4, 8) if name == "sat-gspo" else (4,):
        assert {k: float(v) for k, v in total(parts).items()} == {k: float(v) for k, v in one.items()}
