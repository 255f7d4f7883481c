from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sat_jax.rewards.functions import Grade, GradeJob, adapt_reward, load_reward, to_grade
from sat_jax.rewards.grader import Grader
from sat_jax.types import Group, Prompt, Trajectory

from . import sample_rewards

BEHAVE = f"{sample_rewards.__name__}:behave"


def job(response: str, answer: str = "4") -> GradeJob:
    return GradeJob("2+2", response, answer, "test", {"k": 1})


@pytest.fixture(scope="module")
def pool() -> Iterator[Grader]:
    with Grader(BEHAVE, workers=2, timeout_s=1.0, memory_mb=2048) as grader:
        yield grader


def test_grades_come_back_in_order(pool: Grader) -> None:
    answers = [str(i % 3) for i in range(100)]
    grades = pool.grade([job(a, "1") for a in answers])
    assert [g.reward for g in grades] == [float(a == "1") for a in answers]
    assert {g.verdict for g in grades} == {"graded"}


def test_one_endless_grading_costs_only_itself() -> None:
    """Fault 31: 4 gradings, one sleeps for ever, limit 1 s, two workers."""
    with Grader(BEHAVE, workers=2, timeout_s=1.0) as grader:
        start = time.monotonic()
        grades = grader.grade([job("sleep 600"), job("4"), job("5"), job("4")])
        assert time.monotonic() - start < 4
        assert [g.verdict for g in grades] == ["timeout", "graded", "graded", "graded"]
        assert [g.reward for g in grades] == [0.0, 1.0, 0.0, 1.0]
        assert grades[0].failed
        assert grades[0].info["error"] == "took longer than 1 s"
        assert grader.restarts == 1
        assert grader.counts == {"timeout": 1, "graded": 3}
        assert grader.grade([job("4")])[0].reward == 1.0


def test_waiting_in_the_queue_does_not_count() -> None:
    """Fault 31: six gradings of .4 s on one worker take over twice the limit together; none is late by itself."""
    with Grader(BEHAVE, workers=1, timeout_s=1.0) as grader:
        grades = grader.grade([job("sleep 0.4")] * 6)
        assert {g.verdict for g in grades} == {"graded"}
        assert grader.restarts == 0


def test_jobs_behind_a_killed_one_are_graded_by_the_replacement() -> None:
    with Grader(BEHAVE, workers=1, timeout_s=0.5) as grader:
        grades = grader.grade([job("4"), job("sleep 600"), job("4"), job("die"), *[job("4")] * 40])
        assert [g.verdict for g in grades[:4]] == ["graded", "timeout", "graded", "crashed"]
        assert all(g.reward == 1.0 for g in grades[4:])
        assert "exit status 7" in grades[3].info["error"]


def test_a_computation_that_holds_the_interpreter_is_killed_from_any_thread(pool: Grader) -> None:
    """Fault 46: no signals are involved, so a worker thread may grade."""
    grades: list[Grade] = []
    thread = threading.Thread(target=lambda: grades.extend(pool.grade([job("spin"), job("4")])))
    start = time.monotonic()
    thread.start()
    thread.join(10)
    assert time.monotonic() - start < 5
    assert [g.verdict for g in grades] == ["timeout", "graded"]


@pytest.mark.parametrize(
    ("response", "verdict", "error"),
    [
        ("raise 7", "error", "RuntimeError: no grade for 7"),
        ("nan", "error", "must be finite"),
        ("text", "error", "a number, or a mapping"),
        ("recurse", "error", "RecursionError"),
        ("hoard", "error", "MemoryError"),
        ("unpicklable", "error", "cannot be sent between processes"),
        ("exit", "crashed", "exit status 3"),
    ],
)
def test_every_failure_is_flagged_and_told(pool: Grader, response: str, verdict: str, error: str) -> None:
    grade, after = pool.grade([job(response), job("4")])
    assert (grade.verdict, grade.reward, grade.failed) == (verdict, 0.0, True)
    assert error in grade.info["error"]
    assert after.reward == 1.0


def test_what_a_reward_prints_disturbs_nobody(pool: Grader, capfd: pytest.CaptureFixture[str]) -> None:
    assert pool.grade([job("shout"), job("4")])[1].reward == 1.0
    assert capfd.readouterr() == ("", "")


def test_grandchildren_die_with_their_worker() -> None:
    with Grader(BEHAVE, workers=1, timeout_s=0.5) as grader:
        group_id = grader.grade([job("pid")])[0].info["pid"]
        assert grader.grade([job("grandchild")])[0].verdict == "timeout"
        time.sleep(0.2)
        alive = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group_id and fields[0] != "Z":
                alive.append(status)
        assert not alive


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    with Grader(BEHAVE, workers=1) as grader:
        pid = grader.grade([job("pid")])[0].info["pid"]
        os.kill(pid, 9)
        time.sleep(0.2)
        assert grader.grade([job("4")])[0].reward == 1.0
        assert grader.restarts == 1


def test_closing_cancels_what_waits_and_can_be_repeated() -> None:
    grader = Grader(BEHAVE, workers=1, timeout_s=60)
    futures = [grader.submit(job("sleep 600")) for _ in range(40)]
    time.sleep(0.1)
    start = time.monotonic()
    grader.close()
    grader.close()
    assert time.monotonic() - start < 2
    assert all(f.cancelled() for f in futures)
    with pytest.raises(ValueError, match="closed"):
        grader.submit(job("4"))


def test_a_cancelled_future_does_not_stop_the_others(pool: Grader) -> None:
    futures = [pool.submit(job("sleep 0.2")) for _ in range(2)] + [pool.submit(job("4")) for _ in range(4)]
    futures[3].cancel()
    assert [f.result().reward for i, f in enumerate(futures) if i != 3] == [0, 0, 1, 1, 1]


def test_in_process() -> None:
    with Grader(sample_rewards.behave, workers=0) as grader:
        grades = grader.grade([job("4"), job("5"), job("raise x")])
        assert [g.reward for g in grades] == [1.0, 0.0, 0.0]
        assert grader.counts == {"graded": 2, "error": 1}


def test_groups_are_filled_in(pool: Grader) -> None:
    one = np.zeros(1)
    prompt = Prompt("p", "2+2", np.zeros(1, np.int32), "4", "test")
    members = tuple(
        Trajectory("p", i, one, one, one, one, None, "stop", text=t) for i, t in enumerate(("4", "5", "nan"))
    )
    (graded,) = pool.grade_groups([Group("0:p", prompt, members)])
    np.testing.assert_array_equal(graded.rewards, [1, 0, 0])
    assert [t.reward_info["verdict"] for t in graded.trajectories] == ["graded", "graded", "error"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nonsense", r"write package\.module:name or file\.py:name"),
        ("no_such_module_here:f", "there is no module no_such_module_here"),
        ("no_such_file.py:f", r"there is no file .*no_such_file\.py"),
        (f"{sample_rewards.__name__}:behaves", "has no 'behaves'; did you mean 'behave'"),
        (f"{sample_rewards.__name__}:NOT_CALLABLE", "is of type int: name a function"),
        (
            f"{sample_rewards.__name__}:two",
            r"reward two\(a, b\): a reward takes \(prompt, response, answer, metadata\)",
        ),
    ],
)
def test_bad_rewards_are_refused_at_once(reward: str, message: str, workers: int) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        Grader(reward, workers=workers)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_of_ones_own_file(workers: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def length(prompt, response, answer, metadata):\n    return len(response)\n")
    with Grader(f"{path}:length", workers=workers) as grader:
        assert grader.grade([job("abc")])[0].reward == 3.0
    path.write_text("raise ValueError('not today')\n")
    with pytest.raises(ValueError, match=r"reward .*mine\.py:length: its module cannot be imported \(.*not today"):
        Grader(f"{path}:length", workers=workers)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="workers = -1"):
        Grader(BEHAVE, workers=-1)
    with pytest.raises(ValueError, match="timeout_s = 0"):
        Grader(BEHAVE, timeout_s=0)
    with pytest.raises(ValueError, match="workers import it by name"):
        Grader(sample_rewards.behave, workers=1)


def test_metadata_that_cannot_travel_is_the_callers_error(pool: Grader) -> None:
    with pytest.raises(ValueError, match="metadata of a prompt from test cannot be sent"):
        pool.submit(GradeJob("", "", "", "test", {"f": lambda: None}))


def test_verl_signature() -> None:
    grade = load_reward(f"{sample_rewards.__name__}:compute_score")(job("4"))
    assert grade == Grade(1.0, "graded", {"acc": True, "source": "test", "extra": {"k": 1}})
    extra = GradeJob("", "5", "4", "test", {"extra_info": {"index": 3}})
    assert load_reward(f"{sample_rewards.__name__}:compute_score")(extra).info["extra"] == {"index": 3}
    assert load_reward(f"{sample_rewards.__name__}:compute_score_short")(job("x")).reward == 0.5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, Grade(1.0, "graded")),
        (True, Grade(1.0, "graded")),
        (np.float32(0.5), Grade(0.5, "graded")),
        ({"reward": 0, "verdict": "wrong", "parsed": "7"}, Grade(0.0, "wrong", {"parsed": "7"})),
        ({"score": 1.0}, Grade(1.0, "graded")),
    ],
)
def test_answers_of_reward_functions(value: Any, expected: Grade) -> None:
    assert to_grade(value) == expected


def test_other_signatures_with_defaults() -> None:
    def keyword(prompt: str, response: str, answer: str, metadata: Any, strict: bool = True) -> float:
        return float(strict and metadata["k"])

    assert adapt_reward(keyword)(job("4")).reward == 1.0
