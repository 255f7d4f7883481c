"""Equation (41) itself: REINFORCE with a truncated importance weight."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Radii, Surrogate, Token


@dataclasses.dataclass(frozen=True)
class TisReinforce(Surrogate):
    """``S = sg[min(r, cap)] A log pi`` (41); not the ``-tis`` methods, which weigh PPO by ``pi_l / mu``."""

    source = "arXiv:2607.18722 (41)"
    summary = "REINFORCE weighted by min(r, cap)"
    has_interval = False

    cap: Annotated[float, Range(0, above=True, why="it is the largest importance weight")] = 2.0
    """C, the largest weight; > 0."""

    def objective(self, token: Token, radii: Radii) -> jax.Array:
        return jnp.minimum(token.frozen_ratio, self.cap) * token.advantage * token.log_prob
