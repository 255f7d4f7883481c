"""Off-policy sequence masking: drop negative responses that the policy has moved away from."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Mask, Radii, Token


@dataclasses.dataclass(frozen=True)
class Opsm(Mask):
    """Drop where ``A < 0`` and the response's mean ``log mu - log pi`` exceeds ``threshold``.

    TRL measures the current policy against the sampler, as here; slime measures the step-start one.
    """

    source = "DeepSeek-V3.2 arXiv:2512.02556 (9); TRL off_policy_mask_threshold"
    summary = "drops responses with A < 0 whose mean log(mu / pi) exceeds threshold"

    threshold: Annotated[float, Range()] = 0.05
    """Nats per token."""

    def elementwise(self) -> bool:
        return False

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        drift = token.sequences.mean(token.behavior_log_prob - token.frozen_log_prob)
        return ~((token.advantage < 0) & (drift > self.threshold))
