"""Finds every rule by itself and makes a loss around each: there is no list to forget an entry in."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax import losses
from sat_jax.losses import LossConfig, LossInputs, rules
from sat_jax.losses.rules import Mask, Penalty, Radius, Rule, Surrogate, Weight

KINDS = (Surrogate, Radius, Mask, Weight, Penalty)


@functools.cache
def discovered() -> dict[str, type[Rule]]:
    """Rule classes by module name, one a file."""
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


def around(name: str) -> LossConfig:
    """The plainest loss that has the rule on."""
    rule = discovered()[name]
    if issubclass(rule, Surrogate):
        chain: tuple[str, ...] = (name,)
    else:
        chain = ("unclipped" if issubclass(rule, Penalty) else "ppo", name)
    denominator = "proximal" if "proximal_log_probs" in rule.needs else "rollout"
    return LossConfig(name=f"rule {name}", rules=chain, denominator=denominator)


@functools.cache
def subjects() -> dict[str, LossConfig]:
    """A loss around every rule, every named method, and SAT on every unit, with KL and entropy on."""
    found = {f"rule-{name}": around(name) for name in discovered()}
    seen = {dataclasses.replace(config, name="") for config in found.values()}
    for name, config in losses.METHODS.items():
        if dataclasses.replace(config, name="") not in seen:
            found[name] = config
    sat_sum = LossConfig(rules=("ppo", "sat"), unit="sequence_token", loss_agg_mode="token-mean")
    found["sat-sequence_token"] = dataclasses.replace(sat_sum, kl_loss_coef=0.1, entropy_coef=0.01)
    everything = LossConfig(rules=("dual_clip", "sat", "dppo", "opsm", "tis"), denominator="rollout_policy")
    found["everything"] = dataclasses.replace(
        everything,
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=16.0,
        kl_loss_coef=0.1,
        kl_unit="sequence",
    )
    return found


def batch(B: int = 4, T: int = 10, seed: int = 0) -> LossInputs:
    """Ragged rows with holes, every optional array there."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((B, T)) < 0.75) & (np.arange(T) < rng.integers(min(3, T), T + 1, (B, 1)))
    base = -rng.gamma(0.7, 1.0, (B, T)) - 0.6

    def near(scale: float) -> jax.Array:
        return jnp.asarray(np.minimum(base + scale * rng.normal(size=(B, T)), 0), jnp.float32)

    log_probs = near(0.2)
    # One response is almost on-policy: the narrowest band must keep something.
    behavior = near(0.2).at[0].set(log_probs[0] - jnp.asarray(1e-3 * rng.random(T), jnp.float32))
    return LossInputs(
        log_probs=log_probs,
        behavior_log_probs=behavior,
        advantages=jnp.asarray(rng.normal(size=(B, T)), jnp.float32),
        loss_mask=jnp.asarray(mask),
        reference_log_probs=near(0.3),
        rollout_policy_log_probs=near(0.1),
        proximal_log_probs=near(0.1),
        entropy=jnp.asarray(rng.random((B, T)), jnp.float32),
    )


@functools.cache
def compiled(config: LossConfig):
    """``inputs -> ((loss, metrics), gradient)``, jitted once for each loss."""
    loss_fn = losses.make_loss(config)

    def run(inputs: LossInputs):
        def loss(log_probs: jax.Array):
            return loss_fn(inputs.replace(log_probs=log_probs))

        return jax.value_and_grad(loss, has_aux=True)(inputs.log_probs)

    # Most of a small program's time is its compilation: skip the passes that only pay on large arrays.
    return jax.jit(run, compiler_options={"xla_llvm_disable_expensive_passes": True})
