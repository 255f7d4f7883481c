"""Groups of responses to one ``Batch`` of a shape that repeats, so that the train step compiles once per width.

The shift by one is not done here: arrays are aligned with the tokens they describe (see ``sat_jax.types``), so a
response's numbers are laid down where its tokens are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sat_jax.data.records import Routes, Support, check_routes, check_support, sample_name
from sat_jax.types import NATIVE_ROUTE, NO_TOKEN, Batch, Group, Trajectory

_ROUNDING = 1e-4
"""How far above 0 an engine's rounding may put a log-prob."""


@dataclasses.dataclass
class _Row:
    """One sequence, ready to be laid down: arrays over its own tokens only."""

    tokens: np.ndarray
    n_prompt: int
    log_probs: np.ndarray
    advantage: float
    versions: np.ndarray
    support: np.ndarray | None = None
    routes: np.ndarray | None = None


_Place = tuple[int, int, int]
"""Row, first position and segment id of a sequence in the batch."""


def width_buckets(longest: int, shortest: int = 64) -> tuple[int, ...]:
    """Widths that double from ``shortest`` and end with ``longest``: few shapes, and under half of each is padding."""
    widths = []
    while shortest < longest:
        widths.append(shortest)
        shortest *= 2
    return (*widths, longest)


def make_batch(
    groups: Sequence[Group],
    *,
    widths: Sequence[int],
    rows: int | None = None,
    rows_multiple: int = 1,
    routes: Routes | None = None,
    support: Support | None = None,
    packing: bool = False,
    pad_id: int = 0,
) -> Batch:
    """Lay every trajectory of ``groups`` into one right-padded (or packed) ``Batch`` of numpy arrays, in their order.

    Args:
        groups: graded, with their ``advantages`` filled.
        widths: allowed T, any order; the smallest that fits the longest sequence is used.
        rows: B; by default as many as needed. Surplus rows are padding: segment 0, nothing in ``loss_mask``.
        rows_multiple: B is rounded up to a multiple of this: micro-batches times data-parallel devices.
        routes: lay down recorded experts, checked against this; None leaves ``routed_experts`` out.
        support: lay down the supports that tokens were drawn from, checked against this; None: sampling does not
            truncate.
        packing: put several sequences into a row, each into the first row with room; else one a row.

    Raises:
        ValueError: a trajectory whose arrays disagree with its tokens, an empty response, log-probs that are not finite
            or positive, advantages that are missing or not finite, recorded experts that are missing, out of range,
            partly filled or doubled, supports that are missing where they are wanted or there where they are not, out
            of range, doubled or without the sampled token, a sequence longer than the largest width, more rows than
            ``rows``.
    """
    prepared = []
    for group in groups:
        if group.advantages.shape != (len(group.trajectories),):
            raise ValueError(
                f"group {group.group_id} has advantages of shape {group.advantages.shape} for "
                f"{len(group.trajectories)} trajectories: compute one advantage per trajectory before batching"
            )
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True):
            prepared.append(_prepare(trajectory, float(advantage), support))
    if routes is not None:
        recorded = check_routes([t for group in groups for t in group.trajectories], routes)
        for row, found in zip(prepared, recorded, strict=True):
            row.routes = found
    return _assemble(prepared, widths, rows, rows_multiple, routes, support, packing, pad_id)


def make_sft_batch(
    prompt_ids: Sequence[np.ndarray],
    target_ids: Sequence[np.ndarray],
    *,
    widths: Sequence[int],
    rows: int | None = None,
    rows_multiple: int = 1,
    packing: bool = False,
    pad_id: int = 0,
) -> Batch:
    """Prompts and the answers to imitate, end-of-sequence token included, as a ``Batch``: the targets are masked in,
    every advantage is 1. Everything else is as in ``make_batch``."""
    if len(prompt_ids) != len(target_ids):
        raise ValueError(f"{len(prompt_ids)} prompts and {len(target_ids)} targets: give one target per prompt")
    prepared = []
    for i, (prompt, target) in enumerate(zip(prompt_ids, target_ids, strict=True)):
        if not len(prompt) or not len(target):
            raise ValueError(
                f"example {i} has {len(prompt)} prompt and {len(target)} target tokens: neither may be empty"
            )
        zeros = np.zeros(len(target), np.float32)
        tokens = np.concatenate([prompt, target])
        prepared.append(_Row(tokens, len(prompt), zeros, 1.0, zeros.astype(np.int32)))
    return _assemble(prepared, widths, rows, rows_multiple, None, None, packing, pad_id)


def _prepare(t: Trajectory, advantage: float, support: Support | None) -> _Row:
    name = sample_name(t)
    n_prompt, n = len(t.prompt_ids), len(t.response_ids)
    if n_prompt == 0 or n == 0:
        raise ValueError(
            f"{name} has {n_prompt} prompt and {n} response tokens: an empty one must fail, not be trained on"
        )
    for what, values in (("log-probs", t.log_probs), ("policy versions", t.policy_versions)):
        if values.shape != (n,):
            raise ValueError(
                f"{name} has {n} response tokens but {what} of shape {values.shape}: the engine must report exactly "
                "one per sampled token; nothing is cut or filled here"
            )
    if bad := np.flatnonzero(~(np.isfinite(t.log_probs) & (t.log_probs <= _ROUNDING))).tolist():
        raise ValueError(
            f"{name} has log-prob {t.log_probs[bad[0]]} at response token {bad[0]}: it must be finite and at most 0; "
            "check the engine's sampling and its precision"
        )
    if not np.isfinite(advantage):
        raise ValueError(f"{name} has advantage {advantage}: it must be finite; was its group graded?")
    if support is None and t.support is not None:
        raise ValueError(
            f"{name} was drawn from recorded supports, which this learner does not replay: its ratios would be off by "
            "the mass outside them; replay them, or sample with top_p 1, top_k 0, min_p 0"
        )
    drawn_from = None if support is None else check_support(t, support)
    tokens = np.concatenate([t.prompt_ids, t.response_ids])
    return _Row(tokens, n_prompt, t.log_probs, advantage, t.policy_versions, drawn_from)


def _assemble(
    prepared: Sequence[_Row],
    widths: Sequence[int],
    rows: int | None,
    rows_multiple: int,
    routes: Routes | None,
    support: Support | None,
    packing: bool,
    pad_id: int,
) -> Batch:
    longest = max((len(r.tokens) for r in prepared), default=0)
    width = min((w for w in widths if w >= longest), default=None)
    if width is None:
        raise ValueError(
            f"the longest sequence has {longest} tokens, the widest allowed row {max(widths, default=0)}: raise the "
            "row width, or lower the prompt and response limits"
        )
    places, needed = (
        _first_fit(prepared, width) if packing else ([(i, 0, 1) for i in range(len(prepared))], len(prepared))
    )
    B = -(-max(needed, 1) // rows_multiple) * rows_multiple if rows is None else rows
    if needed > B or B % rows_multiple:
        raise ValueError(
            f"{len(prepared)} sequences need {needed} rows and a multiple of {rows_multiple}, but rows = {B}: raise it "
            f"to {-(-needed // rows_multiple) * rows_multiple}, or take fewer groups"
        )
    shape = (B, width)
    arrays: dict[str, Any] = {
        "tokens": np.full(shape, pad_id, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, bool),
        "behavior_log_probs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "policy_versions": np.zeros(shape, np.int32),
    }
    if routes is not None:
        arrays["routed_experts"] = np.full((*shape, routes.n_layers, routes.top_k), NATIVE_ROUTE, np.int32)
    if support is not None:
        arrays["support"] = np.full((*shape, support.size), NO_TOKEN, np.int32)
    for row, (b, start, segment) in zip(prepared, places, strict=True):
        whole = slice(start, start + len(row.tokens))
        response = slice(start + row.n_prompt, whole.stop)
        arrays["tokens"][b, whole] = row.tokens
        arrays["segment_ids"][b, whole] = segment
        arrays["positions"][b, whole] = np.arange(len(row.tokens))
        arrays["loss_mask"][b, response] = True
        arrays["behavior_log_probs"][b, response] = row.log_probs
        arrays["advantages"][b, response] = row.advantage
        arrays["policy_versions"][b, response] = row.versions
        if row.routes is not None:
            arrays["routed_experts"][b, start : whole.stop - 1] = row.routes
        if row.support is not None:
            arrays["support"][b, response, : row.support.shape[1]] = row.support
    return Batch(**arrays)


def _first_fit(prepared: Sequence[_Row], width: int) -> tuple[list[_Place], int]:
    """(row, start, segment id) of every sequence, each in the first row with room, and the number of rows."""
    used: list[int] = []
    count: list[int] = []
    places = []
    for row in prepared:
        n = len(row.tokens)
        b = next((i for i, u in enumerate(used) if u + n <= width), len(used))
        if b == len(used):
            used.append(0)
            count.append(0)
        count[b] += 1
        places.append((b, used[b], count[b]))
        used[b] += n
    return places, len(used)
