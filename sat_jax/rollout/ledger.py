"""The exactly-once ledger: one JSON line per prompt group and change of state, and the audit of it.

A group's life::

    issued -> generated -> trained            its end in a good run
       |          |------> stale              too old when its step came: dropped
       |----------|------> filtered           nothing to learn from it (zero variance, filtered out)
       |----------|------> failed             lost, aborted or timed out
    any of these -> requeued                  goes back to be issued again: a stale group under "requeue", what was in
                                              flight when a run stopped, what a resumed run has to repeat

``requeued`` is the only way back, and where a resumed run starts from: it either issues the group again or, where the
checkpoint holds its responses, goes on with ``generated``. Whoever trains, drops or filters a group twice without a
``requeued`` in between has doubled it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Literal, get_args

State = Literal["issued", "generated", "trained", "stale", "filtered", "failed", "requeued"]

GroupName = tuple[str, str, int]
"""``group_id, prompt_id, position``."""

_FOLLOWERS: dict[State | None, set[State]] = {
    None: {"issued", "requeued"},
    "issued": {"generated", "filtered", "failed", "requeued"},
    "generated": {"trained", "stale", "filtered", "failed", "requeued"},
    "trained": {"requeued"},
    "stale": {"requeued"},
    "filtered": {"requeued"},
    "failed": {"requeued"},
    "requeued": {"issued", "generated", "requeued"},
}
_ENDS = {"trained", "stale", "filtered", "failed"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the file: what a group has become."""

    group_id: str
    prompt_id: str
    state: State
    version: int  # the published one at issue, that of the oldest token afterwards
    step: int  # of the learner, as far as known then
    time: float  # Unix seconds
    position: int = -1  # place in the prompt stream
    note: str = ""  # the reason, where there is one


class Ledger:
    """Appends entries to a file, flushed with every call, or keeps nothing where ``path`` is None. Not thread-safe by
    itself: the queue writes under its own lock."""

    def __init__(self, path: str | Path | None) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            _drop_torn_line(Path(path))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def write(self, groups: Iterable[GroupName], state: State, version: int, step: int, note: str = "") -> None:
        """One line for each ``(group_id, prompt_id, position)``, then a flush."""
        if self._file is None:
            return
        now = round(time.time(), 3)
        for group_id, prompt_id, position in groups:
            record = vars(Entry(group_id, prompt_id, state, version, step, now, position, note))
            self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_ledger(path: str | Path) -> list[Entry]:
    """All entries in file order. A last line without its newline was torn by a crash and is left out; any other that is
    malformed is a ``ValueError``."""
    entries = []
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            entry = Entry(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: not a ledger line ({error}); restore the file or delete the line"
            ) from error
        if entry.state not in get_args(State):
            raise ValueError(f"{path}:{number}: unknown state {entry.state!r}; known: {', '.join(get_args(State))}")
        entries.append(entry)
    return entries


@dataclasses.dataclass(frozen=True)
class Audit:
    """Where every group ended; the tuples are group ids."""

    ends: dict[str, int]  # how many groups are in which last state
    unfinished: tuple[str, ...]  # last state ``issued`` or ``generated``: lost, unless the run is still going
    doubled: tuple[str, ...]  # ended twice, or issued twice, without being requeued in between
    misordered: tuple[str, ...]  # any other forbidden change of state, such as trained without having been generated

    @property
    def clean(self) -> bool:
        """True where no group is lost, doubled or out of order."""
        return not (self.unfinished or self.doubled or self.misordered)


def audit(entries: Iterable[Entry]) -> Audit:
    """Follows every group through its states. ``requeued`` counts as an end: the group was given back on purpose."""
    last: dict[str, State] = {}
    doubled: dict[str, None] = {}
    misordered: dict[str, None] = {}
    for entry in entries:
        before = last.get(entry.group_id)
        if entry.state not in _FOLLOWERS[before]:
            twice = entry.state == before or (before in _ENDS and entry.state in _ENDS | {"issued"})
            (doubled if twice else misordered)[entry.group_id] = None
        last[entry.group_id] = entry.state
    return Audit(
        ends=dict(Counter(last.values())),
        unfinished=tuple(g for g, s in last.items() if s in ("issued", "generated")),
        doubled=tuple(doubled),
        misordered=tuple(misordered),
    )


def _drop_torn_line(path: Path) -> None:
    """Cuts a last line that a crash left without its newline, so that what is appended starts on a line of its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
