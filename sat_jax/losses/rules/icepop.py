"""IcePop: weigh by the engine's mismatch inside a band, drop outside it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from sat_jax.losses.rules.base import Token, Weight
from sat_jax.losses.rules.tis import Level, rollout_ratio


@dataclasses.dataclass(frozen=True)
class Icepop(Weight):
    """``w = k 1{lower <= k <= upper}``, ``k = pi_l / mu`` (42), bounds inclusive, no gradient.

    Attributes:
        lower: a.
        upper: b.
        binary: the 0/1 form, ``w = 1{lower <= k <= upper}``.
        level: ``token``, or ``sequence_product``: k is the product over the response.
    """

    source: ClassVar[str] = "arXiv:2607.18722 (42)"
    summary: ClassVar[str] = "weighs tokens by k = pi_l / mu where lower <= k <= upper, drops the rest"
    needs: ClassVar[tuple[str, ...]] = ("rollout_policy_log_probs",)

    lower: float = 0.5
    upper: float = 5.0
    binary: bool = False
    level: Level = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.lower < 1 < self.upper:
            raise ValueError(f"icepop band [{self.lower}, {self.upper}] must contain 1: matching tokens must be kept")
        if self.level not in ("token", "sequence_product"):
            raise ValueError(f"icepop.level = {self.level!r} is unknown: use 'token' or 'sequence_product'")

    def elementwise(self) -> bool:
        """Unless the weight is the product over the response."""
        return self.level == "token"

    def weight(self, token: Token) -> jax.Array:
        """k or 1 inside the band, 0 outside."""
        k = rollout_ratio(token, self.level)
        return jnp.where((k >= self.lower) & (k <= self.upper), jnp.ones_like(k) if self.binary else k, 0)
