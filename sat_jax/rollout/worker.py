"""The rollout thread: asks the queue for room, has the engine sample, the grader grade, and puts groups in the
queue."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from sat_jax.rollout.engine import Engine, Request, SamplingParams
from sat_jax.rollout.queue import GroupQueue, Ticket
from sat_jax.rollout.schedule import Schedule
from sat_jax.rollout.weights import WeightStore
from sat_jax.types import Group, Trajectory

MAX_VERSION = 2**31 - 1

Grade = Callable[[Sequence[Group]], Sequence[Group | None]]
"""Grades complete groups: each comes back with rewards and advantages, or as None where it is filtered out. Called in a
thread of its own, one call at a time, with whatever has finished since the last one: its answer for a group must not
depend on the others."""


class RolloutWorker:
    """Owns the engine from ``start`` to ``stop``. Anything that goes wrong in it is raised by the queue's ``take``.

    Under a scheduled regime, batch ``b`` is sampled as a whole with the weights at the start of batch
    ``schedule.source(b)``: the thread waits until they have been published. What is filtered out of a batch is replaced
    with the same version before the next batch begins. The samples therefore do not depend on timing.

    Free-running, groups are issued whenever the queue has room, and weights reach the engine as soon as they are
    published, in the middle of responses.

    The engine holds its first weights and their version, with which the run starts or is resumed. ``updates_per_batch``
    versions lie between one batch and the next. Each response gets a seed of its own, from the run's ``seed``, its
    group and its index.
    """

    def __init__(
        self,
        engine: Engine,
        queue: GroupQueue,
        stream: Iterator[Ticket],
        grade: Grade,
        *,
        group_size: int,
        params: SamplingParams,
        schedule: Schedule,
        updates_per_batch: int = 1,
        seed: int = 0,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"n_samples_per_prompt = {group_size}: must be at least 1")
        self._engine, self._queue, self._stream, self._grade = engine, queue, stream, grade
        self._group_size, self._params, self._schedule, self._seed = group_size, params, schedule, seed
        self._weights = WeightStore()
        self._updates = updates_per_batch
        self._published = engine.version
        self._start = engine.version // updates_per_batch
        self._open: dict[str, tuple[Ticket, list[Trajectory]]] = {}
        self._outstanding = 0  # requests given to the engine that have not come back
        self._finished: SimpleQueue[Group | None] = SimpleQueue()
        self._progress = threading.Condition()
        self._ungraded = 0
        self._sampling_version = -1
        self._mark = 0.0
        self._clock = {"tokens": 0.0, "engine_s": 0.0, "grade_s": 0.0, "wait_s": 0.0}
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            for name, body in (("rollout", self._generate), ("grading", self._grade_finished))
        ]

    # ------------------------------------------------------------------ called by the trainer

    def start(self) -> None:
        """Begins to generate."""
        for thread in self._threads:
            thread.start()

    def publish(self, params: Any, version: int) -> bool:
        """The learner has reached ``version``, the end of a batch. Weights that the schedule broadcasts are copied
        before this returns; True where it did."""
        if version % self._updates:
            raise ValueError(f"version {version} lies within a batch of {self._updates} updates: publish at its end")
        if version < self._published:
            raise ValueError(f"version {version} after {self._published}: versions never go back")
        if version == self._published or not self._schedule.is_published(version // self._updates, self._start):
            return False
        if self._schedule.free_running:
            self._engine.update_weights(params, version)
            self._queue.set_version(version)
        else:
            self._weights.publish(params, version)
        self._published = version  # last: an update that failed has published nothing
        return True

    def settle(self, version: int) -> None:
        """Blocks until every batch that weights older than ``version`` sample has been generated (or the queue stops).

        A checkpoint of ``version`` taken after this repeats exactly: it holds those batches, and whatever is still in
        flight is sampled again with weights that it holds, too. Free-running there is no such moment: returns at once.
        """
        if self._schedule.free_running:
            return
        with self._progress:
            self._progress.wait_for(
                lambda: self._queue.stopped or self._sampling_version >= version or self._queue.complete
            )

    def stop(self, timeout: float = 30.0) -> bool:
        """Stops the queue and both threads; True where they ended within ``timeout`` seconds. A second call is a
        no-op. The engine stays open."""
        self._queue.stop()
        self._weights.close()
        self._finished.put(None)
        self._notify()
        deadline = time.monotonic() + timeout
        while any(thread.is_alive() for thread in self._threads):
            if time.monotonic() > deadline:
                return False
            self._engine.abort()  # again and again: a batch may just be starting
            for thread in self._threads:
                if thread.is_alive():
                    thread.join(0.1)
        return True

    def clock(self) -> dict[str, float]:
        """Totals since the start: response ``tokens`` sampled; seconds of the rollout thread spent sampling
        (``engine_s``), waiting for grades (``grade_s``) and for the learner, be it room or weights (``wait_s``)."""
        return dict(self._clock)

    # ------------------------------------------------------------------ the rollout thread

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._queue.abort(error)
            self._weights.close()
        finally:
            self._notify()

    def _generate(self) -> None:
        self._mark = time.monotonic()
        try:
            if self._schedule.free_running:
                for trajectory in self._engine.generate(self._free_requests()):
                    self._collect(trajectory)
            else:
                while self._generate_batch():
                    pass
        finally:
            self._sampling_version = MAX_VERSION
            self._finished.put(None)

    def _generate_batch(self) -> bool:
        """One pass for the batch being filled; False once the queue is stopped."""
        batch, missing = self._queue.next_batch()
        version = self._schedule.source(batch, self._start) * self._updates
        self._sampling_version = version
        self._notify()
        if version != self._engine.version:
            with self._waiting("wait_s"):
                params = self._weights.fetch(version)
            if params is None:
                return False
            self._engine.update_weights(params, version)
        self._queue.set_version(version)
        with self._waiting("wait_s"):
            room = self._queue.wait_for_room()
        tickets = [t for _ in range(min(room, missing)) if (t := self._queue.issue(self._stream)) is not None]
        for trajectory in self._engine.generate(r for ticket in tickets for r in self._requests(ticket)):
            self._collect(trajectory)
        # What the grader filters out belongs to this batch and is replaced before the next one begins.
        with self._waiting("grade_s"), self._progress:
            self._progress.wait_for(lambda: self._ungraded == 0 or self._queue.stopped)
        return not self._queue.stopped

    def _free_requests(self) -> Iterator[Request | None]:
        while not self._queue.stopped:
            if self._queue.capacity > 0:
                ticket = self._queue.issue(self._stream)
                if ticket is not None:
                    yield from self._requests(ticket)
            elif self._outstanding:
                yield None
            else:
                with self._waiting("wait_s"):
                    self._queue.wait_for_room()

    def _requests(self, ticket: Ticket) -> Iterator[Request]:
        self._open[ticket.group_id] = (ticket, [])
        for index in range(self._group_size):
            self._outstanding += 1
            seed = request_seed(self._seed, ticket.group_id, index)
            yield Request(f"{ticket.group_id}/{index}", ticket.prompt, index, self._params, seed)

    def _collect(self, trajectory: Trajectory) -> None:
        self._charge("engine_s")
        self._outstanding -= 1
        self._clock["tokens"] += len(trajectory.response_ids)
        group_id = trajectory.request_id.rpartition("/")[0]
        ticket, members = self._open[group_id]
        members.append(trajectory)
        if len(members) < self._group_size:
            return
        del self._open[group_id]
        if self._queue.stopped:
            return  # what was in flight goes back to the stream when the queue is closed
        if aborted := sum(t.finish_reason == "abort" for t in members):
            self._queue.fail(group_id, f"{aborted} of {self._group_size} responses aborted")
            return
        with self._progress:
            self._ungraded += 1
        members.sort(key=lambda t: t.sample_index)
        self._finished.put(Group(group_id, ticket.prompt, tuple(members)))

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self._charge("engine_s")
        yield
        self._charge(what)

    def _charge(self, to: str) -> None:
        now = time.monotonic()
        self._clock[to] += now - self._mark
        self._mark = now

    # ------------------------------------------------------------------ the grading thread

    def _grade_finished(self) -> None:
        while not self._queue.stopped:
            groups = [self._finished.get()]
            while not self._finished.empty():
                groups.append(self._finished.get())
            complete = [group for group in groups if group is not None]
            for group, graded in zip(complete, self._grade(complete), strict=True):
                if graded is None:
                    self._queue.filter(group.group_id)
                else:
                    self._queue.put(graded)
            with self._progress:
                self._ungraded -= len(complete)
                self._progress.notify_all()
            if len(complete) < len(groups):
                return

    def _notify(self) -> None:
        with self._progress:
            self._progress.notify_all()


def request_seed(seed: int, group_id: str, index: int) -> int:
    """The seed of response ``index`` of a group: a hash, so that it depends on nothing else that is in the run."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
