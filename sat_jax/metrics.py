"""What a run writes down while it trains, and what each number means.

``METRICS`` is the one register of metric names, read by the writer (TensorBoard descriptions), the report (labels and
units) and ``docs/metrics.md``. ``MetricsWriter`` owns ``metrics.jsonl``, ``evaluations.jsonl``, ``samples.jsonl`` and
``tensorboard/`` of a run folder: append-only, one flushed line per record, valid JSON whatever the numbers are.
Reading them back is ``run_folder``'s job.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE, RESUMES_FILE = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "samples.jsonl",
    "resumes.jsonl",
)
TENSORBOARD_DIR = "tensorboard"


@dataclasses.dataclass(frozen=True)
class Metric:
    """What one metric name stands for.

    Attributes:
        unit: as printed on an axis; empty for a pure number, ``share`` for a fraction in [0, 1].
        description: one sentence without a full stop.
        kind: ``scalar``, or ``histogram``: an object that maps a value to how often it occurred (``value_counts``).
    """

    unit: str
    description: str
    kind: Literal["scalar", "histogram"] = "scalar"


METRICS: dict[str, Metric] = {
    "train/loss": Metric("", "what was minimised: policy term plus weighted KL"),
    "train/pg_loss": Metric("", "policy-gradient term alone"),
    "train/kl_loss": Metric("nats", "KL estimate against the reference policy, before its coefficient"),
    "train/entropy": Metric("nats", "mean entropy of the policy's next-token distribution over active tokens"),
    "train/grad_norm": Metric("", "global L2 norm of the gradient before clipping"),
    "train/lr": Metric("", "learning rate of the update"),
    "train/clip_fraction": Metric("share", "active tokens whose surrogate gradient the clip interval cuts"),
    "train/d_bar": Metric("nats", "sampled mismatch: mean |log ratio| of single tokens, for every unit, eq. (52)"),
    "train/kl_train_rollout": Metric("nats", "KL estimate between learner and rollout engine on the sampled tokens"),
    "train/ratio_max": Metric("", "largest importance ratio of an active token"),
    "train/keep_fraction": Metric("share", "active tokens that a masking rule (DPPO, IcePop, KPop, SeqClip) keeps"),
    "train/weight_mean": Metric("", "mean detached weight (TIS, IcePop) of active tokens"),
    "train/tokens": Metric("tokens", "active tokens of the batch, as the loss counts them"),
    "train/valid_tokens": Metric(
        "tokens", "tokens of the batch under the loss mask; 0 means that there was no step to take"
    ),
    "train/outside_support": Metric(
        "share", "learner's probability outside the replayed supports, mean of active tokens; where sampling truncates"
    ),
    "train/update_skipped": Metric(
        "", "1 where the update was withheld: no active token, or a gradient that is not finite"
    ),
    "sat/q": Metric(
        "nats", "alpha-quantile of |log ratio| at the loss's unit (sequence ratios: the response's mean), eq. (14)"
    ),
    "sat/gate_rate": Metric("share", "active tokens with |log ratio| beyond q, eq. (16)"),
    "sat/eps_low_mean": Metric("", "mean lower clip radius after contraction"),
    "sat/eps_high_mean": Metric("", "mean upper clip radius after contraction"),
    "sat/c_low_min": Metric("", "strongest contraction of a lower radius in the batch; 1 is none"),
    "sat/c_high_min": Metric("", "strongest contraction of an upper radius in the batch; 1 is none"),
    "sat/c_low_mean": Metric("", "mean contraction of the lower radius; 1 is none"),
    "sat/c_high_mean": Metric("", "mean contraction of the upper radius; 1 is none"),
    "sat/intercept_rate": Metric("share", "active tokens whose gradient SAT cuts and the nominal interval would not"),
    "async/staleness_mean": Metric("versions", "mean lag of active tokens: learner version minus sampling version"),
    "async/staleness_max": Metric("versions", "largest lag among active tokens"),
    "async/staleness_histogram": Metric("tokens", "active tokens of the batch by lag in versions", "histogram"),
    "async/queue_groups": Metric("groups", "finished groups waiting in the queue when the batch was taken"),
    "async/dropped_stale": Metric("groups", "groups dropped or requeued so far because they were too old"),
    "async/delta_pi": Metric("nats", "mean |log ratio| owed to policy updates, eq. (2)"),
    "async/delta_impl": Metric("nats", "mean |log ratio| owed to kernels, precision and routing, eq. (2)"),
    "rollout/reward_mean": Metric("reward", "mean reward of the batch's responses"),
    "rollout/reward_histogram": Metric("responses", "responses of the batch by reward", "histogram"),
    "rollout/accuracy": Metric("share", "responses of the batch that the verifier calls correct"),
    "rollout/response_len_mean": Metric("tokens", "mean response length"),
    "rollout/truncated_ratio": Metric("share", "responses ended by the token budget"),
    "rollout/zero_std_groups": Metric("groups", "groups of the batch whose rewards are all equal: no gradient"),
    "rollout/unparsed_ratio": Metric("share", "responses in which the verifier found no answer"),
    "rollout/ungraded": Metric("responses", "responses whose grading timed out, crashed or failed"),
    "rollout/tokens_per_s": Metric("tokens/s", "response tokens sampled per second of engine time"),
    "perf/step_time_s": Metric("s", "learner's own time for the step, waiting excluded"),
    "perf/tokens_per_s": Metric("tokens/s", "tokens trained on per second of step time"),
    "perf/batch_fill": Metric("share", "tokens of the batch that are not padding"),
    "perf/rollout_wait_s": Metric("s", "time the learner waited for a batch"),
    "perf/train_wait_s": Metric("s", "time the rollout side waited for the learner"),
    "moe/router_agreement": Metric("share", "routed (token, layer) expert sets that the learner would have chosen too"),
    "moe/load_max": Metric("", "load of the busiest expert over an even share; 1 is perfect balance"),
    "moe/aux_loss": Metric("", "load-balancing loss of the router, before its coefficient"),
    "moe/z_loss": Metric("", "router z-loss, before its coefficient"),
    "eval/avg@k": Metric("share", "mean accuracy over k samples of every held-out problem"),
    "eval/pass@k": Metric("share", "held-out problems solved by at least one of k samples, unbiased estimate"),
    "eval/response_len_mean": Metric("tokens", "mean response length in evaluation"),
    "eval/truncated_ratio": Metric("share", "evaluation responses ended by the token budget"),
}


def describe(name: str) -> Metric:
    """The register's entry for ``name``; an entry without unit and description for names that are not in it."""
    return METRICS.get(name, Metric("", ""))


def metrics_markdown() -> str:
    """The register as a Markdown table: the body of ``docs/metrics.md``."""
    rows = [f"| `{name}` | {m.unit or '–'} | {m.description} |" for name, m in METRICS.items()]
    return "\n".join(["| metric | unit | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def value_counts(values: np.ndarray | Iterable[float], decimals: int = 2) -> dict[str, int]:
    """How often each value occurs, as a histogram metric holds it: ``value_counts([1, 1, 8]) == {"1": 2, "8": 1}``.

    Args:
        values: numbers of any shape, all finite.
        decimals: values are rounded to this many places first, so that a continuous reward stays a short object.

    Raises:
        ValueError: a value that is NaN or infinite.
    """
    array = np.asarray(values, np.float64).ravel()
    if not np.isfinite(array).all():
        raise ValueError(
            f"cannot count {array[~np.isfinite(array)][0]}: a histogram takes finite values, select them first"
        )
    # Adding zero turns -0.0 into 0.0, which would otherwise be a bin of its own.
    unique, counts = np.unique(np.round(array, decimals) + 0.0, return_counts=True)
    names = (np.format_float_positional(value, trim="-") for value in unique)
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


@dataclasses.dataclass(frozen=True)
class Truncation:
    """What a resume took out of one file: lines that a crash left beyond the checkpoint.

    Attributes:
        file: name of the file.
        lines: complete lines removed, all with ``step`` beyond the resume step.
        first_step, last_step: their range; None where no complete line was removed.
        half_written: 1 where the last line had been cut off in the middle, else 0.
    """

    file: str
    lines: int
    first_step: int | None
    last_step: int | None
    half_written: int

    def __str__(self) -> str:
        parts = [f"{self.lines} line{'s' * (self.lines != 1)} (steps {self.first_step} to {self.last_step})"] * (
            self.lines > 0
        )
        parts += ["a half-written line"] * self.half_written
        return f"{' and '.join(parts)} of {self.file}"


class MetricsWriter:
    """Appends to a run folder's metric files. Not thread-safe: the trainer's own thread owns it.

    Args:
        run_dir: the run folder; created if it does not exist.
        resume_step: None starts fresh and refuses files that already hold records. An integer continues after that
            learner step: lines beyond it, left by a crash after the checkpoint, move into ``resumes.jsonl`` (see
            ``truncations``), which gets one line for every resume.
        tensorboard: also write event files, without TensorFlow.
        clock: seconds since the epoch; the ``time`` of every metrics line.

    Attributes:
        truncations: what the resume removed, one entry per file that lost something; say it to the user.

    Raises:
        ValueError: a fresh start over existing records, or a damaged file.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None = None,
        tensorboard: bool = True,
        clock: Callable[[], float] = time.time,
    ):
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        names = (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE)
        if resume_step is None:
            for name in names:
                path = self.run_dir / name
                if path.exists() and path.stat().st_size:
                    raise ValueError(f"{path} already holds records of a run: resume that run, or choose another --out")
            self.truncations: tuple[Truncation, ...] = ()
        else:
            self.truncations = _cut_back(self.run_dir, names, resume_step, clock())
        self._files: dict[str, BinaryIO] = {name: (self.run_dir / name).open("ab") for name in names}
        self._last_step = dict.fromkeys(names, -1 if resume_step is None else resume_step)
        self._events = _EventFile(self.run_dir / TENSORBOARD_DIR, resume_step, clock) if tensorboard else None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one learner step to ``metrics.jsonl`` and to TensorBoard.

        Args:
            step: the learner version after the step; larger than any logged before.
            metrics: scalars (Python, numpy or device arrays of size one) by name, histograms as ``value_counts``.
                Numbers that are not finite become ``null`` and are named in the line's ``nonfinite`` list.

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
        if self._events is not None:
            self._events.write(step, {k: v for k, v in values.items() if not isinstance(v, dict)})

    def log_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """Append one evaluation: ``avg@k``, ``pass@k``, ``k``, ``problems``, ``sources`` and whatever else it says.

        In TensorBoard the numbers are ``eval/avg@8`` and, per prompt source, ``eval/SOURCE/avg@8``.
        """
        self._append(EVALUATIONS_FILE, step, results)
        if self._events is not None:
            k = results.get("k", "k")
            flat = _numeric_leaves(results, "eval")
            self._events.write(step, {name.replace("@k", f"@{k}"): value for name, value in flat.items()})

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append readable rollouts of one step to ``samples.jsonl``, one line each."""
        for sample in samples:
            self._append(SAMPLES_FILE, step, sample)

    def close(self) -> None:
        """Close every file. Nothing is lost without it: each line was flushed when it was written."""
        for file in self._files.values():
            file.close()
        if self._events is not None:
            self._events.close()

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
    if isinstance(value, np.floating) and not isinstance(value, float):
        # Shortest decimal that gives the same float32 back: 0.1, not 0.10000000149011612.
        value = float(str(value))
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite.append(where)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", nonfinite) for i, item in enumerate(value)]
    array = np.asarray(value)
    if array.ndim:
        return _plain(list(array), where, nonfinite)
    if array.dtype.kind in "iub":
        return array.item()
    if array.dtype.kind in "fV":  # V: bfloat16 and its kin
        return _plain(array[()] if array.dtype.kind == "f" else float(array), where, nonfinite)
    raise ValueError(f"{where} = {value!r} cannot be written as JSON: use numbers, strings, lists and mappings")


def _numeric_leaves(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    leaves: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            leaves |= _numeric_leaves(value, prefix if key == "sources" else f"{prefix}/{key}")
        elif isinstance(value, int | float | np.number) and key not in ("step", "k"):
            leaves[f"{prefix}/{key}"] = float(value)
    return leaves


# The writer puts "step" first, so that cutting back need not parse long samples.
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


def _cut_back(run_dir: Path, names: Iterable[str], step: int, now: float) -> tuple[Truncation, ...]:
    """Cut files back to ``step``; what is cut off goes to ``resumes.jsonl`` first, so that no crash can lose it."""
    cuts, removed = [], {}
    for name in names:
        path = run_dir / name
        _end_last_line(path)
        offset, complete, half = _lines_beyond(path, step) if path.exists() else (0, [], b"")
        if complete or half:
            steps = [int(line["step"]) for line in complete]
            first, last = (steps[0], steps[-1]) if steps else (None, None)
            cuts.append((path, offset, Truncation(name, len(complete), first, last, int(bool(half)))))
            removed[name] = [*complete, *([half.decode("utf-8", errors="replace")] if half else [])]
    record = {
        "step": step,
        "time": round(now, 3),
        "truncated": [dataclasses.asdict(truncation) for _, _, truncation in cuts],
        "removed": removed,
    }
    with (run_dir / RESUMES_FILE).open("ab") as file:
        file.write(json.dumps(record).encode() + b"\n")
    for path, offset, _ in cuts:
        with path.open("r+b") as file:
            file.truncate(offset)
    return tuple(truncation for _, _, truncation in cuts)


def _end_last_line(path: Path) -> None:
    """Give a last line that is complete but for its newline that newline: only the closing brace makes it JSON."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
    last = path.read_bytes().rpartition(b"\n")[2]
    if last.endswith(b"}"):
        try:
            json.loads(last)
        except ValueError:
            return  # half-written after all, in the middle of a nested object
        with path.open("ab") as file:
            file.write(b"\n")


def _lines_beyond(path: Path, step: int) -> tuple[int, list[dict[str, Any]], bytes]:
    """Where the lines after ``step`` begin, those lines, and a half-written last line."""
    offset, keep, beyond, half = 0, 0, [], b""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                half = line
                break
            offset += len(line)
            match = _STEP.match(line)
            if not match:
                raise ValueError(
                    f"{path} line {number} is no record of this writer: restore the file, or delete that line"
                )
            if int(match[1]) > step:
                beyond.append(json.loads(line))
            elif beyond:
                raise ValueError(f"{path} line {number} goes back to step {int(match[1])}: restore the file's order")
            else:
                keep = offset
    return keep, beyond, half
