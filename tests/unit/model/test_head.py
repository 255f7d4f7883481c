import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import model

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
    assert f"{B}x{2}x{V}xf32" in text
    assert f"{B}x{T}x{V}xf32" not in text
    assert f"{B}x{T - 1}x{V}xf32" not in text


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
