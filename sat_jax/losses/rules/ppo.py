"""PPO's clipped surrogate, on token ratios (GRPO) or sequence ratios (GSPO)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sat_jax.losses.rules.base import Radii, Surrogate, Token


@dataclasses.dataclass(frozen=True)
class Ppo(Surrogate):
    """``S = min(r A, clip(r, 1 - low, 1 + high) A)`` (18)-(19), gradient by the keep-gate (22).

    Written as a select, not as ``min`` of a ``clip``: automatic differentiation splits the gradient of ``min`` and
    ``clip`` in halves where their arguments tie, and the keep-gate says that a ratio *on* the boundary is kept.
    """

    source = "arXiv:2607.18722 (18)-(19), (22), (37); PPO arXiv:1707.06347 (7)"
    summary = "clipped surrogate: no gradient outwards beyond 1 - eps_low, 1 + eps_high"

    def objective(self, token: Token, radii: Radii) -> jax.Array:
        boundary = jnp.where(token.advantage > 0, 1 + radii.high, 1 - radii.low)
        return jnp.where(self.cut(token, radii), boundary, token.ratio) * token.advantage

    def cut(self, token: Token, radii: Radii) -> jax.Array:
        """``A > 0 and r > 1 + high`` or ``A < 0 and r < 1 - low``."""
        above = (token.advantage > 0) & (token.frozen_ratio > 1 + radii.high)
        below = (token.advantage < 0) & (token.frozen_ratio < 1 - radii.low)
        return above | below
