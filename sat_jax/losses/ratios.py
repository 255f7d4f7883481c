"""Log-ratios of tokens and sequences, and an exponential that cannot overflow."""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from sat_jax.losses.masked import Sequences

Unit = Literal["token", "sequence", "sequence_token"]

MAX_LOG_RATIO = 20.0
"""Ratios are computed from log-ratios clamped to this many nats (as verl does); beyond it a token has no gradient."""


def clamp_log_ratio(d: chex.Array) -> jax.Array:
    """``d`` clamped to +-20 nats, gradient 1 inside (boundary included) and 0 outside."""
    bound = jnp.asarray(MAX_LOG_RATIO, d.dtype)
    return jnp.where(jnp.abs(d) <= bound, d, jax.lax.stop_gradient(jnp.clip(d, -bound, bound)))


def safe_exp(d: chex.Array) -> jax.Array:
    """``exp`` of the clamped log-ratio: value and gradient finite for every input but NaN."""
    return jnp.exp(clamp_log_ratio(d))


def unit_log_ratio(d: chex.Array, unit: Unit, sequences: Sequences) -> jax.Array:
    """The log-ratio that the surrogate works on.

    * ``token``: d itself.
    * ``sequence``: the length-normalised ratio ``mean_t d`` (20), the same for every token of a response; its gradient
      is spread evenly over the response's active tokens.
    * ``sequence_token``: GSPO-token; the sequence's value with each token's own gradient, ``sg[s] + d - sg[d]``. Equal
      to ``sequence`` in value always and in gradient wherever the advantage is one number a response.

    ``d`` is float [B, T], 0 at inactive positions; so is the result, but [B, 1] for ``sequence`` on whole rows.
    """
    if unit == "token":
        return d
    mean = sequences.mean(d)
    if unit == "sequence":
        return mean
    # The bracket is zero in value, also for an infinite d: it is clamped first.
    own = clamp_log_ratio(d)
    return jax.lax.stop_gradient(mean) + (own - jax.lax.stop_gradient(own))
