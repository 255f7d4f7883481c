"""Decoupled PPO: clip around a proximal policy, correct for the behaviour policy by a weight."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from sat_jax.losses.ratios import safe_exp
from sat_jax.losses.rules.base import Token, Weight


@dataclasses.dataclass(frozen=True)
class Decoupled(Weight):
    """``w = sg[pi_prox / mu]`` on a surrogate whose ratio is ``pi / pi_prox`` (denominator ``proximal``).

    Attributes:
        cap: tokens whose weight exceeds it are dropped, as in AReaL; None keeps all.
    """

    source: ClassVar[str] = "arXiv:2110.00641 (10); AReaL arXiv:2505.24298 (2)"
    summary: ClassVar[str] = "weighs tokens by pi_prox / mu; the surrogate clips pi / pi_prox"
    needs: ClassVar[tuple[str, ...]] = ("proximal_log_probs",)

    cap: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap > 0:
            raise ValueError(
                f"decoupled.cap = {self.cap} must be positive: it bounds an importance weight; None is off"
            )

    def weight(self, token: Token) -> jax.Array:
        """No gradient: both policies are fixed during the step."""
        assert token.proximal is not None  # LossConfig.needs made sure
        weight = safe_exp(token.proximal)
        return weight if self.cap is None else jnp.where(weight <= self.cap, weight, 0)
