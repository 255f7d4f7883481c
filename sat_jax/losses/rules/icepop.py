"""IcePop: weigh by the engine's mismatch inside a band, drop outside it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Token, Weight
from sat_jax.losses.rules.tis import Level, Tis, rollout_ratio

if TYPE_CHECKING:
    from sat_jax.losses.config import LossConfig


@dataclasses.dataclass(frozen=True)
class Icepop(Weight):
    """``w = k 1{lower <= k <= upper}``, ``k = pi_l / mu`` (42), bounds inclusive, no gradient."""

    source = "arXiv:2607.18722 (42)"
    summary = "weighs tokens by k = pi_l / mu where lower <= k <= upper, drops the rest"
    needs = ("rollout_policy_log_probs",)

    lower: Annotated[float, Range(0, 1, below=True)] = 0.5
    """Smallest k that is kept."""
    upper: Annotated[float, Range(1, above=True)] = 5.0
    """Largest k that is kept."""
    binary: bool = False
    """The 0/1 form, ``w = 1{lower <= k <= upper}``."""
    level: Level = "token"
    """``token``, or ``sequence_product``: k is the product over the response."""

    def check_with(self, loss: LossConfig) -> None:
        if loss.get(Tis):
            raise ValueError("loss.rules: tis and icepop both weigh by pi_l / mu; squaring it is neither; drop one")

    def elementwise(self) -> bool:
        return self.level == "token"

    def weight(self, token: Token) -> jax.Array:
        k = rollout_ratio(token, self.level)
        return jnp.where((k >= self.lower) & (k <= self.upper), jnp.ones_like(k) if self.binary else k, 0)
