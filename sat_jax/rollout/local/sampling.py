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
from sat_jax.types import NO_TOKEN

_FLAT_VOCABULARY = 512
"""Up to this many tokens the draw takes one cumulative sum; beyond, one over blocks and one inside the block."""

MASS_ROUNDING = 1e-6
"""A mass this close to ``top_p`` has reached it: what float32 sums over a vocabulary are off by."""


@struct.dataclass
class RowParams:
    """Sampling settings and seeds of every slot: float32 ``temperature, top_p, min_p`` [S], int32 ``top_k`` [S], uint32
    ``seed`` [S]."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    seed: jax.Array

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int]) -> RowParams:
        """Host arrays, one row for each of ``params`` and its seed."""
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),  # type: ignore[arg-type]  # numpy goes in
            top_p=np.array([p.top_p for p in params], np.float32),  # type: ignore[arg-type]
            min_p=np.array([p.min_p for p in params], np.float32),  # type: ignore[arg-type]
            top_k=np.array([p.top_k for p in params], np.int32),  # type: ignore[arg-type]
            seed=np.array(seeds, np.uint32),  # type: ignore[arg-type]
        )


def support_logits(logits: jax.Array, rows: RowParams) -> jax.Array:
    """Logits of the sampled distribution, float32 [S, V]: divided by the temperature, ``-inf`` outside the support;
    greedy rows (temperature 0) come back unchanged."""
    greedy = rows.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
    truncating = ~greedy & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))

    def truncate() -> jax.Array:
        least = least_likely_kept(jnp.sort(scaled, axis=-1, descending=True), rows)
        return jnp.where(truncating[:, None] & (scaled < least), -jnp.inf, scaled)

    # Sorting the vocabulary costs more than a small model's whole forward pass: skip it where no row needs it.
    return jax.lax.cond(jnp.any(truncating), truncate, lambda: scaled)


def least_likely_kept(likely: jax.Array, rows: RowParams) -> jax.Array:
    """float32 [S, 1]: the scaled logit of the least likely token that the filters leave; its ties stay too.

    The one definition of top-k, top-p and min-p, each on what the previous one left. Top-p keeps the smallest set with
    at least that mass: the tokens in front of which, in descending order, there is less than ``top_p``. At exact
    boundaries rounding must not decide, hence ``MASS_ROUNDING``.

    ``likely`` are scaled logits [S, N], descending: of the whole vocabulary, or of its most likely tokens.
    """
    kth = jnp.take_along_axis(likely, jnp.clip(rows.top_k - 1, 0, likely.shape[1] - 1)[:, None], axis=-1)
    kept = (likely >= kth) | (rows.top_k == 0)[:, None]
    probs = jax.nn.softmax(jnp.where(kept, likely, -jnp.inf), axis=-1)
    in_front = jnp.cumsum(probs, axis=-1) - probs
    enough = jnp.maximum(rows.top_p - MASS_ROUNDING, MASS_ROUNDING)[:, None]
    kept &= (in_front < enough) | (rows.top_p >= 1)[:, None]
    # Relative to the largest, so that nothing is renormalised.
    kept &= jnp.exp(likely - likely[:, :1]) >= (rows.min_p * (1 - MASS_ROUNDING))[:, None]
    return jnp.min(jnp.where(kept, likely, jnp.inf), axis=-1, keepdims=True)


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """int32 [S]: the token at quantile ``uniform [S]`` of each distribution, by inverse CDF; never one of weight 0.

    One random number a row instead of the Gumbel trick's V, and two short cumulative sums instead of a long one: exact
    to float32, and cheap at V = 151,936. The probabilities ``weights [S, V]`` need not be normalised.
    """
    S, V = weights.shape
    if V <= _FLAT_VOCABULARY:
        return _first_beyond(weights, uniform * jnp.sum(weights, axis=-1))
    width = 1 << max(1, (V.bit_length() + 1) // 2)
    blocks = jnp.pad(weights, ((0, 0), (0, -V % width))).reshape(S, -1, width)
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


def uniforms(seed: jax.Array, step: jax.Array) -> jax.Array:
    """float32 in [0, 1), in the common shape of ``seed`` (uint32) and ``step`` (int32): what each token is drawn with.

    Token ``step`` of a request, counted from 0, has the key ``fold_in(fold_in(key(0), seed), step)``.
    """
    base = jax.random.key(0)

    @jnp.vectorize
    def one(seed: jax.Array, step: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(base, seed), step))

    numbers: jax.Array = one(seed, step)
    return numbers


def sample(logits: jax.Array, rows: RowParams, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples one token a row of ``logits [S, V]`` with ``uniforms``.

    Returns:
        tokens int32 [S] and their log-probs float32 [S], in nats, at the sampling temperature over the sampling support
        (greedy rows: at temperature 1 over the vocabulary).
    """
    logits = logits.astype(jnp.float32)
    scaled = support_logits(logits, rows)
    largest = jnp.max(scaled, axis=-1)
    weights = jnp.exp(scaled - largest[:, None])
    drawn = draw(weights, uniform)
    greedy = rows.temperature <= 0

    def most_likely() -> jax.Array:
        return jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)

    # XLA's argmax is slow on CPUs: at V = 4096 it takes as long as an eighth of a small model's decode step.
    tokens = jax.lax.cond(jnp.any(greedy), most_likely, lambda: drawn)
    log_z = largest + jnp.log(jnp.sum(weights, axis=-1))
    return tokens, jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0] - log_z


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest of each row of ``x [S, V]``, descending, and their int32 indices; of equal ones the first.

    ``jax.lax.top_k`` sorts the whole row on some backends. The k largest lie in the k blocks with the largest maxima
    (of equal ones the first), so two short searches find them: over block maxima, and over what those blocks hold.
    """
    S, V = x.shape
    width = 1 << max(0, (V // k).bit_length() // 2)  # about sqrt(V / k): both searches are over sqrt(V k)
    if width < 4:
        return jax.lax.top_k(x, k)
    blocks = jnp.pad(x, ((0, 0), (0, -V % width)), constant_values=-jnp.inf).reshape(S, -1, width)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # so that ties still go to the first
    held = jnp.take_along_axis(blocks, chosen[..., None], axis=1).reshape(S, k * width)
    values, at = jax.lax.top_k(held, k)
    block = jnp.take_along_axis(chosen, at // width, axis=-1)
    return values, block * width + at % width


def sample_recorded(
    logits: jax.Array, rows: RowParams, uniform: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples one token a row from at most ``size`` tokens, and says which they were.

    The filters are ``least_likely_kept``, on the ``top_k`` most likely tokens, found without sorting the vocabulary.
    Among tokens that tie with the ``top_k``-th, the lower ids are kept and the others are not sampled: what is recorded
    is what was sampled from, exactly.

    ``temperature`` has to be above 0, ``top_k`` from 1 to ``size`` (0 stands for ``size``), which is at most V.

    Returns:
        tokens int32 [S]; their log-probs float32 [S], in nats, at the sampling temperature over the support; supports
        int32 [S, size], most likely first, ``NO_TOKEN`` behind them.
    """
    scaled = logits.astype(jnp.float32) / rows.temperature[:, None]
    likely, ids = top_k(scaled, size)
    kept = jnp.arange(size) < jnp.where(rows.top_k > 0, rows.top_k, size)[:, None]
    likely = jnp.where(kept, likely, -jnp.inf)
    kept &= likely >= least_likely_kept(likely, rows)
    log_probs = jax.nn.log_softmax(jnp.where(kept, likely, -jnp.inf), axis=-1)
    drawn = draw(jnp.exp(log_probs), uniform)[:, None]
    token, log_prob = (jnp.take_along_axis(x, drawn, axis=-1)[:, 0] for x in (ids, log_probs))
    return token, log_prob, jnp.where(kept, ids, NO_TOKEN)
