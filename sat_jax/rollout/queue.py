"""The bounded queue between engine and learner, and the account of every group that passes through it.

Back-pressure is one formula (AReaL's): the engine may start

    capacity = (floor((version + max_staleness) / U) + 1) * groups_per_batch - accepted - running

more groups, ``version`` being the one published to the engine, ``accepted`` all groups that were finished and not
thrown away since, ``running`` those in flight, and U the updates that a batch is split into. A group that starts at
version ``v`` then belongs to the batch that the learner begins at version ``v + max_staleness`` at the latest if groups
finish in order; those that did not, and those whose own update within the batch comes too late, are caught by
``take``.
"""

from __future__ import annotations

import bisect
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from sat_jax.rollout.ledger import Entry, GroupName, Ledger, State
from sat_jax.types import Group, Prompt

StalePolicy = Literal["drop", "requeue"]


class QueueStopped(RuntimeError):  # noqa: N818 - an event, not a fault: somebody asked for the stop
    """Raised to whoever waits for groups when the queue is stopped."""


class Ticket(Protocol):
    """A prompt at its place in the prompt stream, as the stream hands it out."""

    @property
    def position(self) -> int:
        """Orders groups for the learner and stays, however often the group is generated."""

    @property
    def group_id(self) -> str:
        """Unique within a run."""

    @property
    def prompt(self) -> Prompt: ...


class GroupQueue:
    """Thread-safe, one producer (``issue``, ``put``, ``filter``, ``fail``) and one consumer (``take``, ``trained``).

    Args:
        max_staleness: a group is too old when, at its own update, ``version - oldest token's version`` exceeds this.
        updates_per_batch: U: so many updates a batch is split into, whole groups to one update; divides the groups.
        on_stale: ``drop`` ends such a group, ``requeue`` has it generated again, before new prompts.
        max_groups: most groups that may wait or be in flight; None where only the formula above bounds them.
        last_step: the learner version at which the run ends: no group is started that only a later step could train on.
            None: the run has no end.
        group_timeout: seconds after which a group in flight fails the run by name, in ``take``; None waits for ever.
        version: the learner version at the start. The staleness budget counts from here, so a resumed run gets the room
            of ``max_staleness + 1`` batches and not that of every version since 0.
    """

    def __init__(
        self,
        groups_per_batch: int,
        max_staleness: int,
        *,
        updates_per_batch: int = 1,
        on_stale: StalePolicy = "drop",
        max_groups: int | None = None,
        last_step: int | None = None,
        group_timeout: float | None = None,
        ledger: Ledger | None = None,
        version: int = 0,
    ) -> None:
        if groups_per_batch < 1:
            raise ValueError(f"groups_per_batch = {groups_per_batch}: must be at least 1")
        if groups_per_batch % updates_per_batch:
            raise ValueError(f"updates_per_batch = {updates_per_batch} does not divide {groups_per_batch} groups")
        if max_staleness < updates_per_batch - 1:
            raise ValueError(
                f"max_staleness = {max_staleness}: must be at least updates_per_batch - 1 = {updates_per_batch - 1}, "
                "the age of a batch's last update; 0 is synchronous training with one update"
            )
        if on_stale not in get_args(StalePolicy):
            raise ValueError(f"on_stale = {on_stale!r}: must be 'drop' or 'requeue'")
        if max_groups is not None and max_groups < groups_per_batch:
            raise ValueError(f"queue_groups = {max_groups}: must hold one batch of {groups_per_batch} groups; raise it")
        self.groups_per_batch, self.max_staleness, self.on_stale = groups_per_batch, max_staleness, on_stale
        self._updates = updates_per_batch
        self._max_groups, self._last_step, self._group_timeout = max_groups, last_step, group_timeout
        self._ledger = ledger or Ledger(None)
        self._changed = threading.Condition()
        self._version = self._step = version
        self._accepted = version // updates_per_batch * groups_per_batch
        self._cursor = 0
        self._running: dict[str, tuple[Ticket, float]] = {}
        self._ready: list[tuple[Ticket, Group]] = []
        self._taken: dict[str, tuple[Ticket, Group]] = {}
        self._requeued: list[Ticket] = []
        self._counts: dict[str, int] = dict.fromkeys(get_args(State), 0)
        self._error: BaseException | None = None
        self._stopped = self._exhausted = self._closed = False

    # ------------------------------------------------------------------ producer

    @property
    def capacity(self) -> int:
        """How many groups may be started now; never negative, 0 once nothing is left to start."""
        with self._changed:
            return self._capacity()

    def wait_for_room(self, timeout: float | None = None) -> int:
        """Blocks until a group may be started; returns how many, or 0 once the queue is stopped or time has run out."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._capacity() > 0, timeout)
            return 0 if self._stopped else self._capacity()

    @property
    def complete(self) -> bool:
        """True where every group up to the last step has been generated."""
        with self._changed:
            return self._missing() <= 0 and not self._running

    def next_batch(self) -> tuple[int, int]:
        """``(batch, missing)``: the batch that is being filled, counting finished and running groups, and how many
        groups it still lacks (at least 1)."""
        with self._changed:
            batch, filled = divmod(self._accepted + len(self._running), self.groups_per_batch)
            return batch, self.groups_per_batch - filled

    def issue(self, stream: Iterator[Ticket]) -> Ticket | None:
        """The next group to generate: requeued ones first, then the next of ``stream``; None where both have ended.
        ``RuntimeError`` where there is no room: ask ``wait_for_room`` first."""
        with self._changed:
            if self._exhausted and not self._requeued:
                return None
            if self._capacity() < 1:
                raise RuntimeError("issue() without room: call wait_for_room() first")
            if self._requeued:
                ticket = self._requeued.pop(0)
            elif (drawn := next(stream, None)) is not None:
                ticket, self._cursor = drawn, drawn.position + 1
            else:
                self._exhausted = True
                self._changed.notify_all()
                return None
            self._running[ticket.group_id] = (ticket, time.monotonic())
            self._record([ticket], "issued", self._version)
            return ticket

    def put(self, group: Group) -> None:
        """A finished, graded group. Never blocks: its room was reserved when it was issued. ``ValueError`` where it is
        not in flight (never issued, put twice, failed meanwhile)."""
        with self._changed:
            ticket = self._leave_running(group.group_id)
            bisect.insort(self._ready, (ticket, group), key=_position)
            self._accepted += 1
            self._record([ticket], "generated", group.oldest_version)
            self._changed.notify_all()

    def filter(self, group_id: str, note: str = "") -> None:
        """Ends a group in flight from which there is nothing to learn; its room becomes free."""
        self._end_running(group_id, "filtered", note)

    def fail(self, group_id: str, note: str) -> None:
        """Ends a group in flight that was lost or aborted; its room becomes free."""
        self._end_running(group_id, "failed", note)

    def set_version(self, version: int) -> None:
        """The engine has been given the weights of ``version``, which never goes back; room opens up."""
        with self._changed:
            if version < self._version:
                raise ValueError(
                    f"version {version} after {self._version}: versions never go back; resume with a new queue"
                )
            self._version = version
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """The producer has died of ``error``: who waits in ``take``, now or later, gets it raised. The first wins."""
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ consumer

    def take(self, n: int, version: int, timeout: float | None = None) -> list[Group]:
        """The groups of one batch, in stream order; the learner begins it at ``version``.

        Waits for ``n`` groups that are not too old at their own update; older ones are dropped or requeued and
        counted. Fewer than ``n`` come back only after the prompt stream has ended and nothing is left in flight.

        Raises:
            QueueStopped: ``stop`` was called.
            TimeoutError: ``timeout`` seconds went by, or one group took longer than ``group_timeout``; names it.
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
                self._drop_stale(version, n)
                drained = self._exhausted and not self._running and not self._requeued
                if len(self._ready) >= n or drained:
                    break
                self._changed.wait(self._patience(n, deadline))
            taken, self._ready = self._ready[:n], self._ready[n:]
            self._taken.update({group.group_id: (ticket, group) for ticket, group in taken})
            self._changed.notify_all()  # room where max_groups bounds the queue
            return [group for _, group in taken]

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """The learner has applied its update on ``groups``, each taken and reported once; ``step`` is its version after
        it."""
        with self._changed:
            self._step = step
            for group in groups:
                if group.group_id not in self._taken:
                    raise ValueError(
                        f"group {group.group_id} was not taken, or trained on before: it would count twice"
                    )
                self._record([self._taken.pop(group.group_id)[0]], "trained", group.oldest_version)

    def stop(self) -> None:
        """Wakes up everybody who waits. A second call does nothing."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stops, and gives back everything that has no end yet (``requeued`` in the ledger). A second call does
        nothing. Call it after the producer has ended."""
        with self._changed:
            self._stopped = True
            if not self._closed:
                held = [ticket for ticket, _ in (*self._ready, *self._taken.values())]
                self._record(sorted(held + self._in_flight(), key=lambda t: t.position), "requeued", self._version)
                self._ledger.close()
            self._closed = True
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """True once ``stop``, ``close`` or ``abort`` was called."""
        return self._stopped

    # ------------------------------------------------------------------ checkpoints and metrics

    def snapshot(self) -> tuple[dict[str, Any], list[Group]]:
        """What a checkpoint has to keep: a JSON-ready state, and the finished groups that nobody has trained on."""
        with self._changed:
            held = sorted((*self._ready, *self._taken.values()), key=_position)
            state = {
                "cursor": self._cursor,  # the stream position to go on from
                "in_flight": [t.position for t in self._in_flight()],  # to be generated again
                "held": [ticket.position for ticket, _ in held],  # of the returned groups, in the same order
                "counts": dict(self._counts),
            }
            return state, [group for _, group in held]

    def restore(
        self,
        state: Mapping[str, Any],
        groups: Sequence[Group],
        ticket_at: Callable[[int], Ticket],
        history: Iterable[Entry] = (),
    ) -> None:
        """Takes up, in a fresh queue, where ``snapshot`` was made. The caller sets its stream to ``state["cursor"]``.

        The snapshot's groups are handed out first, as they were sampled; those in flight are issued again before the
        stream, whose tickets ``ticket_at`` gives, goes on. Groups that were issued or trained after the snapshot, by
        the run's ledger in ``history``, are marked ``requeued``, for it will happen again.
        """
        with self._changed:
            if self._cursor or self._ready or self._requeued:
                raise RuntimeError("restore() needs a fresh queue")
            tickets = [ticket_at(position) for position in state["held"]]
            if [t.group_id for t in tickets] != [g.group_id for g in groups]:
                raise ValueError(
                    f"the checkpoint's groups {[g.group_id for g in groups]} are not those of its state "
                    f"{[t.group_id for t in tickets]}: resume with the prompts and the seed of the run"
                )
            self._cursor = int(state["cursor"])
            self._ready = list(zip(tickets, groups, strict=True))
            self._accepted += len(groups)
            self._requeued = [ticket_at(position) for position in state["in_flight"]]
            self._counts.update(state["counts"])
            last = {entry.group_id: entry for entry in history}
            held = [t for t in tickets if t.group_id not in last or last[t.group_id].state != "generated"]
            names = [_name(t) for t in held + self._requeued]
            known = {name[0] for name in names}
            names += [
                (e.group_id, e.prompt_id, e.position)
                for e in last.values()
                if e.position >= self._cursor and e.group_id not in known and e.state != "requeued"
            ]
            self._ledger.write(names, "requeued", self._version, self._step, "resumed")
            self._ledger.write(map(_name, held), "generated", self._version, self._step, "kept in the checkpoint")

    def counts(self) -> dict[str, int]:
        """Changes of state so far, by state, and the groups that are now ``ready``, ``running`` and ``accepted``."""
        with self._changed:
            now = {"ready": len(self._ready), "running": len(self._running), "accepted": self._accepted}
            return self._counts | now

    # ------------------------------------------------------------------ inside, under the lock

    def _capacity(self) -> int:
        if self._exhausted and not self._requeued:
            return 0  # nothing is left that could be started
        batches = (self._version + self.max_staleness) // self._updates + 1
        room = batches * self.groups_per_batch - self._accepted - len(self._running)
        if self._max_groups is not None:
            room = min(room, self._max_groups - len(self._ready) - len(self._running))
        return max(min(room, self._missing()), 0)

    def _missing(self) -> int:
        """Groups that are still to be started before the run's last step has what it needs."""
        if self._last_step is None:
            return sys.maxsize
        return self._last_step // self._updates * self.groups_per_batch - self._accepted - len(self._running)

    def _patience(self, n: int, deadline: float | None) -> float | None:
        """Seconds until the next limit is reached; raises where one has been."""
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise TimeoutError(
                f"{len(self._ready)} of {n} groups in time; in flight: {', '.join(self._running) or 'none'}; "
                "allow more time or look at the engine"
            )
        limits = [] if deadline is None else [deadline]
        if self._group_timeout is not None and self._running:
            ticket, since = min(self._running.values(), key=lambda item: item[1])
            if now >= since + self._group_timeout:
                raise TimeoutError(
                    f"group {ticket.group_id} is in flight for more than {self._group_timeout} s: raise "
                    "group_timeout_s, or look at the engine and the reward"
                )
            limits.append(since + self._group_timeout)
        elif self._group_timeout is not None:
            limits.append(now + self._group_timeout)  # nothing to time yet: look again
        return min(limits) - now if limits else None

    def _leave_running(self, group_id: str) -> Ticket:
        if group_id not in self._running:
            raise ValueError(f"group {group_id} is not in flight: it was never issued, or has ended already")
        return self._running.pop(group_id)[0]

    def _end_running(self, group_id: str, state: State, note: str) -> None:
        with self._changed:
            self._record([self._leave_running(group_id)], state, self._version, note)
            self._changed.notify_all()

    def _drop_stale(self, version: int, n: int) -> None:
        """Drops what is too old for a batch of ``n`` that begins at ``version``, each group at its own update.

        As long as groups are missing, earlier ones may still come and move the others back: only the first update is
        certain then.
        """
        per_update = max(n // self._updates, 1)
        fresh: list[tuple[Ticket, Group]] = []
        stale: list[tuple[Ticket, Group]] = []
        complete = len(self._ready) >= n
        for item in self._ready:
            update = min(len(fresh), n - 1) // per_update if complete else 0
            too_old = version + update - item[1].oldest_version > self.max_staleness
            (stale if too_old else fresh).append(item)
        if not stale:
            return
        for ticket, group in stale:
            self._record([ticket], "stale", group.oldest_version)
            if self.on_stale == "requeue":
                bisect.insort(self._requeued, ticket, key=lambda t: t.position)
                self._record([ticket], "requeued", self._version)
        self._ready = fresh
        self._accepted -= len(stale)
        self._changed.notify_all()

    def _in_flight(self) -> list[Ticket]:
        return sorted([*(t for t, _ in self._running.values()), *self._requeued], key=lambda t: t.position)

    def _record(self, tickets: Sequence[Ticket], state: State, version: int, note: str = "") -> None:
        self._counts[state] += len(tickets)
        self._ledger.write(map(_name, tickets), state, version, self._step, note)


def _position(item: tuple[Ticket, Group]) -> int:
    return item[0].position


def _name(ticket: Ticket) -> GroupName:
    return ticket.group_id, ticket.prompt.prompt_id, ticket.position
