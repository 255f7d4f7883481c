"""Grouped-query attention: over whole sequences, with a gradient of its own, and over a KV cache.

Query head ``n`` reads key head ``n // (H / KV)``; ``G = H / KV``. The softmax is float32 whatever the inputs are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row without any visible key must give a finite (and unused) softmax, not NaN
_PARTS = 8
_SMALLEST_PART = 64


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention to keys that are there already, ``[B, T, H, h]``; differentiable by JAX itself.

    ``q`` is ``[B, T, H, h]``; ``k`` and ``v`` are ``[B, KV, S, h]``: heads before positions, the layout in which a
    cache is read without a copy; ``visible`` is bool ``[B, T, S]``. Meaningless where nothing is visible.
    """
    grouped = _split_heads(q, k.shape[1])
    weights = jax.nn.softmax(_scores(grouped, k.swapaxes(2, 3), visible), axis=-1).astype(v.dtype)
    return _join_heads(_queries_by_keys(weights, v))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def self_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int) -> jax.Array:
    """Causal attention within segments: ``[B, T, H, h]``.

    The queries are cut into at most ``_PARTS`` ranges, and a range meets the keys up to its own end only, which
    spares nearly half of a causal matrix. Within a range, scores are made for at most ``block`` queries at a time:
    memory grows with ``B * H * block * T``. The gradient makes the scores again from the saved log-sum-exp of
    each row (FlashAttention-2, arXiv:2307.08691, Algorithm 2); of size ``T * T`` nothing is kept.

    ``q`` is ``[B, T, H, h]``, ``k`` and ``v`` are ``[B, T, KV, h]``, ``segment_ids`` int32 ``[B, T]``.
    """
    return _forward(q, k, v, segment_ids, block)[0]


class _Saved(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array
    out: jax.Array
    log_z: jax.Array  # float32 [B, T, H, 1]


class _Rows(NamedTuple):
    """Some queries of all sequences and what belongs to them; ``position [t]``, ``segment [B, t]``, the rest
    ``[B, KV, G, t, h or 1]``."""

    position: jax.Array
    segment: jax.Array
    q: jax.Array
    d_out: jax.Array
    log_z: jax.Array
    delta: jax.Array


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int) -> tuple[jax.Array, _Saved]:
    groups, T = k.shape[2], q.shape[1]
    heads, keys, values = _split_heads(q, groups), k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    outs, log_zs = [], []
    for low, high in _parts(T, block):

        def rows(
            q: jax.Array, segment: jax.Array, position: jax.Array, high: int = high
        ) -> tuple[jax.Array, jax.Array]:
            scores = _scores(q, keys[..., :high], _visible(segment, segment_ids[:, :high], position))
            largest = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - largest)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            out = _queries_by_keys(weights.astype(v.dtype), values[:, :, :high]) / total.astype(v.dtype)
            return out, largest + jnp.log(total)

        part = heads[:, :, :, low:high], segment_ids[:, low:high], jnp.arange(low, high)
        axes = (3, 1, 0)
        if high - low <= block:
            out, log_z = rows(*part)
        else:
            blocks = tuple(_cut(x, axis, block) for x, axis in zip(part, axes, strict=True))
            out, log_z = (_uncut(x, 3, high - low) for x in jax.lax.map(lambda xs: rows(*xs), blocks))
        outs.append(out)
        log_zs.append(log_z)
    joined = _join_heads(jnp.concatenate(outs, axis=3))
    return joined, _Saved(q, k, v, segment_ids, joined, _join_heads(jnp.concatenate(log_zs, axis=3)))


def _backward(block: int, saved: _Saved, d_joined: jax.Array) -> tuple[jax.Array | None, ...]:
    # With S = q k' / sqrt(h), P = exp(S - log_z) and o = P v, the gradient of a softmax row is
    #   d_S = P * (d_P - delta),  d_P = d_o v',  delta = sum_s P_s d_P_s = <d_o, o>,
    # so a row needs nothing of its siblings: log_z and o were kept, delta is one dot product, and P is made again for
    # a range of queries at a time. Then d_q = d_S k, d_k += d_S' q and d_v += P' d_o, both with 1 / sqrt(h). Keys
    # beyond a range's end are seen by none of its queries: the slices [..., :high] leave them out.
    groups, T, segment_ids = saved.k.shape[2], saved.q.shape[1], saved.segment_ids
    keys, values = saved.k.transpose(0, 2, 3, 1), saved.v.transpose(0, 2, 3, 1)  # [B, KV, h, S]
    q, d_out, log_z = (_split_heads(x, groups) for x in (saved.q, d_joined, saved.log_z))
    product = d_joined.astype(jnp.float32) * saved.out.astype(jnp.float32)
    delta = _split_heads(jnp.sum(product, axis=-1, keepdims=True), groups)
    # [B, KV, h, S]: this way round no array of T * T is transposed for the matmuls.
    d_keys = d_values = jnp.zeros(keys.shape, jnp.float32)
    d_queries = []
    for low, high in _parts(T, block):

        def rows(
            sums: tuple[jax.Array, jax.Array], at: _Rows, high: int = high
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            seen = _visible(at.segment, segment_ids[:, :high], at.position)
            weights = jnp.exp(_scores(at.q, keys[..., :high], seen) - at.log_z)
            d_weights = _queries_by_keys(at.d_out, values[..., :high], jnp.float32)
            d_scores = (weights * (d_weights - at.delta) * q.shape[-1] ** -0.5).astype(q.dtype)
            d_k = sums[0].at[..., :high].add(_keys_by_queries(at.q, d_scores))
            d_v = sums[1].at[..., :high].add(_keys_by_queries(at.d_out, weights.astype(q.dtype)))
            return (d_k, d_v), _queries_by_keys(d_scores, keys[..., :high].swapaxes(2, 3))

        part = _Rows(
            jnp.arange(low, high), segment_ids[:, low:high], *(x[:, :, :, low:high] for x in (q, d_out, log_z, delta))
        )
        if high - low <= block:
            (d_keys, d_values), d_q = rows((d_keys, d_values), part)
        else:
            blocks = _Rows(*(_cut(x, axis, block) for x, axis in zip(part, (0, 1, 3, 3, 3, 3), strict=True)))
            (d_keys, d_values), d_q = jax.lax.scan(rows, (d_keys, d_values), blocks)
            d_q = _uncut(d_q, 3, high - low)
        d_queries.append(d_q)
    d_k, d_v = (x.transpose(0, 3, 1, 2).astype(saved.k.dtype) for x in (d_keys, d_values))
    return _join_heads(jnp.concatenate(d_queries, axis=3)), d_k, d_v, None


self_attention.defvjp(_forward, _backward)


def _parts(T: int, block: int) -> list[tuple[int, int]]:
    """Ranges of queries: whole blocks where a range is more than one."""
    size = max(_SMALLEST_PART, -(-T // _PARTS))
    if size > block:
        size = -(-size // block) * block
    return [(low, min(low + size, T)) for low in range(0, T, size)]


def _visible(segment: jax.Array, key_segment: jax.Array, position: jax.Array) -> jax.Array:
    causal = position[:, None] >= jnp.arange(key_segment.shape[1])
    return (segment[:, :, None] == key_segment[:, None, :]) & causal


def _scores(q: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
    """Float32 ``[B, KV, G, t, S]`` of ``q [B, KV, G, t, h]`` and ``k [B, KV, h, S]``."""
    scores = _queries_by_keys(q, k, jnp.float32) * q.shape[-1] ** -0.5
    return jnp.where(visible[:, None, None], scores, _MASKED)


def _queries_by_keys(left: jax.Array, right: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """``[B, KV, G, t, i] @ [B, KV, i, j]``: one matmul per key head serves all of its query heads."""
    flat = left.reshape(*left.shape[:2], -1, left.shape[-1])
    product = jnp.einsum("bkti,bkij->bktj", flat, right, preferred_element_type=dtype)
    return product.reshape(*left.shape[:-1], right.shape[-1])


def _keys_by_queries(q: jax.Array, weights: jax.Array) -> jax.Array:
    """Float32 ``[B, KV, h, S]``: ``q [B, KV, G, t, h]`` summed over queries with ``weights [B, KV, G, t, S]``."""
    return jnp.einsum("bkgth,bkgts->bkhs", q, weights, preferred_element_type=jnp.float32)


def _split_heads(x: jax.Array, groups: int) -> jax.Array:
    """``[B, T, H, h] -> [B, KV, G, T, h]``."""
    B, T, H, h = x.shape
    return x.reshape(B, T, groups, H // groups, h).transpose(0, 2, 3, 1, 4)


def _join_heads(x: jax.Array) -> jax.Array:
    """``[B, KV, G, T, h] -> [B, T, H, h]``."""
    B, KV, G, T, h = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(B, T, KV * G, h)


def _cut(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Blocks along a new first axis; the last one is filled up with zeros."""
    count = -(-x.shape[axis] // block)
    widths = [(0, count * block - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    shape = (*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), axis, 0)


def _uncut(x: jax.Array, axis: int, length: int) -> jax.Array:
    joined = jnp.moveaxis(x, 0, axis)
    shape = (*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined.reshape(shape), 0, length, axis=axis)
