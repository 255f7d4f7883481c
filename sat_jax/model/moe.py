"""Mixture of experts: the router, routing replay, and what they report. ``experts.py`` has the MLPs behind them.

Tokens that are padding are neither dispatched nor counted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.model.config import ModelConfig
from sat_jax.model.experts import MoEImplementation, apply_experts
from sat_jax.model.parameters import Params
from sat_jax.model.sharding import Placement
from sat_jax.types import NATIVE_ROUTE


@struct.dataclass
class RouterOutput:
    """What the mixture layers did, as sums, so that micro-batches and devices add up before anyone divides."""

    indices: jax.Array  # int32 [B, T, L, K], the experts used; meaningless at padding
    logits: jax.Array  # float32 [B, T, L, E]; the router's own, before the softmax
    load: jax.Array  # float32 [L, E]; (token, slot) assignments to each expert, padding left out
    probability: jax.Array  # float32 [L, E]; sum of the router's softmax over tokens
    log_z_squared: jax.Array  # float32 [L]; sum of logsumexp(logits)**2 over tokens
    tokens: jax.Array  # float32 scalar; tokens that are not padding
    recorded: jax.Array  # float32 [L]; tokens with recorded experts
    agreed: jax.Array  # float32 [L]; those whose recorded set is what the router would have chosen itself


def load_balancing_loss(
    router: RouterOutput, load: jax.Array | None = None, tokens: jax.Array | None = None
) -> jax.Array:
    """``E * sum_e f_e * P_e``: scalar, K at perfect balance.

    ``f_e`` is the mean number of assignments to expert ``e`` and ``P_e`` its mean probability, both over tokens and
    layers together (transformers' ``load_balancing_loss_func``; Switch Transformer, arXiv:2101.03961, (4)-(6)). No
    gradient flows through ``f``. With ``load [L, E]`` and ``tokens`` of the whole batch, the losses of micro-batches
    add up exactly to the loss of the whole batch.
    """
    load = jax.lax.stop_gradient(router.load if load is None else load)
    total = jnp.maximum(router.tokens if tokens is None else tokens, 1) * load.shape[0]
    return load.shape[1] * jnp.sum(load.sum(0) / total * (router.probability.sum(0) / total))


def router_z_loss(router: RouterOutput, tokens: jax.Array | None = None) -> jax.Array:
    """``mean(logsumexp(logits)**2)`` over tokens and layers: scalar (ST-MoE, arXiv:2202.08906, (5)). ``tokens``: the
    count of the whole batch, where ``router`` is a micro-batch of it."""
    total = jnp.maximum(router.tokens if tokens is None else tokens, 1) * router.log_z_squared.shape[0]
    return router.log_z_squared.sum() / total


def route(
    logits: jax.Array, k: int, normalize: bool, recorded: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Experts and gate weights of every token.

    Natively, the ``k`` largest logits. Where ``recorded`` holds experts, exactly those (R3, eq. (40)): membership is
    replayed, the weights come from the *current* logits, ``g_e = I_e exp(z_e) / sum_e' I_e' exp(z_e')``, and gradients
    reach the router through ``z``. With ``normalize`` False the weights are the full softmax gathered at the experts.

    ``logits`` are float32 ``[..., E]``; ``recorded`` is int32 ``[..., k]`` with ``NATIVE_ROUTE`` rows where there is no
    record, or None. Rows are complete: that is checked on the host by ``data.records.check_routes``, since a gather
    clamps or wraps a wrong index silently.

    Returns:
        indices int32 ``[..., k]``, weights float32 ``[..., k]``, and bool ``[...]`` twice: recorded, and recorded with
        the set that the router would have chosen.
    """
    _, native = jax.lax.top_k(jax.lax.stop_gradient(logits), k)
    if recorded is None:
        indices, has_record, agrees = native, jnp.zeros(logits.shape[:-1], bool), jnp.zeros(logits.shape[:-1], bool)
    else:
        has_record = recorded[..., 0] != NATIVE_ROUTE
        indices = jnp.where(has_record[..., None], recorded, native)
        agrees = has_record & jnp.all(jnp.any(indices[..., :, None] == native[..., None, :], axis=-1), axis=-1)
    # A one-hot selection rather than a gather: its gradient is a broadcast, not a scatter.
    chosen = indices[..., None] == jnp.arange(logits.shape[-1])
    selected = jnp.sum(jnp.where(chosen, logits[..., None, :], 0.0), axis=-1)
    if normalize:
        weights = jax.nn.softmax(selected, axis=-1)
    else:
        weights = jnp.exp(selected - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return indices, weights, has_record, agrees


def moe_mlp(
    p: Params,
    cfg: ModelConfig,
    x: jax.Array,
    valid: jax.Array,
    recorded: jax.Array | None,
    implementation: MoEImplementation,
    placement: Placement | None,
    selection_noise: jax.Array | None = None,
) -> tuple[jax.Array, RouterOutput]:
    """One mixture layer on ``x [B, T, D]``; the second result describes it alone (no ``L`` axis).

    Args:
        p: ``router [D, E]``, ``gate`` and ``up [E, D, F]``, ``down [E, F, D]``.
        valid: bool ``[B, T]``; padding yields zeros and is not counted.
        recorded: int32 ``[B, T, K]`` or None, see ``route``.
        selection_noise: float32 ``[B, T, E]`` added to the logits that *choose* the experts; their weights come from
            the unperturbed logits. For engines that are to route wrongly on purpose.
    """
    E, K = cfg.num_experts, cfg.num_experts_per_tok
    logits = jnp.einsum("btd,de->bte", x, p["router"], preferred_element_type=jnp.float32)
    if selection_noise is not None:
        _, recorded = jax.lax.top_k(logits + selection_noise, K)
    indices, weights, has_record, agrees = route(logits, K, cfg.norm_topk_prob, recorded)
    counted = valid.astype(jnp.float32)
    chosen = jnp.sum(indices[..., None] == jnp.arange(E), axis=-2, dtype=jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    statistics = RouterOutput(
        indices=indices,
        logits=logits,
        load=jnp.einsum("bt,bte->e", counted, chosen),
        probability=jnp.einsum("bt,bte->e", counted, jnp.exp(logits - log_z[..., None])),
        log_z_squared=jnp.sum(jnp.where(valid, jnp.square(log_z), 0.0)),
        tokens=counted.sum(),
        recorded=jnp.sum(has_record & valid, dtype=jnp.float32),
        agreed=jnp.sum(agrees & valid, dtype=jnp.float32),
    )
    dispatched = jnp.where(valid[..., None], indices, E)
    weights = jnp.where(valid[..., None], weights, 0.0).astype(x.dtype)
    y = apply_experts(x, dispatched, weights, (p["gate"], p["up"], p["down"]), implementation, placement)
    return y, statistics
