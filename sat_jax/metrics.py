"""What each number that a run logs is called and means: the one register of metric names.

Read by the writer (TensorBoard descriptions), the report (labels and units) and ``docs/metrics.md``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np

Reduction = Literal["sum", "mean", "min", "max", "value"]
"""``mean`` is weighted by active tokens, ``sum`` is already divided by the batch's denominators, ``value`` is the same
everywhere."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """What one metric name stands for."""

    unit: str
    """As printed on an axis; empty for a pure number, ``share`` for a fraction in [0, 1]."""
    description: str
    reduction: Reduction | None = None
    """How partial results of micro-batches or devices combine; None: there are none, it is logged whole."""


METRICS: dict[str, Metric] = {
    "train/loss": Metric("", "what was minimised: policy term plus weighted KL", "sum"),
    "train/pg_loss": Metric("", "policy-gradient term alone", "sum"),
    "train/kl_loss": Metric("nats", "KL estimate against the reference policy, before its coefficient", "sum"),
    "train/kl_capped_ratio": Metric(
        "share", "active tokens without a KL gradient: a clamp cuts their estimate", "mean"
    ),
    "train/entropy": Metric("nats", "mean entropy of the policy's next-token distribution over active tokens", "mean"),
    "train/grad_norm": Metric("", "global L2 norm of the gradient before clipping"),
    "train/lr": Metric("", "learning rate of the update"),
    "train/clip_fraction": Metric("share", "active tokens whose surrogate gradient the clip interval cuts", "mean"),
    "train/d_bar": Metric(
        "nats", "sampled mismatch: mean |log ratio| of single tokens, for every unit, eq. (52)", "mean"
    ),
    "train/kl_train_rollout": Metric(
        "nats", "KL estimate between learner and rollout engine on the sampled tokens", "mean"
    ),
    "train/ratio_max": Metric("", "largest importance ratio of an active token", "max"),
    "train/keep_fraction": Metric(
        "share", "active tokens that a masking rule (DPPO, IcePop, KPop, SeqClip) keeps", "mean"
    ),
    "train/weight_mean": Metric("", "mean detached weight (TIS, IcePop) of active tokens", "mean"),
    "train/tokens": Metric("tokens", "active tokens of the batch, as the loss counts them", "sum"),
    "train/valid_tokens": Metric(
        "tokens", "tokens of the batch under the loss mask; 0 means that there was no step to take"
    ),
    "train/outside_support": Metric(
        "share", "learner's probability outside the replayed supports, mean of active tokens; where sampling truncates"
    ),
    "train/update_skipped": Metric(
        "", "1 where the update was withheld: no active token, or a gradient that is not finite"
    ),
    "sat/q": Metric(
        "nats",
        "alpha-quantile of |log ratio| at the loss's unit (sequence ratios: the response's mean), eq. (14)",
        "value",
    ),
    "sat/gate_rate": Metric("share", "active tokens with |log ratio| beyond q, eq. (16)", "mean"),
    "sat/eps_low_mean": Metric("", "mean lower clip radius after contraction", "mean"),
    "sat/eps_high_mean": Metric("", "mean upper clip radius after contraction", "mean"),
    "sat/c_low_min": Metric("", "strongest contraction of a lower radius in the batch; 1 is none", "min"),
    "sat/c_high_min": Metric("", "strongest contraction of an upper radius in the batch; 1 is none", "min"),
    "sat/c_low_mean": Metric("", "mean contraction of the lower radius; 1 is none", "mean"),
    "sat/c_high_mean": Metric("", "mean contraction of the upper radius; 1 is none", "mean"),
    "sat/intercept_rate": Metric(
        "share", "active tokens whose gradient SAT cuts and the nominal interval would not", "mean"
    ),
    "async/staleness_mean": Metric("versions", "mean lag of active tokens: learner version minus sampling version"),
    "async/staleness_max": Metric("versions", "largest lag among active tokens"),
    "async/staleness_histogram": Metric("tokens", "active tokens of the batch by lag in versions"),
    "async/queue_groups": Metric("groups", "finished groups waiting in the queue when the batch was taken"),
    "async/dropped_stale": Metric("groups", "groups dropped or requeued so far because they were too old"),
    "async/delta_pi": Metric("nats", "mean |log ratio| owed to policy updates, eq. (2)", "mean"),
    "async/delta_impl": Metric("nats", "mean |log ratio| owed to kernels, precision and routing, eq. (2)", "mean"),
    "rollout/reward_mean": Metric("reward", "mean reward of the batch's responses"),
    "rollout/reward_histogram": Metric("responses", "responses of the batch by reward"),
    "rollout/accuracy": Metric("share", "responses of the batch that the verifier calls correct"),
    "rollout/response_len_mean": Metric("tokens", "mean response length"),
    "rollout/truncated_ratio": Metric("share", "responses ended by the token budget"),
    "rollout/zero_std_groups": Metric("groups", "groups of the batch whose rewards are all equal: no gradient"),
    "rollout/unparsed_ratio": Metric("share", "responses in which the verifier found no answer"),
    "rollout/ungraded": Metric("responses", "responses whose grading timed out, crashed or failed"),
    "rollout/tokens_per_s": Metric("tokens/s", "response tokens sampled per second of engine time"),
    "perf/step_time_s": Metric("s", "learner's own time for the step, waiting excluded"),
    "perf/tokens_per_s": Metric("tokens/s", "tokens trained on per second of step time"),
    "perf/batch_fill": Metric("share", "tokens of the batch that are not padding"),
    "perf/rollout_wait_s": Metric("s", "time the learner waited for a batch"),
    "perf/train_wait_s": Metric("s", "time the rollout side waited for the learner"),
    "moe/router_agreement": Metric("share", "routed (token, layer) expert sets that the learner would have chosen too"),
    "moe/load_max": Metric("", "load of the busiest expert over an even share; 1 is perfect balance"),
    "moe/aux_loss": Metric("", "load-balancing loss of the router, before its coefficient"),
    "moe/z_loss": Metric("", "router z-loss, before its coefficient"),
    "eval/avg@k": Metric("share", "mean accuracy over k samples of every held-out problem"),
    "eval/pass@k": Metric("share", "held-out problems solved by at least one of k samples, unbiased estimate"),
    "eval/response_len_mean": Metric("tokens", "mean response length in evaluation"),
    "eval/truncated_ratio": Metric("share", "evaluation responses ended by the token budget"),
}


def describe(name: str) -> Metric:
    """The register's entry for ``name``; an entry without unit and description for names that are not in it."""
    return METRICS.get(name, Metric("", ""))


def metrics_markdown() -> str:
    """The register as a Markdown table: the body of ``docs/metrics.md``."""
    rows = [f"| `{name}` | {m.unit or '–'} | {m.reduction or '–'} | {m.description} |" for name, m in METRICS.items()]
    return "\n".join(["| metric | unit | over parts | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def value_counts(values: np.ndarray | Iterable[float], decimals: int = 2) -> dict[str, int]:
    """How often each value occurs, as a histogram metric holds it: ``value_counts([1, 1, 8]) == {"1": 2, "8": 1}``.

    Finite numbers of any shape are first rounded to ``decimals``, so that a continuous reward stays a short object.
    """
    array = np.asarray(values, np.float64).ravel()
    if not np.isfinite(array).all():
        raise ValueError(
            f"cannot count {array[~np.isfinite(array)][0]}: a histogram takes finite values, select them first"
        )
    # Adding zero turns -0.0 into 0.0, which would otherwise be a bin of its own.
    unique, counts = np.unique(np.round(array, decimals) + 0.0, return_counts=True)
    names = (np.format_float_positional(value, trim="-") for value in unique)
    return {name: int(count) for name, count in zip(names, counts, strict=True)}
