"""What every loss must do, whatever it is made of. A new rule is found by ``subjects`` and runs through all of it."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import losses
from sat_jax.dataclass_json import from_dict, to_dict
from sat_jax.losses import LossConfig, LossInputs
from tests.conformance.subjects import KINDS, batch, compiled, discovered, subjects

EACH = pytest.mark.parametrize("config", subjects().values(), ids=subjects().keys())


def close(a, b, rtol: float = 2e-6, atol: float = 1e-7) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("name", discovered())
def test_a_rule_is_complete(name: str) -> None:
    rule = discovered()[name]
    assert issubclass(rule, KINDS)
    assert name in losses.rule_names(), f"rules/{name}.py: give LossConfig a field '{name}' of type {rule.__name__}"
    assert type(getattr(LossConfig(), name)) is rule
    assert losses.rule_names()[name] == rule.kind
    assert rule.source
    assert rule.summary
    assert rule.__doc__
    assert dataclasses.is_dataclass(rule)
    assert all(array in {f.name for f in dataclasses.fields(LossInputs)} for array in rule.needs)


def test_every_rule_has_a_file() -> None:
    assert set(losses.rule_names()) == set(discovered())


@EACH
def test_shapes_and_types(config: LossConfig) -> None:
    inputs = batch()
    (loss, metrics), gradient = compiled(config)(inputs)
    assert loss.shape == ()
    assert loss.dtype == gradient.dtype == jnp.float32
    assert gradient.shape == inputs.log_probs.shape
    assert np.abs(gradient).sum() > 0
    assert metrics.keys() <= losses.METRIC_REDUCTIONS.keys()
    assert all(x.shape == () and np.isfinite(x) for x in metrics.values())
    loss_fn = losses.make_loss(config)
    rows = jax.eval_shape(lambda x: loss_fn.rows(x, loss_fn.summarize(x)), inputs)
    assert {x.shape for x in jax.tree.leaves(rows)} == {(4,)}


@EACH
def test_jit_and_vmap_equal_eager(config: LossConfig) -> None:
    loss_fn = losses.make_loss(config)
    two = [batch(seed=s) for s in (1, 2)]
    eager = [loss_fn(inputs) for inputs in two]
    close(eager[0], compiled(config)(two[0])[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *two)
    close(jax.vmap(loss_fn)(stacked), jax.tree.map(lambda *x: jnp.stack(x), *eager))


@EACH
def test_masked_positions_are_inert(config: LossConfig) -> None:
    inputs = batch()
    spoiled = {}
    for i, field in enumerate(dataclasses.fields(inputs)):
        x = getattr(inputs, field.name)
        if x is not None and x.dtype == jnp.float32:
            spoiled[field.name] = jnp.where(inputs.loss_mask, x, (jnp.nan, jnp.inf, -jnp.inf)[i % 3])
    want, got = compiled(config)(inputs), compiled(config)(inputs.replace(**spoiled))
    jax.tree.map(np.testing.assert_array_equal, want, got)
    assert (np.asarray(got[1])[~np.asarray(inputs.loss_mask)] == 0).all()


@EACH
def test_order_of_rows_does_not_matter(config: LossConfig) -> None:
    inputs = batch()
    order = np.array([2, 0, 3, 1])
    (loss, metrics), gradient = compiled(config)(inputs)
    (loss2, metrics2), gradient2 = compiled(config)(jax.tree.map(lambda x: x[order], inputs))
    close((loss, metrics, gradient[order]), (loss2, metrics2, gradient2))


@EACH
def test_padding_does_not_matter(config: LossConfig) -> None:
    inputs = batch()
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 2), (3, 4)), constant_values=x.dtype.type(0)), inputs)
    loss, metrics = losses.make_loss(config)(padded)
    close((loss, metrics), compiled(config)(inputs)[0])


@EACH
def test_packed_equals_unpacked(config: LossConfig) -> None:
    inputs = batch()
    (loss, metrics), gradient = compiled(config)(inputs)
    ids = jnp.broadcast_to(jnp.asarray([[7], [3]]), (2, 10))
    packed = jax.tree.map(lambda x: x.reshape(2, 20), inputs)
    packed = packed.replace(segment_ids=jnp.concatenate([ids, ids + 1], axis=1))
    (loss2, metrics2), gradient2 = compiled(config)(packed)
    close((loss, metrics, gradient), (loss2, metrics2, gradient2.reshape(4, 10)), rtol=1e-5)


@EACH
def test_second_call_does_not_compile(config: LossConfig) -> None:
    loss_fn = jax.jit(losses.make_loss(config))
    loss_fn.lower(batch(seed=1))
    traced = compiled(config)
    traced(batch(seed=1))
    size = traced._cache_size()
    traced(batch(seed=2))
    assert traced._cache_size() == size
    assert hash(losses.make_loss(config)) == hash(losses.make_loss(dataclasses.replace(config)))


@EACH
def test_config_round_trip(config: LossConfig) -> None:
    assert from_dict(LossConfig, json.loads(json.dumps(to_dict(config)))) == config


@EACH
def test_micro_batches_decide_alike(config: LossConfig) -> None:
    inputs = batch()
    loss_fn = losses.make_loss(config)
    summary = loss_fn.summarize(inputs)
    whole = loss_fn.rows(inputs, summary)
    parts = [loss_fn.rows(jax.tree.map(lambda x, i=i: x[i : i + 1], inputs), summary) for i in range(4)]
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    close(rows, whole)
    for name in ("train/clip_fraction", "sat/gate_rate", "train/keep_fraction"):
        if name in whole.diagnostics.sums:
            np.testing.assert_array_equal(rows.diagnostics.sums[name], whole.diagnostics.sums[name])


@EACH
def test_extremes_are_finite(config: LossConfig) -> None:
    inputs = batch()
    d = jnp.asarray(np.random.default_rng(0).choice([-200.0, -30, 0, 30, 200], (4, 10)), jnp.float32)
    extreme = inputs.replace(log_probs=inputs.behavior_log_probs + d)
    (loss, _), gradient = compiled(config)(extreme)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    empty = inputs.replace(loss_mask=jnp.zeros_like(inputs.loss_mask))
    (loss, metrics), gradient = compiled(config)(empty)
    assert loss == 0
    assert (gradient == 0).all()
    assert all(np.isfinite(x) for x in metrics.values())


@EACH
def test_needs_are_named_at_trace_time(config: LossConfig) -> None:
    for array in config.needs():
        with pytest.raises(ValueError, match=array):
            jax.eval_shape(losses.make_loss(config), batch().replace(**{array: None}))
