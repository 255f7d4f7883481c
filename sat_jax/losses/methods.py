"""The named methods: what each is made of, and where it comes from."""

from __future__ import annotations

from sat_jax.losses import rules
from sat_jax.losses.config import Denominator, LossConfig
from sat_jax.losses.ratios import Unit
from sat_jax.losses.rules import Ppo, Rule
from sat_jax.names import nearest

REPLAY_SUFFIX = "-r3"

METHODS: dict[str, LossConfig] = {}
"""Every named loss."""

DESCRIPTIONS: dict[str, str] = {}
"""What each does, in a line."""


def _add(name: str, description: str, *parts: Rule, unit: Unit = "token", denominator: Denominator = "rollout") -> None:
    METHODS[name] = LossConfig(name=name, unit=unit, denominator=denominator, rules=parts)
    DESCRIPTIONS[name] = description


_add("grpo", "PPO's clip on token ratios", Ppo())
_add("gspo", "PPO's clip on the length-normalised sequence ratio", Ppo(), unit="sequence")
_add("grpo-tis", "GRPO on pi_j / pi_l, weighted by min(pi_l / mu, 2)", Ppo(), rules.Tis(), denominator="rollout_policy")
_add(
    "gspo-tis",
    "GSPO on pi_j / pi_l, weighted by min(pi_l / mu, 2)",
    Ppo(),
    rules.Tis(),
    unit="sequence",
    denominator="rollout_policy",
)
_add("dppo", "GRPO, dropping outward tokens with |pi - mu| > 1e-3", Ppo(), rules.Dppo())
_add("sat-grpo", "GRPO with SAT's contracted interval", Ppo(), rules.Sat())
_add("sat-gspo", "GSPO with SAT's contracted interval", Ppo(), rules.Sat(), unit="sequence")
_add("seqclip", "GSPO, dropping responses outside [0.995, 1.005]", Ppo(), rules.Seqclip(), unit="sequence")
_add(
    "icepop",
    "GRPO on pi_j / pi_l, weighted by k = pi_l / mu where 0.5 <= k <= 5",
    Ppo(),
    rules.Icepop(),
    denominator="rollout_policy",
)
_add("kpop", "GRPO, keeping tokens whose Bernoulli KLs are at most 0.1", Ppo(), rules.Kpop())
_add("spo", "quadratic penalty in the ratio instead of a clip", rules.Unclipped(), rules.Spo())
_add("drpo", "quadratic penalty in probability instead of a clip", rules.Unclipped(), rules.Drpo())
_add("cispo", "REINFORCE weighted by the clipped ratio", rules.Cispo())
_add("tis-reinforce", "REINFORCE weighted by min(r, 2), equation (41) as printed", rules.TisReinforce())
_add("dual-clip", "GRPO with a floor for negative advantages", rules.DualClip())
_add(
    "decoupled-ppo", "GRPO on pi / pi_prox, weighted by pi_prox / mu", Ppo(), rules.Decoupled(), denominator="proximal"
)

TABLE_1 = (
    "grpo",
    "gspo",
    "grpo-r3",
    "gspo-r3",
    "grpo-tis",
    "gspo-tis",
    "grpo-tis-r3",
    "gspo-tis-r3",
    "dppo",
    "sat-grpo",
    "sat-gspo",
    "sat-grpo-r3",
    "sat-gspo-r3",
)
"""The thirteen of the paper's Table 1. ``-r3`` replays the rollout's experts in the learner's forward pass."""


def method(name: str) -> LossConfig:
    """The loss of a named method.

    Raises:
        ValueError: an unknown name, with the nearest one; a name with ``-r3``, which is a matter of the forward pass.
    """
    base = name.removesuffix(REPLAY_SUFFIX)
    if base != name and base in METHODS:
        raise ValueError(
            f"'{name}' is a method of training, not a loss: its loss is '{base}'; -r3 replays the rollout's experts in "
            "the forward pass (config.with_method, or --learner.routing_replay True)"
        )
    if name not in METHODS:
        raise ValueError(f"no method is named '{name}'{nearest(name, METHODS)}")
    return METHODS[name]


def split_method(name: str) -> tuple[LossConfig, bool]:
    """The loss of a method of training, and whether it replays the rollout's experts (``-r3``)."""
    return method(name.removesuffix(REPLAY_SUFFIX)), name.endswith(REPLAY_SUFFIX)
