"""Which weights sample which batch: the regimes of asynchrony as arithmetic.

The learner trains on batch ``b`` in U updates, so that batch ``b`` starts at version ``U b``. A deterministic schedule
says in advance at the start of which batch the weights are taken that sample batch ``b``:

    source(b) = max(start, floor((b - delay) / interval) * interval)

with ``delay`` (how many batches ahead of the learner the engine works) and ``interval`` (weights are broadcast every
that many batches). The realised lag ``b - source(b)`` then cycles through ``delay .. delay + interval - 1`` batches:

    synchronous                      delay 0, interval 1      lag 0
    batch-wise, fixed delay n        delay n, interval 1      lag n: every batch exactly n batches old (paper, Fig. 1)
    batch-wise, broadcast every n    delay 1, interval n      lag 1 .. n: the next batch is generated while one trains
    double-buffered blocks of n      delay n, interval n      lag n .. 2n - 1

Because the version is a function of the batch and not of the clock, the samples do not depend on how the threads
interleave. Free-running asynchrony has no such function; there only the queue's staleness bound holds (App. B of
arXiv:2607.18722).
"""

from __future__ import annotations

import dataclasses

from sat_jax.checked import Checked, Count, Natural


@dataclasses.dataclass(frozen=True)
class Schedule(Checked, section="rollout.schedule"):
    """One regime."""

    delay: Natural = 0
    """Batches that the engine works ahead of the learner. Free-running, the queue alone decides: 0."""
    interval: Count = 1
    """Batches between two broadcasts of weights."""
    free_running: bool = False
    """Tokens are sampled with whatever weights have arrived; the order depends on timing, a response may span
    versions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.free_running and self.delay:
            raise ValueError(
                f"rollout.schedule.delay = {self.delay} with free_running: how far the engine works ahead is up to "
                "rollout.max_staleness; use delay 0"
            )

    def source(self, batch: int, start: int = 0) -> int:
        """The batch at whose start the weights are taken that sample ``batch``. The run starts, or is resumed, with
        ``start``: older weights are not available. ``ValueError`` for free-running schedules, which do not fix it."""
        if self.free_running:
            raise ValueError("a free-running schedule does not fix versions; read them from the tokens")
        if batch < start:
            raise ValueError(f"batch {batch} lies before the start, {start}")
        return max(start, (batch - self.delay) // self.interval * self.interval)

    @property
    def max_lag(self) -> int:
        """The largest lag in batches that a deterministic schedule realises; for free-running, what the cadence alone
        can cause."""
        return self.delay + self.interval - 1

    def is_published(self, batch: int, start: int = 0) -> bool:
        """Whether the learner hands the weights at the start of ``batch`` to the engine."""
        return batch == start or batch % self.interval == 0

    def check(
        self, max_staleness: int, groups_per_batch: int, queue_groups: int | None = None, updates_per_batch: int = 1
    ) -> None:
        """``ValueError`` for settings under which engine and learner would wait for each other for ever, or under which
        every batch would be thrown away as stale. The arguments are those of ``GroupQueue``."""
        # The last of a batch's updates is U - 1 versions later than its first.
        oldest = (self.max_lag + 1) * updates_per_batch - 1
        if oldest > max_staleness:
            split = f", {updates_per_batch} updates per batch" if updates_per_batch > 1 else ""
            cause = f"delay {self.delay}, interval {self.interval}{split}"
            raise ValueError(
                f"rollout.schedule ({cause}) trains on tokens {oldest} versions old, rollout.max_staleness = "
                f"{max_staleness} drops them: set max_staleness >= {oldest}, or lower delay, interval or "
                "learner.updates_per_batch"
            )
        needed = (1 if self.free_running else self.max_lag + 1) * groups_per_batch
        if queue_groups is not None and queue_groups < needed:
            raise ValueError(
                f"rollout.queue_groups = {queue_groups} cannot hold a lag of {self.max_lag} batches of "
                f"{groups_per_batch} groups: set queue_groups >= {needed}, or lower the lag"
            )


def synchronous() -> Schedule:
    """Rollout and learner alternate; lag 0."""
    return Schedule()


def fixed_delay(n: int) -> Schedule:
    """Every batch exactly ``n`` batches old (fewer only in the first ``n``, when nothing that old exists)."""
    return Schedule(delay=n)


def batchwise(interval: int, delay: int = 1) -> Schedule:
    """Weights broadcast every ``interval`` batches, generation ``delay`` batches ahead."""
    return Schedule(delay=delay, interval=interval)


def free_running(interval: int = 1) -> Schedule:
    """Fully asynchronous: weights are swapped in while responses are being decoded."""
    return Schedule(interval=interval, free_running=True)
