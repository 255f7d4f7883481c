"""The forward pass over whole sequences, and ``extend``: the same layers over a KV cache, a chunk at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from sat_jax.checked import Checked, Count
from sat_jax.model import layers
from sat_jax.model.attention import attend, self_attention
from sat_jax.model.config import LayerRun, ModelConfig
from sat_jax.model.experts import MoEImplementation
from sat_jax.model.head import HEAD_COLUMNS, head_matrix
from sat_jax.model.moe import RouterOutput, moe_mlp
from sat_jax.model.parameters import Params
from sat_jax.model.sharding import Placement, cache_sharding, constrain

Remat = Literal["none", "dots", "full"]
_HIDDEN = ("batch", None, None)


@dataclasses.dataclass(frozen=True)
class ForwardOptions(Checked):
    """How to compute, never what. Hashable: a static argument."""

    compute_dtype: str | None = None
    """Of activations and matmul inputs (``bfloat16``: parameters stay as they are, say float32 masters, and are cast
    layer by layer). None: the dtype of the parameters. Norms, router, softmax and logits are float32 always."""
    remat: Remat = "none"
    """What a layer keeps for the backward pass: ``none`` recomputes nothing, ``dots`` keeps matmul outputs, ``full``
    keeps only the layer's input."""
    scan_layers: bool = True
    """Compile one layer per run and loop; False unrolls, which compiles longer and can run a little faster."""
    moe: MoEImplementation = "auto"
    """Implementation of the mixture layers, see ``sat_jax.model.experts``."""
    attention_block: Count = 1024
    """Queries whose scores are in memory at once."""
    placement: Placement | None = None
    """Mesh and rules for activations, or None."""


DEFAULT_OPTIONS = ForwardOptions()


@struct.dataclass
class ForwardOutput:
    """Result of ``forward``."""

    hidden: jax.Array  # [B, T, D] after the final norm, in the compute dtype
    router: RouterOutput | None  # what the mixture layers did; None for a dense model


def forward(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
    options: ForwardOptions = DEFAULT_OPTIONS,
) -> ForwardOutput:
    """Hidden states of whole sequences, causal within each segment.

    Args:
        tokens: int32 ``[B, T]``.
        segment_ids: int32 ``[B, T]``; 0 is padding, on any side; other values are the sequences of a packed row. None:
            every token is one sequence's.
        positions: int32 ``[B, T]`` within the segment. None: counted from each segment's first token.
        routed_experts: int32 ``[B, T, L, K]`` to replay, ``NATIVE_ROUTE`` where there is no record; None: no replay.

    Raises:
        ValueError: ``routed_experts`` of another shape, or for a dense model; rows that a mesh does not divide.
    """
    _check_routes(cfg, tokens, routed_experts)
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    if positions is None:
        positions = _count_positions(segment_ids)
    valid = segment_ids > 0
    angles = layers.rope_angles(positions, cfg.head_dim, cfg.rope_theta)
    x = _embed(params, tokens, options)

    def attention(p: Params, h: jax.Array) -> jax.Array:
        q, k, v = layers.project_qkv(p, cfg, h, angles)
        q = constrain(q, ("batch", None, "heads", None), options.placement)
        return layers.project_out(p, cfg, self_attention(q, k, v, segment_ids, options.attention_block))

    routers = []
    for run in cfg.runs:

        def body(x: jax.Array, inputs: tuple[Params, jax.Array | None], run: LayerRun = run) -> Any:
            p, recorded = inputs
            return _layer(p, cfg, run, x, valid, recorded, options, attention)

        step = _rematerialised(body, options.remat)
        x, router = _run_layers(step, x, (params[run.name], _routes_of(run, routed_experts)), run.length, options)
        routers.append(router)
    hidden = layers.rms_norm(x, params["final_norm"], cfg.rms_norm_eps)
    return ForwardOutput(hidden, _gather_routers(routers))


@struct.dataclass
class KVCache:
    """Keys and values of S slots, each a sequence of up to M positions: ``[n, S, KV, M, h]`` of n layers, one array per
    layer run, or one per layer (n = 1), which a decode step reads where it is."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def max_len(self) -> int:
        """M."""
        return int(self.values[0].shape[3])


def init_cache(
    cfg: ModelConfig,
    n_slots: int,
    max_len: int,
    dtype: DTypeLike,
    placement: Placement | None = None,
    per_layer: bool = False,
) -> KVCache:
    """An empty cache of exactly ``cache_bytes`` bytes; ``per_layer`` for parameters from ``split_layers``."""
    if max_len > cfg.max_position_embeddings:
        raise ValueError(
            f"max_len = {max_len} exceeds the model's max_position_embeddings = {cfg.max_position_embeddings}: "
            "shorten prompts and responses, or use another checkpoint"
        )

    stacks = [1] * cfg.num_hidden_layers if per_layer else [run.length for run in cfg.runs]
    where = None if placement is None else cache_sharding(placement)

    def empty() -> tuple[jax.Array, ...]:
        shapes = [(n, n_slots, cfg.num_key_value_heads, max_len, cfg.head_dim) for n in stacks]
        return tuple(jnp.zeros(shape, dtype, device=where) for shape in shapes)

    return KVCache(empty(), empty())


def cache_bytes(cfg: ModelConfig, n_slots: int, max_len: int, dtype: DTypeLike) -> int:
    """``2 * layers * slots * kv_heads * max_len * head_dim * itemsize``."""
    heads = cfg.num_key_value_heads * cfg.head_dim
    return 2 * cfg.num_hidden_layers * n_slots * max_len * heads * jnp.dtype(dtype).itemsize


@struct.dataclass
class ExtendOutput:
    """Result of ``extend``; meaningless at invalid entries."""

    hidden: jax.Array  # [R, C, D] after the final norm
    cache: KVCache  # with the new keys and values
    routed_experts: jax.Array | None  # int32 [R, C, L, K]; None for a dense model


def extend(
    params: Params,
    cfg: ModelConfig,
    cache: KVCache,
    tokens: jax.Array,
    start: jax.Array,
    n_valid: jax.Array,
    slots: jax.Array | None = None,
    options: ForwardOptions = DEFAULT_OPTIONS,
    selection_noise: jax.Array | None = None,
) -> ExtendOutput:
    """Feeds each slot up to C further tokens: C = 1 is a decode step, C > 1 a prefill chunk.

    Entry ``i < n_valid[r]`` of row ``r`` is the token at position ``start[r] + i`` of its slot and sees positions up to
    its own. Other entries write nothing and are seen by nobody. Positions at and beyond ``start`` that the slot held
    before are overwritten or invisible, so a slot is reused by starting at 0.

    Args:
        params: as they are, or from ``split_layers``.
        tokens: int32 ``[R, C]``.
        start: int32 ``[R]``.
        n_valid: int32 ``[R]``, 0 .. C; ``start + n_valid <= M`` is the caller's to keep.
        slots: int32 ``[R]``, the distinct slots that the rows belong to (rows with ``n_valid`` 0 may repeat one). None:
            row ``r`` is slot ``r``, and R = S.
        selection_noise: float32 ``[R, C, L, E]`` added to the router logits that choose experts, see ``moe_mlp``.
    """
    C, M = tokens.shape[1], cache.max_len
    offset = jnp.arange(C)
    valid = offset < n_valid[:, None]
    positions = start[:, None] + offset
    angles = layers.rope_angles(positions, cfg.head_dim, cfg.rope_theta)
    visible = jnp.arange(M) <= positions[:, :, None]
    target = jnp.where(valid, positions, M)  # out of range: the write is dropped
    rows = (jnp.arange(tokens.shape[0]) if slots is None else slots)[:, None]
    x = _embed(params, tokens, options)

    stacks = zip(cache.keys, cache.values, strict=True)
    keys, values, routers = [], [], []
    for run in cfg.runs:

        def body(
            carry: tuple[jax.Array, jax.Array, jax.Array],
            inputs: tuple[Params, jax.Array, jax.Array | None],
            run: LayerRun = run,
        ) -> Any:
            (x, keys, values), (p, layer, noise) = carry, inputs

            def attention(p: Params, h: jax.Array) -> jax.Array:
                nonlocal keys, values
                q, k, v = layers.project_qkv(p, cfg, h, angles)
                keys = keys.at[layer, rows, :, target].set(k.astype(keys.dtype), mode="drop")
                values = values.at[layer, rows, :, target].set(v.astype(values.dtype), mode="drop")
                mine = (layer,) if slots is None else (layer, slots)
                past_k, past_v = keys[mine].astype(q.dtype), values[mine].astype(q.dtype)
                return layers.project_out(p, cfg, attend(q, past_k, past_v, visible))

            x, router = _layer(p, cfg, run, x, valid, None, options, attention, noise)
            return (x, keys, values), None if router is None else router.indices

        for length, inputs in _stacks_of(run, params[run.name], _routes_of(run, selection_noise)):
            (x, *new), indices = _run_layers(body, (x, *next(stacks)), inputs, length, options)
            keys.append(new[0])
            values.append(new[1])
            if indices is not None:
                routers.append(indices)
    hidden = layers.rms_norm(x, params["final_norm"], cfg.rms_norm_eps)
    routes = jnp.moveaxis(jnp.concatenate(routers), 0, 2) if routers else None
    return ExtendOutput(hidden, KVCache(tuple(keys), tuple(values)), routes)


def split_layers(params: Params, cfg: ModelConfig) -> Params:
    """``params`` in the form that decodes fastest: every run a tuple of its layers, and the head the other way round.

    ``extend`` then unrolls, and reads each layer's weights where they are: out of a stack, a loop over decode steps
    would copy all of them once a token.
    """
    layers_of = {
        run.name: tuple(jax.tree.map(lambda x: x[i], params[run.name]) for i in range(run.length))  # noqa: B023 -- at once
        for run in cfg.runs
    }
    rest = {name: leaf for name, leaf in params.items() if name != "head"}
    return {**rest, **layers_of, HEAD_COLUMNS: head_matrix(params, cfg).T}


def _stacks_of(run: LayerRun, parameters: Any, noise: jax.Array | None) -> list[tuple[int, Any]]:
    """Length and inputs of what runs over one stack of the cache: the whole run, or, where split, each layer alone."""
    if not isinstance(parameters, tuple):
        return [(run.length, (parameters, jnp.arange(run.length), noise))]
    first = jnp.zeros(1, jnp.int32)
    noises = [None if noise is None else noise[i : i + 1] for i in range(run.length)]
    return [(1, ((p,), first, n)) for p, n in zip(parameters, noises, strict=True)]


def _embed(params: Params, tokens: jax.Array, options: ForwardOptions) -> jax.Array:
    table = constrain(params["embed"], ("vocab", None), options.placement)  # rows are looked up whole
    x = jnp.take(table, tokens, axis=0, mode="clip")
    if options.compute_dtype is not None:
        x = x.astype(options.compute_dtype)
    return constrain(x, _HIDDEN, options.placement)


def _layer(
    p: Params,
    cfg: ModelConfig,
    run: LayerRun,
    x: jax.Array,
    valid: jax.Array,
    recorded: jax.Array | None,
    options: ForwardOptions,
    attention: Callable[[Params, jax.Array], jax.Array],
    selection_noise: jax.Array | None = None,
) -> tuple[jax.Array, RouterOutput | None]:
    """One pre-norm layer; ``attention`` is the only thing in which training and decoding differ."""
    p = jax.tree.map(lambda leaf: leaf.astype(x.dtype), p)
    with jax.named_scope("attention"):
        x = x + attention(p["attention"], layers.rms_norm(x, p["attention_norm"], cfg.rms_norm_eps))
    router = None
    with jax.named_scope("mlp"):
        h = layers.rms_norm(x, p["mlp_norm"], cfg.rms_norm_eps)
        if run.moe:
            y, router = moe_mlp(p["mlp"], cfg, h, valid, recorded, options.moe, options.placement, selection_noise)
        else:
            y = layers.dense_mlp(p["mlp"], cfg, h)
    return constrain(x + y, _HIDDEN, options.placement), router


def _run_layers(body: Callable[..., Any], carry: Any, inputs: Any, length: int, options: ForwardOptions) -> Any:
    parameters, *rest = inputs
    split = isinstance(parameters, tuple)
    if options.scan_layers and length > 1 and not split:
        return jax.lax.scan(body, carry, inputs)
    outputs = []
    for i in range(length):
        sliced = jax.tree.map(lambda leaf: leaf[i], rest if split else inputs)  # noqa: B023 -- called at once
        carry, output = body(carry, (parameters[i], *sliced) if split else sliced)
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _rematerialised(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "dots" else policies.nothing_saveable
    return jax.checkpoint(body, policy=policy)


def _count_positions(segment_ids: jax.Array) -> jax.Array:
    column = jnp.arange(segment_ids.shape[1])
    first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return column - jax.lax.cummax(jnp.where(first, column, 0), axis=1)


def _routes_of(run: LayerRun, routed_experts: jax.Array | None) -> jax.Array | None:
    """``[B, T, L, ...]`` -> this run's layers, layer axis first."""
    if routed_experts is None or not run.moe:
        return None
    return jnp.moveaxis(routed_experts[:, :, run.first_moe : run.first_moe + run.length], 2, 0)


def _check_routes(cfg: ModelConfig, tokens: jax.Array, routed_experts: jax.Array | None) -> None:
    if routed_experts is None:
        return
    if not cfg.moe_layers:
        raise ValueError("routed_experts were given for a dense model: leave them out, there is nothing to replay")
    expected = (*tokens.shape, len(cfg.moe_layers), cfg.num_experts_per_tok)
    if routed_experts.shape != expected:
        raise ValueError(
            f"routed_experts has shape {routed_experts.shape}, expected [B, T, L, K] = {expected}: they "
            "come from another model, or the axes are in another order (see data.records.check_routes)"
        )


def _gather_routers(routers: list[RouterOutput | None]) -> RouterOutput | None:
    """Per-run statistics with a leading layer axis -> one, layer axis where ``RouterOutput`` says."""
    found = [r for r in routers if r is not None]
    if not found:
        return None
    joined: RouterOutput = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)
    return joined.replace(  # type: ignore[attr-defined]  # flax.struct adds replace at run time
        indices=jnp.moveaxis(joined.indices, 0, 2), logits=jnp.moveaxis(joined.logits, 0, 2), tokens=joined.tokens[0]
    )
