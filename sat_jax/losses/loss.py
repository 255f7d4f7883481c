"""A LossConfig made into a pure function: summarise the batch, reduce rows, divide once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.losses import tokens
from sat_jax.losses.config import LossConfig
from sat_jax.losses.diagnostics import Reductions, reduce_metrics, reduce_rows, token_diagnostics
from sat_jax.losses.inputs import LossInputs
from sat_jax.losses.kl import kl_capped, kl_estimate
from sat_jax.losses.masked import batch_sum, row_sum
from sat_jax.losses.rules.sat import Sat
from sat_jax.losses.tokens import LossSummary, Prepared

Metrics = dict[str, jax.Array]


@struct.dataclass
class LossRows:
    """Shares of the rows, already divided by the whole batch's denominators; every leaf has leading axis B.

    Rows of micro-batches are concatenated and then summed once, so the split does not change a bit of the result
    (``Loss.metrics`` sums them in a fixed order; for a gradient any sum will do).
    """

    loss: jax.Array  # float [B]; sums to the loss
    pg_loss: jax.Array  # its policy term
    kl_loss: jax.Array  # its KL term before the coefficient
    diagnostics: Reductions


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

        Pure, jittable, differentiable in ``inputs.log_probs`` (and ``entropy``), vmappable over a leading axis. Raises
        ``ValueError`` where shapes do not match or an array that a rule needs is missing.
        """
        summary = self.summarize(inputs)
        rows = self.rows(inputs, summary)
        return batch_sum(rows.loss), self.metrics(rows, summary)

    def summarize(self, inputs: LossInputs, axis_names: tuple[str, ...] = ()) -> LossSummary:
        """Denominators and rule summaries of the whole batch; no gradient.

        Under ``jit`` the batch may be sharded over rows in any way; inside ``shard_map`` or ``pmap``, ``axis_names``
        are the mapped axes over which it is spread.
        """
        prepared = tokens.prepare(self.config, jax.lax.stop_gradient(inputs))
        n_tokens = jnp.sum(prepared.mask, dtype=jnp.uint32)
        counted = prepared.sequences.present if self.config.count_empty_rows else prepared.sequences.active
        n_sequences = jnp.sum(counted, dtype=jnp.uint32)
        for axis in axis_names:
            n_tokens, n_sequences = jax.lax.psum((n_tokens, n_sequences), axis)
        dtype = prepared.token.ratio.dtype
        batch_rules = {
            rule.name: rule.summarize(prepared.token, self.ranker(prepared, axis_names))
            for rule in self.config.rules
            if rule.summary_scope()[0] == "batch"
        }
        return LossSummary(n_tokens.astype(dtype), n_sequences.astype(dtype), batch_rules)

    def rows(self, inputs: LossInputs, summary: LossSummary) -> LossRows:
        """Every row's share of loss and metrics, for any slice of rows of the batch behind ``summary``."""
        config = self.config
        prepared = tokens.prepare(config, inputs)
        scale = tokens.token_scale(config, prepared, summary)
        loss, diagnostics = self.policy_rows(prepared, summary, scale)
        pg_loss, kl_loss = loss, jnp.zeros_like(loss)
        if inputs.reference_log_probs is not None:
            reference = jnp.where(prepared.mask, inputs.reference_log_probs, 0).astype(prepared.token.log_prob.dtype)
            kl = kl_estimate(prepared.token.log_prob, reference, config.kl_loss_type)
            if config.kl_unbiased:
                kl = kl * prepared.token.ratio
            if config.kl_unit == "sequence":
                kl = prepared.sequences.mean(kl)
            kl_loss = share(kl, prepared, scale)
            capped = kl_capped(prepared.token.log_prob, inputs.reference_log_probs, config.kl_loss_type)
            diagnostics.sums["train/kl_capped_ratio"] = row_sum(capped.astype(loss.dtype), prepared.mask)
            if config.kl_loss_coef > 0:
                loss = loss + share(kl, prepared, scale, config.kl_loss_coef)
        if inputs.entropy is not None:
            entropy = jnp.where(prepared.mask, inputs.entropy, 0).astype(loss.dtype)
            diagnostics.sums["train/entropy"] = row_sum(entropy, prepared.mask)
            if config.entropy_coef > 0:
                loss = loss - share(entropy, prepared, scale, config.entropy_coef)
        return LossRows(loss, pg_loss, kl_loss, jax.lax.stop_gradient(diagnostics))

    def policy_rows(self, prepared: Prepared, summary: LossSummary, scale: jax.Array) -> tuple[jax.Array, Reductions]:
        """The policy term's share of every row, and the rows' diagnostics: what a kernel replaces."""
        config = self.config
        summaries = tokens.rule_summaries(config, prepared, summary, self.ranker)
        terms = tokens.token_terms(config, prepared.token, summaries)
        per_token = token_diagnostics(config, prepared.token, terms, summaries)
        return share(terms.loss, prepared, scale), reduce_rows(per_token, prepared.mask)

    def ranker(self, prepared: Prepared, axis_names: tuple[str, ...] = (), shards: int = 1) -> tokens.Ranker:
        """How quantiles over active tokens are found: what a kernel replaces."""
        return tokens.ranker(prepared, axis_names, shards)

    def metrics(self, rows: LossRows, summary: LossSummary) -> Metrics:
        """Scalars by name, from the concatenated rows of all micro-batches. Each is a ratio of sums, taken once."""
        metrics = {"train/loss": batch_sum(rows.loss)}
        metrics["train/pg_loss"], metrics["train/kl_loss"] = batch_sum(jnp.stack([rows.pg_loss, rows.kl_loss]))
        metrics |= reduce_metrics(rows.diagnostics, summary.tokens)
        if (sat := self.config.get(Sat)) is not None and sat.name in summary.rules:
            metrics["sat/q"] = summary.rules[sat.name].q
        return jax.lax.stop_gradient(metrics)


def share(x: jax.Array, prepared: Prepared, scale: jax.Array, coefficient: float = 1.0) -> jax.Array:
    """[B]: per-token ``x`` summed over each row's active tokens, times one token's share of the loss.

    The select comes last on purpose: it keeps a compiler from fusing the product into a later sum (a fused multiply-add
    rounds once, not twice), which it would do for some batch sizes and not for others.
    """
    mask = prepared.mask
    # Whole rows share one scale: multiply the row's sum, not its tokens.
    total = row_sum(x, mask) * scale[..., 0] if scale.shape[-1] == 1 else row_sum(x * scale, mask)
    return jnp.where(jnp.any(mask, axis=-1), total if coefficient == 1 else coefficient * total, 0)


def make_loss(config: LossConfig) -> Loss:
    """The loss that ``config`` describes, in plain JAX. ``sat_jax.kernels.make_loss`` offers the Pallas twin."""
    if not isinstance(config, LossConfig):
        raise ValueError(f"make_loss takes a LossConfig, not {config!r}: a named one is losses.method('sat-gspo')")
    return Loss(config)
