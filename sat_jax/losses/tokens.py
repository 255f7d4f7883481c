"""From a batch to per-token terms: check, select, group, record, and the chain of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.losses.config import DENOMINATOR_ARRAY, LossConfig
from sat_jax.losses.inputs import LossInputs, check_shapes
from sat_jax.losses.masked import Sequences, divide, sequences
from sat_jax.losses.quantile import order_statistic, rank_from_alpha
from sat_jax.losses.ratios import clamp_log_ratio, safe_exp, unit_log_ratio
from sat_jax.losses.rules.base import Mask, Penalty, Radii, Radius, Token, Weight

TOKEN_ARRAYS = (
    "log_probs",
    "behavior_log_probs",
    "advantages",
    "rollout_policy_log_probs",
    "proximal_log_probs",
    "scored_log_probs",
)
"""The arrays behind a rule's record."""

Ranker = Callable[[jax.Array, float], jax.Array]
"""``(x, alpha) ->`` the alpha-quantile of ``x`` over active tokens."""


@struct.dataclass
class LossSummary:
    """What every micro-batch must know about the whole batch: float scalars and each rule's own summary, by name.

    ``sequences`` are the responses that the mean over responses counts. No gradient flows through it.
    """

    tokens: jax.Array
    sequences: jax.Array
    rules: dict[str, Any]


@struct.dataclass
class Prepared:
    """A batch ready for rules: cast, selected, grouped."""

    mask: jax.Array  # bool [B, T]
    raw: dict[str, jax.Array]  # the token arrays as they came; a kernel selects for itself
    arrays: dict[str, jax.Array]  # the same, selected
    sequences: Sequences
    token: Token


@struct.dataclass
class TokenTerms:
    """What the rules made of each token, before aggregation; fields broadcast to [B, T]. None: no rule of that kind."""

    loss: jax.Array  # minus the objective; differentiable
    cut: jax.Array  # the interval cuts the gradient
    intercepted: jax.Array | None  # the contracted interval does and the base interval does not
    keep: jax.Array | None  # no mask rule dropped it
    weight: jax.Array | None  # product of the weights
    radii: Radii  # the interval used
    gate: jax.Array | None  # some radius rule gated it


def prepare(config: LossConfig, inputs: LossInputs) -> Prepared:
    """Check, cast to float32 or wider, select active entries and build the rules' record."""
    check_shapes(inputs)
    for name in config.needs():
        if getattr(inputs, name) is None:
            why = f"pass it in LossInputs or drop {_why(config, name)}"
            raise ValueError(f"loss '{config.label}' needs {name}, which is missing: {why}")
    mask = inputs.loss_mask if inputs.loss_mask.dtype == bool else inputs.loss_mask != 0
    dtype = jnp.promote_types(inputs.log_probs.dtype, jnp.float32)

    raw = {name: x for name in TOKEN_ARRAYS if (x := getattr(inputs, name)) is not None}
    if jnp.ndim(inputs.advantages) == 1:
        raw["advantages"] = jnp.where(jnp.any(mask, axis=-1), inputs.advantages, 0)[:, None]
    groups = sequences(mask, inputs.segment_ids, dtype)
    arrays = select(raw, mask, dtype)
    d, frozen_d = unit_log_ratios(config, arrays, groups)
    return Prepared(mask, raw, arrays, groups, record(config, arrays, d, frozen_d, groups))


def select(arrays: dict[str, jax.Array], mask: jax.Array, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Active entries in float32 or wider, 0 elsewhere; [B, 1] arrays are taken as they are.

    Before any arithmetic: masked entries may be NaN, and NaN times zero is NaN, forwards and backwards.
    """
    return {
        name: x.astype(dtype) if x.shape[-1] != mask.shape[-1] else jnp.where(mask, x, 0).astype(dtype)
        for name, x in arrays.items()
    }


def unit_log_ratios(config: LossConfig, arrays: dict[str, jax.Array], groups: Sequences) -> tuple[jax.Array, jax.Array]:
    """The unit's log-ratio, differentiable, and the one that decisions see."""
    denominator = arrays[DENOMINATOR_ARRAY[config.denominator]]
    d = unit_log_ratio(arrays["log_probs"] - denominator, config.unit, groups)
    if "scored_log_probs" not in arrays:
        return d, jax.lax.stop_gradient(d)
    return d, jax.lax.stop_gradient(unit_log_ratio(arrays["scored_log_probs"] - denominator, config.unit, groups))


def record(
    config: LossConfig, arrays: dict[str, jax.Array], d: jax.Array, frozen_d: jax.Array, groups: Sequences
) -> Token:
    """The rules' record of selected arrays; elementwise, so a kernel calls it on tiles."""
    log_prob = arrays["log_probs"]
    behavior = arrays["behavior_log_probs"]
    scored = jax.lax.stop_gradient(arrays.get("scored_log_probs", log_prob))
    ratio = jnp.exp(clamp_log_ratio(d))
    frozen_ratio = safe_exp(frozen_d) if "scored_log_probs" in arrays else jax.lax.stop_gradient(ratio)

    def against_behavior(name: str) -> jax.Array | None:
        return arrays[name] - behavior if name in arrays else None

    return Token(
        ratio=ratio,
        frozen_ratio=frozen_ratio,
        log_ratio=frozen_d,
        advantage=jax.lax.stop_gradient(arrays["advantages"]),
        log_prob=log_prob,
        frozen_log_prob=scored,
        behavior_log_prob=behavior,
        implementation=against_behavior("rollout_policy_log_probs"),
        proximal=against_behavior("proximal_log_probs"),
        sequences=groups,
    )


def token_terms(config: LossConfig, token: Token, summaries: dict[str, Any]) -> TokenTerms:
    """The elementwise heart: chain the rules on a record of any shape, scalars included."""
    surrogate = config.surrogate
    dtype = token.frozen_ratio.dtype
    base = Radii(jnp.asarray(config.eps_low, dtype), jnp.asarray(config.eps_high, dtype))
    radii, gate = base, None
    for radius in config.active(Radius):
        contraction = radius.contract(token, summaries[radius.name])
        c_low = contraction.low if radii.c_low is None else radii.c_low * contraction.low
        c_high = contraction.high if radii.c_high is None else radii.c_high * contraction.high
        radii = Radii(base.low * c_low, base.high * c_high, c_low, c_high)
        gate = contraction.gate if gate is None else gate | contraction.gate
    objective = surrogate.objective(token, radii)
    for penalty in config.active(Penalty):
        objective = objective - penalty.penalty(token, radii)
    weight = None
    for rule in config.active(Weight):
        factor = jax.lax.stop_gradient(rule.weight(token))
        weight = factor if weight is None else weight * factor
    if weight is not None:
        objective = objective * weight
    keep = None
    for mask in config.active(Mask):
        kept = mask.keep(token, radii)
        keep = kept if keep is None else keep & kept
    if keep is not None:
        objective = jnp.where(keep, objective, 0)
    cut = surrogate.cut(token, radii)
    intercepted = None if gate is None else cut & ~surrogate.cut(token, base)
    return TokenTerms(-objective, cut, intercepted, keep, weight, radii, gate)


def token_scale(config: LossConfig, prepared: Prepared, summary: LossSummary) -> jax.Array:
    """One active token's share of the loss: [B, 1] for whole rows, [B, T] for packed ones."""
    counts = prepared.sequences.counts
    one = jnp.ones_like(counts)
    if config.loss_agg_mode == "token-mean":
        return divide(one, summary.tokens)
    if config.loss_agg_mode == "seq-mean-token-mean":
        return divide(divide(one, counts), summary.sequences)
    length = prepared.mask.shape[-1] if config.loss_scale_factor is None else config.loss_scale_factor
    return divide(one, summary.sequences) / length


def ranker(prepared: Prepared, axis_names: tuple[str, ...] = (), shards: int = 1) -> Ranker:
    """``(x, alpha) -> quantile`` over the active tokens; with shards, [B, 1]: one quantile for each block of rows."""
    mask = prepared.mask
    rows = mask.shape[0]
    if shards > 1 and rows % shards:
        raise ValueError(
            f"sat.shards = {shards} does not divide the {rows} rows of a micro-batch: "
            "use the number of devices that they lie on"
        )

    def quantile(x: jax.Array, alpha: float) -> jax.Array:
        # One number a row ([B, 1], whole sequences) is ranked once, weighted by its tokens, instead of T times.
        weights = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.uint32) if x.shape[-1] == 1 else mask

        def ranked(values: jax.Array, counts: jax.Array) -> jax.Array:
            n = jnp.sum(counts, dtype=jnp.uint32)
            for axis in axis_names:
                n = jax.lax.psum(n, axis)
            return order_statistic(values, counts, rank_from_alpha(n, alpha), axis_names)

        if shards == 1:
            return ranked(x, weights)
        blocks = (shards, rows // shards, x.shape[-1])
        return jnp.repeat(jax.vmap(ranked)(x.reshape(blocks), weights.reshape(blocks)), rows // shards)[:, None]

    return quantile


def rule_summaries(
    config: LossConfig, prepared: Prepared, summary: LossSummary, make_ranker: Callable[..., Ranker] = ranker
) -> dict[str, Any]:
    """The batch's summaries, and those of rules whose scope is this micro-batch or a device's rows of it."""
    summaries = dict(summary.rules)
    for rule in config.rules:
        if rule.name not in summaries:
            ranked = make_ranker(prepared, (), rule.summary_scope()[1])
            summaries[rule.name] = jax.lax.stop_gradient(rule.summarize(prepared.token, ranked))
    return summaries


def _why(config: LossConfig, array: str) -> str:
    """Which setting asked for an array."""
    if array == "reference_log_probs":
        return f"kl_loss_coef = {config.kl_loss_coef}"
    if array == "entropy":
        return f"entropy_coef = {config.entropy_coef}"
    asking = [f"rule '{rule.name}'" for rule in config.rules if array in rule.needs]
    if DENOMINATOR_ARRAY[config.denominator] == array:
        asking.append(f"denominator '{config.denominator}'")
    return " and ".join(asking)
