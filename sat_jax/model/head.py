"""From hidden states to log-probabilities, never holding ``[B, T, V]``.

``token_log_probs`` is the one place where the shift by one happens: training, reference, proximal and evaluation passes
all call it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Params
from sat_jax.model.sharding import Placement, constrain
from sat_jax.types import MIN_TEMPERATURE, NO_TOKEN

HEAD_COLUMNS = "head_columns"
"""Key of the head as ``[D, V]``, in parameters made for decoding (``split_layers``)."""


@struct.dataclass
class TokenLogProbs:
    """Token-aligned, float32 ``[B, T]``, nats; entry 0 is 0."""

    log_probs: jax.Array
    """Entry ``t`` is ``log p(tokens[t] | tokens[<t])`` at the temperature asked for."""
    entropy: jax.Array | None
    """Of the distribution that ``tokens[t]`` was drawn from; None where not asked for."""
    outside: jax.Array | None = None
    """Probability of the tokens outside the support, before they are taken out; no gradient. None without a support."""


def head_matrix(params: Params, cfg: ModelConfig) -> jax.Array:
    """``[V, D]``: the head, which is the embedding where tied."""
    matrix: jax.Array = params["embed"] if cfg.tie_word_embeddings else params["head"]
    return matrix


def logits(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Float32 ``[..., V]`` of ``hidden [..., D]``. For single positions: decoding, looking."""
    if HEAD_COLUMNS in params:
        return jnp.einsum("...d,dv->...v", hidden, params[HEAD_COLUMNS], preferred_element_type=jnp.float32)
    return project(hidden, head_matrix(params, cfg))


def token_log_probs(
    params: Params,
    cfg: ModelConfig,
    hidden: jax.Array,
    tokens: jax.Array,
    temperature: float | jax.Array = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = True,
    placement: Placement | None = None,
    active: jax.Array | None = None,
    support: jax.Array | None = None,
) -> TokenLogProbs:
    """Log-probability of every token given those before it, differentiable in ``params`` and ``hidden``.

    ``log_probs[b, t] = log_softmax(logits(hidden[b, t - 1]) / temperature)[tokens[b, t]]``. In packed rows the first
    token of a segment gets the log-prob under the segment before it: mask it, as ``Batch.loss_mask`` does.

    Args:
        hidden: ``[B, T, D]``, after the final norm.
        tokens: int ``[B, T]``.
        temperature: what the sampler divided its logits by (eq. (1) compares the two policies at the same temperature);
            a constant, no gradient flows to it.
        chunk_size: most tokens whose logits are in memory at once: ``chunk_size * V * 4`` bytes over the whole mesh.
            The backward pass makes them again.
        with_entropy: also return ``-sum p log p``.
        placement: mesh and rules, or None; then the head is gathered over ``fsdp`` once and not in every chunk.
        active: bool ``[B, T]``, aligned with ``tokens``: the entries that are wanted. The others are 0, pass no
            gradient and cost nothing, whatever their hidden states hold. None: all of them.
        support: int ``[B, T, S]``, aligned with ``tokens``: where it names tokens, all other logits are -inf, eq. (50);
            where it is ``NO_TOKEN`` throughout, the whole vocabulary counts. None: everywhere.
    """
    if isinstance(temperature, int | float) and not temperature >= MIN_TEMPERATURE:
        raise ValueError(
            f"temperature = {temperature}: log-probs need at least {MIN_TEMPERATURE}; those of greedy decoding are "
            "taken at temperature 1"
        )
    B, T, _ = hidden.shape
    hidden = constrain(hidden, ("batch", None, None), placement)
    matrix = constrain(head_matrix(params, cfg), ("vocab", None), placement)
    groups = 1 if placement is None else placement.ways("batch")
    wanted = jnp.broadcast_to(jnp.arange(T) > 0, (B, T))
    wanted = wanted if active is None else wanted & active
    most = B // groups * max(1, T - 1)
    width = max(1, min(chunk_size // groups, most if active is None else _fine(most)))
    chunks = -(-most // width)

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(groups, B // groups * T, *x.shape[2:])

    made = _chunked(
        grouped(hidden),
        matrix,
        _Targets(grouped(tokens), None if support is None else grouped(support)),
        jax.lax.stop_gradient(jnp.float32(temperature)),
        _plan(grouped(wanted), chunks, width),
        _Static(width, chunks if active is None else None, with_entropy, placement),
    )
    return jax.tree.map(lambda x: x.reshape(B, T), made)


def project(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    """Float32 logits ``[..., V]`` of ``hidden [..., D]`` under ``matrix [V, D]``."""
    return jnp.einsum("...d,vd->...v", hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32)


# ---------------------------------------------------------------- in chunks
#
# The rows that one device holds (all of them without a mesh) are one group of N = rows * T positions, in which the
# wanted positions come first and are walked through in chunks: padding and prompts cost nothing, one long row makes
# nobody wait, and no position leaves the device where a mesh has put it. G groups side by side.


class _Targets(NamedTuple):
    """What the log-probs are of."""

    tokens: jax.Array  # int32 [G, N]
    support: jax.Array | None  # int32 [G, N, S]; what each was drawn from


class _Plan(NamedTuple):
    """Which position is computed where."""

    order: jax.Array  # int32 [G, chunks * width]; positions, wanted ones first, in their order
    slot: jax.Array  # int32 [G, N]; where in ``order`` a wanted position stands
    wanted: jax.Array  # bool [G, N]
    total: jax.Array  # int32 [G]; wanted positions


class _Static(NamedTuple):
    """What is known at trace time."""

    width: int
    trips: int | None  # None: it depends on how many positions are wanted
    with_entropy: bool
    placement: Placement | None


_PARTS, _NARROWEST = 8, 64
"""Chunks into which a small batch is cut at least, so that rounding up to whole ones wastes little, and the width below
which a matmul loses speed."""


def _fine(positions: int) -> int:
    return -(-positions // (_PARTS * _NARROWEST)) * _NARROWEST


def _plan(wanted: jax.Array, chunks: int, width: int) -> _Plan:
    order = jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32)
    order = jnp.pad(order, ((0, 0), (0, max(0, chunks * width - order.shape[1]))))[:, : chunks * width]
    rank = jnp.cumsum(wanted, axis=1, dtype=jnp.int32)
    return _Plan(order, jnp.maximum(rank - 1, 0), wanted, rank[:, -1])


def _trips(plan: _Plan, static: _Static) -> int | jax.Array:
    return -(-jnp.max(plan.total) // static.width) if static.trips is None else static.trips


_take = jax.vmap(lambda x, index: x.at[index].get(mode="promise_in_bounds"))
"""``x [G, N, ...]``, ``index [G, C]`` -> ``[G, C, ...]``."""


class _Chunk(NamedTuple):
    """One chunk of all groups, one behind the other."""

    at: jax.Array  # [G, width]; positions
    before: jax.Array  # [G * width, D]; hidden states before them, 0 where nothing is wanted
    token: jax.Array  # [G * width]
    support: jax.Array | None  # [G * width, S]


def _chunk(i: jax.Array, hidden: jax.Array, targets: _Targets, plan: _Plan, width: int) -> _Chunk:
    at = jax.lax.dynamic_slice_in_dim(plan.order, i * width, width, axis=1)
    filled = i * width + jnp.arange(width) < plan.total[:, None]
    before = jnp.where(filled[..., None], _take(hidden, jnp.maximum(at - 1, 0)), 0)
    token, support = jax.tree.map(lambda x: _take(x, at).reshape(at.size, *x.shape[2:]), targets)
    return _Chunk(at, before.reshape(at.size, -1), token, support)


_NEVER = -1e30
"""A logit for -inf: its probability is exactly 0, and 0 times it is 0."""


def _narrowed(scaled: jax.Array, support: jax.Array) -> jax.Array:
    """``scaled [C, V]`` outside of ``support [C, S]`` set to ``_NEVER``, in rows that have one."""

    def members(ids: jax.Array) -> jax.Array:
        beyond = jnp.where(ids == NO_TOKEN, scaled.shape[1], ids)  # out of bounds: dropped
        return jnp.zeros(scaled.shape[1], bool).at[beyond].set(True, mode="drop")

    everything = jnp.all(support == NO_TOKEN, axis=-1, keepdims=True)
    return jnp.where(jax.vmap(members)(support) | everything, scaled, _NEVER)


def _put_back(plan: _Plan, x: jax.Array) -> jax.Array:
    """``x [G, chunks * width, ...]`` in chunks' order -> ``[G, N, ...]``, 0 where nothing is wanted."""
    return jnp.where(plan.wanted.reshape(plan.wanted.shape + (1,) * (x.ndim - 2)), _take(x, plan.slot), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunked(
    hidden: jax.Array, matrix: jax.Array, targets: _Targets, temperature: jax.Array, plan: _Plan, static: _Static
) -> TokenLogProbs:
    """``hidden [G, N, D]``, ``matrix [V, D]`` -> everything about the wanted positions, ``[G, N]``."""
    return _chunked_forward(hidden, matrix, targets, temperature, plan, static)[0]


def _chunked_forward(
    hidden: jax.Array, matrix: jax.Array, targets: _Targets, temperature: jax.Array, plan: _Plan, static: _Static
) -> tuple[TokenLogProbs, Any]:
    def chunk(i: jax.Array, made: dict[str, jax.Array]) -> dict[str, jax.Array]:
        at, before, token, support = _chunk(i, hidden, targets, plan, static.width)
        scaled, new = project(before, matrix) / temperature, {}
        if support is not None:
            everything = jax.nn.logsumexp(scaled, axis=-1)
            scaled = _narrowed(scaled, support)
        new["log_z"] = log_z = jax.nn.logsumexp(scaled, axis=-1)
        if support is not None:
            new["outside"] = jnp.maximum(-jnp.expm1(log_z - everything), 0)
        new["log_probs"] = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0] - log_z
        if static.with_entropy:
            log_p = scaled - log_z[:, None]  # summing p log p cancels less than log_z - sum p z
            new["entropy"] = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * static.width, axis=1)
        return {name: put(made[name], value.reshape(at.shape)) for name, value in new.items()}

    wanted = {"log_z": True, "log_probs": True, "entropy": static.with_entropy, "outside": targets.support is not None}
    empty = constrain(jnp.zeros(plan.order.shape, jnp.float32), ("batch", None), static.placement)
    made = {name: empty for name, is_wanted in wanted.items() if is_wanted}
    made = jax.lax.fori_loop(0, _trips(plan, static), chunk, made)
    back = {name: _put_back(plan, x) for name, x in made.items() if name != "log_z"}
    outputs = TokenLogProbs(back["log_probs"], back.get("entropy"), back.get("outside"))
    return outputs, (hidden, matrix, targets, temperature, plan, made.get("entropy"), made["log_z"])


def _chunked_backward(static: _Static, saved: Any, g: TokenLogProbs) -> tuple[Any, ...]:
    hidden, matrix, targets, temperature, plan, entropy, log_z = saved
    g_log_probs = jnp.where(plan.wanted, g.log_probs, 0)
    g_entropy = None if g.entropy is None else jnp.where(plan.wanted, g.entropy, 0)
    weight = matrix.astype(hidden.dtype)
    (G, _, D), width = hidden.shape, static.width

    def chunk(i: jax.Array, grown: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_matrix, d_before = grown
        at, before, token, support = _chunk(i, hidden, targets, plan, width)

        def here(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1).reshape(-1, 1)

        g_log_prob = _take(g_log_probs, at).reshape(-1, 1)
        scaled = project(before, matrix) / temperature
        log_p = (scaled if support is None else _narrowed(scaled, support)) - here(log_z)
        p = jnp.exp(log_p)
        one_hot = token[:, None] == jnp.arange(log_p.shape[-1])
        # d log p_target / d z = 1[target] - p;   d H / d z = -p (log p + H)
        d_scaled = jnp.where(one_hot, g_log_prob, 0) - p * g_log_prob
        if g_entropy is not None:
            d_scaled -= p * (log_p + here(entropy)) * _take(g_entropy, at).reshape(-1, 1)
        d_logits = (d_scaled / temperature).astype(before.dtype)
        d_chunk = jnp.einsum("cv,vd->cd", d_logits, weight).reshape(G, width, D)
        # [D, V]: this way round no [.., V] array is transposed for the matmul. A sum for each group: devices that share
        # out the rows add theirs up once, behind the loop.
        pair = before.reshape(G, width, D), d_logits.reshape(G, width, -1)
        d_matrix += jnp.einsum("gcd,gcv->gdv", *pair, preferred_element_type=jnp.float32)
        return d_matrix, jax.lax.dynamic_update_slice_in_dim(d_before, d_chunk, i * width, axis=1)

    zeros = (
        constrain(jnp.zeros((G, D, matrix.shape[0]), jnp.float32), ("batch", None, "vocab"), static.placement),
        constrain(jnp.zeros((*plan.order.shape, D), hidden.dtype), ("batch", None, None), static.placement),
    )
    d_matrix, d_before = jax.lax.fori_loop(0, _trips(plan, static), chunk, zeros)
    # Position t reads the hidden state of position t - 1; a row's first token reads nothing and has 0 here.
    d_hidden = jnp.pad(_put_back(plan, d_before)[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return d_hidden, jnp.sum(d_matrix, axis=0).T.astype(matrix.dtype), None, jnp.zeros_like(temperature), None


_chunked.defvjp(_chunked_forward, _chunked_backward)
