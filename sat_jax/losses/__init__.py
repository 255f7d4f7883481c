"""Losses on sampled log-ratios: pure rules that compose, plain JAX, no model, mesh, file or thread.

loss_fn = make_loss(method("sat-gspo"))
loss, metrics = loss_fn(LossInputs(log_probs=..., behavior_log_probs=..., advantages=..., loss_mask=...))
"""

from sat_jax.losses.advantages import AdvantageKind, group_advantages, zero_variance
from sat_jax.losses.config import Aggregation, LossConfig
from sat_jax.losses.diagnostics import METRIC_REDUCTIONS
from sat_jax.losses.inputs import LossInputs, check_values
from sat_jax.losses.loss import Loss, LossRows, LossSummary, make_loss
from sat_jax.losses.methods import DESCRIPTIONS, METHODS, TABLE_1, method, split_method
from sat_jax.losses.rules import (
    Cispo,
    Contraction,
    Decoupled,
    Dppo,
    Drpo,
    DualClip,
    Icepop,
    Kpop,
    Mask,
    Opsm,
    Penalty,
    Ppo,
    Radii,
    Radius,
    Rule,
    Sat,
    Seqclip,
    Spo,
    Surrogate,
    Tis,
    TisReinforce,
    Token,
    Unclipped,
    Weight,
)

__all__ = [
    "DESCRIPTIONS",
    "METHODS",
    "METRIC_REDUCTIONS",
    "TABLE_1",
    "AdvantageKind",
    "Aggregation",
    "Cispo",
    "Contraction",
    "Decoupled",
    "Dppo",
    "Drpo",
    "DualClip",
    "Icepop",
    "Kpop",
    "Loss",
    "LossConfig",
    "LossInputs",
    "LossRows",
    "LossSummary",
    "Mask",
    "Opsm",
    "Penalty",
    "Ppo",
    "Radii",
    "Radius",
    "Rule",
    "Sat",
    "Seqclip",
    "Spo",
    "Surrogate",
    "Tis",
    "TisReinforce",
    "Token",
    "Unclipped",
    "Weight",
    "check_values",
    "group_advantages",
    "make_loss",
    "method",
    "split_method",
    "zero_variance",
]
