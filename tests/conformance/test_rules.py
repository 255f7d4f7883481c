"""Every rule and every loss passes the public suite, and the suite catches what is broken."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import losses
from sat_jax.checked import Range
from sat_jax.losses import LossConfig, Mask, Penalty, Ppo, Radii, Rule, Surrogate, Token, Weight
from sat_jax.testing import check_loss, check_rule
from sat_jax.testing.rules import around, compiled, sample_inputs
from tests.helpers.kernel import kernel, same
from tests.helpers.subjects import discovered, subjects

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in subjects() if not name.startswith("rule-")])
def test_every_loss_conforms(name: str) -> None:
    check_loss(subjects()[name])
    the_kernel_agrees(subjects()[name])


def the_kernel_agrees(config: LossConfig) -> None:
    """The Pallas twin, gradients and diagnostics included, for losses without a rule that looks at whole responses."""
    if all(rule.elementwise() for rule in config.rules):
        same(kernel(config)(sample_inputs()), compiled(config)(sample_inputs()))


@pytest.mark.parametrize("name", discovered())
def test_every_rule_conforms_and_is_public(name: str) -> None:
    rule = discovered()[name]()
    assert rule.name == name
    assert getattr(losses, type(rule).__name__, None) in (type(rule), None)
    assert type(rule).__name__ in losses.rules.__all__, f"export {type(rule).__name__} in rules/__init__.py"
    check_rule(rule)
    the_kernel_agrees(around(rule))


# --- what is broken is caught, and said ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plain(Penalty):
    source: ClassVar[str] = "nowhere"
    summary: ClassVar[str] = "does nothing wrong"

    def penalty(self, token: Token, radii: Radii) -> jax.Array:
        return 0.01 * jnp.square(token.ratio - 1)


@dataclasses.dataclass(frozen=True)
class Unsourced(Plain):
    source: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True)
class LooksAround(Plain):
    """Looks at the whole response and does not say so."""

    def penalty(self, token: Token, radii: Radii) -> jax.Array:
        return token.sequences.mean(jnp.square(token.ratio - 1))


@dataclasses.dataclass(frozen=True)
class Overflows(Plain):
    def penalty(self, token: Token, radii: Radii) -> jax.Array:
        return jnp.exp(token.log_ratio) * token.ratio


@dataclasses.dataclass(frozen=True)
class CountsRows(Weight):
    """Depends on which rows stand beside it."""

    source: ClassVar[str] = "nowhere"
    summary: ClassVar[str] = "wrong"

    def weight(self, token: Token) -> jax.Array:
        return jnp.arange(token.frozen_ratio.shape[0], dtype=jnp.float32)[:, None] + jnp.ones_like(token.frozen_ratio)


@dataclasses.dataclass(frozen=True)
class DropsAll(Mask):
    source: ClassVar[str] = "nowhere"
    summary: ClassVar[str] = "wrong"

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        return jnp.zeros_like(token.advantage, bool)


@dataclasses.dataclass(frozen=True)
class HoldsAList(Plain):
    table: Any = dataclasses.field(default_factory=lambda: [1.0])


@dataclasses.dataclass(frozen=True)
class NeedsSomething(Plain):
    needs: ClassVar[tuple[str, ...]] = ("hidden_states",)


class NoSurrogate(Surrogate):
    """Decorated by nothing."""


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Unsourced(), "has no source"),
        (LooksAround(), r"let elementwise\(\) return False"),
        (Overflows(), "loss is (inf|nan)|not finite"),
        (CountsRows(), "Does not depend on the order of rows"),
        (DropsAll(), "no token has a gradient"),
        (HoldsAList(), "unhashable|hash"),
        (NeedsSomething(), "which LossInputs does not have"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Rule) else "",
)
def test_a_broken_rule_is_caught(rule: Rule, message: str) -> None:
    with pytest.raises((AssertionError, TypeError), match=message):
        check_rule(rule)


def test_a_sound_one_is_not() -> None:
    check_rule(Plain())
    check_rule(Plain(), LossConfig(unit="sequence", rules=(Ppo(), Plain())))
    with pytest.raises(AssertionError, match="does not stand in the loss"):
        check_rule(Plain(), LossConfig())


def test_what_cannot_stand_in_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="is no dataclass"):
        LossConfig(rules=(NoSurrogate(),))
    with pytest.raises(ValueError, match=r"Bare.weight = 0.1 has no annotation.*weight: float = 0.1"):

        class Bare(Penalty):
            weight = 0.1

    @dataclasses.dataclass(frozen=True)
    class SAT(Penalty):
        """Named as one of ours is."""

    with pytest.raises(ValueError, match="is called sat, as one of sat_jax's own: rename the class"):
        LossConfig(rules=(Ppo(), SAT()))


def test_a_rule_with_a_range_of_its_own_is_held_to_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bounded(Plain):
        weight: Annotated[float, Range(0, 1)] = 0.5
        free: float = 1.0

    assert Bounded(weight=1).weight == 1.0
    with pytest.raises(ValueError, match=r"bounded.weight = 2.0: must lie in \[0, 1\]"):
        Bounded(weight=2.0)
    with pytest.raises(ValueError, match=r"bounded\.free = nan: must be finite"):
        Bounded(free=np.nan)
