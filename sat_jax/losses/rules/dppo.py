"""DPPO with total variation: drop tokens whose step leaves a ball in probability, not in ratio."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Mask, Radii, Token, outward


@dataclasses.dataclass(frozen=True)
class Dppo(Mask):
    """Drop where the step is outward and ``mu |r - 1| = |pi - mu| > delta`` (45), (47)."""

    source = "arXiv:2607.18722 (45), (47)"
    summary = "drops outward tokens with |pi - mu| > delta"

    delta: Annotated[float, Range(0, above=True, why="it is a distance in probability")] = 1e-3
    """Radius in probability; the paper's 1e-3."""

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        distance = jnp.exp(token.behavior_log_prob) * jnp.abs(token.frozen_ratio - 1)
        return ~(outward(token) & (distance > self.delta))
