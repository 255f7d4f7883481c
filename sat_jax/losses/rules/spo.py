"""SPO: a quadratic penalty instead of a clip."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sat_jax.losses.rules.base import Penalty, Radii, Token


@dataclasses.dataclass(frozen=True)
class Spo(Penalty):
    """``|A| / (2 eps) (r - 1)^2`` (48), with the eps of the side that r is on.

    The objective's maximum lies on the boundary, ``r = 1 + eps`` for A > 0, so a radius rule contracts SPO too.
    """

    source = "arXiv:2607.18722 (48); SPO arXiv:2401.16025"
    summary = "quadratic penalty whose optimum is the boundary ratio 1 +- eps"

    def penalty(self, token: Token, radii: Radii) -> jax.Array:
        eps = jnp.where(token.frozen_ratio > 1, radii.high, radii.low)
        return jnp.abs(token.advantage) / (2 * eps) * jnp.square(token.ratio - 1)
