"""The compiled half of the in-process engine, in fixed shapes: prefill a chunk, copy a prefix, decode a few tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax import model
from sat_jax.rollout.local.sampling import RowParams, sample, sample_recorded, uniforms


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Everything that the programs are compiled for."""

    cfg: model.ModelConfig
    slots: int  # S, responses decoded side by side
    max_len: int  # M, positions of a slot: prompt and response together
    decode_steps: int  # most tokens of one dispatch
    prefill_rows: int  # W, prompts prefilled side by side
    prefill_chunks: tuple[int, ...]  # widths C, ascending; how a prompt is cut depends on its own length alone
    eos_ids: tuple[int, ...]  # tokens that end a response
    selection_noise: float
    """Standard deviation of the noise on router logits when experts are *selected*; the gate weights are those of the
    unperturbed logits. A laboratory stand-in for kernels that route differently."""
    split_layers: bool  # weights layer by layer rather than stacked: faster decoding, longer compilation
    options: model.ForwardOptions
    support: int = 0  # most tokens of a recorded support; 0: none is recorded


@struct.dataclass
class SlotState:
    """What a decode dispatch reads of each slot, all [S]."""

    token: jax.Array  # int32; fed next, at ``position``
    position: jax.Array  # int32
    generated: jax.Array  # int32; response tokens so far
    budget: jax.Array  # int32; most response tokens
    active: jax.Array  # bool; False: the slot is empty or has ended, and does nothing
    ignore_eos: jax.Array  # bool
    rows: RowParams


@struct.dataclass
class Decoded:
    """What a decode dispatch made."""

    tokens: jax.Array  # int32 [N, S]; a slot's first ``emitted`` entries count
    log_probs: jax.Array  # float32 [N, S]
    routes: jax.Array | None  # int16 [N, S, L, K] of the tokens that were *fed*; None for dense models
    support: jax.Array | None  # int32 [N, S, shape.support]; None where none is recorded
    emitted: jax.Array  # int32 [S]
    active: jax.Array  # bool [S]; the slots that go on


class Programs:
    """Jitted functions for one ``EngineShape``; ``compilations`` counts how often each was traced.

    ``own(params, dtype)`` copies the learner's weights into the form that the others read.
    """

    def __init__(self, shape: EngineShape) -> None:
        self.compilations: Counter[str] = Counter()
        placement = shape.options.placement
        # The cache goes in and out the same way, or the second call would be another program; the rest is for the host.
        cache = None if placement is None else model.cache_sharding(placement)
        places = None if placement is None else (cache, placement.sharding(()))
        self.decode: Callable[..., tuple[model.KVCache, Decoded]] = jax.jit(
            self._counted("decode", functools.partial(_decode, shape)), donate_argnums=1, out_shardings=places
        )
        self.prefill: Callable[..., tuple[model.KVCache, jax.Array | None]] = jax.jit(
            self._counted("prefill", functools.partial(_prefill, shape)), donate_argnums=1, out_shardings=places
        )
        self.own: Callable[[model.Params, str], model.Params] = jax.jit(
            functools.partial(_own, shape), static_argnums=1
        )
        self.copy_slots: Callable[..., model.KVCache] = jax.jit(
            self._counted("copy", _copy_slots), donate_argnums=0, out_shardings=cache
        )

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any) -> Any:
            self.compilations[name] += 1  # runs while tracing only, which is once for every compilation
            return function(*args)

        traced.__name__ = name
        return traced


@functools.lru_cache(maxsize=8)
def programs_for(shape: EngineShape) -> Programs:
    """Engines of the same shape share what is compiled."""
    return Programs(shape)


def _own(shape: EngineShape, params: model.Params, dtype: str) -> model.Params:
    """A copy: the learner donates, and so deletes, what it publishes."""
    copies = jax.tree.map(lambda x: jnp.copy(x).astype(dtype), params)
    placement = shape.options.placement
    if placement is not None:
        where = model.param_shardings(shape.cfg, placement.mesh, placement.rules)
        copies = jax.lax.with_sharding_constraint(copies, where)
    return model.split_layers(copies, shape.cfg) if shape.split_layers else copies


def _prefill(
    shape: EngineShape,
    params: model.Params,
    cache: model.KVCache,
    tokens: jax.Array,
    start: jax.Array,
    n_valid: jax.Array,
    slots: jax.Array,
    noise_seed: jax.Array,
) -> tuple[model.KVCache, jax.Array | None]:
    """Feeds ``tokens [W, C]`` to ``slots [W]``; returns the cache and routes int16 [W, C, L, K]."""
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    noise = _selection_noise(shape, jnp.broadcast_to(noise_seed[:, None], positions.shape), positions)
    out = model.extend(params, shape.cfg, cache, tokens, start, n_valid, slots, shape.options, **noise)
    return out.cache, None if out.routed_experts is None else out.routed_experts.astype(jnp.int16)


def _copy_slots(cache: model.KVCache, source: jax.Array, target: jax.Array, count: jax.Array) -> model.KVCache:
    """Slot ``target[i]`` becomes a copy of slot ``source[i]``, both int32 [S], for ``i < count``: in place, one at a
    time, for a gather would hold a second cache."""

    def copy(i: jax.Array, cache: model.KVCache) -> model.KVCache:
        def one(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(
                x, jax.lax.dynamic_index_in_dim(x, source[i], axis=1, keepdims=False), target[i], axis=1
            )

        return jax.tree.map(one, cache)

    return jax.lax.fori_loop(0, count, copy, cache)


def _decode(
    shape: EngineShape, params: model.Params, cache: model.KVCache, slots: SlotState
) -> tuple[model.KVCache, Decoded]:
    """Up to ``decode_steps`` tokens for every active slot; ends early when no slot is active any more."""
    cfg, N, S = shape.cfg, shape.decode_steps, shape.slots
    sparse = len(cfg.moe_layers)
    eos = jnp.array(shape.eos_ids, jnp.int32)
    uniform = uniforms(slots.rows.seed, slots.generated + jnp.arange(N)[:, None])
    start = Decoded(
        tokens=jnp.zeros((N, S), jnp.int32),
        log_probs=jnp.zeros((N, S), jnp.float32),
        routes=jnp.zeros((N, S, sparse, cfg.num_experts_per_tok), jnp.int16) if sparse else None,
        support=jnp.zeros((N, S, shape.support), jnp.int32) if shape.support else None,
        emitted=jnp.zeros(S, jnp.int32),
        active=slots.active,
    )

    def going(carry: tuple[jax.Array, jax.Array, model.KVCache, Decoded]) -> jax.Array:
        i, _, _, done = carry
        return (i < N) & jnp.any(done.active)

    def step(carry: tuple[jax.Array, jax.Array, model.KVCache, Decoded]) -> Any:
        i, token, cache, done = carry
        position = slots.position + i
        noise = _selection_noise(shape, slots.rows.seed[:, None], position[:, None])
        valid = done.active.astype(jnp.int32)
        out = model.extend(params, cfg, cache, token[:, None], position, valid, None, shape.options, **noise)
        logits = model.logits(params, cfg, out.hidden[:, 0])
        if done.support is None:
            token, log_prob = sample(logits, slots.rows, uniform[i])
            drawn_from = None
        else:
            token, log_prob, support = sample_recorded(logits, slots.rows, uniform[i], shape.support)
            drawn_from = done.support.at[i].set(support)
        fed = None if out.routed_experts is None else out.routed_experts[:, 0].astype(jnp.int16)
        stopped = jnp.any(token[:, None] == eos, axis=-1) & ~slots.ignore_eos
        ended = stopped | (slots.generated + i + 1 >= slots.budget)
        done = Decoded(
            tokens=done.tokens.at[i].set(token),
            log_probs=done.log_probs.at[i].set(log_prob),
            routes=None if done.routes is None or fed is None else done.routes.at[i].set(fed),
            support=drawn_from,
            emitted=done.emitted + valid,
            active=done.active & ~ended,
        )
        return i + 1, token, out.cache, done

    _, _, cache, done = jax.lax.while_loop(going, step, (jnp.int32(0), slots.token, cache, start))
    return cache, done


def _selection_noise(shape: EngineShape, seed: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
    """Keyword arguments of ``extend``: noise [..., L, E] that depends on seed and position alone; none where it is
    off."""
    if shape.selection_noise == 0.0:
        return {}
    size = (len(shape.cfg.moe_layers), shape.cfg.num_experts)
    base = jax.random.key(1)  # key(0) is the sampler's

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.fold_in(base, seed), position), size)

    noise = jax.vmap(jax.vmap(one))(seed, position)
    return {"selection_noise": shape.selection_noise * noise}
