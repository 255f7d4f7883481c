"""Metrics as per-row sums, minima and maxima: they travel so, and are divided once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.losses.masked import batch_sum, divide, row_max, row_min, row_sum
from sat_jax.losses.ratios import safe_exp
from sat_jax.losses.rules.sat import Sat
from sat_jax.metrics import METRICS, Reduction

if TYPE_CHECKING:
    from sat_jax.losses.config import LossConfig
    from sat_jax.losses.rules.base import Token
    from sat_jax.losses.tokens import TokenTerms

METRIC_REDUCTIONS: dict[str, Reduction] = {name: m.reduction for name, m in METRICS.items() if m.reduction is not None}
"""How each metric of a loss combines over micro-batches and devices, by the register of ``sat_jax.metrics``.

``Loss.metrics`` does all of it on concatenated rows; who combines finished metrics needs this table.
"""


@struct.dataclass
class Reductions:
    """Partial results by metric name: sums over active tokens, minima and maxima over them.

    Per token (fields broadcast to [B, T]) as ``token_diagnostics`` makes them, per row ([B]) after ``reduce_rows``.
    """

    sums: dict[str, jax.Array]
    minima: dict[str, jax.Array]
    maxima: dict[str, jax.Array]


def token_diagnostics(config: LossConfig, token: Token, terms: TokenTerms, summaries: dict[str, Any]) -> Reductions:
    """Table 10's diagnostics and their neighbours, token by token; elementwise, so a kernel calls it on tiles."""
    # Token ratios against the engine for every method, sequence methods included (52).
    d = token.frozen_log_prob - token.behavior_log_prob
    sums = {
        "train/tokens": jnp.ones_like(d),
        "train/d_bar": jnp.abs(d),
        # k3 of KL(mu || pi) from mu's own samples: E_mu[r - 1 - log r].
        "train/kl_train_rollout": safe_exp(d) - 1 - d,
        "train/clip_fraction": terms.cut,
    }
    minima: dict[str, jax.Array] = {}
    if terms.keep is not None:
        sums["train/keep_fraction"] = terms.keep
    if terms.weight is not None:
        sums["train/weight_mean"] = terms.weight
    if token.implementation is not None:
        sums["async/delta_pi"] = jnp.abs(d - token.implementation)
        sums["async/delta_impl"] = jnp.abs(token.implementation)
    radii = terms.radii
    if terms.gate is not None:  # then all of these are there
        assert terms.intercepted is not None
        assert radii.c_low is not None
        assert radii.c_high is not None
        sums |= {
            "sat/gate_rate": terms.gate,
            "sat/intercept_rate": terms.intercepted,
            "sat/eps_low_mean": radii.low,
            "sat/eps_high_mean": radii.high,
            "sat/c_low_mean": radii.c_low,
            "sat/c_high_mean": radii.c_high,
        }
        minima = {"sat/c_low_min": radii.c_low, "sat/c_high_min": radii.c_high}
    if (sat := config.get(Sat)) is not None and sat.scope != "batch":
        # No single number: report the mean of the q that tokens were held against.
        sums["sat/q"] = jnp.broadcast_to(summaries[sat.name].q, radii.low.shape)
    return Reductions(sums, minima, {"train/ratio_max": token.frozen_ratio})


def reduce_rows(per_token: Reductions, mask: jax.Array) -> Reductions:
    """Reduce per-token diagnostics over each row's active tokens."""
    return Reductions(
        {name: row_sum(x, mask) for name, x in per_token.sums.items()},
        {name: row_min(x, mask, empty=1) for name, x in per_token.minima.items()},
        {name: row_max(x, mask, empty=0) for name, x in per_token.maxima.items()},
    )


def reduce_metrics(rows: Reductions, tokens: jax.Array) -> dict[str, jax.Array]:
    """Finish the per-row partials of all rows of a batch with ``tokens`` active tokens."""
    totals = batch_sum(jnp.stack(list(rows.sums.values())))
    means = dict(zip(rows.sums, divide(totals, tokens), strict=True))
    means["train/tokens"] = totals[list(rows.sums).index("train/tokens")]
    metrics = means | {name: jnp.min(x, initial=1) for name, x in rows.minima.items()}
    return metrics | {name: jnp.max(x, initial=0) for name, x in rows.maxima.items()}
