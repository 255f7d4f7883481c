"""LossConfig: which rules make up a loss, and their settings."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar, get_args

from sat_jax.dataclass_json import nearest
from sat_jax.losses.kl import KlType
from sat_jax.losses.ratios import Unit
from sat_jax.losses.rules.base import Kind, Rule, Surrogate
from sat_jax.losses.rules.cispo import Cispo
from sat_jax.losses.rules.decoupled import Decoupled
from sat_jax.losses.rules.dppo import Dppo
from sat_jax.losses.rules.drpo import Drpo
from sat_jax.losses.rules.dual_clip import DualClip
from sat_jax.losses.rules.icepop import Icepop
from sat_jax.losses.rules.kpop import Kpop
from sat_jax.losses.rules.opsm import Opsm
from sat_jax.losses.rules.ppo import Ppo
from sat_jax.losses.rules.sat import Sat
from sat_jax.losses.rules.seqclip import Seqclip
from sat_jax.losses.rules.spo import Spo
from sat_jax.losses.rules.tis import Tis
from sat_jax.losses.rules.tis_reinforce import TisReinforce
from sat_jax.losses.rules.unclipped import Unclipped

R = TypeVar("R", bound=Rule)

Denominator = Literal["rollout", "rollout_policy", "proximal"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Kernel = Literal["auto", "reference", "pallas"]

DENOMINATOR_ARRAY: dict[str, str] = {
    "rollout": "behavior_log_probs",
    "rollout_policy": "rollout_policy_log_probs",
    "proximal": "proximal_log_probs",
}


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """A loss: unit -> surrogate -> radius | mask | weight | penalty, plus KL, entropy and aggregation.

    The fields after ``kernel`` hold the settings of every rule, on or off; ``rules`` says which are on. Their order
    does not matter: radii, masks and weights multiply, penalties add.

    Attributes:
        name: label in tables and reports.
        rules: names of the rules that are on; exactly one is a surrogate.
        unit: what the surrogate's ratio is taken over.
        denominator: which log-probs the ratio divides by: the engine's own (``rollout``), the learner's recomputation
            at the weights that sampled (``rollout_policy``), or at the start of the step (``proximal``).
        eps_low: lower radius of the interval, > 0.
        eps_high: upper radius, > 0.
        loss_agg_mode: ``token-mean``: mean over active tokens; ``seq-mean-token-mean``: mean over responses of each
            one's token mean; ``seq-mean-token-sum-norm``: mean over responses of the token sum, divided by
            ``loss_scale_factor``.
        loss_scale_factor: constant length for ``seq-mean-token-sum-norm``; None takes the padded length T (verl).
        count_empty_rows: whether responses without an active token count in the mean over responses (TRL and slime
            say yes, verl no).
        kl_loss_coef: weight of the KL term; 0 leaves it out.
        kl_loss_type: the estimator.
        kl_unit: ``token``, or ``sequence``: the response's mean, broadcast to its tokens (38).
        kl_unbiased: multiply the estimate by the ratio, gradient through both (TRL ``use_bias_correction_kl``).
        entropy_coef: weight of the entropy bonus; 0 leaves it out.
        kernel: ``reference`` (plain JAX), ``pallas`` or ``auto``; read by ``sat_jax.kernels``, which makes the choice.
    """

    name: str = "grpo"
    rules: tuple[str, ...] = ("ppo",)
    unit: Unit = "token"
    denominator: Denominator = "rollout"
    eps_low: float = 0.2
    eps_high: float = 0.2
    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    loss_scale_factor: float | None = None
    count_empty_rows: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: KlType = "low_var_kl"
    kl_unit: Literal["token", "sequence"] = "token"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    kernel: Kernel = "auto"
    ppo: Ppo = dataclasses.field(default_factory=Ppo)
    dual_clip: DualClip = dataclasses.field(default_factory=DualClip)
    unclipped: Unclipped = dataclasses.field(default_factory=Unclipped)
    cispo: Cispo = dataclasses.field(default_factory=Cispo)
    tis_reinforce: TisReinforce = dataclasses.field(default_factory=TisReinforce)
    sat: Sat = dataclasses.field(default_factory=Sat)
    dppo: Dppo = dataclasses.field(default_factory=Dppo)
    kpop: Kpop = dataclasses.field(default_factory=Kpop)
    seqclip: Seqclip = dataclasses.field(default_factory=Seqclip)
    opsm: Opsm = dataclasses.field(default_factory=Opsm)
    tis: Tis = dataclasses.field(default_factory=Tis)
    icepop: Icepop = dataclasses.field(default_factory=Icepop)
    decoupled: Decoupled = dataclasses.field(default_factory=Decoupled)
    spo: Spo = dataclasses.field(default_factory=Spo)
    drpo: Drpo = dataclasses.field(default_factory=Drpo)

    def __post_init__(self) -> None:
        for field, known in (
            ("unit", get_args(Unit)),
            ("denominator", get_args(Denominator)),
            ("loss_agg_mode", get_args(Aggregation)),
            ("kl_loss_type", get_args(KlType)),
            ("kl_unit", ("token", "sequence")),
            ("kernel", get_args(Kernel)),
        ):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"loss.{field} = {value!r} is unknown{nearest(str(value), known)}")
        for field in ("eps_low", "eps_high"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"loss.{field} = {value} must be positive and finite: it is the distance from ratio 1; use 0.2"
                )
        if self.loss_scale_factor is not None and not self.loss_scale_factor > 0:
            raise ValueError(
                f"loss.loss_scale_factor = {self.loss_scale_factor} must be positive: it divides; None takes T"
            )
        for field in ("kl_loss_coef", "entropy_coef"):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"loss.{field} = {value} must be finite and not negative: it weighs a term; 0 leaves it out"
                )
        self._check_rules()

    def _check_rules(self) -> None:
        known = rule_names()
        for name in self.rules:
            if name not in known:
                raise ValueError(f"loss.rules names '{name}'{nearest(name, known)}")
        if len(set(self.rules)) != len(self.rules):
            raise ValueError(f"loss.rules = {self.rules} repeats a rule: name each once")
        surrogates = [name for name in self.rules if getattr(self, name).kind == "surrogate"]
        if len(surrogates) != 1:
            raise ValueError(
                f"loss.rules = {self.rules} has {len(surrogates)} surrogates ({', '.join(surrogates) or 'none'}): "
                "they exclude each other; name exactly one, such as 'ppo'"
            )
        if {"tis", "icepop"} <= set(self.rules):
            raise ValueError(
                f"loss.rules = {self.rules}: tis and icepop both weigh by pi_l / mu; squaring it is neither; drop one"
            )
        if {"spo", "drpo"} <= set(self.rules):
            raise ValueError(f"loss.rules = {self.rules}: spo and drpo are two forms of one penalty; drop one")
        surrogate = getattr(self, surrogates[0])
        if not surrogate.has_interval and any(getattr(self, name).kind == "radius" for name in self.rules):
            raise ValueError(
                f"loss.rules = {self.rules}: {surrogates[0]} has no interval for a radius rule to contract; use 'ppo'"
            )
        if "decoupled" in self.rules and self.denominator != "proximal":
            raise ValueError(
                f"loss.denominator = '{self.denominator}' with rule decoupled, which weighs by pi_prox / mu: "
                "use 'proximal'"
            )

    @property
    def surrogate(self) -> Surrogate:
        """The one surrogate that is on."""
        return self.active(Surrogate)[0][1]

    def active(self, kind: type[R]) -> list[tuple[str, R]]:
        """The rules of a kind that are on, with their names."""
        return [(name, rule) for name in self.rules if isinstance(rule := getattr(self, name), kind)]

    def needs(self) -> tuple[str, ...]:
        """Optional ``LossInputs`` arrays that this loss cannot do without."""
        wanted = [DENOMINATOR_ARRAY[self.denominator]] if self.denominator != "rollout" else []
        wanted += [array for name in self.rules for array in getattr(self, name).needs]
        if self.kl_loss_coef > 0:
            wanted.append("reference_log_probs")
        if self.entropy_coef > 0:
            wanted.append("entropy")
        return tuple(dict.fromkeys(wanted))


def rule_names() -> dict[str, Kind]:
    """Every rule a ``LossConfig`` knows, with its kind."""
    factories: dict[str, object] = {f.name: f.default_factory for f in dataclasses.fields(LossConfig)}
    return {name: rule.kind for name, rule in factories.items() if isinstance(rule, type) and issubclass(rule, Rule)}
