"""Estimators of KL(pi || reference) from the sampled token, with the clamps that keep them finite."""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp

KlType = Literal["k1", "abs", "k2", "k3", "low_var_kl", "k1+", "k3+"]

INPUT_CLAMP = 20.0
OUTPUT_CLAMP = 10.0


def kl_estimate(log_probs: chex.Array, reference_log_probs: chex.Array, kind: KlType = "low_var_kl") -> jax.Array:
    """One estimate a token, with ``x = clamp(reference - log_probs, +-20)``:

    ======================  ===========================================  =========================
    ``k1``                  ``-x``                                       unbiased, signed
    ``abs``                 ``|x|``
    ``k2``                  ``x^2 / 2``                                  unbiased gradient
    ``k3``, ``low_var_kl``  ``min(exp(x) - x - 1, 10)``                  unbiased, never negative
    ``k1+``, ``k3+``        value of k1, k3; gradient of k2              straight-through
    ======================  ===========================================  =========================

    Floats of one shape in, nats of that shape out; ``log_probs`` is differentiable. A clamped token has no gradient:
    clamping the output alone leaves ``inf * 0`` in the backward pass.

    Source: Schulman, "Approximating KL divergence"; names as in verl and slime.
    """
    # A select instead of clip: exact gradients at the bounds, and no 0 * inf behind it.
    raw = reference_log_probs - log_probs
    x = jnp.where(jnp.abs(raw) <= INPUT_CLAMP, raw, jax.lax.stop_gradient(jnp.clip(raw, -INPUT_CLAMP, INPUT_CLAMP)))
    if kind == "k1":
        return -x
    if kind == "abs":
        return x * jnp.sign(x)  # gradient 0 at 0, where automatic differentiation of abs says 1
    if kind == "k2":
        return 0.5 * x * x
    if kind.endswith("+"):
        value = -x if kind == "k1+" else _k3(x)
        gradient = 0.5 * x * x
        return gradient + jax.lax.stop_gradient(value - gradient)
    return _k3(x)


def kl_capped(log_probs: chex.Array, reference_log_probs: chex.Array, kind: KlType = "low_var_kl") -> jax.Array:
    """Bool: the tokens whose estimate a clamp has cut, so that they have no KL gradient."""
    x = reference_log_probs - log_probs
    beyond = jnp.abs(x) > INPUT_CLAMP
    if kind in ("k3", "low_var_kl"):
        beyond = beyond | (jnp.expm1(jnp.clip(x, -INPUT_CLAMP, INPUT_CLAMP)) - x > OUTPUT_CLAMP)
    return jax.lax.stop_gradient(beyond)


def _k3(x: jax.Array) -> jax.Array:
    # expm1 keeps the small differences that exp(x) - x - 1 would cancel.
    value = jnp.expm1(x) - x
    return jnp.where(value <= OUTPUT_CLAMP, value, OUTPUT_CLAMP)
