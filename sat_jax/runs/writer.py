"""Appends to a run folder: ``metrics.jsonl``, ``evaluations.jsonl``, ``samples.jsonl`` and ``tensorboard/``.

One flushed line a record, valid JSON whatever the numbers are. ``reader`` reads them back.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from sat_jax.metrics import describe
from sat_jax.runs.folder import EVALUATIONS_FILE, METRICS_FILE, SAMPLES_FILE, TENSORBOARD_DIR
from sat_jax.runs.jsonl import Truncation, cut_back


class MetricsWriter:
    """Appends to a run folder's metric files. Not thread-safe: the trainer's own thread owns it.

    Args:
        run_dir: the run folder; created if it does not exist.
        resume_step: None starts fresh and refuses files that already hold records. An integer continues after that
            learner step: lines beyond it, left by a crash after the checkpoint, move into ``resumes.jsonl``, which gets
            one line for every resume; ``truncations`` says what was removed.
        clock: seconds since the epoch; the ``time`` of every metrics line.

    Raises:
        ValueError: a fresh start over existing records, or a damaged file.
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        names = (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE)
        self.truncations: tuple[Truncation, ...] = ()
        if resume_step is not None:
            self.truncations = cut_back(run_dir, names, resume_step, clock())
        elif full := [path for name in names if (path := run_dir / name).exists() and path.stat().st_size]:
            raise ValueError(f"{full[0]} already holds records of a run: resume that run, or choose another --out")
        self._files: dict[str, BinaryIO] = {name: (run_dir / name).open("ab") for name in names}
        self._last_step = dict.fromkeys(names, -1 if resume_step is None else resume_step)
        self._events = _EventFile(run_dir / TENSORBOARD_DIR, resume_step, clock)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one learner step, named by the version after it, to ``metrics.jsonl`` and to TensorBoard.

        Metrics are scalars (Python, numpy or device arrays of size one) and histograms as ``value_counts``. Numbers
        that are not finite become ``null`` and are named in the line's ``nonfinite`` list.

        Raises:
            ValueError: a step that does not grow, or a value that is neither a scalar nor a histogram.
        """
        if step <= self._last_step[METRICS_FILE]:
            raise ValueError(
                f"step {step} was logged after step {self._last_step[METRICS_FILE]}: metrics.jsonl has one line per "
                "learner step, in order; log each step once"
            )
        values = {name: _metric_value(name, value) for name, value in metrics.items()}
        self._append(METRICS_FILE, step, {"time": round(self._clock(), 3), **values})
        self._events.write(step, {k: v for k, v in values.items() if not isinstance(v, dict)})

    def log_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """Append one evaluation: ``avg@k``, ``pass@k``, ``k``, ``problems``, ``sources`` and whatever else it says.

        In TensorBoard the numbers are ``eval/avg@8`` and, per prompt source, ``eval/SOURCE/avg@8``.
        """
        self._append(EVALUATIONS_FILE, step, results)
        at_k = f"@{results.get('k', 'k')}"
        flat = _numeric_leaves(results, "eval")
        self._events.write(step, {name.replace("@k", at_k): value for name, value in flat.items()})

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append readable rollouts of one step to ``samples.jsonl``, one line each."""
        for sample in samples:
            self._append(SAMPLES_FILE, step, sample)

    def close(self) -> None:
        """Close every file. Nothing is lost without it: each line was flushed when it was written."""
        self._events.close()
        for file in self._files.values():
            file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, name: str, step: int, record: Mapping[str, Any]) -> None:
        if step < self._last_step[name]:
            raise ValueError(
                f"step {step} comes after step {self._last_step[name]} in {name}: steps never go back within a file; "
                "resume with resume_step to cut a file back"
            )
        nonfinite: list[str] = []
        plain = {key: _plain(value, key, nonfinite) for key, value in record.items() if key != "step"}
        line: dict[str, Any] = {"step": int(step), **plain}
        if nonfinite:
            line["nonfinite"] = nonfinite
        # A lone surrogate, which a byte-level tokenizer can produce, becomes \udXXX: the JSON escape of itself.
        text = json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="backslashreplace")
        self._files[name].write(text + b"\n")
        self._files[name].flush()
        self._last_step[name] = step


class _EventFile:
    """One TensorBoard event file: one event per step, no thread, never TensorFlow even where it is installed."""

    def __init__(self, folder: Path, resume_step: int | None, clock: Callable[[], float]):
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._described: set[str] = set()
        started = clock()
        # TensorBoard reads a folder's files in the order of their names; the counter orders those of one second.
        name = f"events.out.tfevents.{int(started):010d}.sat_jax.{len(list(folder.iterdir())):04d}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(event_pb2.Event(wall_time=started, file_version="brain.Event:2"))
        if resume_step is not None:
            # Tells TensorBoard to forget what an earlier file says about this step and later ones.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=started, step=resume_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        event = event_pb2.Event(wall_time=self._clock(), step=step)
        for tag, number in values.items():
            value = event.summary.value.add(tag=tag, simple_value=float(number))
            if tag not in self._described:
                self._described.add(tag)
                metric = describe(tag)
                unit = f" ({metric.unit})" if metric.unit else ""
                value.metadata.summary_description = metric.description + unit
        self._write(event)

    def close(self) -> None:
        self._records.close()

    def _write(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _metric_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if np.ndim(value) or isinstance(value, str) or value is None:
        raise ValueError(f"metric '{name}' = {value!r} is no scalar: reduce it first, or log it as value_counts(...)")
    return value if isinstance(value, bool | int | float) else np.asarray(value)[()]


def _plain(value: Any, where: str, nonfinite: list[str]) -> Any:
    """``value`` as JSON data; numbers that are not finite become None and their places are added to ``nonfinite``."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", nonfinite) for i, item in enumerate(value)]
    if not isinstance(value, float):
        array = np.asarray(value)
        if array.ndim:
            return _plain(list(array), where, nonfinite)
        if array.dtype.kind in "iub":
            return array.item()
        if array.dtype.kind not in "fV":  # V: bfloat16 and its kin
            raise ValueError(f"{where} = {value!r} cannot be written as JSON: use numbers, strings, lists and mappings")
        # Shortest decimal that gives the same float32 back: 0.1, not 0.10000000149011612.
        value = float(str(array[()]))
    if math.isfinite(value):
        return value
    nonfinite.append(where)
    return None


def _numeric_leaves(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    leaves: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            leaves |= _numeric_leaves(value, prefix if key == "sources" else f"{prefix}/{key}")
        elif isinstance(value, int | float | np.number) and key not in ("step", "k"):
            leaves[f"{prefix}/{key}"] = float(value)
    return leaves
