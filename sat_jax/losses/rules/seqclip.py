"""SeqClip: zero whole responses whose length-normalised ratio leaves a band."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from sat_jax.losses.rules.base import Mask, Radii, Token


@dataclasses.dataclass(frozen=True)
class Seqclip(Mask):
    """Keep the response iff ``lower <= rho <= upper`` (39); ``rho = exp(mean_t d)``, geometric mean, not the product.

    Attributes:
        lower: a.
        upper: b.
    """

    source: ClassVar[str] = "arXiv:2607.18722 (39)"
    summary: ClassVar[str] = "drops responses whose geometric-mean ratio is outside [lower, upper]"

    lower: float = 0.995
    upper: float = 1.005

    def __post_init__(self) -> None:
        if not 0 <= self.lower < 1 < self.upper:
            raise ValueError(
                f"seqclip band [{self.lower}, {self.upper}] must contain 1: on-policy responses must be kept"
            )

    def elementwise(self) -> bool:
        """A response is kept or dropped as a whole."""
        return False

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        """One answer a sequence, broadcast to its tokens."""
        del radii
        d = token.log_ratio
        # A sequence unit already is the mean.
        mean = token.sequences.mean(d) if d.shape == token.sequences.mask.shape else d
        rho = jnp.exp(mean)
        return (rho >= self.lower) & (rho <= self.upper)
