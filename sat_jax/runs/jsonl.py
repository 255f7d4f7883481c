"""JSONL files of a run: read with a half-written last line, cut back to a step, lines that a crash left behind kept."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from sat_jax.runs.folder import RESUMES_FILE


@dataclasses.dataclass(frozen=True)
class Truncation:
    """What a resume took out of one file: complete lines that a crash left beyond the checkpoint, and where they began
    and ended; ``half_written`` is 1 where the last line had been cut off in the middle."""

    file: str
    lines: int
    first_step: int | None
    last_step: int | None
    half_written: int

    def __str__(self) -> str:
        parts = ["a half-written line"] * self.half_written
        if self.lines:
            parts.insert(0, f"{self.lines} line{'s' * (self.lines > 1)} (steps {self.first_step} to {self.last_step})")
        return f"{' and '.join(parts)} of {self.file}"


def read_lines(
    path: Path, notices: list[str], wanted: Container[int] = range(1, sys.maxsize)
) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file, at the ``wanted`` line numbers from 1; none where the file is missing.

    A half-written last line is skipped, and said in ``notices``; any other that is no object with a ``step`` is an
    error.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number not in wanted:
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path} line {number} is not JSON: restore or delete that line") from error
                notices.append(f"the last line of {path.name} (line {number}) is half-written and was skipped")
                return
            if not isinstance(row, dict) or "step" not in row:
                raise ValueError(f"{path} line {number} is no object with a 'step': restore or delete that line")
            yield row


# The writer puts "step" first, so that cutting back need not parse long samples.
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


def cut_back(run_dir: Path, names: Iterable[str], step: int, now: float) -> tuple[Truncation, ...]:
    """Cut files back to ``step``; what is cut off goes to ``resumes.jsonl`` first, so that no crash can lose it."""
    cuts: list[Truncation] = []
    removed, keep = {}, {}
    for path in filter(Path.exists, map(run_dir.joinpath, names)):
        offset, complete, half = _lines_beyond(path, step)
        if complete or half:
            steps = [line["step"] for line in complete] or [None]
            cuts.append(Truncation(path.name, len(complete), steps[0], steps[-1], len(half)))
            removed[path.name], keep[path] = complete + half, offset
    truncated = [dataclasses.asdict(cut) for cut in cuts]
    record = {"step": step, "time": round(now, 3), "truncated": truncated, "removed": removed}
    with (run_dir / RESUMES_FILE).open("ab") as file:
        file.write(json.dumps(record).encode() + b"\n")
    for path, offset in keep.items():
        os.truncate(path, offset)
    return tuple(cuts)


def _lines_beyond(path: Path, step: int) -> tuple[int, list[Any], list[str]]:
    """Where the lines after ``step`` begin, those lines, and the last line where it is half-written.

    A last line that lacks nothing but its newline is given one.
    """
    offset, keep = 0, 0
    beyond: list[Any] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and not _whole(line):
                return keep, beyond, [line.decode("utf-8", errors="replace")]
            offset += len(line)
            match = _STEP.match(line)
            if not match:
                where = f"{path} line {number}"
                raise ValueError(f"{where} is no record of this writer: restore the file, or delete that line")
            if int(match[1]) > step:
                beyond.append(json.loads(line))
            elif beyond:
                raise ValueError(f"{path} line {number} goes back to step {int(match[1])}: restore the file's order")
            else:
                keep = offset
    if offset and not line.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
        keep = keep + 1 if keep == offset else keep
    return keep, beyond, []


def _whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"}")  # a number could go on
