from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sat_jax.rewards.equality import equal_answers
from sat_jax.rewards.extract import Policy, extract_answer
from sat_jax.rewards.functions import GradeJob
from sat_jax.rewards.grader import Grader
from sat_jax.rewards.math import grade, grade_boxed, grade_lenient, verify
from tests.helpers import DATA

PAIRS = [json.loads(line) for line in (DATA / "rewards" / "answer_pairs.jsonl").read_text().splitlines()]

# Pairs the policies decide differently from the file, where the file itself calls them a matter of convention.
BOXED_ONLY = {66}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['id']}-{pair['kind']}")
def test_answer_pairs(pair: dict[str, Any]) -> None:
    assert (verify(pair["prediction"], pair["gold"]).verdict == "correct") == pair["should_be_equal"]
    boxed = verify(pair["prediction"], pair["gold"], "boxed").verdict == "correct"
    assert boxed == (pair["should_be_equal"] and pair["id"] not in BOXED_ONLY)


def test_nothing_in_an_answer_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attacks = [pair["prediction"] for pair in PAIRS if pair["kind"] == "injection"]
    attacks += [r"\boxed{open('x', 'w')}", r"\boxed{exec(\"open('x','w')\")}", r"\boxed{\write18{touch x}}"]
    assert len(attacks) == 5
    for attack in attacks:
        assert verify(attack, "x+1").verdict == "wrong"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("response", "boxed", "marked", "number"),
    [
        (r"\boxed{5} and then, no, \boxed{7}", "7", "7", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", r"\{1,2\}", r"\{1,2\}"),
        (r"\boxed{\text{E}}", r"\text{E}", r"\text{E}", r"\text{E}"),
        (r"\fbox{3}", "3", "3", "3"),
        (r"$\boxed 7$.", "7", "7", "7"),
        (r"\boxed{\frac{1}{2", None, None, None),
        (r"\boxed{3}, wait, the answer is \boxed{4", None, None, None),
        (r"\boxed{}", None, None, None),
        ("#### 42", None, "42", "42"),
        ("16 - 3 = 13\n#### 13\n#### 14", None, "14", "14"),
        ("The answer is 5. No, the answer is 7.", None, "7", "7"),
        ("The final answer is: **$\\frac{1}{2}$**.", None, r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"So the answer is \(x = 3\) because 3 is prime.", None, "x = 3", "x = 3"),
        ("**Answer:**\n42", None, "42", "42"),
        ("The answer is $18 and not $20.", None, "$18 and not $20", "$18 and not $20"),
        ("The answer is 3.5 apples.", None, "3.5 apples", "3.5 apples"),
        ("She has 1,234 left, at 50% off.", None, None, "50%"),
        ("It is -3/4", None, None, "-3/4"),
        ("42<|im_end|>", None, None, "42"),
        ("<think>\\boxed{1}</think>The answer is 2", None, "2", "2"),
        ("<think>\\boxed{1}</think>", None, None, None),
        ("", None, None, None),
        ("No idea.", None, None, None),
    ],
)
def test_where_the_final_answer_stands(
    response: str, boxed: str | None, marked: str | None, number: str | None
) -> None:
    """Fault 44."""
    policies: tuple[Policy, ...] = ("boxed", "marked", "number")
    assert [extract_answer(response, policy) for policy in policies] == [boxed, marked, number]


def test_unknown_policy() -> None:
    unknown: Any = "anything"
    with pytest.raises(ValueError, match="policy = 'anything': choose one of boxed, marked, number"):
        extract_answer("1", unknown)


EQUAL = [
    ("1/2", "0.5"),
    ("10%", "0.1"),
    ("10%", "10"),
    ("(1,4.5)", "(1,9/2)"),
    ("0.0833333333333333", "1/12"),
    ("2½", "2.5"),
    ("-2 1/3", "-7/3"),
    (r"\$18.00", "18"),
    ("1,800", "1800"),
    (r"9,\!240", "9240"),
    ("18 dollars", "18"),
    (r"5\sqrt{3}\text{ cm}", r"\sqrt{75}"),
    (r"90^{\circ}", "90"),
    (r"3\sqrt{2}", r"\sqrt{18}"),
    ("x²", "x^2"),
    ("y=2x+3", "2x-y+3=0"),
    ("f(x)=x^2", "x^2"),
    (r"\text{(E)}", "E"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("3 and 5", r"\{3,5\}"),
    (r"1\pm\sqrt2", r"1+\sqrt{2},1-\sqrt{2}"),
    (r"\left(3,\tfrac\pi2\right)", r"(3,\frac{\pi}{2})"),
    (r"x\in[0,1)", "[0,1)"),
    ("3:4", "6:8"),
    ("3:4", r"\frac34"),
    ("10^{-3}", "0.001"),
    ("5!", "120"),
    ("1.41421356", r"\sqrt{2}"),
    (r"\frac{x+1}{2}", "0.5x+0.5"),
    (r"\log_2 8", "3"),
    (r"\begin{pmatrix}1\\\frac12\end{pmatrix}", r"\begin{bmatrix} 1 \\ 0.5 \end{bmatrix}"),
]

DIFFERENT = [
    ("(0,1)", "(0,1.5)"),
    ("1/2^99", "1/2^98"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ("(0,1)", "[0,1]"),
    ("[0,1)", "(0,1]"),
    ("x=1", "y=2"),
    ("x=5", "y=5"),
    ("1", "x=2"),
    (r"5\text{ cm}", r"5\text{ m}"),
    ("5 cm", "5 m"),
    ("50%", "0.05"),
    ("0.33", "1/3"),
    ("1.414", r"\sqrt2"),
    ("22/7", r"\pi"),
    ("0.0000001", "0"),
    ("(1,2)", "(2,1)"),
    ("1,2", "1,2,3"),
    ("1,2", "12"),
    ("2 3", "23"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("3:4", "4:3"),
    ("A", "B"),
    ("yes", "no"),
    (r"\emptyset", "0"),
    (r"(0,\infty)", r"(-\infty,0)"),
    (r"\infty", r"-\infty"),
    (r"\frac{1}{0}", "1"),
    ("", "0"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal(a: str, b: str) -> None:
    """Fault 45 and its kin."""
    assert equal_answers(a, b)
    assert equal_answers(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different(a: str, b: str) -> None:
    assert not equal_answers(a, b)
    assert not equal_answers(b, a)


BOMBS = [
    "2^(2^(2^(2^100)))",
    "9^9^9^9",
    "9^{9^{9^{9}}}",
    "(10^{9})!",
    "((10!)!)!",
    r"\binom{1000000000}{500000000}",
    "2^{100000000}",
    "1" * 50_000,
    "(" * 30_000 + "1",
    "1e999999999",
    "{" * 3_000 + "}" * 3_000,
    "1," * 30_000,
    " " * 100_000 + "1" + " " * 100_000,
    r"\frac" * 5_000,
    r"\text{" * 5_000,
    "\n" * 100_000,
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:12])
def test_bombs_are_graded_quickly_without_a_timer(bomb: str) -> None:
    verify(r"\boxed{x+1}", "1+x")  # the first symbolic comparison builds the parser
    start = time.monotonic()
    for response in (rf"\boxed{{{bomb}}}", f"The answer is {bomb}", bomb):
        assert verify(response, "3", "number").verdict in ("wrong", "unparsed")
    assert time.monotonic() - start < 1.0


def test_verdicts_and_rewards() -> None:
    """Fault 44: no box is "unparsed", not "wrong"."""
    boxed, plain = r"It is \boxed{4}.", "It is 4"
    assert grade("", boxed, "4", {}) == {"reward": 1.0, "verdict": "correct", "parsed": "4"}
    assert grade("", boxed, "5", {}) == {"reward": 0.0, "verdict": "wrong", "parsed": "4"}
    assert grade("", plain, "4", {}) == {"reward": 0.0, "verdict": "unparsed", "parsed": None}
    assert grade("", "#### 4", "4", {})["reward"] == 1.0
    assert grade_boxed("", "#### 4", "4", {})["verdict"] == "unparsed"
    assert grade_lenient("", plain, "4", {})["reward"] == 1.0


def test_references_may_be_worked_solutions() -> None:
    assert verify(r"\boxed{18}", "16 - 3 = 13\n#### 18").verdict == "correct"
    assert verify(r"\boxed{18}", r"Thus $x = \boxed{18}$.").verdict == "correct"


def test_trailing_special_tokens_do_not_matter() -> None:
    """Fault 45: answers with a trailing EOS once scored 0 %."""
    for tail in ("<eos>", "<|im_end|>", "</s>", "<|im_end|>\n<|endoftext|>"):
        assert verify("The answer is 42" + tail, "42").verdict == "correct"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader("sat_jax.rewards.math:grade", workers=1, timeout_s=10) as pool:
        yield pool


def test_grading_from_a_worker_thread(grader: Grader) -> None:
    """Fault 46: timers that are signals raise there, and score everything 0."""
    grades: list[Any] = []
    job = GradeJob("", r"\boxed{1/3}", r"\frac{1}{3}")
    bomb = GradeJob("", r"\boxed{2^(2^(2^(2^100)))}", "1")
    symbolic = GradeJob("", r"\boxed{(x+1)^2}", "x^2+2x+1")
    thread = threading.Thread(target=lambda: grades.extend(grader.grade([job, bomb, symbolic])))
    thread.start()
    thread.join(30)
    assert [(g.reward, g.verdict) for g in grades] == [(1.0, "correct"), (0.0, "wrong"), (1.0, "correct")]
