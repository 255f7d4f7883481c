"""One stabiliser a file; ``base`` says what a rule is."""

from sat_jax.losses.rules.base import (
    Contraction,
    Kind,
    Mask,
    Penalty,
    Radii,
    Radius,
    Rule,
    Scope,
    Surrogate,
    Token,
    Weight,
    outward,
)
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

__all__ = [
    "Cispo",
    "Contraction",
    "Decoupled",
    "Dppo",
    "Drpo",
    "DualClip",
    "Icepop",
    "Kind",
    "Kpop",
    "Mask",
    "Opsm",
    "Penalty",
    "Ppo",
    "Radii",
    "Radius",
    "Rule",
    "Sat",
    "Scope",
    "Seqclip",
    "Spo",
    "Surrogate",
    "Tis",
    "TisReinforce",
    "Token",
    "Unclipped",
    "Weight",
    "outward",
]
