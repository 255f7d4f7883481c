"""Recorded expert routes on the host: from an engine's wire layout to rows that the learner can replay, or an error.

Checked here because nothing inside jit can: a gather clamps an index that is too large and wraps one that is negative.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from sat_jax.model.config import ModelConfig
from sat_jax.types import NATIVE_ROUTE


@dataclasses.dataclass(frozen=True)
class RouteLayout:
    """How an engine lays its routes out. Declared, never guessed: a square array fits every order.

    Attributes:
        axes: order of the axes: ``TLK`` (token, layer, slot) or ``LTK``.
        layers: ``all``: one entry per layer of the model, dense ones included (their content is ignored); ``moe``:
            mixture layers only.
    """

    axes: Literal["TLK", "LTK"] = "TLK"
    layers: Literal["all", "moe"] = "moe"


def validate_routes(
    routes: np.ndarray, cfg: ModelConfig, n_tokens: int, name: str, layout: RouteLayout | None = None
) -> np.ndarray:
    """int32 ``[n_tokens, L, K]``, MoE layers only, the missing last row filled with ``NATIVE_ROUTE``.

    A row is either K different experts or all ``NATIVE_ROUTE`` (route natively). The engine reports one row per token
    that it fed to the model: all of them, or all but the last, which was sampled and never fed back.

    Args:
        routes: integers, laid out as ``layout`` says.
        cfg: the learner's model.
        n_tokens: P + R, prompt and response tokens.
        name: the sample's name, for the error.
        layout: the engine's; None: ``[T, L, K]`` of the mixture layers, as ``Trajectory`` holds them.

    Raises:
        ValueError: another number of rows, layers or experts per token; an expert that does not exist; a row that is
            partly filled or names an expert twice; a mixture layer without any record.
    """
    layout = RouteLayout() if layout is None else layout
    moe, K, E = cfg.moe_layers, cfg.num_experts_per_tok, cfg.num_experts
    if not moe:
        raise ValueError(f"{name}: routed experts for a dense model: switch routing replay off")
    routes = np.asarray(routes)
    if routes.ndim != 3 or not np.issubdtype(routes.dtype, np.integer):
        raise ValueError(
            f"{name}: routed experts are {routes.dtype}{list(routes.shape)}, expected integers {layout.axes}"
        )
    if layout.axes == "LTK":
        routes = routes.swapaxes(0, 1)
    rows, n_layers, k = routes.shape
    expected = cfg.num_hidden_layers if layout.layers == "all" else len(moe)
    if n_layers != expected:
        raise ValueError(
            f"{name}: routed experts for {n_layers} layers, expected {expected} ({layout.layers}, axes {layout.axes}): "
            "they come from another model, or the layout is declared wrongly"
        )
    if k != K:
        raise ValueError(f"{name}: {k} routed experts per token, the model has {K}: they come from another model")
    if rows not in (n_tokens - 1, n_tokens):
        raise ValueError(
            f"{name}: {rows} rows of routed experts for {n_tokens} tokens, expected {n_tokens - 1} or {n_tokens}: "
            "rows were lost, or joined twice on resume"
        )
    if layout.layers == "all":
        routes = routes[:, list(moe)]
    out_of_range = (routes >= E) | ((routes < 0) & (routes != NATIVE_ROUTE))
    if out_of_range.any():
        where = _first(out_of_range, moe)
        raise ValueError(
            f"{name}: routed expert {routes[out_of_range][0]} at {where}, the model has experts 0 .. {E - 1}"
        )
    missing = routes == NATIVE_ROUTE
    partly = missing.any(-1) & ~missing.all(-1)
    if partly.any():
        raise ValueError(
            f"{name}: a partly filled row of routed experts at {_first(partly, moe)}: record all {K} or none"
        )
    ordered = np.sort(routes, axis=-1)
    doubled = ((ordered[..., 1:] == ordered[..., :-1]) & ~missing[..., 1:]).any(-1)
    if doubled.any():
        raise ValueError(
            f"{name}: an expert is routed to twice at {_first(doubled, moe)}: the engine reported no routes there "
            "(a prefix-cache hit, perhaps); fix the engine or switch routing replay off"
        )
    silent = missing.all(axis=(0, 2))
    if rows and silent.any():
        raise ValueError(
            f"{name}: no routes at all for layer {moe[int(np.argmax(silent))]}: the engine does not report them"
        )
    result = np.full((n_tokens, len(moe), K), NATIVE_ROUTE, np.int32)
    result[:rows] = routes
    return result


def _first(bad: np.ndarray, moe: tuple[int, ...]) -> str:
    token, ordinal = np.argwhere(bad)[0][:2]
    return f"token {token}, layer {moe[int(ordinal)]}"
