"""Regimes of asynchrony: realised lags, and the settings that could not run."""

import pytest

from sat_jax.rollout.schedule import Schedule, batchwise, fixed_delay, free_running, synchronous


def lags(schedule, steps) -> list[int]:
    return [schedule.lag(s) for s in range(schedule.start, schedule.start + steps)]


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
def test_what_a_step_needs_is_published_in_time_and_in_order(schedule, start):
    schedule = Schedule(schedule.delay, schedule.interval, start=start)
    versions = [schedule.version_for(s) for s in range(start, start + 60)]
    assert versions == sorted(versions)
    assert all(v <= s and schedule.is_published(v) for s, v in enumerate(versions, start))
    assert max(lags(schedule, 60)) == schedule.max_lag
    # While the engine still works on the batch of step s, the learner is at most at step s: count what waits for it.
    for s in range(start, start + 50):
        waiting = {v for v in range(versions[s - start] + 1, s + 1) if schedule.is_published(v)}
        assert len(waiting) <= schedule.versions_held


def test_free_running_fixes_nothing():
    with pytest.raises(ValueError, match="free-running"):
        free_running().version_for(3)


@pytest.mark.parametrize(
    ("schedule", "max_staleness", "queue_groups", "words"),
    [
        (free_running(4), 2, None, r"update_weights_interval = 4 > max_staleness \+ 1 = 3"),
        (batchwise(4), 2, None, "update_weights_interval = 4"),
        (batchwise(3), 2, None, "3 versions old, max_staleness = 2"),
        (fixed_delay(8), 7, None, "8 versions old"),
        (fixed_delay(8), 8, 35, "queue_groups >= 36"),
        (free_running(), 8, 3, "queue_groups >= 4"),
    ],
)
def test_settings_that_would_hang_or_drop_everything_are_refused(schedule, max_staleness, queue_groups, words):
    with pytest.raises(ValueError, match=words):
        schedule.check(max_staleness, groups_per_step=4, queue_groups=queue_groups)


@pytest.mark.parametrize("schedule", [synchronous(), fixed_delay(8), batchwise(8), free_running(9)])
def test_settings_that_can_run_are_accepted(schedule):
    schedule.check(max_staleness=8, groups_per_step=4, queue_groups=36)


@pytest.mark.parametrize("settings", [{"delay": -1}, {"interval": 0}, {"start": -1}])
def test_nonsense_is_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        Schedule(**settings)
