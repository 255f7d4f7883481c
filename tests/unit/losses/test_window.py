"""Where SAT can act: the verdict against the loss's own gradient, on both sides of ratio 1."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from sat_jax import losses
from sat_jax.inspection.geometry import curve
from sat_jax.losses.window import NOISE, edges, window

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("q", "state", "says"),
    [
        (0.0, "off", "off: q = 0, so no token is gated"),
        (3e-8, "noise", "noise: q = 3e-08 is rounding error"),
        (0.02, "acts", r"acts: q = 0.02; newly cuts d in (0.0397, 0.182) and (-0.223, -0.04"),
        (0.2, "half inert", "half inert: q = 0.2 is beyond log(1 + eps) = 0.182; newly cuts d in (-0.223, -0.2)"),
        (0.41, "inert", "inert: q = 0.41 is beyond log(1 + eps) = 0.182 and -log(1 - eps) = 0.223"),
    ],
)
def test_the_five_states(q: float, state: str, says: str) -> None:
    stands = window(q, 0.2, 0.2)
    assert stands.state == state
    assert stands.text.startswith(says)
    assert stands.acts == (state in ("acts", "half inert"))


def test_each_side_ends_at_its_own_edge() -> None:
    low, high = edges(0.1, 0.3)
    assert (low, high) == (pytest.approx(-math.log(0.9)), pytest.approx(math.log(1.3)))
    for edge, before, after in ((low, "acts", "half inert"), (high, "half inert", "inert")):
        assert window(math.nextafter(edge, 0), 0.1, 0.3).state == before
        assert window(edge, 0.1, 0.3).state == after
    assert window(math.nextafter(NOISE, 0), 0.1, 0.3).state == "noise"
    assert window(NOISE, 0.1, 0.3).state == "acts"


def test_a_lower_side_without_an_end_never_becomes_inert() -> None:
    assert window(5.0, 1.5, 0.2).text.startswith(
        "half inert: q = 5 is beyond log(1 + eps) = 0.182; newly cuts d in (-inf"
    )


def test_floor_and_cap_move_what_sat_compares_with() -> None:
    assert window(1e-8, 0.2, 0.2, q_floor=0.02).text == window(0.02, 0.2, 0.2).text
    assert window(0.9, 0.2, 0.2, q_cap=0.1).text == window(0.1, 0.2, 0.2).text


@pytest.mark.parametrize("exponent", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("q", [0.005, 0.02, 0.1, 0.19, 0.21, 0.3])
def test_the_verdict_is_what_the_gradient_does(q: float, exponent: float) -> None:
    """Newly cut: the gradient of SAT-GRPO is zero where GRPO's is not, over a fine grid of log ratios."""
    base = dataclasses.replace(losses.method("grpo"), eps_low=0.2, eps_high=0.25)
    with_sat = dataclasses.replace(losses.method("sat-grpo"), eps_low=0.2, eps_high=0.25)
    with_sat = with_sat.with_rules(losses.Sat(exponent=exponent))
    stands = window(q, 0.2, 0.25, exponent)
    found = []
    for advantage in (1.0, -1.0):
        grids = [curve(config, advantage, 0.3, q, span=0.4, points=8001) for config in (base, with_sat)]
        new = grids[0].log_ratio[(grids[0].gradient != 0) & (grids[1].gradient == 0)]
        if len(new):
            found += [float(new.min()), float(new.max())]
    assert stands.acts == bool(found)
    said = [float(number) for number in re.findall(r"-?\d[\d.e-]*", stands.text.partition("cuts d in ")[2])]
    np.testing.assert_allclose(found, said, atol=1e-3)
