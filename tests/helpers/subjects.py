"""A loss around every rule that the package has, every named method, and a few that use all options at once."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil

from sat_jax import losses
from sat_jax.losses import Dppo, DualClip, LossConfig, Opsm, Ppo, Rule, Sat, Tis, rules
from sat_jax.testing.rules import around


@functools.cache
def discovered() -> dict[str, type[Rule]]:
    """Rule classes by module name, one a file: there is no list to forget an entry in."""
    found = {}
    for module in pkgutil.iter_modules(rules.__path__):
        if module.name == "base":
            continue
        source = importlib.import_module(f"{rules.__name__}.{module.name}")
        own = [
            thing
            for thing in vars(source).values()
            if isinstance(thing, type) and issubclass(thing, Rule) and thing.__module__ == source.__name__
        ]
        assert len(own) == 1, f"rules/{module.name}.py defines {len(own)} rules: one stabiliser a file"
        found[module.name] = own[0]
    return found


@functools.cache
def subjects() -> dict[str, LossConfig]:
    """A loss around every rule, every named method, and SAT on every unit, with KL and entropy on."""
    found = {f"rule-{name}": around(rule()) for name, rule in discovered().items()}
    seen = {dataclasses.replace(config, name="") for config in found.values()}
    for name, config in losses.METHODS.items():
        if dataclasses.replace(config, name="") not in seen:
            found[name] = config
    found["sat-sequence_token"] = LossConfig(
        rules=(Ppo(), Sat()),
        unit="sequence_token",
        loss_agg_mode="token-mean",
        kl_loss_coef=0.1,
        entropy_coef=0.01,
    )
    found["everything"] = LossConfig(
        rules=(DualClip(), Sat(), Dppo(), Opsm(), Tis()),
        denominator="rollout_policy",
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=16.0,
        kl_loss_coef=0.1,
        kl_unit="sequence",
    )
    return found
