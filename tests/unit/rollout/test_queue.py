"""The bounded queue: back-pressure, staleness, order, resume, and that nobody ever hangs."""

import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.rollout.ledger import Ledger, audit, read_ledger
from sat_jax.rollout.queue import GroupQueue, QueueStopped


def ids(groups) -> list[str]:
    return [g.prompt.prompt_id for g in groups]


def test_capacity_is_the_formula(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=2, max_staleness=1), stream()
    assert queue.capacity == 4
    tickets = [queue.issue(source) for _ in range(4)]
    assert queue.capacity == 0
    with pytest.raises(RuntimeError, match="without room"):
        queue.issue(source)
    queue.put(make_group(tickets[0]))
    assert queue.capacity == 0, "finished groups stay accepted"
    queue.filter(tickets[1].group_id)
    queue.fail(tickets[2].group_id, "lost")
    assert queue.capacity == 2, "filtered and failed ones leave"
    queue.set_version(1)
    assert queue.capacity == 4


def test_capacity_counts_from_the_resumed_version():
    assert GroupQueue(groups_per_batch=8, max_staleness=4, version=100).capacity == 40


def test_max_groups_bounds_what_waits(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=9, max_groups=2), stream()
    tickets = [queue.issue(source) for _ in range(2)]
    assert queue.wait_for_room(timeout=0.01) == 0
    queue.put(make_group(tickets[0]))
    assert queue.capacity == 0
    queue.take(1, 0)
    assert queue.capacity == 1


def test_take_hands_out_in_issue_order_whatever_finishes_first(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=3, max_staleness=0), stream()
    tickets = [queue.issue(source) for _ in range(3)]
    for ticket in reversed(tickets):
        queue.put(make_group(ticket))
    assert ids(queue.take(3, 0)) == ["p0", "p1", "p2"]


@pytest.mark.parametrize(("policy", "expected"), [("drop", ["p1", "p3"]), ("requeue", ["p1", "p2"])])
def test_stale_groups_are_dropped_or_requeued_and_counted(policy, expected, tmp_path, make_group, stream):
    path = tmp_path / "ledger.jsonl"
    queue = GroupQueue(groups_per_batch=1, max_staleness=2, on_stale=policy, ledger=Ledger(path))
    source = stream()
    first, second, third = (queue.issue(source) for _ in range(3))
    queue.put(make_group(first, [0]))
    queue.put(make_group(second, [3, 3]))
    queue.put(make_group(third, [0, 3]))  # the oldest token counts, not the newest
    queue.trained(queue.take(1, 0), 1)
    queue.set_version(3)
    assert ids(queue.take(1, 3)) == expected[:1]
    assert queue.counts()["stale"] == 1
    fourth = queue.issue(source)
    assert fourth.prompt.prompt_id == expected[1]
    queue.put(make_group(fourth, [3]))
    assert ids(queue.take(1, 3)) == expected[1:]
    states = [e.state for e in read_ledger(path) if e.prompt_id == "p2"]
    assert states[:3] == ["issued", "generated", "stale"]
    assert (states[3:4] == ["requeued"]) == (policy == "requeue")


def test_versions_three_four_five_trained_at_six(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=3), stream()
    queue.put(make_group(queue.issue(source), [3, 4, 5]))
    assert len(queue.take(1, 6)) == 1


def test_a_group_ends_once(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=0), stream()
    ticket = queue.issue(source)
    queue.put(make_group(ticket))
    for again in (lambda: queue.put(make_group(ticket)), lambda: queue.fail(ticket.group_id, "late")):
        with pytest.raises(ValueError, match="not in flight"):
            again()
    taken = queue.take(1, 0)
    queue.trained(taken, 1)
    with pytest.raises(ValueError, match="count twice"):
        queue.trained(taken, 1)


def test_producer_error_reaches_a_waiting_consumer_at_once():
    queue = GroupQueue(groups_per_batch=1, max_staleness=0)
    threading.Timer(0.05, lambda: queue.abort(ZeroDivisionError("engine"))).start()
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="engine"):
        queue.take(1, 0, timeout=30)
    assert time.monotonic() - started < 5
    with pytest.raises(ZeroDivisionError):
        queue.take(1, 0)
    assert queue.wait_for_room() == 0


def test_stop_wakes_both_sides_and_twice_is_a_no_op(stream):
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=0), stream()
    queue.issue(source)
    results = {}

    def producer():
        results["room"] = queue.wait_for_room()

    def consumer():
        try:
            queue.take(1, 0)
        except QueueStopped:
            results["stopped"] = True

    threads = [threading.Thread(target=t, daemon=True) for t in (producer, consumer)]
    for thread in threads:
        thread.start()
    queue.stop()
    queue.stop()
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert results == {"room": 0, "stopped": True}


def test_take_times_out_and_names_what_is_in_flight(stream):
    queue = GroupQueue(groups_per_batch=1, max_staleness=0)
    queue.issue(stream())
    with pytest.raises(TimeoutError, match="0 of 1 groups in time; in flight: 0:p0"):
        queue.take(1, 0, timeout=0.02)


def test_a_group_that_never_returns_fails_the_run_by_name(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=2, max_staleness=0, group_timeout=0.1), stream()
    queue.put(make_group(queue.issue(source)))
    queue.issue(source)
    with pytest.raises(TimeoutError, match=r"group 0:p1 is in flight for more than 0.1 s"):
        queue.take(2, 0, timeout=30)


def test_next_batch_counts_finished_and_running(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=3, max_staleness=2, version=5), stream()
    assert queue.next_batch() == (5, 3)
    tickets = [queue.issue(source) for _ in range(4)]
    assert queue.next_batch() == (6, 2)
    queue.filter(tickets[0].group_id)
    queue.put(make_group(tickets[1], [5]))
    assert queue.next_batch() == (6, 3)


def test_exhausted_source_hands_out_the_rest(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=2, max_staleness=0), stream(0, 1)
    ticket = queue.issue(source)
    assert queue.issue(source) is None
    queue.put(make_group(ticket))
    assert ids(queue.take(2, 0)) == ["p0"]
    assert queue.take(2, 1) == []


def test_versions_never_go_back():
    queue = GroupQueue(groups_per_batch=1, max_staleness=0, version=5)
    with pytest.raises(ValueError, match="never go back"):
        queue.set_version(4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"groups_per_batch": 0, "max_staleness": 0}, "groups_per_batch = 0"),
        ({"groups_per_batch": 1, "max_staleness": -1}, "max_staleness = -1"),
        ({"groups_per_batch": 4, "max_staleness": 1, "max_groups": 3}, "queue_groups = 3"),
        ({"groups_per_batch": 4, "max_staleness": 1, "on_stale": "keep"}, "on_stale = 'keep'"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        GroupQueue(**settings)


def test_resume_neither_skips_nor_repeats(tmp_path, make_group, stream, place):
    """Fault 37: generated {0,1,2}, 3 in flight, trained {0,1}, cursor 4, crash -> next batch {2,3}; every id once."""
    path = tmp_path / "ledger.jsonl"
    queue, source = GroupQueue(groups_per_batch=2, max_staleness=1, ledger=Ledger(path)), stream(0, 8)
    tickets = [queue.issue(source) for _ in range(4)]
    for ticket in tickets[:3]:
        queue.put(make_group(ticket))
    queue.trained(queue.take(2, 0), 1)
    state, groups = queue.snapshot()
    assert json.loads(json.dumps(state)) == state
    assert (state["cursor"], state["held"], state["in_flight"]) == (4, [2], [3])
    # After the checkpoint the run goes on, trains 2 and 3, issues 4, and crashes without saying goodbye.
    queue.set_version(1)
    queue.put(make_group(tickets[3]))
    queue.trained(queue.take(2, 1), 2)
    queue.issue(source)
    assert not audit(read_ledger(path)).clean

    history = read_ledger(path)
    resumed = GroupQueue(groups_per_batch=2, max_staleness=1, ledger=Ledger(path), version=1)
    resumed.restore(state, groups, place, history)
    assert resumed.next_batch() == (1, 1)
    source = stream(state["cursor"], 8)
    batches = []
    for step in range(1, 4):
        resumed.set_version(step)
        while resumed.counts()["ready"] < 2:
            resumed.put(make_group(resumed.issue(source), [step]))
        batches.append(resumed.take(2, step))
        resumed.trained(batches[-1], step + 1)
    resumed.close()
    assert [ids(b) for b in batches] == [["p2", "p3"], ["p4", "p5"], ["p6", "p7"]]
    assert batches[0][0] is groups[0], "what was finished is trained on as it was sampled"
    assert resumed.counts()["trained"] == 8
    report = audit(read_ledger(path))
    assert report.clean
    assert report.ends == {"trained": 8}


def test_groups_taken_but_not_trained_on_are_part_of_a_snapshot(make_group, stream, place):
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=1), stream()
    queue.put(make_group(queue.issue(source)))
    taken = queue.take(1, 0)
    state, groups = queue.snapshot()
    assert groups == taken
    resumed = GroupQueue(groups_per_batch=1, max_staleness=1)
    resumed.restore(state, groups, place)
    assert resumed.take(1, 0) == taken


def test_a_second_resume_of_the_same_ledger_is_clean(tmp_path, make_group, stream, place):
    path = tmp_path / "ledger.jsonl"
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=3, ledger=Ledger(path)), stream()
    for _ in range(2):
        queue.put(make_group(queue.issue(source)))
    queue.issue(source)
    state, groups = queue.snapshot()
    queue.close()
    for _ in range(2):
        history = read_ledger(path)
        queue = GroupQueue(groups_per_batch=1, max_staleness=3, ledger=Ledger(path))
        queue.restore(state, groups, place, history)
        queue.issue(stream(state["cursor"]))
        queue.close()
        assert audit(read_ledger(path)).clean


def test_dropped_as_stale_moves_the_cursor_past(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=0), stream()
    queue.put(make_group(queue.issue(source)))
    queue.set_version(1)
    with pytest.raises(TimeoutError):
        queue.take(1, 1, timeout=0)
    state, groups = queue.snapshot()
    assert (state["cursor"], state["in_flight"], groups) == (1, [], [])


def test_restore_checks_what_it_is_given(make_group, stream, place):
    queue = GroupQueue(groups_per_batch=1, max_staleness=0)
    queue.put(make_group(queue.issue(stream())))
    state, groups = queue.snapshot()
    with pytest.raises(RuntimeError, match="fresh"):
        queue.restore(state, groups, place)
    with pytest.raises(ValueError, match="not those of its state"):
        GroupQueue(groups_per_batch=1, max_staleness=0).restore(state, [], place)


def test_close_gives_back_what_has_no_end(tmp_path, make_group, stream):
    path = tmp_path / "ledger.jsonl"
    queue, source = GroupQueue(groups_per_batch=1, max_staleness=2, ledger=Ledger(path)), stream()
    tickets = [queue.issue(source) for _ in range(3)]
    queue.put(make_group(tickets[0]))
    queue.put(make_group(tickets[1]))
    queue.take(1, 0)  # taken, never trained on
    queue.close()
    queue.close()
    report = audit(read_ledger(path))
    assert report.clean
    assert report.ends == {"requeued": 3}


@settings(max_examples=80, deadline=None)
@given(
    updates=st.integers(1, 3),
    groups_per_update=st.integers(1, 3),
    slack=st.integers(0, 3),
    policy=st.sampled_from(["drop", "requeue"]),
    moves=st.lists(st.sampled_from(["issue", "put", "filter", "fail", "batch"]), max_size=60),
    data=st.data(),
)
def test_any_history_keeps_the_books(updates, groups_per_update, slack, policy, moves, data, make_group, stream):
    groups_per_batch, max_staleness = updates * groups_per_update, updates - 1 + slack
    queue = GroupQueue(groups_per_batch, max_staleness, updates_per_batch=updates, on_stale=policy)
    source, flying, version, trained = stream(), [], 0, []
    for move in moves:
        if move == "issue" and queue.capacity:
            flying.append((queue.issue(source), version))
        elif move in ("put", "filter", "fail") and flying:
            ticket, born = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            if move == "put":
                queue.put(make_group(ticket, [born]))
            else:
                (queue.filter if move == "filter" else queue.fail)(ticket.group_id, "")
        elif move == "batch":
            try:
                batch = queue.take(groups_per_batch, version, timeout=0)
            except TimeoutError:
                continue
            assert ids(batch) == sorted(ids(batch), key=lambda name: int(name[1:]))
            for update in range(updates):
                part = batch[update * groups_per_update : (update + 1) * groups_per_update]
                assert all(version - g.oldest_version <= max_staleness for g in part), "too old at its own update"
                version += 1
                queue.trained(part, version)
            queue.set_version(version)
            trained += ids(batch)
    assert len(trained) == len(set(trained)), "a prompt was trained on twice"
    counts = queue.counts()
    batches = (version + max_staleness) // updates + 1
    assert counts["accepted"] + counts["running"] <= batches * groups_per_batch
    assert counts["issued"] == sum(counts[s] for s in ("generated", "filtered", "failed")) + counts["running"]
    assert counts["generated"] == counts["trained"] + counts["stale"] + counts["ready"]
    state, _ = queue.snapshot()
    pending = len(state["in_flight"]) + len(state["held"])
    ended = counts["trained"] + counts["filtered"] + counts["failed"] + (counts["stale"] if policy == "drop" else 0)
    assert state["cursor"] == pending + ended, "every prompt drawn is pending or has an end"


def test_staleness_is_counted_at_each_groups_own_update(make_group, stream):
    """Two updates of two groups, bound 2: what is 2 versions old may be trained on in the first update only."""
    queue, source = GroupQueue(groups_per_batch=4, max_staleness=2, updates_per_batch=2), stream()
    assert queue.capacity == 8  # floor((0 + 2) / 2) + 1 batches of four
    tickets = [queue.issue(source) for _ in range(8)]
    for ticket in tickets[:4]:
        queue.put(make_group(ticket))
    first = queue.take(4, 0)
    queue.trained(first[:2], 1)
    queue.trained(first[2:], 2)
    queue.set_version(2)
    assert queue.capacity == 4
    for ticket in tickets[4:]:  # all sampled at version 0: 2 versions old at versions 2, 3 at version 3
        queue.put(make_group(ticket))
    with pytest.raises(TimeoutError, match="2 of 4 groups"):
        queue.take(4, 2, timeout=0)
    assert queue.counts()["stale"] == 2
    for ticket in [queue.issue(source) for _ in range(2)]:
        queue.put(make_group(ticket, [2]))
    assert ids(queue.take(4, 2)) == ["p4", "p5", "p8", "p9"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups_per_batch": 4, "max_staleness": 0, "updates_per_batch": 2}, "at least updates_per_batch - 1 = 1"),
        ({"groups_per_batch": 4, "max_staleness": 4, "updates_per_batch": 3}, "does not divide 4 groups"),
    ],
)
def test_updates_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        GroupQueue(**settings)


def test_nothing_is_started_that_only_a_step_after_the_last_could_train_on(make_group, stream):
    queue, source = GroupQueue(groups_per_batch=2, max_staleness=9, last_step=2), stream()
    tickets = [queue.issue(source) for _ in range(4)]
    assert queue.capacity == 0
    assert not queue.complete
    for ticket in tickets[:3]:
        queue.put(make_group(ticket))
    queue.filter(tickets[3].group_id)
    assert queue.capacity == 1  # the filtered one is replaced
    queue.put(make_group(queue.issue(source)))
    assert queue.complete
    assert queue.wait_for_room(timeout=0.01) == 0
