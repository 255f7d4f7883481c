"""Losses and gradients of TRL, verl and slime on 20 batches, padded into one stack so that one vmap covers them."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from tests.helpers import DATA

CASES = DATA / "losses"
B, T = 6, 12


@functools.cache
def description() -> dict[str, Any]:
    return json.loads((CASES / "loss_cases.json").read_text())


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    packed = np.load(CASES / "loss_cases.npz")
    index, values = json.loads(packed["index"].tobytes()), packed["values"]  # every access reads the file anew
    found, start = {}, 0
    for name, shape in index.items():
        size = int(np.prod(shape, dtype=int))
        found[name] = values[start : start + size].reshape(shape)
        start += size
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    rows: int
    width: int
    group_size: int

    def __getitem__(self, key: str) -> np.ndarray:
        return arrays()[f"in/{self.name}/{key}"]

    @property
    def tokens(self) -> int:
        return int(self["mask"].sum())


@functools.cache
def cases() -> tuple[Case, ...]:
    return tuple(Case(c["name"], c["B"], c["T"], c["group_size"]) for c in description()["cases"])


def expected(variant: str, case: Case, what: str) -> np.ndarray | None:
    """None where the reference itself is undefined."""
    return arrays().get(f"{variant}/{case.name}/{what}")


def stacked(key: str, fill: float = 0.0) -> np.ndarray:
    """[20, 6, 12], or [20, 6] for arrays of one number a row."""
    parts = [case[key] for case in cases()]
    out = np.full((len(parts), B, T)[: parts[0].ndim + 1], fill)
    for i, part in enumerate(parts):
        out[(i, *(slice(0, n) for n in part.shape))] = part
    return out
