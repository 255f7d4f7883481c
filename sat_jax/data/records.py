"""What an engine reports beside its tokens, checked on the host before anything replays it: the experts that processed
every token, and the tokens that every one was drawn from.

Nothing inside ``jit`` can check them: a gather clamps an index that is too large and wraps one that is negative.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from sat_jax.checked import INT_MAX, Checked, Count, Range
from sat_jax.types import NATIVE_ROUTE, NO_TOKEN, Trajectory


@dataclasses.dataclass(frozen=True)
class Routes(Checked, section="routes"):
    """What recorded experts must look like for this model."""

    n_layers: Annotated[int, Range(1, INT_MAX, why="a dense model has nothing to replay; switch routing replay off")]
    """L: mixture-of-experts layers."""
    top_k: Count
    """K: experts per token."""
    n_experts: Count
    """E: experts per layer."""
    numbers: tuple[int, ...] = ()
    """Numbers of these layers in the model; empty: all of its layers are mixtures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(self.n_layers)))
        if len(self.numbers) != self.n_layers:
            raise ValueError(f"routes.numbers = {self.numbers}: must be {self.n_layers}, one a mixture layer")


@dataclasses.dataclass(frozen=True)
class RouteLayout(Checked, section="layout"):
    """How an engine lays its routes out. Declared, never guessed: a square array fits every order."""

    axes: Literal["TLK", "LTK"] = "TLK"
    """Token, layer, slot; or layer first."""
    n_layers: Count | None = None
    """Layers that the engine reports, dense ones included, whose content is ignored. None: mixture layers only."""


@dataclasses.dataclass(frozen=True)
class Support(Checked, section="support"):
    """What recorded supports must look like."""

    size: Count
    """S: most tokens of one."""
    vocab_size: Count
    """V."""


def sample_name(t: Trajectory) -> str:
    """What errors call a trajectory."""
    return f"sample {t.sample_index} of prompt {t.prompt_id}"


def check_routes(
    trajectories: Sequence[Trajectory], routes: Routes, layout: RouteLayout | None = None
) -> list[np.ndarray]:
    """Int ``[P + R - 1, L, K]`` for each trajectory: the experts recorded for every token that was an input.

    Each set is K different experts, or ``NATIVE_ROUTE`` throughout (route natively). The last sampled token was never
    an input: its row may be missing, and is dropped where an engine puts something there. ``layout`` is the engine's;
    None: ``[T, L, K]`` of the mixture layers.

    Raises:
        ValueError: no record at all, or none for a layer; another number of rows, layers or experts; an expert that
            does not exist; a set that is partly filled or names an expert twice. Sample, token and layer are named.
    """
    recorded = [_input_rows(t, routes, layout or RouteLayout()) for t in trajectories]
    lengths = np.array([len(rows) for rows in recorded], int)
    ends = np.cumsum(lengths)
    if not lengths.any():
        return recorded
    # [K, tokens, L]: numpy is slow along an axis as short as top-k.
    columns = np.empty((routes.top_k, ends[-1], routes.n_layers), np.result_type(*{r.dtype for r in recorded}))
    for rows, length, end in zip(recorded, lengths, ends, strict=True):
        columns[:, end - length : end] = rows.transpose(2, 0, 1)

    def refuse(where: np.ndarray, problem: str) -> None:
        if where.any():
            token, layer = np.argwhere(where)[0]
            i = int(np.searchsorted(ends, token, side="right"))
            raise ValueError(
                f"{sample_name(trajectories[i])}, token {token - ends[i] + lengths[i]}, layer {routes.numbers[layer]}: "
                f"expert set {columns[:, token, layer].tolist()} {problem}; it comes from a prefix cache or another "
                "model; never replay it"
            )

    lowest, highest = columns.min(0), columns.max(0)
    refuse((lowest < NATIVE_ROUTE) | (highest >= routes.n_experts), f"is outside 0..{routes.n_experts - 1}")
    refuse((lowest == NATIVE_ROUTE) & (highest != NATIVE_ROUTE), "is partly filled")
    twice = np.zeros(lowest.shape, bool)
    for a, b in itertools.combinations(columns, 2):
        twice |= a == b
    refuse(twice & (highest != NATIVE_ROUTE), "names an expert twice")
    some = np.flatnonzero(lengths)
    silent = np.logical_and.reduceat(highest == NATIVE_ROUTE, (ends - lengths)[some])
    if silent.any():
        i, layer = np.argwhere(silent)[0]
        raise ValueError(
            f"{sample_name(trajectories[some[i]])} has no recorded expert in layer {routes.numbers[layer]}: the engine "
            "does not report that layer (a fused kernel?); switch routing replay off, or that kernel"
        )
    return recorded


def _input_rows(t: Trajectory, routes: Routes, layout: RouteLayout) -> np.ndarray:
    if t.routed_experts is None:
        raise ValueError(
            f"{sample_name(t)} comes without routed experts: routing replay needs an engine that reports them; switch "
            "the replay off or the report on"
        )
    n, wire = len(t.prompt_ids) + len(t.response_ids), np.asarray(t.routed_experts)
    n_layers = layout.n_layers or routes.n_layers
    rows = wire.swapaxes(0, 1) if layout.axes == "LTK" and wire.ndim == 3 else wire
    fits = rows.ndim == 3 and rows.shape[1:] == (n_layers, routes.top_k) and len(rows) in (n - 1, n)
    if not fits or rows.dtype.kind not in "iu":
        raise ValueError(
            f"{sample_name(t)} has routed experts {wire.dtype}{list(wire.shape)}: integers of {n - 1} or {n} input "
            f"tokens, {n_layers} layers, top-{routes.top_k} (axes {layout.axes}) are needed; rows were lost or joined "
            "twice, they come from another model, or the layout is declared wrongly"
        )
    return rows[: n - 1] if layout.n_layers is None else rows[: n - 1, list(routes.numbers)]


def check_support(t: Trajectory, support: Support) -> np.ndarray:
    """``t.support``, int ``[R, S']`` with S' at most ``support.size``, once every row is a set of tokens that the
    sampled one belongs to.

    Raises:
        ValueError: no record at all; another number of rows, more columns; an id outside the vocabulary, a token
            twice, a row without the sampled token.
    """
    name, n = sample_name(t), len(t.response_ids)
    if t.support is None:
        raise ValueError(
            f"{name} comes without the supports that its tokens were drawn from: sampling truncates, and replaying "
            "that needs an engine that reports them; sample with top_p 1, top_k 0, min_p 0 otherwise"
        )
    recorded = np.asarray(t.support)
    if recorded.ndim != 2 or not np.issubdtype(recorded.dtype, np.integer) or len(recorded) != n:
        raise ValueError(
            f"{name} has {n} response tokens but supports {recorded.dtype}{list(recorded.shape)}: integers "
            f"[{n}, at most {support.size}] are needed, one row a sampled token"
        )
    if recorded.shape[1] > support.size and (recorded[:, support.size :] != NO_TOKEN).any():
        raise ValueError(
            f"{name} has supports of {recorded.shape[1]} tokens, more than sampling.top_k = {support.size}: it was "
            "sampled with other settings"
        )
    recorded = recorded[:, : support.size]
    ordered = np.sort(recorded, axis=1)
    problems = {
        f"names an id outside 0..{support.vocab_size - 1}": (ordered[:, :1] < NO_TOKEN)
        | (ordered[:, -1:] >= support.vocab_size),
        "names a token twice": (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_TOKEN),
        "lacks the sampled token": ~(recorded == t.response_ids[:, None]).any(1, keepdims=True),
    }
    for problem, where in problems.items():
        if where.any():
            i = int(np.argmax(where.any(1)))
            kept = recorded[i][recorded[i] != NO_TOKEN].tolist()
            raise ValueError(
                f"{name}, response token {i} (id {t.response_ids[i]}): its support {kept} {problem}; the engine's "
                "record belongs to another token or model; never replay it"
            )
    return recorded
