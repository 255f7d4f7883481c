"""SAT: the interval contracts where the realised mismatch is in the batch's tail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.checked import Count, NonNegative, Positive, Range
from sat_jax.losses.rules.base import Contraction, Radius, Scope, Token


@struct.dataclass
class SatSummary:
    """What SAT knows about a batch."""

    q: jax.Array
    """The order statistic of |d| (14); scalar, or one number a row where the scope is not the batch."""
    reference: jax.Array
    """q after ``q_floor`` and ``q_cap``, what gate and kernel divide by."""


@dataclasses.dataclass(frozen=True)
class Sat(Radius):
    """Gate, Hill contraction and radii (13)-(17), all on ``sg(d)``.

    ``q`` is the alpha-quantile of |d| over active tokens. A token is gated where ``q > 0`` and ``|d| > q``; a gated
    token with d > 0 contracts the upper radius by ``psi(|d|; q) = 1 / (1 + (|d|/q)^k)``, with d < 0 the lower one.
    """

    source = "arXiv:2607.18722 (13)-(17), (20)"
    summary = "contracts eps on the side of d for tokens whose |d| exceeds the batch's alpha-quantile"

    alpha: Annotated[float, Range(0, 1, above=True, below=True, why="it is the share of tokens below q")] = 0.90
    """Share of active tokens at or below q, in (0, 1), read as the decimal that was typed."""
    exponent: Annotated[float, Range(0, above=True, why="psi must fall with |d|; the paper uses 2")] = 2.0
    """k of the Hill kernel, > 0."""
    scope: Scope = "batch"
    """Whose tokens q ranks: the whole ``batch``, each ``microbatch``, or each ``device``'s rows of one."""
    shards: Count = 1
    """For scope ``device``: into how many equal contiguous blocks the rows are cut."""
    q_floor: NonNegative = 0.0
    """Ours, not the paper's; the reference never falls below it, so rounding noise is not gated. 0 is off."""
    q_cap: Positive | None = None
    """Ours; the reference never exceeds it, so the tail of a badly mismatched batch still contracts. None is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards > 1 and self.scope != "device":
            raise ValueError(f"sat.shards = {self.shards} with scope '{self.scope}': only scope 'device' is cut; use 1")
        if self.q_cap is not None and not self.q_cap > self.q_floor:
            raise ValueError(
                f"sat.q_cap = {self.q_cap} must exceed sat.q_floor = {self.q_floor}; leave it out to switch it off"
            )

    def summary_scope(self) -> tuple[Scope, int]:
        return self.scope, self.shards

    def summarize(self, token: Token, order_statistic: Callable[[jax.Array, float], jax.Array]) -> SatSummary:
        """The quantile (14), and the reference derived from it."""
        q = order_statistic(jnp.abs(token.log_ratio), self.alpha)
        reference = jnp.maximum(q, self.q_floor) if self.q_floor > 0 else q
        if self.q_cap is not None:
            reference = jnp.minimum(reference, self.q_cap)
        return SatSummary(q=q, reference=reference)

    def contract(self, token: Token, summary: SatSummary) -> Contraction:
        """c_minus, c_plus (15)-(16): exactly 1 on the side that does not contract."""
        d, q = token.log_ratio, summary.reference
        gate = (q > 0) & (jnp.abs(d) > q)
        # Select before dividing: q may be 0 or infinite, and so may |d|.
        psi = hill(jnp.where(gate, jnp.abs(d), 0) / jnp.where(q > 0, q, 1), self.exponent)
        return Contraction(low=jnp.where(d < 0, psi, 1), high=jnp.where(d > 0, psi, 1), gate=gate)


def hill(x: jax.Array, exponent: float) -> jax.Array:
    """``1 / (1 + x^k)`` (15) for ``x = u/q >= 0``; exactly 1 at 0."""
    power = x * x if exponent == 2 else x ** (int(exponent) if float(exponent).is_integer() else exponent)
    return 1 / (1 + power)
