"""The order statistic: exact, on the typed decimal, whatever the split."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax import losses
from sat_jax.losses import LossConfig, LossInputs, Ppo, Sat
from sat_jax.losses.quantile import by_bisection, by_histogram, decimal_digits, order_statistic, rank_from_alpha

pytestmark = pytest.mark.slow

ALPHAS = (0.9, 0.95, 0.5, 0.1, 0.999, 0.07, 1e-05, 0.123456789, 0.3)
COUNTS = (0, 1, 2, 3, 9, 10, 11, 20, 99, 100, 101, 262_144, 2**24 + 1, 2**31 - 1, 2**31)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rank_is_exact(alpha: float) -> None:
    want = [math.ceil(Fraction(str(alpha)) * n) for n in COUNTS]
    got = rank_from_alpha(jnp.asarray(COUNTS, jnp.uint32), alpha)
    assert got.tolist() == want


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 2**31), digits=st.integers(1, 10**9 - 1))
def test_rank_of_any_decimal(n: int, digits: int) -> None:
    alpha = float(f"0.{digits:09d}")
    assert int(_rank(jnp.uint32(n), digits)) == math.ceil(Fraction(str(alpha)) * n)


def _rank(n: jax.Array, digits: int) -> jax.Array:
    with jax.disable_jit():
        return rank_from_alpha(np.uint32(n), float(f"0.{digits:09d}"))


def test_the_decimal_is_the_one_typed() -> None:
    assert decimal_digits(0.9) == (9,)
    assert decimal_digits(np.float32(0.9)) == (9,)
    assert decimal_digits(0.05) == (0, 5)
    assert decimal_digits(1e-05) == (0, 0, 0, 0, 1)
    for alpha in (0.0, 1.0, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="inside"):
            decimal_digits(alpha)


BITS = st.floats(0, 2.0**100, width=32) | st.sampled_from([0.0, 1e-45, 1e-8, 0.2, float("inf")])


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.tuples(BITS, st.integers(0, 3)), min_size=12, max_size=12), rank=st.integers(0, 36))
def test_against_sorting(values: list[tuple[float, int]], rank: int) -> None:
    x = np.array([v for v, _ in values], np.float32)
    weights = np.array([w for _, w in values], np.uint32)
    repeated = np.sort(np.repeat(x, weights))
    rank = min(rank, len(repeated))
    want = repeated[rank - 1] if rank else np.float32(0)
    assert _order(x, weights, np.uint32(rank)) == want
    pattern = jax.lax.bitcast_convert_type(x, jnp.uint32)
    for algorithm in (_bisect, _count):
        if rank:
            found = algorithm(pattern, weights, np.uint32(rank))
            assert jax.lax.bitcast_convert_type(found, jnp.float32) == want


_order = jax.jit(order_statistic)
_bisect = jax.jit(functools.partial(by_bisection, across=lambda x: x))
_count = jax.jit(functools.partial(by_histogram, across=lambda x: x))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_every_width(dtype: jnp.dtype) -> None:
    with jax.enable_x64(True):
        x = jnp.abs(jnp.asarray(np.random.default_rng(0).normal(size=101), dtype))
        for algorithm in (by_bisection, by_histogram):
            pattern = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(dtype).bits}"))
            ones = jnp.ones(x.shape, jnp.uint32)
            found = algorithm(pattern, ones, jnp.uint32(91), across=lambda n: n)
            assert jax.lax.bitcast_convert_type(found, dtype) == jnp.sort(x)[90]


def inputs(B: int = 4, T: int = 12, seed: int = 0) -> LossInputs:
    rng = np.random.default_rng(seed)
    log_probs = -rng.gamma(1.0, 1.0, (B, T)).astype(np.float32)
    return LossInputs(
        jnp.asarray(log_probs),
        jnp.asarray(np.minimum(log_probs + rng.normal(0, 0.1, (B, T)), 0), jnp.float32),
        jnp.asarray(rng.normal(size=(B, T)), jnp.float32),
        jnp.asarray(rng.random((B, T)) < 0.8),
    )


def test_sequence_unit_weighs_by_length() -> None:
    batch = inputs()
    summary = losses.make_loss(losses.method("sat-gspo")).summarize(batch)
    mask = np.asarray(batch.loss_mask)
    d = np.where(mask, np.asarray(batch.log_probs) - np.asarray(batch.behavior_log_probs), 0)
    rho = np.broadcast_to(np.abs(d.sum(1) / mask.sum(1))[:, None], mask.shape)[mask]
    want = np.sort(rho)[math.ceil(Fraction("0.9") * mask.sum()) - 1]
    assert float(summary.rules["sat"].q) == pytest.approx(float(want), rel=1e-6)
    # The longest sequence is also the furthest: nothing can exceed q.
    lone = LossInputs(*(jax.tree.leaves(batch)[i][:1] for i in range(4)))
    assert losses.make_loss(losses.method("sat-gspo"))(lone)[1]["sat/gate_rate"] == 0


@pytest.mark.parametrize(("scope", "shards"), [("batch", 1), ("microbatch", 1), ("device", 2)])
def test_scopes(scope: str, shards: int) -> None:
    batch = inputs(B=4)
    loss_fn = losses.make_loss(LossConfig(rules=(Ppo(), Sat(scope=scope, shards=shards))))
    summary = loss_fn.summarize(batch)
    mask = np.asarray(batch.loss_mask)
    d = np.abs(np.asarray(batch.log_probs) - np.asarray(batch.behavior_log_probs))

    def q(rows: slice) -> float:
        active = np.sort(d[rows][mask[rows]])
        return active[math.ceil(Fraction("0.9") * len(active)) - 1]

    gates = []
    for part in (slice(0, 2), slice(2, 4)):
        rows = loss_fn.rows(jax.tree.map(lambda x, part=part: x[part], batch), summary)
        gates.append(np.asarray(rows.diagnostics.sums["sat/gate_rate"]))
    if scope == "batch":
        thresholds = [q(slice(None))] * 4
    elif scope == "microbatch":
        thresholds = [q(slice(0, 2))] * 2 + [q(slice(2, 4))] * 2
    else:
        thresholds = [q(slice(i, i + 1)) for i in range(4)]
    want = [(d[i][mask[i]] > thresholds[i]).sum() for i in range(4)]
    assert np.concatenate(gates).tolist() == want


def test_the_reference_can_be_bounded() -> None:
    batch = inputs()
    q = float(losses.make_loss(losses.method("sat-grpo"))(batch)[1]["sat/q"])
    for sat, reference in (
        (Sat(q_floor=2 * q), 2 * q),
        (Sat(q_cap=q / 2), q / 2),
        (Sat(q_floor=q / 9, q_cap=9 * q), q),
    ):
        summary = losses.make_loss(LossConfig(rules=(Ppo(), sat))).summarize(batch).rules["sat"]
        assert float(summary.q) == q
        assert float(summary.reference) == pytest.approx(reference)
    on_policy = batch.replace(behavior_log_probs=batch.log_probs + 1e-7)
    noisy = losses.make_loss(losses.method("sat-grpo"))(on_policy)[1]
    floored = losses.make_loss(LossConfig(rules=(Ppo(), Sat(q_floor=1e-4))))(on_policy)[1]
    assert floored["sat/gate_rate"] == 0
    assert floored["sat/q"] == noisy["sat/q"]
