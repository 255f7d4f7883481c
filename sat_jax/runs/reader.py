"""Reading a run folder back: what the report, the summary table and the terminal viewers look at."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sat_jax.names import snake_case
from sat_jax.runs import folder
from sat_jax.runs.jsonl import Truncation, read_lines

MAX_SAMPLES = 400
"""Lines of ``samples.jsonl`` that are parsed."""

Histogram = Mapping[str, int]
"""Value -> count, as ``metrics.value_counts`` writes it."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder in memory.

    Attributes:
        name: ``name`` of config.json, or the folder's own.
        info: config.json: ``config``, ``versions``, ``devices``, ``git_commit``, ``command``.
        steps: int64 [N]: learner versions with a line in metrics.jsonl, rising.
        columns: float64 [N] per scalar metric, NaN where a step lacks it or logged a number that is not finite.
        histograms: per histogram metric, those that were logged, by rising step.
        evaluations: lines of evaluations.jsonl by rising step; the last one of a step counts.
        samples: some lines of samples.jsonl, spread evenly over the run.
        groups: how many prompt groups are in which state now (``trained``, ``stale`` ...), by ledger.jsonl.
        notices: whatever a reader must be told: cut-off lines, numbers that were not finite, resumes.
    """

    path: Path
    name: str
    info: Mapping[str, Any]
    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    histograms: Mapping[str, Sequence[Histogram]]
    evaluations: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    groups: Mapping[str, int]
    notices: Sequence[str]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric where it is finite; two empty arrays where it never is."""
        values = self.columns.get(key)
        if values is None:
            return np.zeros(0, np.int64), np.zeros(0)
        finite = np.isfinite(values)
        return self.steps[finite], values[finite]

    def evaluation_series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one number of the evaluations, ``avg@k`` for instance."""
        rows = [(e["step"], e[key]) for e in self.evaluations if e.get(key) is not None]
        return np.array([s for s, _ in rows], np.int64), np.array([v for _, v in rows], np.float64)

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the resolved configuration by dotted path, or ``default`` where there is none."""
        return flatten(self.info["config"]).get(path, default)


def read_run(path: Path) -> Run:
    """Read a run folder, finished or still being written; all but its ``config.json`` may be missing.

    Raises:
        ValueError: no such folder, no ``config.json``, or a damaged line that is not the last one of its file.
    """
    info = folder.read_config(path)
    if info is None:
        raise ValueError(f"{path / folder.CONFIG_FILE} is not the config.json of a run: name the folder of one")
    notices: list[str] = []
    rows = list(read_lines(path / folder.METRICS_FILE, notices))
    steps, columns, histograms = _columns(rows)
    notices += _fault_notices(rows, columns)
    evaluations = {row["step"]: row for row in read_lines(path / folder.EVALUATIONS_FILE, notices)}
    samples = _read_samples(path / folder.SAMPLES_FILE, notices)
    for resume in read_lines(path / folder.RESUMES_FILE, notices):
        removed = ", ".join(str(Truncation(**entry)) for entry in resume["truncated"])
        loss = f"; {removed} past it moved to {folder.RESUMES_FILE}" if removed else ""
        notices.append(f"resumed at step {resume['step']}{loss}")
    name = str(info.get("name") or path.resolve().name)
    in_order = [evaluations[step] for step in sorted(evaluations)]
    groups = _group_states(path / folder.LEDGER_FILE)
    return Run(path, name, info, steps, columns, histograms, in_order, samples, groups, notices)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration as dotted paths: ``{"loss": {"sat": {"alpha": .9}}}`` -> ``{"loss.sat.alpha": .9}``.

    Rules that are objects with their class, ``{"rules": [{"class": "module:DualClip", "floor": 3}]}``, go by the name
    of that class, ``{"rules": ["dual_clip"], "dual_clip.floor": 3}``. No class is imported.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        elif key == "rules" and isinstance(value, list) and any(isinstance(rule, Mapping) for rule in value):
            rules = _rules_by_name(value)
            flat[f"{prefix}{key}"] = list(rules)
            for name, settings in rules.items():
                flat |= flatten(settings, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _rules_by_name(rules: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings of each rule by name. Where the class is the user's own, its place is among them."""
    named: dict[str, dict[str, Any]] = {}
    for rule in rules:
        module, _, class_name = rule["class"].rpartition(":")
        base = name = snake_case(class_name)
        while name in named:
            name = f"{base}_{len(named)}"
        hidden = {"class"} if module.startswith("sat_jax.") else set()
        named[name] = {key: value for key, value in rule.items() if key not in hidden}
    return named


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run's held-out avg@k went: "best" alone hides a collapse, so the others stand beside it."""

    before: float
    final: float
    best: float
    best_step: int
    max_drawdown: float  # largest fall from an earlier high, at least 0
    below_half_peak: bool  # whether it ever fell below half of an earlier high


def outcome(run: Run) -> Outcome | None:
    """None without an evaluation."""
    steps, values = run.evaluation_series("avg@k")
    if not len(values):
        return None
    peaks = np.maximum.accumulate(values)
    best = int(np.argmax(values))
    return Outcome(
        before=float(values[0]),
        final=float(values[-1]),
        best=float(values[best]),
        best_step=int(steps[best]),
        max_drawdown=float((peaks - values).max()),
        below_half_peak=bool((values < 0.5 * peaks).any()),
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, list[Histogram]]]:
    by_step = {row["step"]: row for row in rows}
    steps = sorted(by_step)
    columns, histograms = {}, {}
    for key in dict.fromkeys(key for row in rows for key in row if key != "step"):
        values = [by_step[step].get(key) for step in steps]
        logged = [value for value in values if value is not None]
        if all(isinstance(value, int | float) for value in logged):
            columns[key] = np.array(values, np.float64)  # None becomes NaN
        elif all(isinstance(value, dict) for value in logged):
            histograms[key] = logged
    return np.array(steps, np.int64), columns, histograms


def _fault_notices(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, np.ndarray]) -> Iterator[str]:
    where: dict[str, list[int]] = {}
    for row in rows:
        for key in row.get("nonfinite", ()):
            where.setdefault(key, []).append(row["step"])
    for key, steps in sorted(where.items()):
        yield f"{key} was not finite at {_counted(len(steps), 'step')}, first at step {steps[0]}"
    if skipped := int(np.nansum(columns.get("train/update_skipped", 0))):
        yield f"the update was withheld at {_counted(skipped, 'step')}: no active token or no finite gradient"
    if ungraded := int(np.nansum(columns.get("rollout/ungraded", 0))):
        yield f"{_counted(ungraded, 'response')} could not be graded (timeout, crash or error of the reward)"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _read_samples(path: Path, notices: list[str]) -> list[dict[str, Any]]:
    """At most ``MAX_SAMPLES`` lines, spread evenly, first and last included; the others are not parsed."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        total = sum(1 for _ in file)
    wanted = np.linspace(1, total, min(MAX_SAMPLES, total)).round().astype(int)
    return list(read_lines(path, notices, set(wanted.tolist())))


_LEDGER_ENTRY = re.compile(rb'"group_id": "((?:[^"\\]|\\.)*)".*?"state": "(\w+)"')


def _group_states(path: Path) -> dict[str, int]:
    """Groups by their newest state. Lines are not parsed as JSON: a long run's ledger has a million of them."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        newest = {match[1]: match[2] for line in file if (match := _LEDGER_ENTRY.search(line))}
    return {state.decode(): count for state, count in Counter(newest.values()).most_common()}
