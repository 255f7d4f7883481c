"""A LossConfig made into a pure function: summarise the batch, reduce rows, divide once."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.losses.config import DENOMINATOR_ARRAY, LossConfig
from sat_jax.losses.diagnostics import Reductions, policy_diagnostics, reduce_metrics
from sat_jax.losses.inputs import LossInputs, check_shapes
from sat_jax.losses.kl import kl_estimate
from sat_jax.losses.masked import Sequences, batch_sum, divide, row_sum, sequences
from sat_jax.losses.quantile import order_statistic, rank_from_alpha
from sat_jax.losses.ratios import clamp_log_ratio, safe_exp, unit_log_ratio
from sat_jax.losses.rules.base import Mask, Penalty, Radii, Radius, Rule, Token, Weight

Metrics = dict[str, jax.Array]


@struct.dataclass
class LossSummary:
    """What every micro-batch must know about the whole batch. No gradient flows through it.

    Attributes:
        tokens: float scalar; active tokens.
        sequences: float scalar; responses that the mean over responses counts.
        rules: each active rule's own summary, by name.
    """

    tokens: jax.Array
    sequences: jax.Array
    rules: dict[str, Any]


@struct.dataclass
class LossRows:
    """Shares of the rows, already divided by the whole batch's denominators; every leaf has leading axis B.

    Rows of micro-batches are concatenated and then summed once, so the split does not change a bit of the result
    (``Loss.metrics`` sums them in a fixed order; for a gradient any sum will do).

    Attributes:
        loss: float [B]; sums to the loss.
        pg_loss: float [B]; policy term alone.
        kl_loss: float [B]; KL term before its coefficient.
        diagnostics: per-row partial sums, minima and maxima behind the metrics.
    """

    loss: jax.Array
    pg_loss: jax.Array
    kl_loss: jax.Array
    diagnostics: Reductions


@struct.dataclass
class Prepared:
    """A batch ready for rules: cast, selected, grouped.

    Attributes:
        mask: bool [B, T].
        token: the rules' record.
        token_log_ratio: float [B, T]; log pi - log mu of single tokens, no gradient, for d_bar.
        sequences: how the tokens group.
    """

    mask: jax.Array
    token: Token
    token_log_ratio: jax.Array
    sequences: Sequences


@struct.dataclass
class TokenTerms:
    """What the rules made of each token, before aggregation; fields broadcast to [B, T].

    Attributes:
        loss: minus the objective; differentiable.
        cut: the interval cuts the gradient.
        intercepted: the contracted interval does and the base interval does not.
        keep: no mask rule dropped it; None without mask rules.
        weight: product of the weights; None without weight rules.
        radii: the interval used.
        gate: some radius rule gated it; None without radius rules.
    """

    loss: jax.Array
    cut: jax.Array
    intercepted: jax.Array | None
    keep: jax.Array | None
    weight: jax.Array | None
    radii: Radii
    gate: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as a value: hashable, so ``jax.jit`` may close over it or take it as a static argument.

    ``loss_fn(inputs)`` is the whole thing. A learner with micro-batches uses its three parts:

        summary = loss_fn.summarize(whole_batch)
        rows = [loss_fn.rows(part, summary) for part in parts]      # differentiate rows.loss.sum()
        metrics = loss_fn.metrics(concatenated_rows, summary)
    """

    config: LossConfig

    def __call__(self, inputs: LossInputs) -> tuple[jax.Array, Metrics]:
        """Loss (scalar) and metrics of a whole batch.

        Pure, jittable, differentiable in ``inputs.log_probs`` (and ``entropy``), vmappable over a leading axis.

        Raises:
            ValueError: shapes that do not match, or an array that a rule needs is missing.
        """
        summary = self.summarize(inputs)
        rows = self.rows(inputs, summary)
        return batch_sum(rows.loss), self.metrics(rows, summary)

    def summarize(self, inputs: LossInputs, axis_names: tuple[str, ...] = ()) -> LossSummary:
        """Denominators and rule summaries of the whole batch; no gradient.

        Args:
            inputs: the whole batch (under ``jit`` it may be sharded over rows in any way).
            axis_names: inside ``shard_map`` or ``pmap``: the mapped axes over which the batch is spread.
        """
        prepared = prepare(self.config, jax.lax.stop_gradient(inputs))
        tokens = jnp.sum(prepared.mask, dtype=jnp.uint32)
        counted = prepared.sequences.present if self.config.count_empty_rows else prepared.sequences.active
        n_sequences = jnp.sum(counted, dtype=jnp.uint32)
        for axis in axis_names:
            tokens, n_sequences = jax.lax.psum((tokens, n_sequences), axis)
        dtype = prepared.token_log_ratio.dtype
        batch_rules = {
            name: rule.summarize(prepared.token, _ranker(prepared, axis_names))
            for name, rule in self.config.active(Rule)
            if getattr(rule, "scope", "batch") == "batch"
        }
        return LossSummary(tokens.astype(dtype), n_sequences.astype(dtype), batch_rules)

    def rows(self, inputs: LossInputs, summary: LossSummary) -> LossRows:
        """Every row's share of loss and metrics, for any slice of rows of the batch behind ``summary``."""
        config = self.config
        prepared = prepare(config, inputs)
        terms = token_terms(config, prepared.token, rule_summaries(config, prepared, summary))
        scale = token_scale(config, prepared, summary)
        mask = prepared.mask

        occupied = jnp.any(mask, axis=-1)

        def share(x: jax.Array, coefficient: float = 1.0) -> jax.Array:
            # Whole rows share one scale: multiply the row's sum, not its tokens. The select comes last on purpose: it
            # keeps a compiler from fusing the product into a later sum (a fused multiply-add rounds once, not twice),
            # which it would do for some batch sizes and not for others.
            total = row_sum(x, mask) * scale[..., 0] if scale.shape[-1] == 1 else row_sum(x * scale, mask)
            return jnp.where(occupied, total if coefficient == 1 else coefficient * total, 0)

        loss = pg_loss = share(terms.loss)
        kl_loss, entropy = jnp.zeros_like(pg_loss), None
        if inputs.reference_log_probs is not None:
            kl = self._kl(prepared, inputs.reference_log_probs)
            kl_loss = share(kl)
            if config.kl_loss_coef > 0:
                loss = loss + share(kl, config.kl_loss_coef)
        if inputs.entropy is not None:
            entropy = jnp.where(mask, inputs.entropy, 0).astype(pg_loss.dtype)
            if config.entropy_coef > 0:
                loss = loss - share(entropy, config.entropy_coef)
        diagnostics = policy_diagnostics(config, inputs, prepared, terms, entropy)
        return LossRows(loss, pg_loss, kl_loss, jax.lax.stop_gradient(diagnostics))

    def metrics(self, rows: LossRows, summary: LossSummary) -> Metrics:
        """Scalars by name, from the concatenated rows of all micro-batches. Each is a ratio of sums, taken once."""
        metrics = {"train/loss": batch_sum(rows.loss)}
        metrics["train/pg_loss"], metrics["train/kl_loss"] = batch_sum(jnp.stack([rows.pg_loss, rows.kl_loss]))
        metrics |= reduce_metrics(rows.diagnostics, summary.tokens)
        if "sat" in summary.rules:
            metrics["sat/q"] = summary.rules["sat"].q
        return jax.lax.stop_gradient(metrics)

    def _kl(self, prepared: Prepared, reference_log_probs: jax.Array) -> jax.Array:
        config = self.config
        log_prob = prepared.token.log_prob
        reference = jnp.where(prepared.mask, reference_log_probs, 0).astype(log_prob.dtype)
        estimate = kl_estimate(log_prob, reference, config.kl_loss_type)
        if config.kl_unbiased:
            estimate = estimate * prepared.token.ratio
        return prepared.sequences.mean(estimate) if config.kl_unit == "sequence" else estimate


def make_loss(config: LossConfig) -> Loss:
    """The loss that ``config`` describes, in plain JAX. ``sat_jax.kernels.make_loss`` offers the Pallas twin."""
    return Loss(config)


def prepare(config: LossConfig, inputs: LossInputs) -> Prepared:
    """Check, cast to float32 or wider, select active entries and build the rules' record."""
    check_shapes(inputs)
    for name in config.needs():
        if getattr(inputs, name) is None:
            raise ValueError(
                f"loss '{config.name}' needs {name}, which is missing: pass it in LossInputs "
                f"or drop {_why(config, name)}"
            )
    mask = inputs.loss_mask if inputs.loss_mask.dtype == bool else inputs.loss_mask != 0
    dtype = jnp.promote_types(inputs.log_probs.dtype, jnp.float32)

    def select(x: jax.Array) -> jax.Array:
        # Before any arithmetic: masked entries may be NaN, and NaN times zero is NaN, forwards and backwards.
        return jnp.where(mask, x, 0).astype(dtype)

    groups = sequences(mask, inputs.segment_ids, dtype)
    log_prob = select(inputs.log_probs)
    behavior = select(inputs.behavior_log_probs)
    denominator = (
        behavior if config.denominator == "rollout" else select(getattr(inputs, DENOMINATOR_ARRAY[config.denominator]))
    )
    scored = jax.lax.stop_gradient(log_prob)
    if inputs.scored_log_probs is not None:
        scored = jax.lax.stop_gradient(select(inputs.scored_log_probs))
    ratio = jnp.exp(clamp_log_ratio(unit_log_ratio(log_prob - denominator, config.unit, groups)))
    frozen_d = jax.lax.stop_gradient(unit_log_ratio(scored - denominator, config.unit, groups))
    frozen_ratio = jax.lax.stop_gradient(ratio) if inputs.scored_log_probs is None else safe_exp(frozen_d)
    advantages = jnp.asarray(inputs.advantages)
    if advantages.ndim == 1:
        advantages = jnp.where(jnp.any(mask, axis=-1), advantages, 0).astype(dtype)[:, None]
    else:
        advantages = select(advantages)
    token = Token(
        ratio=ratio,
        frozen_ratio=frozen_ratio,
        log_ratio=frozen_d,
        advantage=jax.lax.stop_gradient(advantages),
        log_prob=log_prob,
        frozen_log_prob=scored,
        behavior_log_prob=behavior,
        implementation=None
        if inputs.rollout_policy_log_probs is None
        else select(inputs.rollout_policy_log_probs) - behavior,
        proximal=None if inputs.proximal_log_probs is None else select(inputs.proximal_log_probs) - behavior,
        sequences=groups,
    )
    return Prepared(mask, token, scored - behavior, groups)


def token_terms(config: LossConfig, token: Token, summaries: dict[str, Any]) -> TokenTerms:
    """The elementwise heart: chain the rules on a record of any shape, scalars included."""
    surrogate = config.surrogate
    dtype = token.frozen_ratio.dtype
    base = Radii(jnp.asarray(config.eps_low, dtype), jnp.asarray(config.eps_high, dtype))
    radii, gate = base, None
    for name, radius in config.active(Radius):
        contraction = radius.contract(token, summaries[name])
        c_low = contraction.low if radii.c_low is None else radii.c_low * contraction.low
        c_high = contraction.high if radii.c_high is None else radii.c_high * contraction.high
        radii = Radii(base.low * c_low, base.high * c_high, c_low, c_high)
        gate = contraction.gate if gate is None else gate | contraction.gate
    objective = surrogate.objective(token, radii)
    for _, penalty in config.active(Penalty):
        objective = objective - penalty.penalty(token, radii)
    weight = None
    for _, rule in config.active(Weight):
        factor = jax.lax.stop_gradient(rule.weight(token))
        weight = factor if weight is None else weight * factor
    if weight is not None:
        objective = objective * weight
    keep = None
    for _, mask in config.active(Mask):
        kept = mask.keep(token, radii)
        keep = kept if keep is None else keep & kept
    if keep is not None:
        objective = jnp.where(keep, objective, 0)
    cut = surrogate.cut(token, radii)
    intercepted = None if gate is None else cut & ~surrogate.cut(token, base)
    return TokenTerms(-objective, cut, intercepted, keep, weight, radii, gate)


def rule_summaries(config: LossConfig, prepared: Prepared, summary: LossSummary) -> dict[str, Any]:
    """The batch's summaries, and those of rules whose scope is this micro-batch or a device's rows of it."""
    summaries = dict(summary.rules)
    for name, rule in config.active(Rule):
        if name not in summaries:
            shards = getattr(rule, "shards", 1)
            summaries[name] = jax.lax.stop_gradient(rule.summarize(prepared.token, _ranker(prepared, (), shards)))
    return summaries


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


def _ranker(prepared: Prepared, axis_names: tuple[str, ...] = (), shards: int = 1) -> Any:
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


def _why(config: LossConfig, array: str) -> str:
    """Which setting asked for an array, for the error message."""
    if array == "reference_log_probs":
        return f"kl_loss_coef = {config.kl_loss_coef}"
    if array == "entropy":
        return f"entropy_coef = {config.entropy_coef}"
    asking = [f"rule '{name}'" for name in config.rules if array in getattr(config, name).needs]
    if DENOMINATOR_ARRAY[config.denominator] == array:
        asking.append(f"denominator '{config.denominator}'")
    return " and ".join(asking)
