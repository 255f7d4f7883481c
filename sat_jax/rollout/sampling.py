"""From logits to tokens: temperature, top-k, top-p, min-p, the draw, and its log-prob. Pure, jittable, row by row.

No row looks at another one, and the draw of a row depends on nothing but its logits, its seed and its step: a request
gives the same tokens whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sat_jax.rollout.engine import SamplingParams

_FLAT_VOCABULARY = 512
"""Up to this many tokens the draw takes one cumulative sum; beyond, one over blocks and one inside the block."""


@struct.dataclass
class RowParams:
    """``SamplingParams`` of every slot: float32 ``temperature, top_p, min_p`` [S], int32 ``top_k`` [S], uint32 ``seed``
    [S]."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    seed: jax.Array

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> RowParams:
        """Host arrays, one row for each of ``params``."""
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),  # type: ignore[arg-type]  # numpy goes in
            top_p=np.array([p.top_p for p in params], np.float32),  # type: ignore[arg-type]
            min_p=np.array([p.min_p for p in params], np.float32),  # type: ignore[arg-type]
            top_k=np.array([p.top_k for p in params], np.int32),  # type: ignore[arg-type]
            seed=np.array([p.seed for p in params], np.uint32),  # type: ignore[arg-type]
        )


def support_logits(logits: jax.Array, rows: RowParams) -> jax.Array:
    """Logits of the sampled distribution: divided by the temperature, ``-inf`` outside the support.

    Temperature, then top-k (ties with the k-th kept), then top-p (the smallest set with at least that mass: in
    ascending order, tokens whose inclusive cumulative probability is <= 1 - top_p go; the most likely one always stays;
    ties with the least likely one kept stay), then min-p (probability below ``min_p`` times the largest goes), each on
    the previous one's output. Greedy rows (temperature 0) come back unchanged.

    Args:
        logits: float32 [S, V].
        rows: settings [S].
    """
    greedy = rows.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
    truncating = ~greedy & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    # Sorting the vocabulary costs more than a small model's whole forward pass: skip it where no row needs it. A row
    # that truncates nothing has threshold -inf and comes out bit-equal from either branch.
    return jax.lax.cond(jnp.any(truncating), _truncate, lambda scaled, *_: scaled, scaled, rows, truncating)


def _truncate(scaled: jax.Array, rows: RowParams, truncating: jax.Array) -> jax.Array:
    V = scaled.shape[-1]
    ascending = jnp.sort(scaled, axis=-1)
    kth = jnp.take_along_axis(ascending, jnp.clip(V - rows.top_k, 0, V - 1)[:, None], axis=-1)
    threshold = jnp.where((rows.top_k > 0)[:, None], kth, -jnp.inf)

    kept = jnp.where(ascending >= threshold, ascending, -jnp.inf)
    cumulative = jnp.cumsum(jax.nn.softmax(kept, axis=-1), axis=-1)
    removed = (cumulative <= (1.0 - rows.top_p)[:, None]).at[:, -1].set(False)
    smallest = jnp.min(jnp.where(removed | jnp.isneginf(kept), jnp.inf, kept), axis=-1, keepdims=True)
    threshold = jnp.where((rows.top_p < 1)[:, None], smallest, threshold)

    largest = ascending[:, -1:]
    unlikely = (
        jnp.exp(scaled - largest) < rows.min_p[:, None]
    )  # probabilities relative to the largest: no renormalising
    return jnp.where(truncating[:, None] & ((scaled < threshold) | unlikely), -jnp.inf, scaled)


def draw(log_probs: jax.Array, uniform: jax.Array) -> jax.Array:
    """int32 [S]: the token at quantile ``uniform`` of each distribution, by inverse CDF; never one of probability 0.

    One random number a row instead of the Gumbel trick's V, and two short cumulative sums instead of a long one: exact
    to float32, and cheap at V = 151,936.

    Args:
        log_probs: float32 [S, V], normalised or not.
        uniform: float32 [S] in [0, 1).
    """
    probs = jnp.exp(log_probs)
    S, V = probs.shape
    if V <= _FLAT_VOCABULARY:
        return _first_beyond(probs, uniform * jnp.sum(probs, axis=-1))
    width = 1 << max(1, (V.bit_length() + 1) // 2)
    blocks = jnp.pad(probs, ((0, 0), (0, -V % width))).reshape(S, -1, width)
    mass = jnp.sum(blocks, axis=-1)
    target = uniform * jnp.sum(mass, axis=-1)
    block = _first_beyond(mass, target)
    before = jnp.sum(jnp.where(jnp.arange(mass.shape[1]) < block[:, None], mass, 0.0), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * width + _first_beyond(inside, target - before)


def _first_beyond(mass: jax.Array, target: jax.Array) -> jax.Array:
    """First index with positive mass whose cumulative mass exceeds ``target``; the last one with mass where rounding
    leaves none."""
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    positive = mass > 0
    beyond = positive & (jnp.cumsum(mass, axis=-1) > target[:, None])
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1).astype(jnp.int32), last)


def sample(logits: jax.Array, rows: RowParams, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples one token a row.

    Args:
        logits: [S, V], any float dtype; float32 from here on.
        rows: settings [S].
        step: int32 [S]; how many tokens the response has already. Token ``t`` of a request uses the key
            ``fold_in(fold_in(key(0), seed), t)``.

    Returns:
        tokens int32 [S] and their log-probs float32 [S], in nats, at the sampling temperature over the sampling support
        (greedy rows: at temperature 1 over the vocabulary).
    """
    logits = logits.astype(jnp.float32)
    log_probs = jax.nn.log_softmax(support_logits(logits, rows), axis=-1)
    base = jax.random.key(0)

    def uniform_of(seed: jax.Array, t: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(base, seed), t))

    drawn = draw(log_probs, jax.vmap(uniform_of)(rows.seed, step))
    tokens = jnp.where(rows.temperature <= 0, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
    return tokens, jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
