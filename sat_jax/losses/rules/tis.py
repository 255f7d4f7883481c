"""Truncated importance sampling for the engine's mismatch, on top of any surrogate."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from sat_jax.checked import NonNegative, Positive
from sat_jax.losses.ratios import safe_exp
from sat_jax.losses.rules.base import Token, Weight

Level = Literal["token", "sequence_product"]


@dataclasses.dataclass(frozen=True)
class Tis(Weight):
    """``w = sg[clip(pi_l / mu, floor, cap)]``, the form of TRL, verl and slime, on PPO whose ratio is pi_j / pi_l.

    Equation (41) as printed, ``sg[min(r, C)] A log pi``, is ``tis_reinforce``.
    """

    source = "arXiv:2607.18722 (41), E.2; TRL, verl, slime"
    summary = "weighs tokens by pi_l / mu, truncated at cap"
    needs = ("rollout_policy_log_probs",)

    cap: Positive = 2.0
    """C, the largest weight."""
    floor: NonNegative = 0.0
    """Smallest weight; 0 is off (TRL ``cmin``, slime ``tis_clip_low``)."""
    level: Level = "token"
    """``token``, or ``sequence_product``: one weight a response, the product of its tokens' ratios."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.floor < self.cap:
            raise ValueError(f"tis.floor = {self.floor} must lie below tis.cap = {self.cap}; use 0 and 2")

    def elementwise(self) -> bool:
        return self.level == "token"

    def weight(self, token: Token) -> jax.Array:
        return jnp.clip(rollout_ratio(token, self.level), self.floor, self.cap)


def rollout_ratio(token: Token, level: Level) -> jax.Array:
    """``pi_l / mu`` of the token, or its product over the response."""
    assert token.implementation is not None  # LossConfig.needs made sure
    d = token.implementation
    return safe_exp(d if level == "token" else token.sequences.sum(d))
