"""The Pallas twins against the reference: any shape, packed rows, a simulated TPU; every rule is in tests/conformance."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from sat_jax import kernels, losses
from sat_jax.losses import LossConfig
from sat_jax.testing.rules import compiled
from sat_jax.testing.rules import sample_inputs as batch
from tests.helpers.kernel import kernel, same


@pytest.mark.parametrize(
    ("name", "shape"),
    [("grpo", (1, 1)), ("sat-gspo", (1, 1)), ("sat-gspo", (33, 5)), ("grpo", (2, 1030)), ("sat-gspo", (40, 1300))],
)
def test_any_shape(name: str, shape: tuple[int, int]) -> None:
    config = losses.method(name)
    inputs = batch(*shape)
    same(kernel(config)(inputs), compiled(config)(inputs))


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
