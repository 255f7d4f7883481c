"""The rollout thread: schedules realised token by token, errors that arrive, stops that end, resumes that repeat."""

import dataclasses
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.rollout.engine import MAX_SEED, SamplingParams
from sat_jax.rollout.ledger import Ledger, audit, read_ledger
from sat_jax.rollout.queue import GroupQueue, QueueStopped
from sat_jax.rollout.schedule import batchwise, fixed_delay, free_running, synchronous
from sat_jax.rollout.weights import WeightStore
from sat_jax.rollout.worker import RolloutWorker, request_seed
from sat_jax.testing import FakeEngine

GROUPS, SIZE = 3, 2
PARAMS = SamplingParams(max_new_tokens=10)
WEIGHTS = (3, 17)


def graded(groups):
    return [dataclasses.replace(g, advantages=np.zeros(SIZE, np.float32)) for g in groups]


def picky(groups):
    """Filters out groups by their own first token: the same ones whatever came with them."""
    keep = [g.trajectories[0].response_ids[0] % 3 != 0 for g in groups]
    return [g if kept else None for g, kept in zip(graded(groups), keep, strict=True)]


class Run:
    """Engine, queue and worker under one schedule, with a learner that only counts."""

    def __init__(
        self,
        stream,
        schedule,
        *,
        engine=None,
        grade=graded,
        params=PARAMS,
        ledger=None,
        max_staleness=8,
        resume=None,
        start=0,
        updates=1,
        **queue,
    ):
        self.engine, self.updates = engine or FakeEngine(version=start), updates
        self.queue = GroupQueue(GROUPS, max_staleness, updates_per_batch=updates, ledger=ledger, version=start, **queue)
        if resume is not None:
            state, groups, place = resume
            self.queue.restore(state, groups, place)
            stream = (lambda make: lambda: make(state["cursor"]))(stream)
        self.worker = RolloutWorker(
            self.engine,
            self.queue,
            stream(),
            grade,
            group_size=SIZE,
            params=params,
            schedule=schedule,
            updates_per_batch=updates,
            seed=7,
        )
        self.version = start

    def step(self):
        groups = self.queue.take(GROUPS, self.version, timeout=20)
        size = GROUPS // self.updates
        for update in range(self.updates):
            self.version += 1
            self.queue.trained(groups[update * size : (update + 1) * size], self.version)
        self.worker.publish({"w": jnp.full(WEIGHTS, self.version)}, self.version)
        return groups

    def __enter__(self):
        self.worker.start()
        return self

    def __exit__(self, *_):
        assert self.worker.stop(timeout=10), "the threads did not end"
        self.queue.close()


def content(groups):
    return [
        (g.group_id, [(t.response_ids.tolist(), t.policy_versions.tolist()) for t in g.trajectories]) for g in groups
    ]


def published() -> int:
    """How many arrays of the weights' shape the process holds; other tests may have left some."""
    return sum(x.shape == WEIGHTS for x in jax.live_arrays())


SCHEDULES = [synchronous(), fixed_delay(1), fixed_delay(4), batchwise(3), batchwise(2, delay=2)]


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"delay{s.delay}-every{s.interval}")
def test_every_token_of_a_batch_has_the_scheduled_version(stream, schedule, updates):
    others = published()
    with Run(stream, schedule, updates=updates, max_staleness=(schedule.max_lag + 1) * updates - 1) as run:
        for batch in range(8):
            versions = {int(v) for g in run.step() for t in g.trajectories for v in t.policy_versions}
            assert versions == {schedule.source(batch) * updates}
            most = 1 + schedule.delay // schedule.interval + 1
            assert published() - others <= most, "the weights that sample, and those that still will"
        assert run.queue.counts()["stale"] == 0
    if schedule.max_lag == 0:
        assert run.engine.params["w"][0, 0] <= 8 * updates


def test_weights_are_published_at_the_end_of_a_batch_only(stream):
    run = Run(stream, synchronous(), updates=3)
    assert run.worker.publish({}, 3)
    with pytest.raises(ValueError, match="version 4 lies within a batch of 3 updates"):
        run.worker.publish({}, 4)


@pytest.mark.parametrize("grade", [graded, picky])
def test_timing_changes_nothing(stream, grade):
    def sampled(jitter):
        rng = random.Random(jitter)
        pause = (lambda *_: time.sleep(rng.random() * 0.003)) if jitter else (lambda *_: None)
        with Run(stream, fixed_delay(2), engine=FakeEngine(on_round=pause, slots=4), grade=grade) as run:
            steps = []
            for _ in range(6):
                steps.append(content(run.step()))
                pause()
            return steps

    reference = sampled(0)
    assert sampled(1) == reference
    assert sampled(2) == reference


def test_filtered_groups_are_replaced_within_their_batch(stream):
    with Run(stream, fixed_delay(2), grade=picky) as run:
        batches = [run.step() for _ in range(6)]
        assert run.queue.counts()["filtered"] > 0
    for step, batch in enumerate(batches):
        assert len(batch) == GROUPS
        assert {g.oldest_version for g in batch} == {max(0, step - 2)}
    order = [int(g.prompt.prompt_id[1:]) for batch in batches for g in batch]
    assert order == sorted(order)


def test_free_running_swaps_weights_in_the_middle_of_responses(stream):
    holder = {}

    def publish_between_rounds(n):
        if n in (1, 2):
            holder["worker"].publish({}, n)

    engine = FakeEngine(vocab_size=10**6, tokens_per_round=2, on_round=publish_between_rounds)
    run = Run(stream, free_running(), engine=engine)
    holder["worker"] = run.worker
    with run:
        groups = run.queue.take(GROUPS, 2, timeout=20)
    versions = groups[0].trajectories[0].policy_versions
    assert versions.tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert groups[0].oldest_version == 0


def test_free_running_goes_on_for_many_steps_and_keeps_the_bound(stream, tmp_path):
    path = tmp_path / "ledger.jsonl"
    engine = FakeEngine(slots=5, on_round=lambda _: time.sleep(0.0005))
    with Run(stream, free_running(), engine=engine, ledger=Ledger(path), max_staleness=1, grade=picky) as run:
        for step in range(20):
            assert all(step - g.oldest_version <= 1 for g in run.step())
        clock = run.worker.clock()
    report = audit(read_ledger(path))
    assert report.clean
    assert report.ends["trained"] == 20 * GROUPS
    assert clock["tokens"] > 0
    assert clock["engine_s"] > 0


def failing_grade(_):
    raise ZeroDivisionError("reward")


def failing_engine(n):
    if n == 2:
        raise ZeroDivisionError("engine")


@pytest.mark.parametrize("schedule", [fixed_delay(2), free_running()])
@pytest.mark.parametrize("culprit", ["reward", "engine"])
def test_an_error_in_either_thread_reaches_the_learner(stream, schedule, culprit):
    engine = FakeEngine(vocab_size=10**6, on_round=failing_engine if culprit == "engine" else lambda _: None)
    with Run(stream, schedule, engine=engine, grade=failing_grade if culprit == "reward" else graded) as run:
        started = time.monotonic()
        with pytest.raises(ZeroDivisionError, match=culprit):
            run.step()
        assert time.monotonic() - started < 10
        with pytest.raises(ZeroDivisionError, match=culprit):
            run.step()


def test_a_grader_that_miscounts_is_an_error(stream):
    with Run(stream, synchronous(), grade=lambda groups: []) as run, pytest.raises(ValueError, match="shorter"):
        run.step()


@pytest.mark.parametrize("schedule", [fixed_delay(1), free_running()])
def test_stop_while_the_producer_waits_for_room_and_the_consumer_for_groups(stream, schedule):
    run = Run(stream, schedule, max_staleness=1)
    run.worker.start()
    deadline = time.monotonic() + 10
    while run.queue.capacity or run.queue.counts()["running"]:  # the producer has filled the queue and waits
        assert time.monotonic() < deadline
        time.sleep(0.001)
    outcome = []

    def consume():
        try:
            run.queue.take(100, 0)
        except QueueStopped:
            outcome.append("stopped")

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    assert run.worker.stop(timeout=10)
    consumer.join(timeout=10)
    assert outcome == ["stopped"]
    assert run.worker.stop(timeout=1)


@pytest.mark.parametrize("schedule", [fixed_delay(1), free_running()])
def test_stop_does_not_wait_for_long_responses(stream, schedule):
    engine = FakeEngine(vocab_size=10**9, tokens_per_round=1, on_round=lambda _: time.sleep(0.01))
    run = Run(stream, schedule, engine=engine, params=SamplingParams(max_new_tokens=10**6))
    run.worker.start()
    while engine.rounds < 3:
        time.sleep(0.001)
    assert run.worker.stop(timeout=10)
    run.queue.close()
    assert run.queue.counts()["failed"] == 0, "what was in flight goes back to the stream"


def test_stop_before_start_and_without_groups(stream):
    run = Run(stream, synchronous())
    assert run.worker.stop(timeout=1)


def test_a_lost_response_fails_the_run_by_name(stream):
    engine = FakeEngine(lose=lambda request: request.request_id == "0:p1/1")
    run = Run(stream, synchronous(), engine=engine, group_timeout=0.2)
    with run, pytest.raises(TimeoutError, match="group 0:p1"):
        run.step()


def test_an_aborted_group_fails_as_a_whole_and_is_replaced(stream):
    holder = {}

    def abort_one(n):
        if n == 1:
            holder["engine"].abort(["0:p0/1"])

    engine = holder["engine"] = FakeEngine(vocab_size=10**6, on_round=abort_one)
    with Run(stream, synchronous(), engine=engine) as run:
        assert [g.prompt.prompt_id for g in run.step()] == ["p1", "p2", "p3"]
        assert run.queue.counts()["failed"] == 1


def test_prompts_that_run_out_end_the_run(stream):
    with Run(lambda: stream(0, 4), synchronous()) as run:
        assert len(run.step()) == 3
        assert len(run.step()) == 1
        assert run.step() == []


@pytest.mark.parametrize("schedule", [synchronous(), fixed_delay(3), batchwise(4)])
@pytest.mark.parametrize("grade", [graded, picky])
def test_a_settled_checkpoint_repeats_the_run_exactly(stream, place, schedule, grade):
    with Run(stream, schedule, grade=grade) as run:
        reference = [content(run.step()) for _ in range(12)]
    with Run(stream, schedule, grade=grade) as run:
        before = [content(run.step()) for _ in range(5)]
        run.worker.settle(5)
        state, groups = run.queue.snapshot()
        run.step()  # lost in the crash
    with Run(stream, schedule, grade=grade, resume=(state, groups, place), start=5) as run:
        assert before + [content(run.step()) for _ in range(7)] == reference


def test_publishing_backwards_is_refused(stream):
    run = Run(stream, synchronous())
    run.worker.publish({}, 2)
    run.worker.publish({}, 2)
    with pytest.raises(ValueError, match="version 1 after 2"):
        run.worker.publish({}, 1)


def test_a_failed_update_publishes_nothing(stream):
    class Refusing(FakeEngine):
        def update_weights(self, params, version):
            raise ValueError("weights refused")

    run = Run(stream, free_running(), engine=Refusing(), max_staleness=0)
    capacity = run.queue.capacity
    for _ in range(2):  # the second try is made, not taken for done
        with pytest.raises(ValueError, match="weights refused"):
            run.worker.publish({}, 1)
    assert run.queue.capacity == capacity
    assert run.engine.version == 0


def test_published_weights_are_copies():
    store, params = WeightStore(), {"w": jnp.arange(4.0)}
    store.publish(params, 1)
    store.publish(params, 2)
    params["w"].delete()  # what donation does
    np.testing.assert_array_equal(store.fetch(1)["w"], np.arange(4.0))
    assert len(store) == 1, "fetching forgets"
    with pytest.raises(ValueError, match="in order"):
        store.publish({}, 2)
    store.close()
    store.close()
    assert store.fetch(9) is None


def test_seeds_differ_by_run_group_and_index():
    seeds = {request_seed(s, g, i) for s in range(3) for g in ("0:a", "1:a", "0:b") for i in range(4)}
    assert len(seeds) == 36
    assert all(0 <= s <= MAX_SEED for s in seeds)
