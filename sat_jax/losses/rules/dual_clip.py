"""Dual clip: PPO's surrogate with a floor for negative advantages at large ratios."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Radii, Token
from sat_jax.losses.rules.ppo import Ppo


@dataclasses.dataclass(frozen=True)
class DualClip(Ppo):
    """``S = max(S_ppo, bound * A)`` where A < 0, so one wildly off-policy token cannot dominate.

    TRL's ``delta`` is the same function for ``delta >= 1 + eps_high``; verl's ``vanilla`` always has it with 3.
    """

    source = "arXiv:1912.09729 (5); verl clip_ratio_c, TRL delta, slime eps_clip_c"
    summary = "clipped surrogate with a floor at bound * A for A < 0"

    bound: Annotated[float, Range(1, above=True, why="it caps the ratio of tokens with A < 0")] = 3.0
    """Largest ratio that still counts against a negative advantage; > 1."""

    def objective(self, token: Token, radii: Radii) -> jax.Array:
        floor = jnp.asarray(self.bound, token.ratio.dtype) * token.advantage
        return jnp.where(self._floored(token), floor, super().objective(token, radii))

    def cut(self, token: Token, radii: Radii) -> jax.Array:
        return super().cut(token, radii) | self._floored(token)

    def _floored(self, token: Token) -> jax.Array:
        return (token.advantage < 0) & (token.frozen_ratio > self.bound)
