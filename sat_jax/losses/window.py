"""Where SAT can act at all: the one answer for every tool that shows a batch or a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

NOISE = 1e-5
"""A quantile of |log ratio| below this is float32 rounding, not staleness: engine and learner were seen to disagree by
up to 5e-6 on the same weights."""

State = Literal["off", "noise", "acts", "half inert", "inert"]


@dataclasses.dataclass(frozen=True)
class Window:
    """Where one batch stands in the range of q, in nats, in which SAT can change a gradient.

    State ``off``: nothing is gated; ``noise``: what is gated is rounding error; ``acts``; ``half inert``: acts on one
    side of ratio 1 only; ``inert``: the nominal interval clips every gated token already.
    """

    state: State
    q: float
    eps_low: float
    eps_high: float
    exponent: float

    @property
    def acts(self) -> bool:
        """Whether SAT can cut a gradient that the nominal interval keeps."""
        return self.state in ("acts", "half inert")

    @property
    def text(self) -> str:
        """One line: the state, the numbers it follows from, and the log ratios d whose gradient SAT newly cuts."""
        if self.state == "off":
            return "off: q = 0, so no token is gated; learner and engine agree on most tokens"
        if self.state == "noise":
            return f"noise: q = {self.q:.2g} is rounding error, not staleness; sat.q_floor can keep the gate shut"
        low, high = edges(self.eps_low, self.eps_high)
        beyond, cut = [], []
        if self.q >= high:
            beyond.append(f"log(1 + eps) = {high:.3g}")
        else:
            cut.append(f"({_onset(self.q, self.eps_high, +1, self.exponent):.3g}, {high:.3g})")
        if self.q >= low:
            beyond.append(f"-log(1 - eps) = {low:.3g}")
        else:
            cut.append(f"({-low:.3g}, {-_onset(self.q, self.eps_low, -1, self.exponent):.3g})")
        says = f"{self.state}: q = {self.q:.3g}" + (f" is beyond {' and '.join(beyond)}" if beyond else "")
        return says + (f"; newly cuts d in {' and '.join(cut)}" if cut else "")


def edges(eps_low: float, eps_high: float) -> tuple[float, float]:
    """Distances |log ratio| at which the nominal interval ends: ``-log(1 - eps_low)``, ``log(1 + eps_high)``."""
    return (-math.log1p(-eps_low) if eps_low < 1 else math.inf), math.log1p(eps_high)


def window(
    q: float, eps_low: float, eps_high: float, exponent: float = 2.0, q_floor: float = 0.0, q_cap: float | None = None
) -> Window:
    """Where a batch stands whose alpha-quantile of |log ratio| is ``q``.

    A gated token at distance ``u > q`` is newly intercepted iff its ratio lies between the contracted and the nominal
    boundary, ``1 + eps_high psi(u; q) < exp(u) < 1 + eps_high``, or the mirror image below 1. With q beyond an edge of
    the nominal interval there is no such token on that side. ``q_floor`` and ``q_cap`` are what SAT holds q between.
    """
    q = max(q, q_floor) if q_cap is None else min(max(q, q_floor), q_cap)
    low, high = edges(eps_low, eps_high)
    state: State = "acts" if q < min(low, high) else "half inert" if q < max(low, high) else "inert"
    if q < NOISE:
        state = "noise" if q > 0 else "off"
    return Window(state, q, eps_low, eps_high, exponent)


def _onset(q: float, eps: float, side: int, exponent: float) -> float:
    """Smallest distance ``u >= q`` beyond the contracted boundary; about ``(eps q^2)^(1/3)`` for ``q << eps``."""

    def beyond(u: float) -> bool:
        return abs(math.expm1(side * u)) > eps / (1 + (u / q) ** exponent)

    # ``outside`` is beyond for certain: a ratio there is 1 - 1/e or more away from 1, the contracted radius below 1/2.
    inside, outside = q, max(1.0, q * (2 * eps) ** (1 / exponent))
    if beyond(inside):
        return inside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if beyond(middle) else (middle, outside)
    return outside
