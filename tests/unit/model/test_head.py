import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sat_jax import model
from sat_jax.model import head
from sat_jax.rollout.engine import SamplingParams
from sat_jax.rollout.local.sampling import RowParams, sample_recorded, uniforms
from sat_jax.types import MIN_TEMPERATURE, NO_TOKEN
from tests.helpers.models import LLAMA, MOE

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("with_support", [False, True])
def test_the_lowest_temperature_works_with_extreme_logits(with_support):
    """Log-probs are right and the gradients' norm is finite, for tokens that are likely and others that are not."""
    params, hidden, tokens = inputs(7)
    largest = float(jnp.abs(model.logits(params, MOE, hidden)).max())
    params = jax.tree.map(lambda x: x * (1e4 / largest), params)
    support = (tokens[..., None] + jnp.arange(3)) % V if with_support else None

    def total(params, hidden):
        found = model.token_log_probs(params, MOE, hidden, tokens, MIN_TEMPERATURE, support=support)
        return jnp.sum(found.log_probs) + jnp.sum(found.entropy), found.log_probs

    (_, log_probs), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, hidden)
    assert np.isfinite(optax.tree.norm(gradients))
    scaled = np.asarray(model.logits(params, MOE, hidden), np.float64)[:, :-1] / MIN_TEMPERATURE
    if with_support:
        inside = (np.asarray(support)[:, 1:, :, None] == np.arange(V)).any(2)
        scaled = np.where(inside, scaled, -np.inf)
    expected = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
    expected = np.take_along_axis(expected, np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(log_probs[:, 1:], expected, rtol=1e-5, atol=1e-7 * 1e4 / MIN_TEMPERATURE)


@pytest.mark.parametrize("temperature", [0.0, 1e-38, -1.0, math.nan])
def test_a_temperature_too_low_to_divide_by_is_refused(temperature):
    params, hidden, tokens = inputs()
    with pytest.raises(ValueError, match=rf"temperature = {temperature}: log-probs need at least 0.0001"):
        model.token_log_probs(params, MOE, hidden, tokens, temperature)


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
    counted = []

    def project(hidden, matrix):
        jax.debug.callback(lambda: counted.append(1))
        return jnp.zeros((*hidden.shape[:-1], 40))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "project", project)
        active = jnp.arange(65) % 4 == jnp.ones((4, 1), int)
        model.token_log_probs({"embed": params, "head": params}, MOE, hidden, tokens, chunk_size=64, active=active)
        jax.effects_barrier()
    assert len(counted) == 1


def supports(tokens, size=6, seed=5):
    """The token and a few others, in any order, padded anywhere; one in four positions without a record."""
    rng = np.random.default_rng(seed)
    found = np.full((B, T, size), NO_TOKEN, np.int32)
    for b, t in np.ndindex(B, T):
        if rng.random() < 0.75:
            others = rng.choice(V, rng.integers(0, size), replace=False)
            ids = [int(tokens[b, t]), *(i for i in others if i != int(tokens[b, t]))]
            found[b, t, rng.permutation(size)[: len(ids)]] = ids
    return found


def dense(support):
    """``support`` as 0 and -inf over the vocabulary, [B, T, V]."""
    mask = np.full((B, T, V), -np.inf, np.float32)
    for b, t in np.ndindex(B, T):
        ids = support[b, t][support[b, t] != NO_TOKEN]
        mask[b, t, ids if len(ids) else slice(None)] = 0
    return mask


@pytest.mark.parametrize("chunk_size", [4, 1024])
def test_a_support_is_a_mask_of_minus_infinity(chunk_size):
    """Log-probs, entropy, the mass outside and the gradient of eq. (50), against jax.grad through -inf logits."""
    params, hidden, tokens = inputs(6)
    support = supports(tokens)
    mask, weight = dense(support)[:, 1:], np.random.default_rng(1).normal(size=(2, B, T)).astype(np.float32)

    def replayed(params, hidden):
        found = model.token_log_probs(params, MOE, hidden, tokens, 0.7, chunk_size, support=jnp.asarray(support))
        return jnp.sum(weight[0] * found.log_probs + weight[1] * found.entropy), found

    def masked(params, hidden):
        scaled = model.logits(params, MOE, hidden)[:, :-1] / 0.7
        log_p = jax.nn.log_softmax(scaled + mask)
        chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        inside = jnp.isfinite(log_p)
        safe = jnp.where(inside, log_p, 0)
        entropy = -jnp.sum(jnp.where(inside, jnp.exp(safe) * safe, 0), axis=-1)
        outside = jnp.sum(jnp.where(inside, 0, jax.nn.softmax(scaled)), axis=-1)
        found = [jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy, outside)]
        return jnp.sum(weight[0] * found[0] + weight[1] * found[1]), head.TokenLogProbs(*found)

    a = jax.jit(jax.value_and_grad(replayed, (0, 1), has_aux=True))(params, hidden)
    b = jax.jit(jax.value_and_grad(masked, (0, 1), has_aux=True))(params, hidden)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6), a, b)


def test_gradients_flow_through_the_support_alone():
    params, hidden, tokens = inputs(7)
    support = jnp.full((B, T, 3), NO_TOKEN).at[..., 0].set(tokens).at[..., 1].set((tokens + 1) % 5)

    def total(params):
        found = model.token_log_probs(params, MOE, hidden, tokens, support=support)
        return found.log_probs.sum() + found.entropy.sum()

    touched = np.asarray(jax.grad(total)(params)["head"]).any(axis=1)
    named = np.isin(np.arange(V), np.asarray(support[:, 1:]))
    assert touched[~named].sum() == 0
    assert touched[named].any()


def test_a_support_of_nothing_is_the_whole_vocabulary():
    params, hidden, tokens = inputs(8)
    found = model.token_log_probs(params, MOE, hidden, tokens, support=jnp.full((B, T, 2), NO_TOKEN))
    plain = model.token_log_probs(params, MOE, hidden, tokens)
    np.testing.assert_array_equal(found.log_probs, plain.log_probs)
    np.testing.assert_array_equal(found.entropy, plain.entropy)
    assert not found.outside.any()
    assert plain.outside is None


def test_without_a_support_the_program_is_the_one_without_the_argument():
    params, hidden, tokens = inputs()
    run = lambda **kw: jax.jit(lambda p, x: model.token_log_probs(p, MOE, x, tokens, **kw).log_probs)  # noqa: E731
    assert "scatter" not in run().lower(params, hidden).as_text()
    assert "scatter" in run(support=jnp.zeros((B, T, 2), jnp.int32)).lower(params, hidden).as_text()


def test_replaying_the_support_makes_the_ratio_one():
    """Fault 14: p = [.6, .3, .1], top_p = .9, token 0. The engine says log(.6667); over the whole vocabulary the ratio
    would be .9."""
    p = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    settings = RowParams.of([SamplingParams(top_p=0.9, top_k=3)] * 16, range(16))
    drawn, behavior, support = sample_recorded(jnp.tile(p, (16, 1)), settings, uniforms(settings.seed, 0), 3)
    assert 0 in drawn
    np.testing.assert_array_equal(support, [[0, 1, NO_TOKEN]] * 16)
    np.testing.assert_allclose(behavior, np.log([2 / 3, 1 / 3])[np.asarray(drawn)], atol=1e-6)
    head_of_p = {"embed": jnp.zeros((3, D)), "head": jnp.zeros((3, D)).at[:, 0].set(p)}
    hidden = jnp.zeros((1, 17, D)).at[..., 0].set(1.0)
    tokens = jnp.concatenate([jnp.zeros(1, jnp.int32), drawn])[None]
    recorded = jnp.concatenate([jnp.full((1, 3), NO_TOKEN), support])[None]
    ratio = lambda **kw: np.exp(model.token_log_probs(head_of_p, MOE, hidden, tokens, **kw).log_probs[0, 1:] - behavior)  # noqa: E731
    np.testing.assert_allclose(ratio(support=recorded), 1.0, atol=1e-6)
    np.testing.assert_allclose(ratio(), 0.9, atol=1e-6)
