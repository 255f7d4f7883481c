"""SeqClip: zero whole responses whose length-normalised ratio leaves a band."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Mask, Radii, Token


@dataclasses.dataclass(frozen=True)
class Seqclip(Mask):
    """Keep the response iff ``lower <= rho <= upper`` (39); ``rho = exp(mean_t d)``, the geometric mean."""

    source = "arXiv:2607.18722 (39)"
    summary = "drops responses whose geometric-mean ratio is outside [lower, upper]"

    lower: Annotated[float, Range(0, 1, below=True)] = 0.995
    """Smallest rho that is kept."""
    upper: Annotated[float, Range(1, above=True)] = 1.005
    """Largest rho that is kept."""

    def elementwise(self) -> bool:
        return False

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        d = token.log_ratio
        # A sequence unit already is the mean.
        mean = token.sequences.mean(d) if d.shape == token.sequences.mask.shape else d
        rho = jnp.exp(mean)
        return (rho >= self.lower) & (rho <= self.upper)
