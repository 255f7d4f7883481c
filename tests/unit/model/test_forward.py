"""Properties of the whole forward pass: packing, padding, replay, scan, remat, precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import model
from tests.helpers.models import DEFAULT, LLAMA, MIXED, MOE, agreement, init, run

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(0, MOE.vocab_size, (2, 10)), jnp.int32)


def test_packed_sequences_do_not_see_each_other():
    params = init(MOE)
    a, b = TOKENS[0, :6], TOKENS[1, :4]
    packed = jnp.concatenate([a, b])[None]
    segments = jnp.array([[1] * 6 + [2] * 4])
    (together, logits, _) = run(MOE, params, packed, segments)
    (alone_a, logits_a, _) = run(MOE, params, TOKENS[:1], jnp.array([[1] * 6 + [0] * 4]))
    (alone_b, logits_b, _) = run(MOE, params, TOKENS[1:], jnp.array([[1] * 4 + [0] * 6]))
    np.testing.assert_allclose(logits[0, :6], logits_a[0, :6], atol=1e-5)
    np.testing.assert_allclose(logits[0, 6:], logits_b[0, :4], atol=1e-5)
    np.testing.assert_array_equal(together.router.indices[0, 6:], alone_b.router.indices[0, :4])
    np.testing.assert_allclose(together.router.load, alone_a.router.load + alone_b.router.load)


def test_left_and_right_padding_and_the_width_of_padding_do_not_matter():
    params = init(MOE, 1)
    row = TOKENS[:1, :5]
    right, left = jnp.pad(row, ((0, 0), (0, 5)), constant_values=7), jnp.pad(row, ((0, 0), (5, 0)), constant_values=9)
    (out, logits, _) = run(MOE, params, right, jnp.array([[1] * 5 + [0] * 5]))
    (_, other, _) = run(MOE, params, left, jnp.array([[0] * 5 + [1] * 5]))
    np.testing.assert_allclose(logits[:, :5], other[:, 5:], atol=1e-5)
    assert out.router.tokens == 5


def test_explicit_positions_are_used():
    params = init(MOE, 1)
    (_, counted, _) = run(MOE, params, TOKENS)
    (_, same, _) = run(MOE, params, TOKENS, None, jnp.broadcast_to(jnp.arange(10), (2, 10)))
    (_, shifted, _) = run(MOE, params, TOKENS, None, jnp.broadcast_to(jnp.arange(10) + 3, (2, 10)))
    (_, stretched, _) = run(MOE, params, TOKENS, None, jnp.broadcast_to(jnp.arange(10) * 3, (2, 10)))
    np.testing.assert_array_equal(counted, same)
    np.testing.assert_allclose(counted, shifted, atol=1e-4)  # rotary attention sees differences only
    assert np.abs(counted - stretched).max() > 0.1


OPTIONS = {  # every setting once, in as few programs as that takes
    "unrolled-dense": dataclasses.replace(DEFAULT, scan_layers=False, moe="slots"),
    "full-ragged-blocks": dataclasses.replace(DEFAULT, remat="full", moe="ragged", attention_block=4),
    "dots": dataclasses.replace(DEFAULT, remat="dots"),
}
RECORDED = jnp.asarray(np.argsort(RNG.random((2, 10, 2, MOE.num_experts)), -1)[..., :2], jnp.int32)
RECORDED = RECORDED.at[0, :4].set(-1)
SEGMENTS = jnp.array([[1] * 6 + [2] * 3 + [0], [1] * 10])


def gradients(options):
    params = init(MOE, 2)

    def loss(params):
        out = model.forward(params, MOE, TOKENS, SEGMENTS, routed_experts=RECORDED, options=options)
        found = model.token_log_probs(params, MOE, out.hidden, TOKENS)
        return jnp.sum(found.log_probs * (SEGMENTS > 0)), out.router

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.fixture(scope="module")
def plain():
    return gradients(DEFAULT)


@pytest.mark.parametrize("name", OPTIONS)
def test_how_it_is_computed_changes_neither_value_nor_gradient(name, plain):
    (loss, router), grads = gradients(OPTIONS[name])
    (wanted, wanted_router), wanted_grads = plain
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_array_equal(router.indices, wanted_router.indices)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted_grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), grads, wanted_grads)


def test_recorded_experts_are_used_and_compared(plain):
    (_, router), _ = plain
    recorded = np.asarray(RECORDED[..., 0] >= 0)
    np.testing.assert_array_equal(np.asarray(router.indices)[recorded], np.asarray(RECORDED)[recorded])
    valid = np.asarray(SEGMENTS > 0)
    (native, _, _) = run(MOE, init(MOE, 2), TOKENS, SEGMENTS, None, jnp.full_like(RECORDED, -1))
    assert native.router.recorded.sum() == 0
    assert router.recorded.sum() == (recorded[..., 0] & valid).sum() * 2
    own = np.argsort(-np.asarray(router.logits), -1)[..., :2]
    agreed = (np.sort(own, -1) == np.sort(RECORDED, -1)).all(-1) & valid[..., None] & recorded
    np.testing.assert_allclose(agreement(router), agreed.sum() / router.recorded.sum(), rtol=1e-6)


def test_replaying_its_own_routes_changes_nothing():
    params = init(MIXED, 3)
    (native, logits, _) = run(MIXED, params, TOKENS)
    assert native.router.indices.shape == (2, 10, 1, 2)  # layer 1 alone is a mixture
    (replayed, again, _) = run(MIXED, params, TOKENS, None, None, native.router.indices)
    np.testing.assert_array_equal(logits, again)
    assert agreement(replayed.router) == 1.0
    swapped = native.router.indices[..., ::-1]
    (backwards, close, _) = run(MIXED, params, TOKENS, None, None, swapped)
    np.testing.assert_allclose(logits, close, atol=1e-5)
    assert agreement(backwards.router) == 1.0


def test_bfloat16_compute_keeps_float32_masters():
    params = init(LLAMA, 4)
    options = dataclasses.replace(DEFAULT, compute_dtype="bfloat16")
    (exact, _, found) = run(LLAMA, params, TOKENS)
    (half, _, rough) = run(LLAMA, params, TOKENS, options=options)
    assert half.hidden.dtype == jnp.bfloat16
    assert rough.log_probs.dtype == jnp.float32
    assert 0 < np.abs(found.log_probs - rough.log_probs).mean() < 0.1

    def loss(params):
        return model.forward(params, LLAMA, TOKENS, options=options).hidden.astype(jnp.float32).sum()

    grads = jax.eval_shape(jax.grad(loss), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert exact.router is None


def test_routes_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 10, 3, 2\), expected \[B, T, L, K\] = \(2, 10, 2, 2\)"):
        model.forward(init(MOE), MOE, TOKENS, routed_experts=jnp.zeros((2, 10, 3, 2), jnp.int32))
    with pytest.raises(ValueError, match="dense model"):
        model.forward(init(LLAMA), LLAMA, TOKENS, routed_experts=RECORDED)
