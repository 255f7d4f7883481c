import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import model
from sat_jax.model import head

from .common import LLAMA, MOE

B, T, V, D = 3, 9, MOE.vocab_size, MOE.hidden_size


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    params = {name: jnp.asarray(rng.normal(size=(V, D)) / 3, jnp.float32) for name in ("embed", "head")}
    return params, hidden, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)


def whole(params, cfg, hidden, tokens, temperature):
    """The same from the [B, T, V] array that the library avoids."""
    log_p = jax.nn.log_softmax(model.logits(params, cfg, hidden) / temperature)[:, :-1]
    chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return [jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy)]


@pytest.mark.parametrize("chunk_size", [1, 5 * B, 1024])
@pytest.mark.parametrize("cfg", [MOE, LLAMA], ids=["head", "tied"])
def test_chunked_values_and_gradients_equal_the_whole(cfg, chunk_size):
    params, hidden, tokens = inputs()
    weight = np.random.default_rng(1).normal(size=(2, B, T)).astype(np.float32)

    def chunked(params, hidden):
        found = model.token_log_probs(params, cfg, hidden, tokens, 0.7, chunk_size)
        return jnp.sum(weight[0] * found.log_probs + weight[1] * found.entropy), (found.log_probs, found.entropy)

    def direct(params, hidden):
        pair = whole(params, cfg, hidden, tokens, 0.7)
        return jnp.sum(weight[0] * pair[0] + weight[1] * pair[1]), tuple(pair)

    (_, a), da = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(params, hidden)
    (_, b), db = jax.jit(jax.value_and_grad(direct, (0, 1), has_aux=True))(params, hidden)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6), (a, da), (b, db))


def test_entry_t_belongs_to_token_t():
    """Two prompt and two response tokens: the response's log-probs stand under the response's tokens."""
    cfg = MOE
    params, hidden, tokens = inputs(2)
    found = model.token_log_probs(params, cfg, hidden[:1, :4], tokens[:1, :4])
    log_p = np.asarray(jax.nn.log_softmax(model.logits(params, cfg, hidden[0, :4])))
    expected = [0.0] + [log_p[t - 1, int(tokens[0, t])] for t in (1, 2, 3)]
    np.testing.assert_allclose(found.log_probs[0], expected, rtol=1e-5, atol=1e-6)


def test_temperature_divides_the_logits():
    """Logits [2, 0] at temperature 0.5, token 0: -0.018150; not the raw -0.126928, nor that divided by 0.5."""
    params = {"embed": jnp.zeros((2, D)), "head": jnp.zeros((2, D)).at[0, 0].set(2.0)}
    hidden = jnp.zeros((1, 2, D)).at[..., 0].set(1.0)
    found = model.token_log_probs(params, MOE, hidden, jnp.zeros((1, 2), jnp.int32), temperature=0.5)
    np.testing.assert_allclose(found.log_probs[0, 1], -0.018150, atol=1e-6)


def test_the_whole_logits_never_exist():
    params, hidden, tokens = inputs()

    def loss(params, hidden):
        return model.token_log_probs(params, MOE, hidden, tokens, chunk_size=2 * B).log_probs.sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(params, hidden).as_text()
    assert f"<{2 * B}x{V}xf32" in text
    sizes = [math.prod(map(int, shape.split("x")[:-1])) for shape in re.findall(rf"<((?:\d+x)+{V})xf32>", text)]
    assert max(sizes) <= max(2 * B, D)  # [D, V] is the matrix's own gradient


def test_bfloat16_hidden_states_give_float32_log_probs():
    params, hidden, tokens = inputs()
    found = model.token_log_probs(params, MOE, hidden.astype(jnp.bfloat16), tokens)
    exact = model.token_log_probs(params, MOE, hidden, tokens)
    assert found.log_probs.dtype == found.entropy.dtype == jnp.float32
    np.testing.assert_allclose(found.log_probs, exact.log_probs, atol=0.05)


def test_without_entropy():
    params, hidden, tokens = inputs()
    found = model.token_log_probs(params, MOE, hidden, tokens, with_entropy=False)
    assert found.entropy is None
    np.testing.assert_array_equal(found.log_probs, model.token_log_probs(params, MOE, hidden, tokens).log_probs)


MASKS = {
    "some": np.random.default_rng(3).random((B, T)) < 0.6,
    "none": np.zeros((B, T), bool),
    "one full row, one empty": np.arange(B)[:, None] == np.zeros(T, int),
    "padding on either side": (np.arange(T) >= 4 - np.arange(B)[:, None]) & (np.arange(T) < T - np.arange(B)[:, None]),
    "all": np.ones((B, T), bool),
}


@pytest.mark.parametrize("chunk_size", [4, 1024])
@pytest.mark.parametrize("mask", MASKS)
def test_only_what_is_asked_for_is_computed(mask, chunk_size):
    """Values and gradients on active positions are those of everything; elsewhere hidden states may hold anything."""
    params, hidden, tokens = inputs(4)
    active = jnp.asarray(MASKS[mask]).at[:, 0].set(False)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, B, T)), jnp.float32)
    read = jnp.pad(active[:, 1:], ((0, 0), (0, 1)))

    def value(params, hidden, found):
        masked = [jnp.where(active, x, 0) for x in (found.log_probs, found.entropy)]
        return jnp.sum(weight[0] * masked[0] + weight[1] * masked[1]), masked

    def part(params, hidden):
        x = jnp.where(read[..., None], hidden, jnp.nan)
        found = model.token_log_probs(params, MOE, x, tokens, 0.7, chunk_size, active=MASKS[mask])
        _, masked = value(params, hidden, found)
        # Unmasked: what was not asked for must be 0 by itself.
        return jnp.sum(weight[0] * found.log_probs + weight[1] * found.entropy), (
            found.log_probs,
            found.entropy,
            masked,
        )

    def full(params, hidden):
        total, masked = value(params, hidden, model.token_log_probs(params, MOE, hidden, tokens, 0.7))
        return total, (*masked, masked)

    a = jax.jit(jax.value_and_grad(part, (0, 1), has_aux=True))(params, hidden)
    b = jax.jit(jax.value_and_grad(full, (0, 1), has_aux=True))(params, hidden)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6), a, b)


def test_a_row_of_one_token_has_nothing_to_predict():
    params, hidden, tokens = inputs()
    for active in (None, jnp.ones((B, 1), bool)):

        def total(params, hidden, active=active):
            found = model.token_log_probs(params, MOE, hidden[:, :1], tokens[:, :1], active=active)
            return found.log_probs.sum() + found.entropy.sum()

        value, gradient = jax.value_and_grad(total, (0, 1))(params, hidden)
        assert value == 0
        assert not any(np.any(x) for x in jax.tree.leaves(gradient))


def test_inactive_positions_cost_no_chunk():
    """The loop's trip count is read off the mask: a quarter of the positions, a quarter of the chunks."""
    params, hidden, tokens = (jnp.zeros((40, 8)), jnp.zeros((4, 65, 8)), jnp.zeros((4, 65), jnp.int32))
    plan = head._plan(jnp.arange(256).reshape(1, 256) % 4 == 0, chunks=16, width=16)
    static = head._Static(16, None, with_entropy=True, placement=None)
    assert int(head._trips(plan, static)) == 4
    counted = []

    def project(hidden, matrix):
        jax.debug.callback(lambda: counted.append(1))
        return jnp.zeros((*hidden.shape[:-1], 40))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_project", project)
        active = jnp.arange(65) % 4 == jnp.ones((4, 1), int)
        model.token_log_probs({"embed": params, "head": params}, MOE, hidden, tokens, chunk_size=64, active=active)
        jax.effects_barrier()
    assert len(counted) == 1
