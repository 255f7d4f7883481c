"""LossConfig: a loss as a value, composed of rules."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, TypeVar

from sat_jax.checked import Checked, NonNegative, Positive
from sat_jax.losses import rules as known_rules
from sat_jax.losses.kl import KlType
from sat_jax.losses.ratios import Unit
from sat_jax.losses.rules.base import Radius, Rule, Surrogate
from sat_jax.losses.rules.ppo import Ppo

R = TypeVar("R", bound=Rule)

Denominator = Literal["rollout", "rollout_policy", "proximal"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Kernel = Literal["auto", "reference", "pallas"]

DENOMINATOR_ARRAY: dict[str, str] = {
    "rollout": "behavior_log_probs",
    "rollout_policy": "rollout_policy_log_probs",
    "proximal": "proximal_log_probs",
}
_UNBIASED_KL = ("k1", "k3", "low_var_kl")


@dataclasses.dataclass(frozen=True)
class LossConfig(Checked, section="loss"):
    """A loss: unit -> surrogate -> radius | mask | weight | penalty, plus KL, entropy and aggregation.

        LossConfig(unit="sequence", rules=(Ppo(), Sat(alpha=0.95), Tis(cap=2.0)), denominator="rollout_policy")

    Attributes:
        name: label in tables and reports; empty: made of the rules'.
        unit: what the surrogate's ratio is taken over.
        denominator: which log-probs the ratio divides by: the engine's own (``rollout``), the learner's recomputation
            at the weights that sampled (``rollout_policy``), or at the start of the batch (``proximal``).
        eps_low, eps_high: lower and upper radius of the interval.
        rules: what it is made of, each named by its class, once; exactly one is a surrogate. Their order does not
            matter: radii, masks and weights multiply, penalties add.
        loss_agg_mode: ``token-mean``: mean over active tokens; ``seq-mean-token-mean``: mean over responses of each
            one's token mean; ``seq-mean-token-sum-norm``: mean over responses of the token sum, divided by
            ``loss_scale_factor``.
        loss_scale_factor: constant length for ``seq-mean-token-sum-norm``; None takes the padded length T (verl).
        count_empty_rows: responses without an active token count in the mean over responses (TRL, slime; not verl).
        kl_loss_coef, entropy_coef: weights of the KL term and of the entropy bonus; 0 leaves it out.
        kl_loss_type: the estimator.
        kl_unit: ``token``, or ``sequence``: the response's mean, broadcast to its tokens (38).
        kl_unbiased: multiply the estimate by the ratio, gradient through both (TRL ``use_bias_correction_kl``); exact
            with k1 and k3.
        kernel: ``reference`` (plain JAX), ``pallas`` or ``auto``; read by ``sat_jax.kernels``, which makes the choice.
    """

    name: str = ""
    unit: Unit = "token"
    denominator: Denominator = "rollout"
    eps_low: Positive = 0.2
    eps_high: Positive = 0.2
    rules: tuple[Rule, ...] = (Ppo(),)
    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    loss_scale_factor: Positive | None = None
    count_empty_rows: bool = False
    kl_loss_coef: NonNegative = 0.0
    kl_loss_type: KlType = "low_var_kl"
    kl_unit: Literal["token", "sequence"] = "token"
    kl_unbiased: bool = False
    entropy_coef: NonNegative = 0.0
    kernel: Kernel = "auto"

    def __post_init__(self) -> None:
        for rule in self.rules if isinstance(self.rules, tuple) else ():
            _check_rule(rule)
        super().__post_init__()
        if self.kl_unbiased and self.kl_loss_type not in _UNBIASED_KL:
            raise ValueError(
                f"loss.kl_unbiased = True with kl_loss_type '{self.kl_loss_type}': only k1 and k3 are made exact "
                f"(others' gradients are off by 16 % and more); use one of {', '.join(_UNBIASED_KL)}"
            )
        names = [rule.name for rule in self.rules]
        if len(set(names)) != len(names):
            raise ValueError(f"loss.rules = {', '.join(names)} repeats a rule: name each once")
        surrogates = [rule.name for rule in self.rules if isinstance(rule, Surrogate)]
        if len(surrogates) != 1:
            raise ValueError(
                f"loss.rules = {', '.join(names) or '()'} has {len(surrogates)} surrogates "
                f"({', '.join(surrogates) or 'none'}): they exclude each other; give exactly one, such as Ppo()"
            )
        if not self.surrogate.has_interval and (radii := self.active(Radius)):
            raise ValueError(
                f"loss.rules = {', '.join(names)}: {surrogates[0]} has no interval for {radii[0].name} to contract; "
                "use Ppo()"
            )
        for rule in self.rules:
            rule.check_with(self)

    @property
    def label(self) -> str:
        """``name``, or the names of the rules."""
        return self.name or "+".join(rule.name for rule in self.rules)

    @property
    def surrogate(self) -> Surrogate:
        return self.active(Surrogate)[0]

    def active(self, kind: type[R]) -> list[R]:
        return [rule for rule in self.rules if isinstance(rule, kind)]

    def get(self, kind: type[R]) -> R | None:
        """The rule of a class, ``loss.get(Sat)``, or None."""
        return next(iter(self.active(kind)), None)

    def with_rules(self, *rules: Rule) -> LossConfig:
        """The same loss with more rules; each takes the place of the one of its name, a surrogate of the surrogate."""
        kept = [r for r in self.rules if all(r.name != new.name for new in rules)]
        if any(isinstance(new, Surrogate) for new in rules):
            kept = [r for r in kept if not isinstance(r, Surrogate)]
        return dataclasses.replace(self, rules=(*kept, *rules))

    def without(self, kind: type[Rule]) -> LossConfig:
        """The same loss without the rules of a class or kind."""
        return dataclasses.replace(self, rules=tuple(rule for rule in self.rules if not isinstance(rule, kind)))

    def needs(self) -> tuple[str, ...]:
        """Optional ``LossInputs`` arrays that this loss cannot do without."""
        wanted = [DENOMINATOR_ARRAY[self.denominator]] if self.denominator != "rollout" else []
        wanted += [array for rule in self.rules for array in rule.needs]
        if self.kl_loss_coef > 0:
            wanted.append("reference_log_probs")
        if self.entropy_coef > 0:
            wanted.append("entropy")
        return tuple(dict.fromkeys(wanted))


@functools.cache
def _ours() -> dict[str, type[Rule]]:
    exported = [getattr(known_rules, name) for name in known_rules.__all__]
    return {x.section: x for x in exported if isinstance(x, type) and issubclass(x, Rule)}


def _check_rule(rule: object) -> None:
    """Refuses what cannot stand in a loss, whoever wrote it."""
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise ValueError(f"loss.rules holds the class {rule.__name__}: make a rule of it, {rule.__name__}()")
    if not isinstance(rule, Rule):
        raise ValueError(
            f"loss.rules holds {rule!r}: a loss is made of rules, such as Ppo() and Sat(alpha=0.9); "
            "losses.method(NAME) gives a named one"
        )
    cls = type(rule)
    if _ours().get(rule.name, cls) is not cls:
        raise ValueError(
            f"rule {cls.__module__}.{cls.__name__} is called {rule.name}, as one of sat_jax's own: rename the class"
        )
    if "__dataclass_params__" not in vars(cls):
        raise ValueError(
            f"rule {cls.__name__} is no dataclass, so its settings are not its own: write "
            "@dataclasses.dataclass(frozen=True) above it"
        )
