"""Cached decoding against the forward pass over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import model
from tests.helpers.models import CHECKPOINTS, LLAMA, MIXED, MOE, init, load, run

pytestmark = pytest.mark.slow

S, T, M = 3, 9, 12


@functools.partial(jax.jit, static_argnums=0)
def extend(cfg, params, cache, tokens, start, n_valid, slots=None):
    return model.extend(params, cfg, cache, tokens, start, n_valid, slots)


def ints(*values):
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize("cfg", [MOE, MIXED, LLAMA], ids=["moe", "mixed", "llama"])
def test_chunks_and_steps_equal_the_whole(cfg):
    """Prompts of 5, 3 and 4 tokens in chunks of 2, then single tokens: the hidden states of one forward pass."""
    params = init(cfg)
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, (S, T)).astype(np.int32)
    (out, _, found) = run(cfg, params, jnp.asarray(tokens))
    cache = model.init_cache(cfg, S, M, "float32")
    assert sum(x.nbytes for x in (*cache.keys, *cache.values)) == model.cache_bytes(cfg, S, M, "float32")
    hidden = np.zeros(out.hidden.shape, np.float32)
    routes = np.full((S, T, len(cfg.moe_layers), cfg.num_experts_per_tok), -1)
    position, goal = np.zeros(S, np.int32), np.array([5, 3, 4])
    while (position < T).any():
        width = 2 if (position < goal).any() else 1
        n = np.clip((goal if width == 2 else T) - position, 0, width).astype(np.int32)
        chunk = np.full((S, width), 31, np.int32)
        for s in range(S):
            chunk[s, : n[s]] = tokens[s, position[s] : position[s] + n[s]]
        step = extend(cfg, params, cache, jnp.asarray(chunk), jnp.asarray(position), jnp.asarray(n))
        cache = step.cache
        for s in range(S):
            at = slice(position[s], position[s] + n[s])
            hidden[s, at] = step.hidden[s, : n[s]]
            if cfg.moe_layers:
                routes[s, at] = step.routed_experts[s, : n[s]]
        position = position + n
    np.testing.assert_allclose(hidden, out.hidden, atol=1e-5)
    again = model.token_log_probs(params, cfg, jnp.asarray(hidden), jnp.asarray(tokens))
    np.testing.assert_allclose(again.log_probs, found.log_probs, atol=1e-5)
    if cfg.moe_layers:
        np.testing.assert_array_equal(routes, out.router.indices)
    else:
        assert step.routed_experts is None


def test_a_slot_is_reused_and_others_are_left_alone():
    params = init(MOE, 1)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, MOE.vocab_size, (S, 4)), jnp.int32)
    empty = model.init_cache(MOE, S, M, "float32")
    fresh = extend(MOE, params, empty, tokens, ints(0, 0, 0), ints(4, 4, 4))
    # Slot 1 starts over with slot 2's tokens; the rows of slots 0 and 2 are idle.
    again = extend(MOE, params, fresh.cache, tokens[jnp.array([0, 2, 1])], ints(0, 0, 0), ints(0, 4, 0))
    np.testing.assert_allclose(again.hidden[1], fresh.hidden[2], atol=1e-6)
    for before, after in zip(fresh.cache.keys + fresh.cache.values, again.cache.keys + again.cache.values, strict=True):
        np.testing.assert_array_equal(before[:, [0, 2]], after[:, [0, 2]])


def test_rows_may_serve_some_of_the_slots():
    params = init(MOE, 1)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, MOE.vocab_size, (S, 4)), jnp.int32)
    empty = model.init_cache(MOE, S, M, "float32")
    every = extend(MOE, params, empty, tokens, ints(0, 0, 0), ints(4, 4, 4))
    some = extend(MOE, params, empty, tokens[jnp.array([2, 0])], ints(0, 0), ints(4, 4), ints(2, 0))
    np.testing.assert_allclose(some.hidden, every.hidden[jnp.array([2, 0])], atol=1e-6)
    for all_slots, two in zip(every.cache.keys, some.cache.keys, strict=True):
        np.testing.assert_allclose(two[:, [0, 2]], all_slots[:, [0, 2]], atol=1e-6)
        assert not np.asarray(two[:, 1]).any()


@pytest.mark.parametrize("name", ["moe_top4_norm", "moe_mixed_dense", "dense_tied"])
def test_greedy_tokens_of_the_golden_checkpoints(name):
    cfg, params = load(name)
    g = np.load(CHECKPOINTS / name / "greedy.npz")
    prompts = [ids[mask > 0] for ids, mask in zip(g["prompt_ids"], g["prompt_mask"], strict=True)]
    width, new = max(map(len, prompts)), g["new_ids"].shape[1]

    @jax.jit
    def decode(params, tokens, lengths):
        first = model.extend(
            params,
            cfg,
            model.init_cache(cfg, len(prompts), width + new, "float32"),
            tokens,
            jnp.zeros_like(lengths),
            lengths,
        )
        last = jnp.take_along_axis(first.hidden, lengths[:, None, None] - 1, axis=1)

        def step(carry, _):
            cache, hidden, position = carry
            log_p = jax.nn.log_softmax(model.logits(params, cfg, hidden[:, 0]))
            token = jnp.argmax(log_p, -1).astype(jnp.int32)
            out = model.extend(params, cfg, cache, token[:, None], position, jnp.ones_like(position))
            return (out.cache, out.hidden, position + 1), (token, jnp.max(log_p, -1))

        return jax.lax.scan(step, (first.cache, last, lengths), None, length=new)[1]

    padded = np.stack([np.pad(p, (0, width - len(p))) for p in prompts])
    ids, log_probs = decode(params, jnp.asarray(padded), jnp.asarray([len(p) for p in prompts], jnp.int32))
    for row, (found, lp) in enumerate(zip(np.asarray(ids).T, np.asarray(log_probs).T, strict=True)):
        wanted = g["new_ids"][row]
        ends = np.flatnonzero(np.isin(wanted, cfg.eos_token_id))
        n = int(ends[0]) + 1 if len(ends) else new  # the golden run stops there and pads
        np.testing.assert_array_equal(found[:n], wanted[:n])
        np.testing.assert_allclose(lp[:n], g["new_logprobs"][row, :n], atol=1e-4)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ValueError, match="max_len = 5000 exceeds the model's max_position_embeddings = 4096"):
        model.init_cache(MOE, 1, 5000, "float32")
