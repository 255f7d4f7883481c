"""DRPO: SPO's penalty, measured in probability."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from sat_jax.losses.rules.base import Penalty, Radii, Token


@dataclasses.dataclass(frozen=True)
class Drpo(Penalty):
    """``|A| / (2 delta) mu (r - 1)^2`` (49).

    Its own delta replaces eps; a radius rule contracts delta on the side that r is on.

    Attributes:
        delta: radius in probability, > 0.
    """

    source: ClassVar[str] = "arXiv:2607.18722 (49)"
    summary: ClassVar[str] = "quadratic penalty weighted by mu, optimum at |pi - mu| = delta"

    delta: float = 1e-3

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"drpo.delta = {self.delta} must be positive: it is a distance in probability; use 1e-3")

    def penalty(self, token: Token, radii: Radii) -> jax.Array:
        """Soft twin of DPPO's mask."""
        delta: jax.Array | float = self.delta
        if radii.c_low is not None and radii.c_high is not None:
            delta = self.delta * jnp.where(token.frozen_ratio > 1, radii.c_high, radii.c_low)
        mu = jnp.exp(token.behavior_log_prob)
        return jnp.abs(token.advantage) / (2 * delta) * mu * jnp.square(token.ratio - 1)
