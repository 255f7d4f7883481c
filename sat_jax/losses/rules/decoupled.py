"""Decoupled PPO: clip around a proximal policy, correct for the behaviour policy by a weight."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp

from sat_jax.checked import Range
from sat_jax.losses.ratios import safe_exp
from sat_jax.losses.rules.base import Token, Weight

if TYPE_CHECKING:
    from sat_jax.losses.config import LossConfig


@dataclasses.dataclass(frozen=True)
class Decoupled(Weight):
    """``w = sg[pi_prox / mu]`` on a surrogate whose ratio is ``pi / pi_prox`` (denominator ``proximal``)."""

    source = "arXiv:2110.00641 (10); AReaL arXiv:2505.24298 (2)"
    summary = "weighs tokens by pi_prox / mu; the surrogate clips pi / pi_prox"
    needs = ("proximal_log_probs",)

    cap: Annotated[float, Range(0, above=True, why="it bounds an importance weight")] | None = None
    """Tokens whose weight exceeds it are dropped, as in AReaL; None keeps all."""

    def check_with(self, loss: LossConfig) -> None:
        if loss.denominator != "proximal":
            raise ValueError(
                f"loss.denominator = '{loss.denominator}' with rule decoupled, which weighs by pi_prox / mu: use "
                "'proximal'"
            )

    def weight(self, token: Token) -> jax.Array:
        assert token.proximal is not None  # LossConfig.needs made sure
        weight = safe_exp(token.proximal)
        return weight if self.cap is None else jnp.where(weight <= self.cap, weight, 0)
