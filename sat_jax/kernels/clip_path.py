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
class Operands:
    """The arrays of one call: ``[B, T]``, or ``[B, 1]`` for what the tokens of a row have in common."""

    tokens: Arrays  # the token arrays by name, as they came; the kernel selects and casts
    mask: jax.Array  # bool [B, T]
    scale: jax.Array  # one token's share of the loss
    d: jax.Array | None  # the unit's log-ratio; None for the token unit, which the kernel computes itself
    frozen_d: jax.Array | None  # the one that decisions see; None where it is ``d``
    summaries: Any  # the rules', [B, 1] throughout


jax.tree_util.register_dataclass(Operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def clip_path(config: LossConfig, interpret: Any, operands: Operands) -> tuple[jax.Array, Reductions]:
    """Share of the loss [B] and row diagnostics; differentiable in ``tokens["log_probs"]`` and ``d``."""
    loss, diagnostics, _, _ = _run(config, interpret, operands)
    return loss, diagnostics


def _forward(config: LossConfig, interpret: Any, operands: Operands) -> tuple[Any, Any]:
    loss, diagnostics, by_log_probs, by_d = _run(config, interpret, operands)
    return (loss, diagnostics), (by_log_probs, by_d, operands)


def _backward(config: LossConfig, interpret: Any, residuals: Any, cotangents: Any) -> tuple[Operands]:
    by_log_probs, by_d, operands = residuals
    scale = cotangents[0][:, None]
    zero = jax.tree.map(_zero, operands)
    log_probs = (by_log_probs * scale).astype(operands.tokens["log_probs"].dtype)
    d = None if by_d is None else by_d * scale
    return (dataclasses.replace(zero, tokens=zero.tokens | {"log_probs": log_probs}, d=d),)


clip_path.defvjp(_forward, _backward)


def _zero(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)


def _narrow(x: jax.Array) -> jax.Array:
    """As a TPU's memory holds it: masks in bytes, nothing wider than 32 bits."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int8)
    return x if x.dtype.itemsize <= 4 else x.astype(jnp.float32)


def _run(
    config: LossConfig, interpret: Any, operands: Operands
) -> tuple[jax.Array, Reductions, jax.Array, jax.Array | None]:
    """One ``pallas_call``: loss [B], diagnostics [B], d loss / d log_probs [B, T], d loss / d d."""
    B, T = operands.mask.shape
    rows, columns = min(ROWS, B), min(COLUMNS, T)
    names = _diagnostic_names(config, operands)
    tile = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
    line = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    table = pl.BlockSpec((rows, LANES), lambda i, j: (i, 0))

    given = jax.tree.map(_narrow, operands)
    d_of_tokens = operands.d is not None and operands.d.shape[-1] == T > 1
    out_shape = [jax.ShapeDtypeStruct((B, LANES), jnp.float32)]
    out_shape += [jax.ShapeDtypeStruct((B, T), jnp.float32)] * (2 if d_of_tokens else 1)
    call = pl.pallas_call(
        functools.partial(_kernel, config=config, names=names, shape=(B, T), block=(rows, columns)),
        grid=(pl.cdiv(B, rows), pl.cdiv(T, columns)),
        in_specs=(jax.tree.map(lambda x: tile if x.shape[-1] == T else line, given),),
        out_specs=[table, tile, tile][: len(out_shape)],
        out_shape=out_shape,
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=60 * B * T,
            transcendentals=2 * B * T,
            bytes_accessed=sum(x.nbytes for x in jax.tree.leaves(given)) + 4 * B * T * len(out_shape),
        ),
    )
    with jax.enable_x64(False):  # else a Python number in a rule is a float64 in the kernel
        lanes, by_log_probs, *by_d = call(given)
    column = {name: lanes[:, i] for i, name in enumerate(names.flat)}
    diagnostics = Reductions(
        {name: column[f"sum {name}"] for name in names.sums},
        {name: column[f"min {name}"] for name in names.minima},
        {name: column[f"max {name}"] for name in names.maxima},
    )
    if operands.d is None:
        return column["loss"], diagnostics, by_log_probs, None
    return column["loss"], diagnostics, by_log_probs, by_d[0] if by_d else column["gradient"][:, None]


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


def _diagnostic_names(config: LossConfig, operands: Operands) -> _Names:
    """Names in the order in which the kernel meets them, found by tracing one token."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)

    def trace(tokens: Arrays, d: jax.Array, summaries: Any) -> Reductions:
        return _terms(config, tokens, d, d, summaries)[1]

    tokens, summaries = jax.tree.map(lambda _: one, (operands.tokens, operands.summaries))
    traced = jax.eval_shape(trace, tokens, one, summaries)
    return _Names(tuple(traced.sums), tuple(traced.minima), tuple(traced.maxima))


def _terms(
    config: LossConfig, tokens: Arrays, d: jax.Array | None, frozen_d: jax.Array | None, summaries: Any
) -> tuple[jax.Array, Reductions]:
    """Per-token loss and diagnostics of a tile of selected arrays."""
    if d is None:
        denominator = tokens[DENOMINATOR_ARRAY[config.denominator]]
        d = tokens["log_probs"] - denominator
        frozen_d = jax.lax.stop_gradient(tokens.get("scored_log_probs", tokens["log_probs"]) - denominator)
    assert frozen_d is not None
    token = record(config, tokens, d, jax.lax.stop_gradient(frozen_d), one_token())
    terms = token_terms(config, token, summaries)
    return terms.loss, token_diagnostics(config, token, terms, summaries)


def _kernel(
    refs: Any,
    lanes_ref: Any,
    gradient_ref: Any,
    *d_ref: Any,
    config: LossConfig,
    names: _Names,
    shape: tuple[int, int],
    block: tuple[int, int],
) -> None:
    operands: Operands = jax.tree.map(lambda ref: ref[...], refs)
    i, j = pl.program_id(0), pl.program_id(1)

    # The last tile of a row or column hangs over the edge, where memory holds anything: it counts as masked.
    row = i * block[0] + jax.lax.broadcasted_iota(jnp.int32, block, 0)
    column = j * block[1] + jax.lax.broadcasted_iota(jnp.int32, block, 1)
    mask = (operands.mask.astype(jnp.int32) != 0) & (row < shape[0]) & (column < shape[1])
    tokens = select(operands.tokens, mask, jnp.dtype(jnp.float32))
    scale = jnp.where(mask, operands.scale, 0)
    d: Any = operands.d
    frozen_d: Any = d if operands.frozen_d is None else operands.frozen_d
    if d_ref:
        d, frozen_d = jnp.where(mask, d, 0), jnp.where(mask, frozen_d, 0)

    def loss(log_probs: jax.Array, d: jax.Array | None) -> tuple[jax.Array, Reductions]:
        arrays = tokens | {"log_probs": log_probs}
        per_token, diagnostics = _terms(config, arrays, d, frozen_d, operands.summaries)
        total = jnp.sum(jnp.where(mask, per_token * scale, 0), axis=1, keepdims=True)
        return total, diagnostics

    total, pull_back, diagnostics = jax.vjp(loss, tokens["log_probs"], d, has_aux=True)
    by_log_probs, by_d = pull_back(jnp.ones_like(total))
    gradient_ref[...] = jnp.where(mask, by_log_probs, 0)
    if d_ref:
        d_ref[0][...] = jnp.where(mask, by_d, 0)

    lane = jax.lax.broadcasted_iota(jnp.int32, (block[0], LANES), 1)
    added = [total, jnp.zeros_like(total) if d is None or d_ref else by_d]
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


def _row(x: jax.Array, mask: jax.Array, reduce: Any, empty: float) -> jax.Array:
    """[rows, 1]: reduction over the active tokens of a tile."""
    x = x.astype(jnp.float32) if x.dtype != jnp.bool_ else jnp.where(x, 1.0, 0.0)
    return reduce(jnp.where(mask, jnp.broadcast_to(x, mask.shape), empty), axis=1, keepdims=True)
