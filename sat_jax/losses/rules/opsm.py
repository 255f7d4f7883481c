"""Off-policy sequence masking: drop negative responses that the policy has moved away from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import jax

from sat_jax.checked import Range
from sat_jax.losses.rules.base import Mask, Radii, Token


@dataclasses.dataclass(frozen=True)
class Opsm(Mask):
    """Drop where ``A < 0`` and the response's mean ``log mu - log pi`` exceeds ``threshold``.

    TRL measures the current policy against the sampler, as here; slime measures the step-start one.

    Attributes:
        threshold: nats per token.
    """

    source: ClassVar[str] = "DeepSeek-V3.2 arXiv:2512.02556 (9); TRL off_policy_mask_threshold"
    summary: ClassVar[str] = "drops responses with A < 0 whose mean log(mu / pi) exceeds threshold"

    threshold: Annotated[float, Range()] = 0.05

    def elementwise(self) -> bool:
        """A response is kept or dropped as a whole."""
        return False

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        """One statistic a response; the sign of A may vary by token."""
        del radii
        drift = token.sequences.mean(token.behavior_log_prob - token.frozen_log_prob)
        return ~((token.advantage < 0) & (drift > self.threshold))
