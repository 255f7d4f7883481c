"""KPop: keep a token while two Bernoulli divergences of its probability stay small."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Mask, Radii, Token

PROBABILITY_MARGIN = 1e-6
"""Probabilities are kept this far from 0 and 1, where a Bernoulli divergence is infinite."""


@dataclasses.dataclass(frozen=True)
class Kpop(Mask):
    """Keep iff ``KL(Bern(pi) || Bern(mu)) <= phi`` and ``KL(Bern(mu) || Bern(pi)) <= phi`` (43)."""

    source = "arXiv:2607.18722 (43)"
    summary = "keeps tokens whose two Bernoulli KLs are at most phi"

    phi: Annotated[float, Range(0, above=True, why="it bounds a divergence in nats")] = 0.1
    """Largest divergence, in nats."""

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        pi, mu = _probability(token.frozen_log_prob), _probability(token.behavior_log_prob)
        return (bernoulli_kl(pi, mu) <= self.phi) & (bernoulli_kl(mu, pi) <= self.phi)


def bernoulli_kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """``p log(p/q) + (1-p) log((1-p)/(1-q))``, nats, for probabilities strictly inside (0, 1)."""
    return p * (jnp.log(p) - jnp.log(q)) + (1 - p) * (jnp.log1p(-p) - jnp.log1p(-q))


def _probability(log_prob: jax.Array) -> jax.Array:
    return jnp.clip(jnp.exp(log_prob), PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
