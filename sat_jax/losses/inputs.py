"""What a loss reads, and every check on it: shapes at trace time, values on request."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

OPTIONAL_LOG_PROBS = ("reference_log_probs", "rollout_policy_log_probs", "proximal_log_probs", "scored_log_probs")
LOG_PROB_SLACK = 1e-3
"""A log-prob may exceed 0 by this much: rounding in a low-precision engine."""


@struct.dataclass
class LossInputs:
    """One batch, token-aligned. Anything may stand where ``loss_mask`` is 0.

    Attributes:
        log_probs: float [B, T], nats; the learner's, differentiable.
        behavior_log_probs: float [B, T]; the engine's own, at the sampling temperature.
        advantages: float [B, T], or [B] where rows are not packed.
        loss_mask: bool or 0/1 [B, T].
        segment_ids: int [B, T] or None; packed rows, 0 is padding.
        reference_log_probs: float [B, T] or None; frozen reference policy, for the KL term.
        rollout_policy_log_probs: float [B, T] or None; learner at the weights that sampled.
        proximal_log_probs: float [B, T] or None; learner at the start of the step.
        scored_log_probs: float [B, T] or None; a no-gradient scoring pass at the *same* weights as ``log_probs``. All
            decisions (quantile, gate, mask, weight, which side of a boundary) then read it, so that one micro-batch and
            four decide alike although their matrix products round differently.
        entropy: float [B, T] or None; differentiable, for the entropy term and its metric.
    """

    log_probs: jax.Array
    behavior_log_probs: jax.Array
    advantages: jax.Array
    loss_mask: jax.Array
    segment_ids: jax.Array | None = None
    reference_log_probs: jax.Array | None = None
    rollout_policy_log_probs: jax.Array | None = None
    proximal_log_probs: jax.Array | None = None
    scored_log_probs: jax.Array | None = None
    entropy: jax.Array | None = None


def check_shapes(inputs: LossInputs) -> None:
    """Raises ``ValueError`` for shapes and types that do not fit; works while tracing."""
    for name in ("log_probs", "behavior_log_probs", "advantages", "loss_mask"):
        if getattr(inputs, name) is None:
            raise ValueError(f"{name} is None: every loss needs it; pass an array [B, T]")
    if np.ndim(inputs.log_probs) != 2:
        raise ValueError(
            f"log_probs has shape {np.shape(inputs.log_probs)}: it must be [B, T]; vmap over further leading axes"
        )
    shape = np.shape(inputs.log_probs)
    for name in ("behavior_log_probs", "loss_mask", "segment_ids", *OPTIONAL_LOG_PROBS, "entropy"):
        array = getattr(inputs, name)
        if array is not None and np.shape(array) != shape:
            raise ValueError(f"{name} has shape {np.shape(array)} but log_probs has {shape}: pass one entry a token")
    advantages = np.shape(inputs.advantages)
    if advantages != shape and advantages != shape[:1]:
        raise ValueError(f"advantages has shape {advantages}: it must be {shape} (a token) or {shape[:1]} (a row)")
    if inputs.segment_ids is not None and advantages != shape:
        raise ValueError(
            f"advantages has shape {advantages} but rows are packed (segment_ids): give one entry a token, {shape}"
        )
    kind = jnp.result_type(inputs.log_probs)
    if not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(f"log_probs has dtype {kind}: it must be floating; cast it to float32")
    kind = jnp.result_type(inputs.loss_mask)
    if jnp.issubdtype(kind, jnp.complexfloating):
        raise ValueError(f"loss_mask has dtype {kind}: it must be bool or 0/1")
    if inputs.segment_ids is not None and not jnp.issubdtype(jnp.result_type(inputs.segment_ids), jnp.integer):
        kind = jnp.result_type(inputs.segment_ids)
        raise ValueError(f"segment_ids has dtype {kind}: it must be an integer; 0 marks padding")


def check_values(inputs: LossInputs) -> None:
    """Checks the values of concrete arrays, which cannot be seen while tracing, and their shapes.

    Raises:
        ValueError: a mask that is not 0/1; on active tokens, log-probs above 0 or NaN, or infinite advantages.
    """
    check_shapes(inputs)
    mask = np.asarray(inputs.loss_mask)
    if mask.dtype != bool:
        odd = mask[(mask != 0) & (mask != 1)]
        if odd.size:
            raise ValueError(f"loss_mask holds {odd.flat[0]}: it must be bool or 0/1; weights belong in the advantages")
        mask = mask != 0
    for name in ("log_probs", "behavior_log_probs", *OPTIONAL_LOG_PROBS):
        array = getattr(inputs, name)
        if array is None:
            continue
        values = np.asarray(array, np.float64)
        _refuse(mask & np.isnan(values), values, name, "log-probs must be numbers on active tokens; mask the token out")
        above = f"log-probs are at most 0 (+{LOG_PROB_SLACK}); pass logs, in nats"
        _refuse(mask & (values > LOG_PROB_SLACK), values, name, above)
    advantages = np.asarray(inputs.advantages, np.float64)
    if advantages.ndim == 1:
        advantages = np.broadcast_to(advantages[:, None], mask.shape)
    rule = "they must be finite on active tokens; mask the token out"
    _refuse(mask & ~np.isfinite(advantages), advantages, "advantages", rule)


def _refuse(bad: np.ndarray, values: np.ndarray, name: str, rule: str) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}[{where[0]}, {where[1]}] = {values[where]:g}: {rule} ({int(bad.sum())} such tokens)")
