"""The plain importance-weighted surrogate, the base of the soft penalties."""

from __future__ import annotations

import dataclasses

import jax

from sat_jax.losses.rules.base import Radii, Surrogate, Token


@dataclasses.dataclass(frozen=True)
class Unclipped(Surrogate):
    """``S = r A`` (4), no interval of its own; SPO and DRPO bound it softly."""

    source = "arXiv:2607.18722 (4), (48)-(49)"
    summary = "importance-weighted advantage without a clip"

    def objective(self, token: Token, radii: Radii) -> jax.Array:
        return token.ratio * token.advantage
