from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sat_jax.cli.arguments import call
from sat_jax.cli.arguments import command as parser_of
from sat_jax.cli.data import data, grade
from sat_jax.data.prompts import PromptOptions
from tests.helpers.chatml import CHATML

Write = Callable[[str, str], str]


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def run(command: Callable[..., None], *args: str) -> None:
    call(command, parser_of(command, "sat-jax").parse(args))


def test_grade(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": 7, "response": r"\boxed{\frac12}", "answer": "0.5", "note": "é"},
        {"response": "The answer is 3.", "answer": 3},
        {"response": r"\boxed{3}", "answer": "4"},
        {"response": "no idea, 4", "answer": "4", "verdict": "old"},
    ]
    out = tmp_path / "out.jsonl"
    out.write_text("previous")
    run(grade, write("in.jsonl", lines(*rows)), "--out", str(out), "--workers", "1")
    graded = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [g["correct"] for g in graded] == [True, True, False, False]
    assert [g["verdict"] for g in graded] == ["correct", "correct", "wrong", "unparsed"]
    assert [g["parsed"] for g in graded] == [r"\frac12", "3", "3", None]
    assert [g["reward"] for g in graded] == [1.0, 1.0, 0.0, 0.0]
    assert all(row.items() - {"verdict": "old"}.items() <= g.items() for row, g in zip(rows, graded, strict=True))
    printed = capsys.readouterr().out
    assert "correct: 2 of 4 (50.0%)" in printed
    assert "unparsed" in printed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(("policy", "correct"), [("boxed", 1), ("marked", 2), ("number", 3)])
def test_grade_under_every_policy(write: Write, tmp_path: Path, policy: str, correct: int) -> None:
    rows = [{"response": r, "answer": "4"} for r in (r"\boxed{4}", "The answer is 4", "so 4")]
    out = tmp_path / "out.jsonl"
    run(grade, write("in.jsonl", lines(*rows)), "--out", str(out), "--policy", policy, "--workers", "0")
    assert sum(json.loads(line)["correct"] for line in out.read_text().splitlines()) == correct


def test_grade_with_another_reward(write: Write, tmp_path: Path) -> None:
    path, out = write("in.jsonl", lines({"response": " 4", "answer": "4"})), tmp_path / "out.jsonl"
    run(grade, path, "--out", str(out), "--reward", "sat_jax.rewards.toy:exact_match", "--workers", "0")
    assert json.loads(out.read_text())["parsed"] == "4"


GOOD = lines({"response": "4", "answer": "4"})


@pytest.mark.parametrize(
    ("text", "extra", "message"),
    [
        ("", (), "holds no lines to grade"),
        (GOOD + "{", (), r"in\.jsonl line 2 is not valid JSON"),
        (
            GOOD + lines({"response": "4"}),
            (),
            r"in\.jsonl line 2: every line needs a string 'answer', this one lacks it",
        ),
        (lines({"response": None, "answer": "4"}), (), "needs a string 'response', this one has a NoneType"),
        (GOOD, ("--reward", "nonsense"), r"write package\.module:name or file\.py:name"),
        (GOOD, ("--timeout", "0"), "timeout_s = 0"),
    ],
)
def test_grade_refuses_and_leaves_nothing(
    write: Write, tmp_path: Path, text: str, extra: tuple[str, ...], message: str
) -> None:
    path, out = write("in.jsonl", text), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=message):
        run(grade, path, "--out", str(out), "--workers", "0", *extra)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_grade_does_not_write_over_its_input(write: Write) -> None:
    path = write("in.jsonl", GOOD)
    with pytest.raises(ValueError, match="is the file that is graded"):
        run(grade, path, "--out", path)
    assert Path(path).read_text() == GOOD


def test_data(write: Write, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    row = {"question": "What is 1+1?", "answer": "1+1=2\n#### 2"}
    other = {"question": "What is 1+1?", "answer": "3"}
    run(data, write("x.jsonl", lines(row, row, other)), "--model", str(folder))
    printed = capsys.readouterr().out
    for part in (
        "plain (question, answer)",
        "3 (2 unique, 1 duplicates)",
        "482 <|im_end|>, 480 <|endoftext|>",
        "reference answer '2'",
        "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n",
        "1+1=2\n#### 2<|im_end|>",
    ):
        assert part in printed
    before, _, after = printed.partition("loss mask 1")
    assert "loss mask 0 (prompt), positions 0 to" in before
    assert "What is" in before
    assert "#### 2" in after


def test_data_without_a_model_counts_bytes(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    run(data, write("x.jsonl", lines({"question": "é+1", "answer": "2"})), "--drop-duplicates", "--suffix", " [b]")
    printed = capsys.readouterr().out
    assert "prompt length in bytes" in printed
    assert "8 to 8" in printed
    assert "é+1 [b]\n" in printed
    assert "2<eos>\n" in printed


def test_data_errors(write: Write, tmp_path: Path) -> None:
    path = write("x.jsonl", lines({"question": "1+1", "answer": "2"}))
    with pytest.raises(ValueError, match="--example 1: there are 1 prompts"):
        data(path, example=1)
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        data(path, model=tmp_path)
    with pytest.raises(ValueError, match="max_prompt_len is 2"):
        data(path, options=PromptOptions(max_prompt_len=2))
