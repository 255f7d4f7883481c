"""Masked sums and means over tokens and sequences: the only place that divides by a count."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct


def divide(total: chex.Array, count: chex.Array) -> jax.Array:
    """``total / count``; 0 where there is nothing to average."""
    count = jnp.asarray(count)
    return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(jnp.result_type(total)), 0)


@jax.custom_jvp
@jax.jit
def token_sum(x: chex.Array) -> jax.Array:
    """Sum over the last axis whose bits depend on the row alone, not on how many rows there are.

    XLA's CPU compiler picks the order of a reduction by the size of the whole array, so the rows of a batch and of a
    micro-batch would round differently. There, halves are added onto halves instead, which also rounds less: O(log T)
    times, not O(T). Other platforms reduce row by row anyway.
    """
    return jax.lax.platform_dependent(x, cpu=_pairwise, default=_plain_sum)


@jax.custom_jvp
@jax.jit
def batch_sum(x: chex.Array) -> jax.Array:
    """Sum over the last axis, the batch's rows, in an order that does not depend on how they were computed.

    On a CPU a loop of its own: fused with the sums over tokens before it, it would be reordered by the micro-batching.
    """
    return jax.lax.platform_dependent(x, cpu=_pairwise_loop, default=_plain_sum)


@token_sum.defjvp
def _token_sum_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return token_sum(*primals), jnp.sum(tangents[0], axis=-1)


@batch_sum.defjvp
def _batch_sum_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return batch_sum(*primals), jnp.sum(tangents[0], axis=-1)


def _plain_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1)


def _pairwise(x: jax.Array) -> jax.Array:
    x, levels = _to_power_of_two(x)
    for _ in range(levels):
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return jnp.sum(x, axis=-1)


def _pairwise_loop(x: jax.Array) -> jax.Array:
    x, levels = _to_power_of_two(x)
    width = x.shape[-1]

    def fold(i: jax.Array, x: jax.Array) -> jax.Array:
        shifted = jnp.concatenate([x, jnp.zeros_like(x)], axis=-1)
        return x + jax.lax.dynamic_slice_in_dim(shifted, width >> (i + 1), width, axis=-1)

    return jnp.sum(jax.lax.fori_loop(0, levels, fold, x)[..., :1], axis=-1)


def _to_power_of_two(x: jax.Array) -> tuple[jax.Array, int]:
    levels = max(x.shape[-1] - 1, 0).bit_length()
    padding = (1 << levels) - x.shape[-1] if x.shape[-1] else 0
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]), levels


def masked_mean(x: chex.Array, mask: chex.Array) -> jax.Array:
    """Mean of ``x`` over True entries of ``mask`` (same shape); 0 where there is none. float32 or wider."""
    mask = jnp.asarray(mask).astype(bool)
    x = jnp.where(mask, x, 0)
    return divide(jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32)), jnp.sum(mask, dtype=jnp.uint32))


def row_sum(x: chex.Array, mask: chex.Array) -> jax.Array:
    """[B] sums of ``x`` over the active tokens of each row; [B, 1] stands for a number that a row's tokens share."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if x.shape[-1] == 1:
        count = jnp.sum(mask, axis=-1, dtype=jnp.uint32)
        return jnp.where(count > 0, x[..., 0] * count.astype(x.dtype), 0)
    return token_sum(jnp.where(mask, x, 0))


def row_min(x: chex.Array, mask: chex.Array, empty: float) -> jax.Array:
    """[B] minima of ``x`` [B, T] or [B, 1] over the active tokens of each row; ``empty`` where there is none."""
    return jnp.min(jnp.where(_row_mask(x, mask), x, empty), axis=-1, initial=empty)


def row_max(x: chex.Array, mask: chex.Array, empty: float) -> jax.Array:
    """[B] maxima, like ``row_min``."""
    return jnp.max(jnp.where(_row_mask(x, mask), x, empty), axis=-1, initial=empty)


def _row_mask(x: chex.Array, mask: chex.Array) -> jax.Array:
    return jnp.any(mask, axis=-1, keepdims=True) if x.shape[-1] == 1 else mask


@struct.dataclass
class Sequences:
    """Which tokens belong together: rows, or the segments packed into them.

    Statistics of a sequence come back in a shape that broadcasts against ``[B, T]``: ``[B, 1]`` for whole rows, where
    they are one number a row and cost nothing, ``[B, T]`` for packed ones.
    """

    mask: jax.Array  # bool [B, T], active tokens
    counts: jax.Array  # float [B, 1] or [B, T]; active tokens of the token's own sequence
    index: jax.Array | None  # int32 [B, T]; 0-based position of the token's segment in its row
    active: jax.Array  # uint32 [B]; sequences of the row with at least one active token
    present: jax.Array  # uint32 [B]; sequences of the row, empty ones included

    def sum(self, x: chex.Array) -> jax.Array:
        """Sum of ``x`` [B, T] over the active tokens of each token's sequence."""
        x = jnp.where(self.mask, x, 0)
        if self.index is None:
            return token_sum(x)[..., None]
        return jnp.take_along_axis(_segment_sum(x, self.index), self.index, axis=-1)

    def mean(self, x: chex.Array) -> jax.Array:
        """Mean of ``x`` [B, T] over the active tokens of each token's sequence; 0 for an empty one."""
        return self.sum(x) / jnp.maximum(self.counts, 1)


def sequences(mask: chex.Array, segment_ids: chex.Array | None, dtype: jnp.dtype) -> Sequences:
    """Group the tokens of each row: ``mask`` is bool [B, T], ``segment_ids`` int [B, T], ``dtype`` that of the counts.

    A new segment starts wherever the id changes; id 0 is padding.
    """
    if segment_ids is None:
        counts = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.uint32)
        active = (counts[..., 0] > 0).astype(jnp.uint32)
        return Sequences(mask, counts.astype(dtype), None, active, jnp.ones_like(active))
    # Ids may be any integers, so count changes instead of trusting them as indices.
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    index = jnp.pad(jnp.cumsum(changes, axis=-1, dtype=jnp.int32), ((0, 0), (1, 0)))
    per_segment = _segment_sum(mask.astype(dtype), index)
    real = _segment_sum((segment_ids != 0).astype(dtype), index)
    return Sequences(
        mask,
        jnp.take_along_axis(per_segment, index, axis=-1),
        index,
        jnp.sum(per_segment > 0, axis=-1, dtype=jnp.uint32),
        jnp.sum(real > 0, axis=-1, dtype=jnp.uint32),
    )


def one_token() -> Sequences:
    """A sequence that is a single active token: what elementwise work on scalars sees."""
    one = jnp.ones((), jnp.uint32)
    return Sequences(jnp.ones((1,), bool), jnp.ones((1,)), None, one, one)


def _segment_sum(x: jax.Array, index: jax.Array) -> jax.Array:
    """[B, T] sums, entry (b, s) over segment s of row b. A scatter-add, so a segment's tokens all see the same bits."""
    return jax.vmap(lambda row, ids: jnp.zeros_like(row).at[ids].add(row))(x, index)
