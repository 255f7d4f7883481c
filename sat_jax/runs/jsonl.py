"""JSONL files of a run: read with a half-written last line, cut back to a step, lines that a crash left behind kept."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sat_jax.runs.folder import RESUMES_FILE


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


def read_lines(path: Path, notices: list[str]) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file; none where the file is missing. A half-written last line is skipped, and said."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
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
