"""The clip path as one Pallas kernel: log-ratio, gate, radii, surrogate, its gradient and every diagnostic of a tile.

The kernel body calls the same pure functions as the reference (``record``, ``token_terms``, ``token_diagnostics``) on a
tile in on-chip memory and differentiates them there, so every elementwise rule is in it by construction. Each input is
read once; what goes out is the gradient [B, T] and one line of partial sums a row. The backward pass only scales the
stored gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from sat_jax.losses import LossConfig
from sat_jax.losses.config import DENOMINATOR_ARRAY
from sat_jax.losses.diagnostics import Reductions, token_diagnostics
from sat_jax.losses.masked import one_token
from sat_jax.losses.tokens import record, select, token_terms

LANES = 128
ROWS, COLUMNS = 32, 1024
"""Largest tile: 32 rows fill a packed int8 register of the mask; 1024 tokens keep all operands within a few MiB."""

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call; hashable, so it can be a static argument.

    Attributes:
        config: the loss.
        names: the [B, T] arrays, in operand order; ``log_probs`` first.
        unit: where the unit's log-ratio comes from: ``token`` (computed in the kernel), ``row`` ([B, 1]) or ``tile``.
        frozen: the decisions' log-ratio is another array of the same shape (a scoring pass was given).
        scale: ``row`` or ``tile``: one token's share of the loss.
        summaries: pytree structure of the rules' summaries.
        interpret: as for ``pallas_call``.
    """

    config: LossConfig
    names: tuple[str, ...]
    unit: str
    frozen: bool
    scale: str
    summaries: Any
    interpret: Any


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of one call.

    Attributes:
        tokens: [B, T] arrays in ``plan.names`` order.
        mask: bool [B, T].
        d: the unit's log-ratio, [B, 1] or [B, T]; None for the token unit.
        frozen_d: the decisions' one, same shape; None where it is ``d``.
        scale: [B, 1] or [B, T].
        summaries: leaves of the rules' summaries, each a scalar or [B, 1].
    """

    tokens: tuple[jax.Array, ...]
    mask: jax.Array
    d: jax.Array | None
    frozen_d: jax.Array | None
    scale: jax.Array
    summaries: tuple[jax.Array, ...]


jax.tree_util.register_dataclass(Operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def clip_path(plan: Plan, operands: Operands) -> tuple[jax.Array, Reductions]:
    """Share of the loss [B] and row diagnostics; differentiable in ``tokens[0]`` (log_probs) and ``d``."""
    loss, diagnostics, _, _ = _run(plan, operands)
    return loss, diagnostics


def _forward(plan: Plan, operands: Operands) -> tuple[Any, Any]:
    loss, diagnostics, by_log_probs, by_d = _run(plan, operands)
    return (loss, diagnostics), (by_log_probs, by_d, operands)


def _backward(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Operands]:
    by_log_probs, by_d, operands = residuals
    scale = cotangents[0][:, None]
    zero = jax.tree.map(_zero, operands)
    tokens = ((by_log_probs * scale).astype(operands.tokens[0].dtype), *zero.tokens[1:])
    return (dataclasses.replace(zero, tokens=tokens, d=None if by_d is None else by_d * scale),)


clip_path.defvjp(_forward, _backward)


def _zero(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)


def _run(plan: Plan, operands: Operands) -> tuple[jax.Array, Reductions, jax.Array, jax.Array | None]:
    """One ``pallas_call``: loss [B], diagnostics [B], d loss / d log_probs [B, T], d loss / d d."""
    B, T = operands.mask.shape
    rows, columns = min(ROWS, B), min(COLUMNS, T)
    names = _diagnostic_names(plan, operands)
    tile = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
    line = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    table = pl.BlockSpec((rows, LANES), lambda i, j: (i, 0))

    tiles = [operands.mask.astype(jnp.int8), *operands.tokens]
    lines = [jnp.broadcast_to(x, (B, 1)).astype(jnp.float32) for x in operands.summaries]
    for x in (operands.d, operands.frozen_d, operands.scale):
        if x is not None:
            (tiles if x.shape[-1] == T and T != 1 else lines).append(x)
    in_specs = [tile] * len(tiles) + [line] * len(lines)
    out_shape = [jax.ShapeDtypeStruct((B, LANES), jnp.float32), jax.ShapeDtypeStruct((B, T), jnp.float32)]
    out_specs = [table, tile]
    if plan.unit == "tile":
        out_shape.append(jax.ShapeDtypeStruct((B, T), jnp.float32))
        out_specs.append(tile)
    call = pl.pallas_call(
        functools.partial(_kernel, plan=plan, names=names, shape=(B, T), block=(rows, columns), n_tiles=len(tiles)),
        grid=(pl.cdiv(B, rows), pl.cdiv(T, columns)),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=plan.interpret,
        cost_estimate=pl.CostEstimate(
            flops=60 * B * T,
            transcendentals=2 * B * T,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*tiles, *lines)) + 4 * B * T * len(out_shape),
        ),
    )
    with jax.enable_x64(False):  # else a Python number in a rule is a float64 in the kernel
        outputs = call(*(x if x.dtype.itemsize <= 4 else x.astype(jnp.float32) for x in (*tiles, *lines)))
    lanes, by_log_probs = outputs[0], outputs[1]
    column = {name: lanes[:, i] for i, name in enumerate(names.flat)}
    diagnostics = Reductions(
        {name: column[f"sum {name}"] for name in names.sums},
        {name: column[f"min {name}"] for name in names.minima},
        {name: column[f"max {name}"] for name in names.maxima},
    )
    by_d = None
    if plan.unit == "tile":
        by_d = outputs[2]
    elif plan.unit == "row":
        by_d = column["gradient"][:, None]
    return column["loss"], diagnostics, by_log_probs, by_d


@dataclasses.dataclass(frozen=True)
class _Names:
    """Which lane of the output line holds what."""

    sums: tuple[str, ...]
    minima: tuple[str, ...]
    maxima: tuple[str, ...]

    @property
    def flat(self) -> tuple[str, ...]:
        sums = tuple(f"sum {name}" for name in self.sums)
        minima = tuple(f"min {name}" for name in self.minima)
        return ("loss", "gradient", *sums, *minima, *(f"max {name}" for name in self.maxima))


def _diagnostic_names(plan: Plan, operands: Operands) -> _Names:
    """Names in the order in which the kernel meets them, found by tracing one token."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)

    def trace(tokens: Arrays, leaves: list[jax.Array], d: jax.Array) -> Reductions:
        return _terms(plan, tokens, d, d, leaves)[1]

    traced = jax.eval_shape(trace, dict.fromkeys(plan.names, one), [one] * len(operands.summaries), one)
    return _Names(tuple(traced.sums), tuple(traced.minima), tuple(traced.maxima))


def _terms(
    plan: Plan, tokens: Arrays, d: jax.Array | None, frozen_d: jax.Array | None, leaves: list[jax.Array]
) -> tuple[jax.Array, Reductions]:
    """Per-token loss and diagnostics of a tile of selected arrays."""
    config = plan.config
    if d is None:
        denominator = tokens[DENOMINATOR_ARRAY[config.denominator]]
        d = tokens["log_probs"] - denominator
        frozen_d = jax.lax.stop_gradient(tokens.get("scored_log_probs", tokens["log_probs"]) - denominator)
    assert frozen_d is not None
    token = record(config, tokens, d, jax.lax.stop_gradient(frozen_d), one_token())
    summaries = jax.tree.unflatten(plan.summaries, leaves)
    terms = token_terms(config, token, summaries)
    return terms.loss, token_diagnostics(config, token, terms, summaries)


def _kernel(
    *refs: Any, plan: Plan, names: _Names, shape: tuple[int, int], block: tuple[int, int], n_tiles: int
) -> None:
    n_lines = len(refs) - n_tiles - (3 if plan.unit == "tile" else 2)
    tiles = [ref[...] for ref in refs[:n_tiles]]
    lines = [ref[...] for ref in refs[n_tiles : n_tiles + n_lines]]
    lanes_ref, gradient_ref = refs[n_tiles + n_lines : n_tiles + n_lines + 2]
    i, j = pl.program_id(0), pl.program_id(1)

    # The last tile of a row or column hangs over the edge, where memory holds anything: it counts as masked.
    row = i * block[0] + jax.lax.broadcasted_iota(jnp.int32, block, 0)
    column = j * block[1] + jax.lax.broadcasted_iota(jnp.int32, block, 1)
    mask = (tiles[0].astype(jnp.int32) != 0) & (row < shape[0]) & (column < shape[1])
    raw = dict(zip(plan.names, tiles[1 : 1 + len(plan.names)], strict=True))
    tokens = select(raw, mask, jnp.dtype(jnp.float32))
    n_leaves = plan.summaries.num_leaves
    leaves = lines[:n_leaves]
    extra = _Extra(tiles[1 + len(plan.names) :], lines[n_leaves:])
    d = extra.take(plan.unit)
    frozen_d = extra.take(plan.unit) if plan.frozen else d
    scale = jnp.where(mask, extra.take(plan.scale), 0)
    if plan.unit == "tile":
        d, frozen_d = jnp.where(mask, d, 0), jnp.where(mask, frozen_d, 0)

    def loss(log_probs: jax.Array, d: jax.Array | None) -> tuple[jax.Array, Reductions]:
        per_token, diagnostics = _terms(plan, tokens | {"log_probs": log_probs}, d, frozen_d, leaves)
        total = jnp.sum(jnp.where(mask, per_token * scale, 0), axis=1, keepdims=True)
        return total, diagnostics

    total, pull_back, diagnostics = jax.vjp(loss, tokens["log_probs"], d, has_aux=True)
    by_log_probs, by_d = pull_back(jnp.ones_like(total))
    gradient_ref[...] = jnp.where(mask, by_log_probs, 0)
    if plan.unit == "tile":
        refs[-1][...] = jnp.where(mask, by_d, 0)

    lane = jax.lax.broadcasted_iota(jnp.int32, (block[0], LANES), 1)
    added = [total, by_d if plan.unit == "row" else jnp.zeros_like(total)]
    added += [_row(diagnostics.sums[name], mask, jnp.sum, 0.0) for name in names.sums]
    lowest = [_row(diagnostics.minima[name], mask, jnp.min, 1.0) for name in names.minima]
    highest = [_row(diagnostics.maxima[name], mask, jnp.max, 0.0) for name in names.maxima]
    n, m = len(added), len(added) + len(lowest)

    def lay(parts: list[jax.Array], start: int) -> jax.Array:
        out = jnp.zeros((block[0], LANES), jnp.float32)
        for k, part in enumerate(parts):
            out = jnp.where(lane == start + k, part, out)
        return out

    fresh = lay([*added, *lowest, *highest], 0)

    @pl.when(j == 0)
    def _first() -> None:
        lanes_ref[...] = fresh

    @pl.when(j > 0)
    def _later() -> None:
        old = lanes_ref[...]
        merged = jnp.where(lane < n, old + fresh, jnp.where(lane < m, jnp.minimum(old, fresh), jnp.maximum(old, fresh)))
        lanes_ref[...] = merged


class _Extra:
    """Hands out the operands that may be tiles or lines, in the order in which they were laid down."""

    def __init__(self, tiles: list[jax.Array], lines: list[jax.Array]) -> None:
        self._groups = {"tile": list(tiles), "row": list(lines)}

    def take(self, where: str) -> Any:
        """The next operand of that group; None for what the kernel computes itself."""
        return None if where == "token" else self._groups[where].pop(0)


def _row(x: jax.Array, mask: jax.Array, reduce: Any, empty: float) -> jax.Array:
    """[rows, 1]: reduction over the active tokens of a tile."""
    x = x.astype(jnp.float32) if x.dtype != jnp.bool_ else jnp.where(x, 1.0, 0.0)
    return reduce(jnp.where(mask, jnp.broadcast_to(x, mask.shape), empty), axis=1, keepdims=True)
