"""Regimes of asynchrony: realised lags, and the settings that could not run."""

import pytest

from sat_jax.rollout.schedule import Schedule, batchwise, fixed_delay, free_running, synchronous


def lags(schedule, batches, start=0) -> list[int]:
    return [b - schedule.source(b, start) for b in range(start, start + batches)]


def test_synchronous_has_no_lag():
    assert lags(synchronous(), 5) == [0] * 5


def test_fixed_delay_is_exactly_n_after_the_ramp():
    assert lags(fixed_delay(3), 8) == [0, 1, 2, 3, 3, 3, 3, 3]


def test_broadcast_every_n_cycles_through_one_to_n():
    assert lags(batchwise(4), 13) == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]


def test_double_buffered_blocks_cycle_through_n_to_2n_minus_1():
    assert lags(batchwise(3, delay=3), 12)[3:] == [3, 4, 5] * 3


@pytest.mark.parametrize("schedule", [synchronous(), fixed_delay(8), batchwise(8), batchwise(4, delay=7)])
@pytest.mark.parametrize("start", [0, 13])
def test_what_a_batch_needs_is_published_in_time_and_in_order(schedule, start):
    sources = [schedule.source(b, start) for b in range(start, start + 60)]
    assert sources == sorted(sources)
    assert all(s <= b and schedule.is_published(s, start) for b, s in enumerate(sources, start))
    assert max(lags(schedule, 60, start)) == schedule.max_lag
    # While the engine still works on batch b, the learner is at most at batch b: count what waits for it.
    for b in range(start, start + 50):
        waiting = {s for s in range(sources[b - start] + 1, b + 1) if schedule.is_published(s, start)}
        assert len(waiting) <= schedule.delay // schedule.interval + 1


def test_free_running_fixes_nothing():
    with pytest.raises(ValueError, match="free-running"):
        free_running().source(3)


@pytest.mark.parametrize(
    ("schedule", "max_staleness", "queue_groups", "updates", "words"),
    [
        (free_running(4), 2, None, 1, "trains on tokens 3 versions old, rollout.max_staleness = 2"),
        (batchwise(4), 2, None, 1, "delay 1, interval 4"),
        (batchwise(3), 2, None, 1, "3 versions old, rollout.max_staleness = 2"),
        (fixed_delay(8), 7, None, 1, "8 versions old"),
        (fixed_delay(8), 8, 35, 1, "queue_groups >= 36"),
        (free_running(), 8, 3, 1, "queue_groups >= 4"),
        (synchronous(), 2, None, 4, "4 updates per batch.* 3 versions old"),
        (fixed_delay(2), 10, None, 4, "set max_staleness >= 11"),
        (free_running(2), 6, None, 4, "set max_staleness >= 7"),
    ],
)
def test_settings_that_would_hang_or_drop_everything_are_refused(schedule, max_staleness, queue_groups, updates, words):
    with pytest.raises(ValueError, match=words):
        schedule.check(max_staleness, 4, queue_groups, updates)


@pytest.mark.parametrize("schedule", [synchronous(), fixed_delay(8), batchwise(8), free_running(9)])
def test_settings_that_can_run_are_accepted(schedule):
    schedule.check(8, 4, 36)
    schedule.check(2 * 9 - 1, 4, 36, updates_per_batch=2)


@pytest.mark.parametrize("settings", [{"delay": -1}, {"interval": 0}, {"delay": 1, "free_running": True}])
def test_nonsense_is_refused(settings):
    with pytest.raises(ValueError, match=r"rollout\.schedule\."):
        Schedule(**settings)
