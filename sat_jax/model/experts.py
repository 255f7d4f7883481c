"""The experts of a mixture layer: a dropless grouped MLP, chosen per platform.

Implementations of the same sum ``y[n] = sum_k weight[n, k] * expert[index[n, k]](x[n])``:

* ``ragged``: rows sorted by expert, ``jax.lax.ragged_dot``. Accelerators.
* ``blocked``: rows sorted by expert, each expert's filled up to whole blocks, a batched matmul over a few blocks at a
  time. CPU, where ``ragged_dot`` is some thirty times slower than a matmul.
* ``slots``: every expert has room for a few tokens, and is given those that chose it. Few tokens (decoding), where
  reading the weights is what costs.

No token is ever dropped, whatever the load.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sat_jax.model.sharding import Placement

MoEImplementation = Literal["auto", "slots", "blocked", "ragged"]
Weights = tuple[jax.Array, jax.Array, jax.Array]


def choose_implementation(tokens: int, experts: int, k: int, platform: str) -> MoEImplementation:
    """What ``auto`` means for this many tokens: measured on two CPU cores; accelerators have a good ``ragged_dot``."""
    if platform != "cpu":
        return "ragged"
    return "slots" if experts // 2 < tokens * k <= 64 * experts else "blocked"


def apply_experts(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    experts: Weights,
    implementation: MoEImplementation,
    placement: Placement | None,
) -> jax.Array:
    """``[B, T, D]``; ``indices`` of padding are E."""
    (B, T, D), (E, K) = x.shape, (experts[0].shape[0], indices.shape[-1])
    platform = jax.default_backend() if placement is None else placement.mesh.devices.flat[0].platform
    if implementation == "auto":
        implementation = choose_implementation(B * T, E, K, platform)
    grouped = _slots if implementation == "slots" else functools.partial(_grouped, ragged=implementation == "ragged")
    if placement is None or placement.mesh.size == 1:
        return grouped(x.reshape(B * T, D), indices.reshape(-1, K), weights.reshape(-1, K), experts).reshape(x.shape)

    mesh = placement.mesh
    batch, expert, column = (placement.mesh_axes(a) for a in ("batch", "expert", "expert_mlp"))
    exchanged = tuple(a for a in expert if a in batch)

    def local(x: jax.Array, indices: jax.Array, weights: jax.Array, *experts: jax.Array) -> jax.Array:
        # Each device serves its own experts for the tokens of its whole expert group, then the group adds up.
        for axis in exchanged:
            x, indices, weights = (jax.lax.all_gather(a, axis, tiled=True) for a in (x, indices, weights))
        first = jax.lax.axis_index(expert) * experts[0].shape[0] if expert else 0
        mine = (indices >= first) & (indices < first + experts[0].shape[0])
        indices = jnp.where(mine, indices - first, experts[0].shape[0])
        weights = jnp.where(mine, weights, 0)
        rows = x.shape[0] * T
        y = grouped(
            x.reshape(rows, D), indices.reshape(rows, K), weights.reshape(rows, K), (experts[0], experts[1], experts[2])
        )
        y = y.reshape(x.shape)
        for axis in reversed(exchanged):
            y = jax.lax.psum_scatter(y, axis, tiled=True)
        return jax.lax.psum(y, column) if column else y  # last: by now each device holds its own rows only

    rows = placement.spec(("batch", None, None))
    gate, down = placement.spec(("expert", None, "expert_mlp")), placement.spec(("expert", "expert_mlp", None))
    return jax.shard_map(
        local, mesh=mesh, in_specs=(rows, rows, rows, gate, gate, down), out_specs=PartitionSpec(*rows), check_vma=False
    )(x, indices, weights, *experts)


def _slots(x: jax.Array, indices: jax.Array, weights: jax.Array, experts: Weights) -> jax.Array:
    """``[N, D]``; ``indices`` of padding are E.

    Room for every token with every expert would always do. Half of it or less suffices nearly always, and where it does
    not, there is more: nothing is dropped, and a token's result does not depend on how much it was.
    """
    (N, K), E = indices.shape, experts[0].shape[0]
    flat = indices.reshape(-1)
    chosen = flat[:, None] == jnp.arange(E)
    rank = jnp.sum(jnp.where(chosen, jnp.cumsum(chosen, axis=0) - 1, 0), axis=1)  # among those with the same expert
    gate, up, down = experts

    def with_room(room: int) -> jax.Array:
        cell = jnp.where(flat < E, flat * room + rank, E * room)
        token = jnp.full(E * room, N, jnp.int32).at[cell].set(jnp.arange(N * K, dtype=jnp.int32) // K, mode="drop")
        rows = jnp.take(x, token, axis=0, mode="fill", fill_value=0).reshape(E, room, -1)
        y = _matmul(jax.nn.silu(_matmul(rows, gate)) * _matmul(rows, up), down)
        return _sum_rows(y.reshape(E * room, -1), cell.reshape(N, K), weights)

    largest = jnp.max(jnp.where(flat < E, rank, 0))
    rooms = _rooms(N, N * K / E) if gate.size > SMALL_PROJECTION else [N]
    branches = [functools.partial(with_room, room) for room in rooms]
    return jax.lax.switch(jnp.sum(largest >= jnp.array(rooms[:-1], jnp.int32)), branches)


SMALL_PROJECTION = 2**17
"""Up to this many weights a projection stays in a core's cache: then a choice of rooms costs more to compile than it
saves."""


def _rooms(tokens: int, mean: float) -> list[int]:
    """Sizes to choose from: two standard deviations above the mean load, twice that, ... and every token."""
    rooms, room = [], 4 * math.ceil((mean + 2 * math.sqrt(mean)) / 4)
    while 4 * room <= 3 * tokens:
        rooms.append(room)
        room *= 2
    return [*rooms, tokens]


def _sum_rows(y: jax.Array, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    """``sum_k weights[n, k] * y[rows[n, k]]``, rows out of range being 0.

    One gather a slot, added up: XLA makes a single loop of them, and never writes ``[N, K, D]``.
    """
    picked = [jnp.take(y, rows[:, k], axis=0, mode="fill", fill_value=0) for k in range(rows.shape[1])]
    if weights is not None:
        picked = [row * weights[:, k, None] for k, row in enumerate(picked)]
    return functools.reduce(jnp.add, picked)


class _Layout(NamedTuple):
    """Where each (token, slot) lies once rows are sorted by expert."""

    slot: jax.Array  # [M]: row -> n * K + k, or N * K for a filler row
    row: jax.Array  # [N * K]: its inverse, or M for padding
    sizes: jax.Array  # [E]: rows of each expert
    block_expert: jax.Array  # [M / block]: whose rows a block holds
    used: jax.Array  # how many blocks hold any


def _layout(indices: jax.Array, experts: int, block: int, group: int) -> _Layout:
    flat = indices.reshape(-1)
    count = flat.shape[0]
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    blocks = -(-sizes // block)
    block_end = jnp.cumsum(blocks)
    total = -(-min(count, -(-count // block) + experts) // group) * group  # static bound on non-empty blocks
    shift = jnp.append((block_end - blocks) * block - (jnp.cumsum(sizes) - sizes), 0)
    expert = flat[order]
    rows = jnp.where(expert < experts, jnp.arange(count, dtype=jnp.int32) + shift[expert], total * block)
    row = jnp.zeros(count, jnp.int32).at[order].set(rows, unique_indices=True)
    slot = jnp.full(total * block, count, jnp.int32).at[rows].set(order, mode="drop")
    block_expert = jnp.sum(jnp.arange(total)[:, None] >= block_end, axis=1)
    return _Layout(slot, row, sizes, jnp.minimum(block_expert, experts - 1), block_end[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x: jax.Array, slot: jax.Array, row: jax.Array, k: int) -> jax.Array:
    """``x [N, D]`` -> sorted rows ``[M, D]``; zero in fillers. ``_collect`` is its transpose: no scatter is needed."""
    return jnp.take(x, slot // k, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(y: jax.Array, slot: jax.Array, row: jax.Array, k: int) -> jax.Array:
    """Sorted rows ``[M, D]`` -> ``[N, D]``, each token's ``k`` rows added up."""
    return jnp.take(y, row.reshape(-1, k), axis=0, mode="fill", fill_value=0).sum(axis=1)


_spread.defvjp(
    lambda x, slot, row, k: (_spread(x, slot, row, k), (slot, row)),
    lambda k, maps, g: (_collect(g, *maps, k), None, None),
)
_collect.defvjp(
    lambda y, slot, row, k: (_collect(y, slot, row, k), (slot, row)),
    lambda k, maps, g: (_spread(g, *maps, k), None, None),
)


def _grouped(x: jax.Array, indices: jax.Array, weights: jax.Array, experts: Weights, ragged: bool) -> jax.Array:
    E = experts[0].shape[0]
    if not ragged:
        shape = _block_shape(indices.size, E)
        return _blocked(x, weights, experts, _layout(indices, E, *shape), shape)
    gate, up, down = experts
    at = _layout(indices, E, block=1, group=1)
    rows = _spread(x, at.slot, at.row, indices.shape[-1])
    scale = _spread(weights.reshape(-1, 1), at.slot, at.row, 1)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, at.sizes)) * jax.lax.ragged_dot(rows, up, at.sizes) * scale
    # Rows behind the last group belong to nobody, and what ragged_dot leaves there is not specified.
    used = (at.slot < indices.size)[:, None]
    y = jnp.where(used, jax.lax.ragged_dot(jnp.where(used, hidden, 0), down, at.sizes), 0)
    return _collect(y, at.slot, at.row, indices.shape[-1])


def _block_shape(assignments: int, experts: int) -> tuple[int, int]:
    """Rows of a block, and blocks that are multiplied side by side.

    Blocks are at most a quarter of an expert's even share, so that filling up each expert's last one costs little; a
    group is some 1,024 rows, enough to keep all cores busy and few enough to stay in their caches. It never holds more
    weights than there are.
    """
    block = 1
    while block < 128 and block * experts * 4 < assignments:
        block *= 2
    return block, max(1, min(1024 // block, experts))


_matmul = functools.partial(jnp.einsum, "bij,bjk->bik")
_matmul_t = functools.partial(jnp.einsum, "bik,bjk->bij")  # by the transposed second factor
_outer = functools.partial(jnp.einsum, "bij,bik->bjk", preferred_element_type=jnp.float32)


class _Blocks(NamedTuple):
    """What the loop over groups of blocks reads, first axis: group."""

    token: jax.Array  # int32 [groups, group, block]; a filler's is some token
    scale: jax.Array  # [groups, group, block, 1]; the gate weight, 0 in fillers: nothing of theirs reaches a result
    owner: jax.Array  # int32 [groups, group]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(x: jax.Array, weights: jax.Array, experts: Weights, at: _Layout, shape: tuple[int, int]) -> jax.Array:
    """The grouped MLP: a loop over groups of blocks, as many as the batch fills; ``shape`` is that of ``_block_shape``.

    Everything between the gather of a group's rows and its results stays in the caches. The gradient is written out:
    left to automatic differentiation, a loop of unknown length has none, and gathered expert weights and spread rows
    would be kept for it.
    """
    return _blocked_forward(x, weights, experts, at, shape)[0]


def _blocked_forward(
    x: jax.Array, weights: jax.Array, experts: Weights, at: _Layout, shape: tuple[int, int]
) -> tuple[jax.Array, tuple[Any, ...]]:
    block, group = shape
    gate, up, down = experts
    blocks = _blocks(x, weights, at, block, group)
    groups = blocks.owner.shape[0]
    wide = jnp.concatenate([gate, up], axis=-1)  # one wide matmul instead of two narrow ones

    def body(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, both = sums
        rows, owner = jnp.take(x, blocks.token[i], axis=0, mode="clip"), blocks.owner[i]
        projected = _matmul(rows, wide[owner])
        a, b = jnp.split(projected, 2, axis=-1)
        down_rows = _matmul(jax.nn.silu(a) * b * blocks.scale[i], down[owner])
        return y.at[i].set(down_rows), both.at[i].set(projected)

    rows = (groups, group, block)
    start = jnp.zeros((*rows, x.shape[-1]), x.dtype), jnp.zeros((*rows, wide.shape[-1]), x.dtype)
    y, both = jax.lax.fori_loop(0, -(-at.used // group), body, start)
    return _collect_blocks(y, at, weights), (x, weights, experts, at, both)


def _blocked_backward(shape: tuple[int, int], saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    # For a row x of expert e with gate weight s:  a, b = x G_e, x U_e;  h = silu(a) b;  y = (s h) D_e.
    # So, with d_y the gradient of its token (a gather: each row belongs to one token):
    #   d_(s h) = d_y D_e',  d_s = <d_(s h), h>,  d_h = s d_(s h),
    #   d_a = d_h b silu'(a) = d_h b sigmoid(a) (1 + a (1 - sigmoid(a))),  d_b = d_h silu(a),
    #   d_x = [d_a d_b] [G_e U_e]',  d_[G_e U_e] += x' [d_a d_b],  d_D_e += (s h)' d_y.
    # Only a and b were kept (``both``); everything else is made again while a group of blocks lies in the caches.
    block, group = shape
    x, weights, (gate, up, down), at, both = saved
    blocks = _blocks(x, weights, at, block, group)
    wide = jnp.concatenate([gate, up], axis=-1)

    def body(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_wide, d_down, d_rows, d_weight = sums
        token, scale, owner = blocks.token[i], blocks.scale[i], blocks.owner[i]
        rows, d_y = jnp.take(x, token, axis=0, mode="clip"), jnp.take(d_out, token, axis=0, mode="clip")
        a, b = jnp.split(both[i], 2, axis=-1)
        sigmoid = jax.nn.sigmoid(a)
        hidden = a * sigmoid * b
        d_scaled = _matmul_t(d_y, down[owner])
        d_hidden = d_scaled * scale
        d_both = jnp.concatenate([d_hidden * b * sigmoid * (1 + a * (1 - sigmoid)), d_hidden * a * sigmoid], axis=-1)
        of_wide, of_down = _outer(rows, d_both), _outer(hidden * scale, d_y)
        for j in range(group):  # a scatter would do the same, many times slower on CPUs
            d_wide, d_down = d_wide.at[owner[j]].add(of_wide[j]), d_down.at[owner[j]].add(of_down[j])
        d_rows = d_rows.at[i].set(_matmul_t(d_both, wide[owner]))
        d_weight = d_weight.at[i].set(jnp.sum(d_scaled * hidden, axis=-1))
        return d_wide, d_down, d_rows, d_weight

    start = (
        jnp.zeros(wide.shape, jnp.float32),
        jnp.zeros(down.shape, jnp.float32),
        jnp.zeros((*blocks.token.shape, x.shape[-1]), x.dtype),
        jnp.zeros(blocks.token.shape, weights.dtype),
    )
    d_wide, d_down, d_rows, d_weight = jax.lax.fori_loop(0, -(-at.used // group), body, start)
    d_gate, d_up = jnp.split(d_wide.astype(gate.dtype), 2, axis=-1)
    d_weights = jnp.take(d_weight.reshape(-1), at.row, mode="fill", fill_value=0).reshape(weights.shape)
    return _collect_blocks(d_rows, at, weights), d_weights, (d_gate, d_up, d_down.astype(down.dtype)), None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _blocks(x: jax.Array, weights: jax.Array, at: _Layout, block: int, group: int) -> _Blocks:
    token = jnp.minimum(at.slot // weights.shape[-1], x.shape[0] - 1)
    scale = jnp.take(weights.reshape(-1), at.slot, mode="fill", fill_value=0)
    return _Blocks(
        token.reshape(-1, group, block), scale.reshape(-1, group, block, 1), at.block_expert.reshape(-1, group)
    )


def _collect_blocks(y: jax.Array, at: _Layout, weights: jax.Array) -> jax.Array:
    """``[N, D]``: the rows of each token added up; nothing for a slot that was not dispatched."""
    return _sum_rows(y.reshape(-1, y.shape[-1]), at.row.reshape(weights.shape), None)
