"""The exact inverse-CDF order statistic over active tokens: integers, no sort, no gather.

A non-negative float's bit pattern, read as an integer, is ordered like its value. The order statistic is therefore
found digit by digit of that integer: each step counts tokens, which under ``jit`` on sharded arrays is a local sum and
a small all-reduce. Every split over devices and micro-batches counts the same tokens and so finds the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal

import chex
import jax
import jax.numpy as jnp

DIGIT_BITS = 8

Across = Callable[[jax.Array], jax.Array]
"""Sums counts over mapped axes; the identity where there are none."""


def decimal_digits(alpha: float) -> tuple[int, ...]:
    """Digits after the point of ``alpha`` as it was typed: 0.95 -> (9, 5).

    ``str`` of a float is the shortest decimal that reads back as that float, which is what a person typed; the binary
    value itself (0.9 is stored a little above nine tenths) would round the rank up.
    """
    if not 0.0 < float(alpha) < 1.0:
        raise ValueError(
            f"alpha = {alpha} is not inside (0, 1): it is the share of tokens below the quantile, such as 0.9"
        )
    digits = Decimal(str(alpha)).as_tuple()
    leading_zeros = -int(digits.exponent) - len(digits.digits)
    return (0,) * leading_zeros + digits.digits


def rank_from_alpha(count: chex.Array, alpha: float) -> jax.Array:
    """``ceil(alpha * count)``, the 1-based rank of the quantile, exactly, for counts up to 2**31.

    Horner's scheme over the decimal digits ``d1 d2 .. dk`` of alpha: ``alpha*n = (d1*n + (d2*n + ...)/10)/10``. Each
    step divides by ten before it multiplies, so 32 bits suffice; a non-zero remainder anywhere rounds the result up.
    Integers of any shape in, uint32 of that shape out; 0 for 0.
    """
    n = jnp.asarray(count).astype(jnp.uint32)
    tens, ones = n // 10, n % 10
    floor = jnp.zeros_like(n)
    inexact = jnp.zeros(n.shape, bool)
    for digit in reversed(decimal_digits(alpha)):
        partial = jnp.uint32(digit) * ones + floor
        floor = jnp.uint32(digit) * tens + partial // 10
        inexact = inexact | (partial % 10 != 0)
    return floor + inexact.astype(jnp.uint32)


@functools.partial(jax.jit, static_argnames="axis_names")
def order_statistic(
    magnitudes: chex.Array, weights: chex.Array, rank: chex.Array, axis_names: tuple[str, ...] = ()
) -> jax.Array:
    """The ``rank``-th smallest of non-negative numbers, each counted ``weights`` times.

    ``inf{x : sum(weights[magnitudes <= x]) >= rank}``, a scalar; 0 for rank 0. Inside ``shard_map`` or ``pmap`` name
    the mapped axes to count across them; under ``jit`` on sharded arrays nothing needs naming.

    Args:
        magnitudes: float [...], >= 0. Anything may stand where the weight is 0.
        weights: bool or unsigned [...], same shape (booleans count once).
        rank: unsigned scalar, 1-based.
    """
    chex.assert_equal_shape([magnitudes, weights])
    width = jnp.finfo(magnitudes.dtype).bits
    integer = {16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[width]
    pattern = jax.lax.bitcast_convert_type(magnitudes, integer)

    def across(counts: jax.Array) -> jax.Array:
        return functools.reduce(jax.lax.psum, axis_names, counts)

    # Both are exact, so they agree to the bit. A scatter is fast on a CPU and slow on a TPU, which likes whole passes.
    found = jax.lax.platform_dependent(
        pattern,
        weights.astype(jnp.uint32),
        jnp.asarray(rank, jnp.uint32),
        cpu=functools.partial(by_histogram, across=across),
        default=functools.partial(by_bisection, across=across),
    )
    value = jax.lax.bitcast_convert_type(found, magnitudes.dtype)
    return jnp.where(rank > 0, value, jnp.zeros_like(value))


def by_bisection(pattern: jax.Array, counts: jax.Array, rank: jax.Array, *, across: Across) -> jax.Array:
    """The largest pattern with fewer than ``rank`` tokens below it, built from the top bit down.

    One fused compare-and-sum and one all-reduce of a number for every bit but the sign.
    """
    top = jnp.iinfo(pattern.dtype).bits - 2

    def step(i: jax.Array, prefix: jax.Array) -> jax.Array:
        trial = prefix | (jnp.ones((), pattern.dtype) << (top - i).astype(pattern.dtype))
        below = across(jnp.sum(jnp.where(pattern < trial, counts, 0), dtype=jnp.uint32))
        return jnp.where(below < rank, trial, prefix)

    return jax.lax.fori_loop(0, top + 1, step, jnp.zeros((), pattern.dtype))


def by_histogram(pattern: jax.Array, counts: jax.Array, rank: jax.Array, *, across: Across) -> jax.Array:
    """The same, a byte at a time: one scatter-add and one all-reduce of 256 numbers for each."""
    # Each byte is a digit in base 256, and the answer is found digit by digit from the top. Count how many tokens have
    # each value of the digit and add the counts up from 0: where the sum first reaches the rank is the answer's digit.
    # Tokens with a smaller digit are below it, and ``remaining`` is its rank among those that are left. The next digit
    # is counted only among tokens that share all digits found so far, the ``prefix``; others fall into no bin.
    dtype = pattern.dtype
    shift = jnp.iinfo(dtype).bits - 1
    prefix, remaining = jnp.zeros((), dtype), rank
    while shift > 0:
        width = min(DIGIT_BITS, shift)
        bins = 1 << width
        above, shift = shift, shift - width
        digit = ((pattern >> shift) & (bins - 1)).astype(jnp.int32)
        # The sign bit is clear, so at the first digit everything shares the (empty) prefix.
        digit = jnp.where((pattern >> above) == (prefix >> above), digit, bins)
        histogram = across(jnp.zeros((bins,), jnp.uint32).at[digit].add(counts, mode="drop"))
        cumulative = jnp.cumsum(histogram, dtype=jnp.uint32)
        chosen = jnp.sum(cumulative < remaining, dtype=jnp.int32)
        remaining = remaining - jnp.where(chosen > 0, cumulative[chosen - 1], 0)
        prefix = prefix | (chosen.astype(dtype) << shift)
    return prefix
