"""Metrics as per-row sums, minima and maxima: they travel so, and are divided once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.losses.masked import batch_sum, divide, row_max, row_min, row_sum
from sat_jax.losses.ratios import safe_exp

if TYPE_CHECKING:
    from sat_jax.losses.config import LossConfig
    from sat_jax.losses.inputs import LossInputs
    from sat_jax.losses.loss import Prepared, TokenTerms

Reduction = Literal["sum", "mean", "min", "max", "value"]

METRIC_REDUCTIONS: dict[str, Reduction] = {
    "train/loss": "sum",
    "train/pg_loss": "sum",
    "train/kl_loss": "sum",
    "train/tokens": "sum",
    "train/d_bar": "mean",
    "train/kl_train_rollout": "mean",
    "train/ratio_max": "max",
    "train/clip_fraction": "mean",
    "train/entropy": "mean",
    "train/keep_fraction": "mean",
    "train/weight_mean": "mean",
    "async/delta_pi": "mean",
    "async/delta_impl": "mean",
    "sat/q": "value",
    "sat/gate_rate": "mean",
    "sat/intercept_rate": "mean",
    "sat/eps_low_mean": "mean",
    "sat/eps_high_mean": "mean",
    "sat/c_low_mean": "mean",
    "sat/c_high_mean": "mean",
    "sat/c_low_min": "min",
    "sat/c_high_min": "min",
}
"""How each metric combines over micro-batches and devices.

``mean`` is weighted by active tokens, ``sum`` is already divided by the batch's denominators, ``value`` is the same
everywhere. ``Loss.metrics`` does all of it on concatenated rows; who combines finished metrics needs this table.
"""


@struct.dataclass
class Reductions:
    """Per-row partial results, each float [B]: sums over active tokens, minima and maxima over them."""

    sums: dict[str, jax.Array]
    minima: dict[str, jax.Array]
    maxima: dict[str, jax.Array]


def policy_diagnostics(
    config: LossConfig, inputs: LossInputs, prepared: Prepared, terms: TokenTerms, entropy: jax.Array | None
) -> Reductions:
    """Table 10's diagnostics and their neighbours, reduced over each row's active tokens."""
    mask, token, d = prepared.mask, prepared.token, prepared.token_log_ratio

    def total(x: jax.Array) -> jax.Array:
        return row_sum(x, mask).astype(d.dtype)

    sums = {
        "train/tokens": jnp.sum(mask, axis=-1, dtype=d.dtype),
        "train/d_bar": total(jnp.abs(d)),
        # k3 of KL(mu || pi) from mu's own samples: E_mu[r - 1 - log r].
        "train/kl_train_rollout": total(safe_exp(d) - 1 - d),
        "train/clip_fraction": total(terms.cut),
    }
    minima: dict[str, jax.Array] = {}
    maxima = {"train/ratio_max": row_max(token.frozen_ratio, mask, empty=0)}
    if entropy is not None:
        sums["train/entropy"] = total(entropy)
    if terms.keep is not None:
        sums["train/keep_fraction"] = total(terms.keep)
    if terms.weight is not None:
        sums["train/weight_mean"] = total(terms.weight)
    middle = token.implementation if inputs.rollout_policy_log_probs is not None else token.proximal
    if middle is not None:
        sums["async/delta_pi"] = total(jnp.abs(d - middle))
        sums["async/delta_impl"] = total(jnp.abs(middle))
    radii = terms.radii
    if (
        terms.gate is not None
        and terms.intercepted is not None
        and radii.c_low is not None
        and radii.c_high is not None
    ):
        sums |= {
            "sat/gate_rate": total(terms.gate),
            "sat/intercept_rate": total(terms.intercepted),
            "sat/eps_low_mean": total(radii.low),
            "sat/eps_high_mean": total(radii.high),
            "sat/c_low_mean": total(radii.c_low),
            "sat/c_high_mean": total(radii.c_high),
        }
        minima["sat/c_low_min"] = row_min(radii.c_low, mask, empty=1)
        minima["sat/c_high_min"] = row_min(radii.c_high, mask, empty=1)
    return Reductions(sums, minima, maxima)


def reduce_metrics(rows: Reductions, tokens: jax.Array) -> dict[str, jax.Array]:
    """Finish the per-row partials of all rows of a batch with ``tokens`` active tokens."""
    totals = batch_sum(jnp.stack(list(rows.sums.values())))
    means = dict(zip(rows.sums, divide(totals, tokens), strict=True))
    means["train/tokens"] = totals[list(rows.sums).index("train/tokens")]
    metrics = means | {name: jnp.min(x, initial=1) for name, x in rows.minima.items()}
    return metrics | {name: jnp.max(x, initial=0) for name, x in rows.maxima.items()}
