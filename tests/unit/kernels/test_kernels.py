"""The Pallas twins against the reference: any shape, packed rows, a simulated TPU. tests/conformance has every rule."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from sat_jax import kernels, losses
from sat_jax.losses import LossConfig
from sat_jax.testing.rules import compiled
from sat_jax.testing.rules import sample_inputs as batch
from tests.helpers.kernel import kernel, same
from tests.helpers.subjects import subjects


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rule-ppo", "rule-kpop", "rule-sat", "sat-gspo"])
def test_float32_stays_float32_where_float64_is_switched_on(name: str) -> None:
    config, inputs = subjects()[name], batch()
    expected = compiled(config)(inputs)
    with jax.enable_x64(True):
        (loss, metrics), gradient = kernel.__wrapped__(config)(inputs)  # a program of its own
    assert loss.dtype == gradient.dtype == jnp.float32
    same(((loss, metrics), gradient), expected)


def test_a_float64_array_beside_float32_log_probs_is_narrowed() -> None:
    inputs, config = batch(), losses.method("grpo")
    with jax.enable_x64(True):
        wide = inputs.replace(advantages=jnp.asarray(np.asarray(inputs.advantages), jnp.float64))
        found = kernel.__wrapped__(config)(wide)
    same(found, compiled(config)(inputs))


@pytest.mark.slow
def test_float64_log_probs_are_refused_or_left_to_the_reference() -> None:
    config = losses.method("sat-grpo")
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, batch())
        with pytest.raises(ValueError, match="compute in float32; cast log_probs, or use kernel 'reference'"):
            kernels.make_loss(dataclasses.replace(config, kernel="pallas"))(inputs)
        chosen = kernels.KernelLoss(config)  # as ``auto`` makes it on a TPU
        np.testing.assert_array_equal(chosen(inputs)[0], losses.make_loss(config)(inputs)[0])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("grpo", (1, 1)), ("sat-gspo", (1, 1)), ("sat-gspo", (33, 5)), ("grpo", (2, 1030)), ("sat-gspo", (40, 1300))],
)
def test_any_shape(name: str, shape: tuple[int, int]) -> None:
    config = losses.method(name)
    inputs = batch(*shape)
    same(kernel(config)(inputs), compiled(config)(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sat-grpo", "sat-gspo"])
def test_packed_scored_and_masked(name: str) -> None:
    config = losses.method(name)
    inputs = batch(4, 24)
    ids = jnp.repeat(jnp.asarray([1, 2, 3]), 8)[None].repeat(4, 0)
    noise = jnp.asarray(1e-3 * np.random.default_rng(0).normal(size=(4, 24)), jnp.float32)
    packed = inputs.replace(segment_ids=ids, scored_log_probs=jnp.minimum(inputs.log_probs + noise, 0))
    same(kernel(config)(packed), compiled(config)(packed))
    spoiled = packed.replace(log_probs=jnp.where(packed.loss_mask, packed.log_probs, jnp.nan))
    same(kernel(config)(spoiled), compiled(config)(packed))


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (8, 128), (70, 2100)])
def test_order_statistic(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(np.abs(rng.normal(size=shape)) * 10.0 ** rng.integers(-9, 3, shape), jnp.float32)
    mask = jnp.asarray(rng.random(shape) < 0.7).at[0, 0].set(True)
    active = np.sort(np.asarray(x)[np.asarray(mask)])
    spoiled = jnp.where(mask, x, jnp.nan)
    for rank in {1, len(active) // 2 + 1, len(active)}:
        got = kernels.order_statistic(spoiled, mask, jnp.uint32(rank), interpret=True)
        assert got == active[rank - 1]
    assert kernels.order_statistic(x, mask, jnp.uint32(0), interpret=True) == 0


@pytest.mark.slow
def test_no_races_on_a_simulated_tpu() -> None:
    """The TPU interpreter executes memory traffic as a chip would and watches every access."""
    params = pltpu.InterpretParams(detect_races=True)
    inputs = batch(40, 1300)
    for name in ("sat-grpo", "sat-gspo"):
        same(kernel(losses.method(name), params)(inputs), compiled(losses.method(name))(inputs))


def test_choice_and_refusal() -> None:
    assert type(kernels.make_loss(losses.method("grpo"))) is losses.Loss
    assert type(kernels.make_loss(LossConfig(kernel="pallas"))) is kernels.KernelLoss
    with pytest.raises(ValueError, match="seqclip, which looks at whole responses"):
        kernels.make_loss(dataclasses.replace(losses.method("seqclip"), kernel="pallas"))
    with pytest.raises(ValueError, match="float32"):
        kernels.order_statistic(jnp.zeros((2, 2), jnp.bfloat16), jnp.ones((2, 2), bool), jnp.uint32(1))
