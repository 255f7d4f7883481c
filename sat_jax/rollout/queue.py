"""The bounded queue between engine and learner, and the account of every group that passes through it.

Back-pressure is one formula (AReaL's): the engine may start

    capacity = (max_staleness + version + 1) * groups_per_step - accepted - running

more groups, ``version`` being the one published to the engine, ``accepted`` all groups that were finished and not
thrown away since, ``running`` those in flight. A group that starts at version ``v`` is then among the first
``(max_staleness + v + 1) * groups_per_step``, so it is trained on at step ``v + max_staleness`` at the latest if groups
finish in order; those that did not are caught by ``take``.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from sat_jax.rollout.ledger import Ledger, State
from sat_jax.types import Group, Prompt

StalePolicy = Literal["drop", "requeue"]


class QueueStopped(RuntimeError):  # noqa: N818 - an event, not a fault: somebody asked for the stop
    """Raised to whoever waits for groups when the queue is stopped."""


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Permission to generate one group. ``serial`` counts issues within the run and orders groups for the learner."""

    group_id: str
    serial: int
    prompt: Prompt


class GroupQueue:
    """Thread-safe: one producer (``wait_for_room``, ``issue``, ``put``, ``filter``, ``fail``) and one consumer
    (``take``,
    ``trained``, ``snapshot``).

    Args:
        groups_per_step: groups of one learner batch.
        max_staleness: a group is too old when ``version - oldest token's version`` exceeds this.
        on_stale: ``drop`` ends such a group, ``requeue`` has it generated again, before new prompts.
        max_groups: most groups that may wait or be in flight; None where only the formula above bounds them.
        ledger: where changes of state are written.
        version: the learner version at the start. The staleness budget counts from here, so a resumed run gets the room
            of ``max_staleness + 1`` batches and not that of every version since 0.

    Raises:
        ValueError: non-positive sizes, an unknown policy, a queue smaller than one batch.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        *,
        on_stale: StalePolicy = "drop",
        max_groups: int | None = None,
        ledger: Ledger | None = None,
        version: int = 0,
    ) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step = {groups_per_step}: must be at least 1")
        if max_staleness < 0:
            raise ValueError(f"max_staleness = {max_staleness}: must be >= 0; 0 is synchronous training")
        if on_stale not in ("drop", "requeue"):
            raise ValueError(f"on_stale = {on_stale!r}: must be 'drop' or 'requeue'")
        if max_groups is not None and max_groups < groups_per_step:
            raise ValueError(f"queue_groups = {max_groups}: must hold one batch of {groups_per_step} groups; raise it")
        self.groups_per_step, self.max_staleness, self.on_stale = groups_per_step, max_staleness, on_stale
        self._max_groups = max_groups
        self._ledger = ledger or Ledger(None)
        self._changed = threading.Condition()
        self._version = self._step = version
        self._accepted = version * groups_per_step
        self._serial = self._cursor = 0
        self._running: dict[str, tuple[Ticket, float]] = {}
        self._ready: list[tuple[int, Group]] = []
        self._taken: dict[str, Ticket] = {}
        self._tickets: dict[str, Ticket] = {}  # of everything in _ready
        self._requeued: list[Ticket] = []
        self._counts: dict[State, int] = dict.fromkeys(
            ("issued", "generated", "trained", "stale", "filtered", "failed", "requeued"), 0
        )
        self._error: BaseException | None = None
        self._stopped = self._exhausted = self._closed = False

    # ------------------------------------------------------------------ producer

    @property
    def capacity(self) -> int:
        """How many groups may be started now; never negative."""
        with self._changed:
            return self._capacity()

    def _capacity(self) -> int:
        room = (self.max_staleness + self._version + 1) * self.groups_per_step - self._accepted - len(self._running)
        if self._max_groups is not None:
            room = min(room, self._max_groups - len(self._ready) - len(self._running))
        return max(room, 0)

    def wait_for_room(self, timeout: float | None = None) -> int:
        """Blocks until a group may be started; returns how many, or 0 once the queue is stopped or time has run out."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._capacity() > 0, timeout)
            return 0 if self._stopped else self._capacity()

    def issue(self, prompts: Iterator[Prompt]) -> Ticket | None:
        """A ticket for the next group: requeued ones first, then the next of ``prompts``; None where both are
        exhausted.

        Raises:
            RuntimeError: there is no room; ask ``wait_for_room`` first.
        """
        with self._changed:
            if self._capacity() < 1:
                raise RuntimeError("issue() without room: call wait_for_room() first")
            if self._requeued:
                ticket = self._requeued.pop(0)
            else:
                prompt = next(prompts, None)
                if prompt is None:
                    return None
                ticket = Ticket(f"{self._serial:06d}:{prompt.prompt_id}", self._serial, prompt)
                self._serial += 1
                self._cursor += 1
            self._running[ticket.group_id] = (ticket, time.monotonic())
            self._record([ticket], "issued", self._version)
            return ticket

    def put(self, group: Group) -> None:
        """A finished, graded group. Never blocks: its room was reserved when it was issued.

        Raises:
            ValueError: a group that is not in flight (never issued, put twice, failed meanwhile).
        """
        with self._changed:
            ticket = self._leave_running(group.group_id)
            bisect.insort(self._ready, (ticket.serial, group), key=lambda item: item[0])
            self._tickets[ticket.group_id] = ticket
            self._accepted += 1
            self._record([ticket], "generated", group.oldest_version)
            self._changed.notify_all()

    def filter(self, group_id: str, note: str = "") -> None:
        """Ends a group in flight from which there is nothing to learn; its room becomes free."""
        self._end_running(group_id, "filtered", note)

    def fail(self, group_id: str, note: str) -> None:
        """Ends a group in flight that was lost, aborted or timed out; its room becomes free."""
        self._end_running(group_id, "failed", note)

    def overdue(self, seconds: float) -> list[Ticket]:
        """Groups in flight for longer than ``seconds``."""
        limit = time.monotonic() - seconds
        with self._changed:
            return [ticket for ticket, since in self._running.values() if since < limit]

    def set_version(self, version: int) -> None:
        """The engine has been given the weights of ``version``; room opens up.

        Raises:
            ValueError: versions never go back.
        """
        with self._changed:
            if version < self._version:
                raise ValueError(
                    f"version {version} after {self._version}: versions never go back; resume with a new queue"
                )
            self._version = version
            self._changed.notify_all()

    def exhaust(self) -> None:
        """No more prompts: ``take`` hands out what is left and then empty lists."""
        with self._changed:
            self._exhausted = True
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """The producer has died of ``error``: whoever waits in ``take``, now or later, gets it raised.

        The first wins.
        """
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ consumer

    def take(self, n: int, version: int, timeout: float | None = None) -> list[Group]:
        """The groups of one learner step, in issue order.

        Waits for ``n`` groups that are not too old for a learner at ``version``; older ones are dropped or requeued and
        counted. Fewer than ``n`` come back only after ``exhaust``, when nothing is left in flight.

        Raises:
            QueueStopped: ``stop`` was called.
            TimeoutError: ``timeout`` seconds went by; names what is in flight.
            BaseException: whatever the producer died of.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._step = version
            while True:
                if self._error is not None:
                    raise self._error
                if self._stopped:
                    raise QueueStopped("the rollout queue was stopped")
                self._drop_stale(version)
                drained = self._exhausted and not self._running and not self._requeued
                if len(self._ready) >= n or drained:
                    break
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    waiting = ", ".join(self._running) or "none"
                    raise TimeoutError(
                        f"{len(self._ready)} of {n} groups after {timeout} s; in flight: {waiting}; raise the timeout "
                        "or look at the engine"
                    )
                self._changed.wait(remaining)
            taken, self._ready = self._ready[:n], self._ready[n:]
            groups = [group for _, group in taken]
            for group in groups:
                self._taken[group.group_id] = self._tickets.pop(group.group_id)
            self._changed.notify_all()  # room where max_groups bounds the queue
            return groups

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """The learner has applied its update on ``groups``; ``step`` is its version after it."""
        with self._changed:
            self._step = step
            for group in groups:
                if group.group_id not in self._taken:
                    raise ValueError(f"group {group.group_id} was not taken from this queue: it would be counted twice")
                self._record([self._taken.pop(group.group_id)], "trained", group.oldest_version)

    def stop(self) -> None:
        """Wakes up everybody who waits. A second call does nothing."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stops, and gives back everything that has no end yet (``requeued`` in the ledger). A second call does
        nothing.
        Call it after the producer has ended."""
        with self._changed:
            self._stopped = True
            if not self._closed:
                self._record(self._pending(), "requeued", self._version, "run ended")
                self._ledger.close()
            self._closed = True
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """True once ``stop``, ``close`` or ``abort`` was called."""
        return self._stopped

    # ------------------------------------------------------------------ checkpoints and metrics

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint has to keep: JSON-ready.

        ``cursor`` prompts have been drawn from the source; ``pending`` (in issue order) have no end yet and are
        generated again after a resume; ``serial`` is the next group's number.
        """
        with self._changed:
            pending = [
                {"group_id": t.group_id, "serial": t.serial, "prompt_id": t.prompt.prompt_id} for t in self._pending()
            ]
            return {"cursor": self._cursor, "serial": self._serial, "pending": pending, "counts": dict(self._counts)}

    def waiting(self) -> list[Group]:
        """The finished groups that no learner step has taken yet, in issue order."""
        with self._changed:
            return [group for _, group in self._ready]

    def restore(
        self,
        state: Mapping[str, Any],
        lookup: Callable[[str], Prompt],
        history: Iterable[tuple[str, str]] = (),
        waiting: Iterable[Group] = (),
    ) -> None:
        """Takes up where ``snapshot`` was made: pending groups are issued first, then prompts from ``cursor`` on.

        Args:
            state: what ``snapshot`` returned.
            lookup: the prompt of a ``prompt_id``.
            waiting: finished groups that were stored with the snapshot. Those that it lists as pending are ready at
                once, as they were sampled; the other pending ones are generated again.
            history: ``(group_id, prompt_id)`` of every group in the run's ledger. Those that the snapshot does not know
                as ended (they were issued or trained after it) are marked ``requeued``, for they happen again.

        Raises:
            RuntimeError: the queue has been used.
            KeyError: ``lookup`` does not know a pending prompt.
        """
        with self._changed:
            if self._serial or self._requeued:
                raise RuntimeError("restore() needs a fresh queue")
            self._cursor, self._serial = int(state["cursor"]), int(state["serial"])
            self._counts.update(state["counts"])
            finished = {group.group_id: group for group in waiting}
            for entry in state["pending"]:
                ticket = Ticket(entry["group_id"], int(entry["serial"]), lookup(entry["prompt_id"]))
                if ticket.group_id in finished:
                    self._ready.append((ticket.serial, finished[ticket.group_id]))
                    self._tickets[ticket.group_id] = ticket
                else:
                    self._requeued.append(ticket)
            self._accepted += len(self._ready)
            kept = {t.group_id: t.prompt.prompt_id for t in self._tickets.values()}
            again = {t.group_id: t.prompt.prompt_id for t in self._requeued} | kept
            again |= {g: p for g, p in history if g not in again and int(g.split(":", 1)[0]) >= self._serial}
            self._counts["requeued"] += len(self._requeued)
            self._ledger.write(
                ((g, p, "requeued") for g, p in again.items()), self._version, self._step, "resumed from a checkpoint"
            )
            # Whatever the file said of them last, they are waiting again: spelt out, so that the audit stays simple.
            again_states: tuple[State, State] = ("issued", "generated")
            for state_again in again_states:
                self._ledger.write(
                    ((g, p, state_again) for g, p in kept.items()), self._version, self._step, "kept by the checkpoint"
                )

    @property
    def cursor(self) -> int:
        """Prompts drawn from the source so far, requeued ones not counted twice."""
        return self._cursor

    def counts(self) -> dict[str, int]:
        """Changes of state so far, by state, and the groups that are now ``ready``, ``running`` and ``accepted``."""
        with self._changed:
            now = {"ready": len(self._ready), "running": len(self._running), "accepted": self._accepted}
            return {str(state): n for state, n in self._counts.items()} | now

    # ------------------------------------------------------------------ inside, under the lock

    def _leave_running(self, group_id: str) -> Ticket:
        if group_id not in self._running:
            raise ValueError(f"group {group_id} is not in flight: it was never issued, or has ended already")
        return self._running.pop(group_id)[0]

    def _end_running(self, group_id: str, state: State, note: str) -> None:
        with self._changed:
            self._record([self._leave_running(group_id)], state, self._version, note)
            self._changed.notify_all()

    def _drop_stale(self, version: int) -> None:
        stale = [item for item in self._ready if version - item[1].oldest_version > self.max_staleness]
        if not stale:
            return
        self._ready = [item for item in self._ready if version - item[1].oldest_version <= self.max_staleness]
        for _, group in stale:
            ticket = self._tickets.pop(group.group_id)
            self._record([ticket], "stale", group.oldest_version)
            if self.on_stale == "requeue":
                bisect.insort(self._requeued, ticket, key=lambda t: t.serial)
                self._record([ticket], "requeued", self._version)
        self._accepted -= len(stale)
        self._changed.notify_all()

    def _pending(self) -> list[Ticket]:
        tickets = [t for t, _ in self._running.values()] + list(self._tickets.values()) + list(self._taken.values())
        return sorted(tickets + self._requeued, key=lambda t: t.serial)

    def _record(self, tickets: Sequence[Ticket], state: State, version: int, note: str = "") -> None:
        self._counts[state] += len(tickets)
        self._ledger.write(((t.group_id, t.prompt.prompt_id, state) for t in tickets), version, self._step, note)


def token_staleness(groups: Iterable[Group], version: int) -> np.ndarray:
    """int32 [tokens]: ``version - policy_version`` of every response token in ``groups``."""
    versions = [t.policy_versions for group in groups for t in group.trajectories]
    return version - np.concatenate([np.zeros(0, np.int32), *versions]).astype(np.int32)
