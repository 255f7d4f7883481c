"""What a rule is: five kinds of handle on one sampled log-ratio.

    unit -> surrogate -> radius | mask | weight | penalty

A rule is a frozen dataclass of its settings. It may summarise the batch once (SAT: the quantile) and then acts
elementwise on a ``Token`` record, so ``jax.vmap(jax.grad(...))`` over a grid of records *is* its geometry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.checked import Checked
from sat_jax.losses.masked import Sequences
from sat_jax.names import snake_case

if TYPE_CHECKING:
    from sat_jax.losses.config import LossConfig

Kind = Literal["surrogate", "radius", "mask", "weight", "penalty"]
Scope = Literal["batch", "microbatch", "device"]


@struct.dataclass
class Token:
    """Everything a rule may look at. Fields broadcast to [B, T]; a sequence unit gives [B, 1] for whole rows.

    Only ``ratio`` and ``log_prob`` carry a gradient. Decisions (gates, masks, weights, which side of a boundary) read
    the others.

    Attributes:
        ratio: ``r = exp(d)`` of the unit, finite.
        frozen_ratio: the ratio that decisions see, no gradient; ``ratio`` up to the rounding of a scoring pass.
        log_ratio: the ``d`` that decisions see, no gradient, not clamped.
        advantage: ``A``.
        log_prob: token log-prob under the learner.
        frozen_log_prob: the one that decisions see.
        behavior_log_prob: ``log mu``, the engine's.
        implementation: ``log pi_l - log mu`` or None: recomputation at the sampling weights against the engine.
        proximal: ``log pi_prox - log mu`` or None.
        sequences: grouping of the tokens, for rules with sequence statistics.
    """

    ratio: jax.Array
    frozen_ratio: jax.Array
    log_ratio: jax.Array
    advantage: jax.Array
    log_prob: jax.Array
    frozen_log_prob: jax.Array
    behavior_log_prob: jax.Array
    implementation: jax.Array | None
    proximal: jax.Array | None
    sequences: Sequences


@struct.dataclass
class Radii:
    """Distances from ratio 1 at which the surrogate stops: the interval is ``[1 - low, 1 + high]``.

    ``c_low`` and ``c_high`` are what eps_low and eps_high were multiplied by, in (0, 1]; None without a radius rule.
    """

    low: jax.Array
    high: jax.Array
    c_low: jax.Array | None = None
    c_high: jax.Array | None = None


@struct.dataclass
class Contraction:
    """What a radius rule answers: factors in (0, 1] and which tokens it gated."""

    low: jax.Array
    high: jax.Array
    gate: jax.Array


@dataclasses.dataclass(frozen=True)
class Rule(Checked):
    """Base of all rules: subclass one of the five kinds below, as a frozen dataclass of its settings, in any file.

    Its name in a loss is the snake_case of its class: ``DualClip`` is ``dual_clip``, and so are its dotted overrides.
    """

    kind: ClassVar[Kind]  # set by the five kinds
    source: ClassVar[str] = ""  # paper and equation
    summary: ClassVar[str] = ""  # one line for ``sat-jax methods``
    needs: ClassVar[tuple[str, ...]] = ()  # optional ``LossInputs`` arrays it cannot do without
    open_to_subclasses: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(section=snake_case(cls.__name__), **kwargs)
        known = {name for base in cls.__mro__[1:] for name in vars(base)}
        for name, value in vars(cls).items():
            is_setting = not (name.startswith("_") or callable(value) or hasattr(value, "__get__"))
            if is_setting and name not in known and name not in cls.__annotations__:
                raise ValueError(
                    f"{cls.__name__}.{name} = {value!r} has no annotation, so it would be no setting: write "
                    f"'{name}: {type(value).__name__} = {value!r}'"
                )

    @property
    def name(self) -> str:
        return self.section

    def check_with(self, loss: LossConfig) -> None:
        """Raises ``ValueError`` where the rule cannot stand in ``loss``: beside another rule, say."""

    def elementwise(self) -> bool:
        """False where the rule looks at a whole sequence; it then stays out of the one-pass kernel."""
        return True

    def summary_scope(self) -> tuple[Scope, int]:
        """Whose tokens ``summarize`` sees, and for ``device`` into how many equal blocks of rows they are cut."""
        return "batch", 1

    def summarize(self, token: Token, order_statistic: Callable[[jax.Array, float], jax.Array]) -> Any:
        """Pytree of what the rule must know about the whole batch. No gradient.

        ``order_statistic(x, alpha)`` is the alpha-quantile of ``x`` over active tokens (inverse CDF).
        """
        return ()


@dataclasses.dataclass(frozen=True)
class Surrogate(Rule):
    """The objective per token, to be maximised. A loss has exactly one."""

    kind: ClassVar[Kind] = "surrogate"
    has_interval: ClassVar[bool] = True

    def objective(self, token: Token, radii: Radii) -> jax.Array:
        """S, differentiable in ``token.ratio`` or ``token.log_prob``."""
        raise TypeError(f"{type(self).__name__} is a surrogate without an objective")

    def cut(self, token: Token, radii: Radii) -> jax.Array:
        """Bool: the interval cuts this token's gradient (or, for CISPO, its weight)."""
        return jnp.zeros(jnp.broadcast_shapes(token.frozen_ratio.shape, token.advantage.shape), bool)


@dataclasses.dataclass(frozen=True)
class Radius(Rule):
    """Contracts the interval token by token."""

    kind: ClassVar[Kind] = "radius"

    def contract(self, token: Token, summary: Any) -> Contraction:
        """Factors on eps_low and eps_high."""
        raise TypeError(f"{type(self).__name__} is a radius rule without contract")


@dataclasses.dataclass(frozen=True)
class Mask(Rule):
    """Keeps or drops a token's policy term; the denominators still count it."""

    kind: ClassVar[Kind] = "mask"

    def keep(self, token: Token, radii: Radii) -> jax.Array:
        """Bool, True where the token stays."""
        raise TypeError(f"{type(self).__name__} is a mask rule without keep")


@dataclasses.dataclass(frozen=True)
class Weight(Rule):
    """A detached factor on a token's policy term."""

    kind: ClassVar[Kind] = "weight"

    def weight(self, token: Token) -> jax.Array:
        """Non-negative, no gradient."""
        raise TypeError(f"{type(self).__name__} is a weight rule without weight")


@dataclasses.dataclass(frozen=True)
class Penalty(Rule):
    """Something subtracted from the surrogate."""

    kind: ClassVar[Kind] = "penalty"

    def penalty(self, token: Token, radii: Radii) -> jax.Array:
        """Non-negative, differentiable in ``token.ratio``."""
        raise TypeError(f"{type(self).__name__} is a penalty rule without penalty")


def outward(token: Token) -> jax.Array:
    """Bool: the step pushes the ratio further away from 1, ``A (r - 1) > 0`` (22)."""
    return token.advantage * (token.frozen_ratio - 1) > 0
