"""CISPO: clip the importance weight, keep every token's gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sat_jax.losses.rules.base import Radii, Surrogate, Token


@dataclasses.dataclass(frozen=True)
class Cispo(Surrogate):
    """``S = sg[clip(r, 1 - low, 1 + high)] A log pi``.

    Bounds are distances from 1, as in verl and slime; TRL's ``epsilon_high`` is the upper bound itself and it has no
    lower one: ``eps_low = 1, eps_high = bound - 1`` here.
    """

    source = "arXiv:2506.13585 (4)-(5)"
    summary = "REINFORCE weighted by the clipped ratio; no token loses its gradient"

    def objective(self, token: Token, radii: Radii) -> jax.Array:
        """S; its value depends on log pi, its gradient is the clipped ratio times A."""
        weight = jnp.minimum(jnp.maximum(token.frozen_ratio, 1 - radii.low), 1 + radii.high)
        return weight * token.advantage * token.log_prob

    def cut(self, token: Token, radii: Radii) -> jax.Array:
        """The weight is clipped, whatever the sign of A."""
        outside = (token.frozen_ratio > 1 + radii.high) | (token.frozen_ratio < 1 - radii.low)
        return outside & (token.advantage != 0)
