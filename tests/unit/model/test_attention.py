"""Attention over whole sequences against the plain softmax over all keys, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.model.attention import attend, self_attention

pytestmark = pytest.mark.slow

B, H, KV, h = 2, 4, 2, 8


def inputs(T, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, h)), dtype) for heads in (H, KV, KV))
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (B, T)), axis=1))
    return q, k, v, segments


def plain(q, k, v, segments):
    column = jnp.arange(q.shape[1])
    visible = (segments[:, :, None] == segments[:, None, :]) & (column[:, None] >= column)
    return attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible)


def both(function, *args):
    """Output, and the gradient of a sum whose weights differ from entry to entry."""
    q, k, v, segments = args
    value, pull = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
    return value, *pull(jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape).astype(value.dtype))


# One token; one range; ranges of 64 queries, the last one short; ranges of several blocks, the last one short.
@pytest.mark.parametrize(("T", "block"), [(1, 1024), (13, 1024), (150, 1024), (13, 4), (150, 48), (600, 32)])
def test_values_and_gradients_are_those_of_the_whole_matrix(T, block):
    args = inputs(T)
    expected = jax.jit(lambda *a: both(plain, *a))(*args)
    found = jax.jit(lambda *a: both(lambda *b: self_attention(*b, block), *a))(*args)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        assert T == 1 or np.abs(b).max() > 0.1


def test_padding_and_other_segments_are_neither_seen_nor_taught():
    q, k, v, _ = inputs(9)
    segments = jnp.array([[0, 0, 1, 1, 1, 2, 2, 0, 0]] * B)
    others = np.asarray(segments[0]) != 1

    def mine(q, k, v):
        return jnp.sum(jnp.sin(self_attention(q, k, v, segments, 1024)[:, 2:5]))

    gradients = jax.jit(jax.grad(mine, (0, 1, 2)))(q, k, v)
    for gradient in gradients:
        assert not np.asarray(gradient)[:, others].any()
        assert np.abs(np.asarray(gradient)[:, ~others]).max() > 1e-2
    wild = jnp.where(others[None, :, None, None], 1e4, 1.0)
    np.testing.assert_array_equal(mine(q * wild, k * wild, v * wild), mine(q, k, v))


def test_bfloat16_accumulates_in_float32():
    args = inputs(150, dtype=jnp.bfloat16)
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in args]
    exact = jax.jit(lambda *x: both(plain, *x))(*wide)
    found = jax.jit(lambda *x: both(lambda *y: self_attention(*y, 32), *x))(*args)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        scale = np.abs(b).max()
        np.testing.assert_allclose(a.astype(jnp.float32) / scale, b / scale, atol=0.02)


def test_memory_of_the_gradient_grows_with_the_block_not_with_the_square():
    def temporaries(block):
        T = 2048
        shapes = [jax.ShapeDtypeStruct((1, T, n, h), jnp.float32) for n in (2, 1, 1)]
        segments = jax.ShapeDtypeStruct((1, T), jnp.int32)
        program = jax.jit(jax.grad(lambda q, k, v, s: self_attention(q, k, v, s, block).sum(), (0, 1, 2)))
        return program.lower(*shapes, segments).compile().memory_analysis().temp_size_in_bytes

    # All scores of two heads are 32 MiB; blocks of 64 need a few arrays of 1 MiB, besides q, k, v and their gradients.
    assert temporaries(64) < 6 * 2**20
