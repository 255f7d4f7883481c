"""The order statistic by counting passes: sixteen buckets a pass, so eight passes instead of thirty-one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES = 128
BITS = 4
"""Digits of a pass: 15 thresholds are compared while a tile is on the chip; more would be bound by arithmetic."""
ROWS, COLUMNS = 64, 2048
NEVER = 0x7FFFFFFF
"""Pattern of an inactive token: larger than every threshold, so it is never counted."""


@functools.partial(jax.jit, static_argnames=("axis_names", "interpret"))
def order_statistic(
    magnitudes: jax.Array, mask: jax.Array, rank: jax.Array, axis_names: tuple[str, ...] = (), interpret: Any = False
) -> jax.Array:
    """The ``rank``-th smallest of the active magnitudes; same signature and bits as the reference for a boolean mask.

    Args:
        magnitudes: float32 [B, T], >= 0. Anything may stand where the mask is False.
        mask: bool [B, T].
        rank: unsigned scalar, 1-based.
        axis_names: mapped axes over which the counts of each pass are summed (15 numbers a pass).
        interpret: as for ``pallas_call``.

    Returns:
        float32 scalar; 0 where ``rank`` is 0.

    Raises:
        ValueError: another dtype or rank.
    """
    if magnitudes.dtype != jnp.float32 or magnitudes.ndim != 2 or mask.shape != magnitudes.shape:
        raise ValueError(
            f"order_statistic kernel got {magnitudes.dtype}{magnitudes.shape} and mask {mask.shape}: "
            "it takes float32 [B, T] twice; use losses.quantile.order_statistic for the rest"
        )
    pattern = jnp.where(mask, jax.lax.bitcast_convert_type(magnitudes, jnp.int32), NEVER)
    prefix = jnp.zeros((), jnp.int32)
    shift = 31
    while shift > 0:
        width = min(BITS, shift)
        shift -= width
        steps = jnp.arange(1, 1 << width, dtype=jnp.int32)
        below = _count_below(pattern, prefix + (steps << shift), interpret)
        for axis in axis_names:
            below = jax.lax.psum(below, axis)
        prefix = prefix + (jnp.sum(below.astype(jnp.uint32) < rank, dtype=jnp.int32) << shift)
    value = jax.lax.bitcast_convert_type(prefix, jnp.float32)
    return jnp.where(rank > 0, value, 0.0)


def _count_below(pattern: jax.Array, thresholds: jax.Array, interpret: Any) -> jax.Array:
    """int32 [n]: how many patterns lie below each of n thresholds; one pass over the data."""
    B, T = pattern.shape
    n = thresholds.shape[0]
    rows, columns = min(ROWS, B), min(COLUMNS, T)
    line = jnp.pad(thresholds, (0, LANES - n))[None]
    call = pl.pallas_call(
        functools.partial(_kernel, n=n, shape=(B, T), block=(rows, columns)),
        grid=(pl.cdiv(B, rows), pl.cdiv(T, columns)),
        in_specs=[pl.BlockSpec((1, LANES), lambda i, j: (0, 0)), pl.BlockSpec((rows, columns), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((1, LANES), lambda i, j: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((1, LANES), jnp.int32),
        interpret=interpret,
    )
    with jax.enable_x64(False):  # else a Python number in the kernel is 64 bits wide
        counts = call(line, pattern)
    return counts[0, :n]


def _kernel(
    thresholds_ref: Any, pattern_ref: Any, counts_ref: Any, *, n: int, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    i, j = pl.program_id(0), pl.program_id(1)
    row = i * block[0] + jax.lax.broadcasted_iota(jnp.int32, block, 0)
    column = j * block[1] + jax.lax.broadcasted_iota(jnp.int32, block, 1)
    pattern = jnp.where((row < shape[0]) & (column < shape[1]), pattern_ref[...], NEVER)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    thresholds = thresholds_ref[...]
    counts = jnp.zeros((1, LANES), jnp.int32)
    for k in range(n):
        # Float sums are exact here (a tile has fewer than 2**24 entries) and every TPU generation reduces floats.
        below = jnp.where(pattern < thresholds[:, k : k + 1], 1.0, 0.0)
        total = jnp.sum(jnp.sum(below, axis=1, keepdims=True), axis=0, keepdims=True).astype(jnp.int32)
        counts = jnp.where(lane == k, total, counts)

    @pl.when((i == 0) & (j == 0))
    def _first() -> None:
        counts_ref[...] = counts

    @pl.when((i > 0) | (j > 0))
    def _later() -> None:
        counts_ref[...] += counts
