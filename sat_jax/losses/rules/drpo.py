"""DRPO: SPO's penalty, measured in probability."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Penalty, Radii, Token
from sat_jax.losses.rules.spo import Spo

if TYPE_CHECKING:
    from sat_jax.losses.config import LossConfig


@dataclasses.dataclass(frozen=True)
class Drpo(Penalty):
    """``|A| / (2 delta) mu (r - 1)^2`` (49).

    Its own delta replaces eps; a radius rule contracts delta on the side that r is on.
    """

    source = "arXiv:2607.18722 (49)"
    summary = "quadratic penalty weighted by mu, optimum at |pi - mu| = delta"

    delta: Annotated[float, Range(0, above=True, why="it is a distance in probability")] = 1e-3
    """Radius in probability, > 0."""

    def check_with(self, loss: LossConfig) -> None:
        if loss.get(Spo):
            raise ValueError("loss.rules: spo and drpo are two forms of one penalty; drop one")

    def penalty(self, token: Token, radii: Radii) -> jax.Array:
        delta: jax.Array | float = self.delta
        if radii.c_low is not None and radii.c_high is not None:
            delta = self.delta * jnp.where(token.frozen_ratio > 1, radii.c_high, radii.c_low)
        mu = jnp.exp(token.behavior_log_prob)
        return jnp.abs(token.advantage) / (2 * delta) * mu * jnp.square(token.ratio - 1)
