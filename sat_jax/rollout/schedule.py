"""Which policy version samples the batch of which learner step: the regimes of asynchrony as arithmetic.

Learner step ``s`` turns version ``s`` into version ``s + 1``. A deterministic schedule says in advance which version
``v(s) <= s`` samples the batch that step ``s`` trains on:

    v(s) = max(start, floor((s - delay) / interval) * interval)

with ``delay`` (how many batches ahead of the learner the engine works) and ``interval`` (weights are broadcast every
that many steps). The realised lag ``s - v(s)`` then cycles through ``delay .. delay + interval - 1``:

    synchronous                      delay 0, interval 1      lag 0
    batch-wise, fixed delay n        delay n, interval 1      lag n: every batch exactly n versions old (paper, Fig. 1)
    batch-wise, broadcast every n    delay 1, interval n      lag 1 .. n: the next batch is generated while one trains
    double-buffered blocks of n      delay n, interval n      lag n .. 2n - 1

Because the version is a function of the step and not of the clock, the samples do not depend on how the threads
interleave. Free-running asynchrony has no such function; there only the queue's staleness bound holds (App. B of
arXiv:2607.18722).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One regime.

    Attributes:
        delay: batches that the engine works ahead of the learner, >= 0. Not used when free-running.
        interval: learner steps between two broadcasts of weights, >= 1.
        free_running: tokens are sampled with whatever weights have arrived; the order depends on timing.
        start: the version with which the run starts: 0, or the resumed step. Older weights are not available.

    Raises:
        ValueError: a negative delay, an interval below 1, a negative start.
    """

    delay: int = 0
    interval: int = 1
    free_running: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ValueError(f"fixed_delay = {self.delay}: must be >= 0; 0 is synchronous training")
        if self.interval < 1:
            raise ValueError(f"update_weights_interval = {self.interval}: must be >= 1 learner step")
        if self.start < 0:
            raise ValueError(f"start version = {self.start}: must be >= 0")

    def version_for(self, step: int) -> int:
        """The version that samples the batch of learner step ``step``.

        Raises:
            ValueError: free-running schedules do not fix it; a step before the start.
        """
        if self.free_running:
            raise ValueError("a free-running schedule does not fix versions; read them from the tokens")
        if step < self.start:
            raise ValueError(f"step {step} lies before the start version {self.start}")
        return max(self.start, (step - self.delay) // self.interval * self.interval)

    def lag(self, step: int) -> int:
        """Versions between sampling and training of the batch of ``step``."""
        return step - self.version_for(step)

    @property
    def max_lag(self) -> int:
        """The largest lag that a deterministic schedule realises; for free-running, what the cadence alone can
        cause."""
        return (0 if self.free_running else self.delay) + self.interval - 1

    def is_published(self, version: int) -> bool:
        """Whether the learner hands version ``version`` to the engine."""
        return version == self.start or version % self.interval == 0

    @property
    def versions_held(self) -> int:
        """The most published versions that can wait for the engine at once: the memory bound of the weight store."""
        return 1 if self.free_running else self.delay // self.interval + 1

    def check(self, max_staleness: int, groups_per_step: int, queue_groups: int | None = None) -> None:
        """Refuses settings that could not run.

        Args:
            max_staleness: the bound on the lag, in versions.
            groups_per_step: groups of one learner batch.
            queue_groups: most groups that may wait or be in flight; None where only ``max_staleness`` bounds them.

        Raises:
            ValueError: settings under which engine and learner would wait for each other for ever, or under which every
                batch would be thrown away as stale.
        """
        if self.interval > max_staleness + 1:
            raise ValueError(
                f"update_weights_interval = {self.interval} > max_staleness + 1 = {max_staleness + 1}: the engine "
                f"would run out of room before new weights arrive; set max_staleness >= {self.interval - 1}"
            )
        if self.max_lag > max_staleness:
            raise ValueError(
                f"this schedule trains on batches {self.max_lag} versions old, max_staleness = {max_staleness} drops "
                f"them: set max_staleness >= {self.max_lag} or lower fixed_delay / update_weights_interval"
            )
        needed = (1 if self.free_running else self.max_lag + 1) * groups_per_step
        if queue_groups is not None and queue_groups < needed:
            raise ValueError(
                f"queue_groups = {queue_groups} cannot hold a lag of {self.max_lag} at {groups_per_step} groups a "
                f"step: set queue_groups >= {needed} or lower the lag"
            )


def synchronous() -> Schedule:
    """Rollout and learner alternate; lag 0."""
    return Schedule()


def fixed_delay(n: int) -> Schedule:
    """Every batch exactly ``n`` versions old (fewer only in the first ``n`` steps, when nothing that old exists)."""
    return Schedule(delay=n)


def batchwise(update_weights_interval: int, delay: int = 1) -> Schedule:
    """Weights broadcast every ``update_weights_interval`` steps, generation ``delay`` batches ahead."""
    return Schedule(delay=delay, interval=update_weights_interval)


def free_running(update_weights_interval: int = 1) -> Schedule:
    """Fully asynchronous: weights are swapped in while responses are being decoded."""
    return Schedule(interval=update_weights_interval, free_running=True)
