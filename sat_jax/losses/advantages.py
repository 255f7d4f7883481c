"""Group-relative advantages, each with the convention for its standard deviation in its name."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

AdvantageKind = Literal["group_std_unbiased", "group_std_biased", "group_mean", "leave_one_out"]
Failures = Literal["exclude", "zero"]

SPREAD_TOLERANCE = 1e-6
"""A group whose rewards span less than this, relative to their size, has no signal: advantages are exactly 0."""


def group_advantages(
    rewards: Any,
    group_ids: Any = None,
    kind: AdvantageKind = "group_std_unbiased",
    eps: float = 1e-6,
    failed: Any = None,
    failures: Failures = "exclude",
) -> Any:
    """Each response's reward against its group.

    ======================  ==============================================================================
    ``group_std_unbiased``  ``(r - mean) / (std + eps)``, n - 1 in the std (slime, verl: eps 1e-6; TRL: 1e-4)
    ``group_std_biased``    ``(r - mean) / (std + eps)``, n in the std (TRL's asynchronous trainer)
    ``group_mean``          ``r - mean`` (Dr. GRPO)
    ``leave_one_out``       ``r - mean of the others = (r - mean) n / (n - 1)`` (RLOO)
    ======================  ==============================================================================

    A group without spread (max - min within rounding of the rewards) gets exactly 0, not rounding error divided by eps;
    so does a group of one.

    Args:
        rewards: float [N, G] (groups are rows), or [M] with ``group_ids``.
        group_ids: int [M], any values; members of a group share one.
        failed: bool, shape of ``rewards``: responses that were aborted or could not be graded. Their advantage is 0.
        failures: whether a failed sibling is left out of the baseline (``exclude``, the default) or counts as reward 0.

    Returns:
        float array shaped like ``rewards``; numpy in, numpy out, jax in, jax out. float32, or float64 if given.

    Raises:
        ValueError: shapes that do not fit, an unknown kind.
    """
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"advantage kind {kind!r} is unknown: use {' or '.join(get_args(AdvantageKind))}")
    if failures not in ("exclude", "zero"):
        raise ValueError(f"failures = {failures!r} is unknown: use 'exclude' or 'zero'")
    xp: Any = jnp if isinstance(rewards, jax.Array) else np
    rewards = xp.asarray(rewards)
    if rewards.dtype != xp.float64:
        rewards = rewards.astype(xp.float32)
    same = None
    if group_ids is not None:
        group_ids = xp.asarray(group_ids)
        if rewards.ndim != 1 or group_ids.shape != rewards.shape:
            raise ValueError(
                f"group_ids has shape {group_ids.shape} and rewards {rewards.shape}: both must be flat and equal"
            )
        same = group_ids[:, None] == group_ids[None, :]
    elif rewards.ndim != 2:
        raise ValueError(f"rewards has shape {rewards.shape}: pass [groups, responses], or a flat array and group_ids")
    ok = xp.ones(rewards.shape, bool) if failed is None else ~xp.asarray(failed)
    if ok.shape != rewards.shape:
        raise ValueError(f"failed has shape {ok.shape} and rewards {rewards.shape}: give one flag a response")
    # Select before arithmetic: a failed response's reward is often NaN.
    values = xp.where(ok, rewards, 0)
    counted = ok if failures == "exclude" else xp.ones_like(ok)

    # members[i] are the values of the group of response i, along the last axis.
    members = values[..., None, :] if same is None else xp.broadcast_to(values[None, :], same.shape)
    member = counted[..., None, :] if same is None else same & counted[None, :]
    members, member = xp.broadcast_arrays(members, member)
    n = member.sum(-1)
    mean = xp.where(member, members, 0).sum(-1) / xp.maximum(n, 1)
    deviation = xp.where(member, members - mean[..., None], 0)
    high = xp.where(member, members, -xp.inf).max(-1, initial=-xp.inf)
    low = xp.where(member, members, xp.inf).min(-1, initial=xp.inf)
    size = xp.where(member, xp.abs(members), 0).max(-1, initial=0.0)
    spread = (n > 1) & (xp.where(n > 0, high, 0) - xp.where(n > 0, low, 0) > SPREAD_TOLERANCE * xp.maximum(size, 1e-30))

    centred = values - mean
    if kind == "group_mean":
        advantages = centred
    elif kind == "leave_one_out":
        advantages = centred * n / xp.maximum(n - 1, 1)
    else:
        degrees = n - 1 if kind == "group_std_unbiased" else n
        std = xp.sqrt((deviation * deviation).sum(-1) / xp.maximum(degrees, 1))
        advantages = centred / (std + eps)
    return xp.where(spread & ok, advantages, 0).astype(rewards.dtype)


def zero_variance(rewards: Any) -> Any:
    """Bool [N]: groups of ``rewards`` [N, G] whose members all got the same reward, up to rounding."""
    xp: Any = jnp if isinstance(rewards, jax.Array) else np
    rewards = xp.asarray(rewards)
    size = xp.maximum(xp.abs(rewards).max(-1, initial=0.0), 1e-30)
    return rewards.max(-1, initial=-xp.inf) - rewards.min(-1, initial=xp.inf) <= SPREAD_TOLERANCE * size
