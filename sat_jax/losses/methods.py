"""The named methods: what each is made of, and where it comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

from sat_jax.dataclass_json import nearest
from sat_jax.losses.config import LossConfig

REPLAY_SUFFIX = "-r3"

_PPO: dict[str, Any] = {"rules": ("ppo",)}
_TIS: dict[str, Any] = {"rules": ("ppo", "tis"), "denominator": "rollout_policy"}
_SAT: dict[str, Any] = {"rules": ("ppo", "sat")}
_SEQUENCE: dict[str, Any] = {"unit": "sequence"}

_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "grpo": (_PPO, "PPO's clip on token ratios"),
    "gspo": (_PPO | _SEQUENCE, "PPO's clip on the length-normalised sequence ratio"),
    "grpo-tis": (_TIS, "GRPO on pi_j / pi_l, weighted by min(pi_l / mu, 2)"),
    "gspo-tis": (_TIS | _SEQUENCE, "GSPO on pi_j / pi_l, weighted by min(pi_l / mu, 2)"),
    "dppo": ({"rules": ("ppo", "dppo")}, "GRPO, dropping outward tokens with |pi - mu| > 1e-3"),
    "sat-grpo": (_SAT, "GRPO with SAT's contracted interval"),
    "sat-gspo": (_SAT | _SEQUENCE, "GSPO with SAT's contracted interval"),
    "seqclip": ({"rules": ("ppo", "seqclip")} | _SEQUENCE, "GSPO, dropping responses outside [0.995, 1.005]"),
    "icepop": (
        {"rules": ("ppo", "icepop"), "denominator": "rollout_policy"},
        "GRPO on pi_j / pi_l, weighted by k = pi_l / mu where 0.5 <= k <= 5",
    ),
    "kpop": ({"rules": ("ppo", "kpop")}, "GRPO, keeping tokens whose Bernoulli KLs are at most 0.1"),
    "spo": ({"rules": ("unclipped", "spo")}, "quadratic penalty in the ratio instead of a clip"),
    "drpo": ({"rules": ("unclipped", "drpo")}, "quadratic penalty in probability instead of a clip"),
    "cispo": ({"rules": ("cispo",)}, "REINFORCE weighted by the clipped ratio"),
    "tis-reinforce": ({"rules": ("tis_reinforce",)}, "REINFORCE weighted by min(r, 2), equation (41) as printed"),
    "dual-clip": ({"rules": ("dual_clip",)}, "GRPO with a floor for negative advantages"),
    "decoupled-ppo": (
        {"rules": ("ppo", "decoupled"), "denominator": "proximal"},
        "GRPO on pi / pi_prox, weighted by pi_prox / mu",
    ),
}

METHODS: dict[str, LossConfig] = {name: LossConfig(name=name, **settings) for name, (settings, _) in _SETTINGS.items()}
"""Every named loss."""

DESCRIPTIONS: dict[str, str] = {name: text for name, (_, text) in _SETTINGS.items()}

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
    """The loss of a named method; ``-r3`` is a matter of the forward pass and leaves the loss as it is.

    Raises:
        ValueError: an unknown name, with the nearest one.
    """
    base = name.removesuffix(REPLAY_SUFFIX)
    if base not in METHODS or (base != name and name not in TABLE_1):
        raise ValueError(f"no method is named '{name}'{nearest(name, [*METHODS, *TABLE_1])}")
    return dataclasses.replace(METHODS[base], name=name)


def method_uses_replay(name: str) -> bool:
    """Whether a method replays the rollout's experts (R3)."""
    method(name)
    return name.endswith(REPLAY_SUFFIX)
