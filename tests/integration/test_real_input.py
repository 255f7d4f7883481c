"""``train --model HF_DIR --prompts FILE``: a Hugging Face folder and a prompt file, right and wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sat_jax.cli.main import main
from sat_jax.cli.train import parse_options
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.training import build
from tests.helpers import DATA

pytestmark = pytest.mark.slow

CHECKPOINT = DATA / "model" / "moe_top4_norm"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = [
    {"question": f"Ann has {a} apples and buys {b} more. How many has she now?", "answer": f"{a} + {b}\n#### {a + b}"}
    for a in range(3, 9)
    for b in range(2, 6)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "policy"
    shutil.copytree(CHECKPOINT, copy, ignore=shutil.ignore_patterns("*.npz"))
    config = {"chat_template": CHAT, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    return file


SMALL = [
    *("--steps", "2", "--samples_per_step", "2", "--reward.workers", "0"),
    *("--rollout.prompts_per_step", "2", "--rollout.n_samples_per_prompt", "2", "--engine.slots", "4"),
    *("--rollout.schedule.delay", "0", "--sampling.max_new_tokens", "6"),
    *("--evaluation.problems", "2", "--evaluation.k", "1"),
]


def test_a_checkpoint_trains_on_a_prompt_file(folder: Path, prompts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", "--model", str(folder), "--prompts", str(prompts), "--out", str(run), *SMALL]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["train/d_bar"] < 1e-4
        assert line["moe/router_agreement"] == 1.0
        assert line["rollout/zero_std_groups"] == 2  # random weights answer nothing
        assert line["train/valid_tokens"] == line["rollout/response_len_mean"] * 4
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert sample["prompt"].startswith("<|im_start|>user\nAnn has")
        assert sample["prompt"].endswith("<|im_start|>assistant\n")
        assert np.abs(sample["log_ratio"]).max() < 1e-4
        assert sample["finish_reason"] == ("stop" if sample["tokens"][-1] == "<|im_end|>" else "length")
        assert len(sample["tokens"]) == 6 or sample["finish_reason"] == "stop"
    held_out = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert held_out["problems"] == 2

    exit_status = main(["eval", str(run), "-k", "1", "--workers", "0", "--json"])
    assert exit_status == 0


def _remove(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, prompts: (folder / name).unlink()


def _edit(name: str, **changes: object) -> Callable[[Path, Path], None]:
    def edit(folder: Path, prompts: Path) -> None:
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(record | changes))

    return edit


def _truncate(folder: Path, prompts: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _append(line: str) -> Callable[[Path, Path], None]:
    return lambda folder, prompts: prompts.write_text(prompts.read_text() + line)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder, prompts: shutil.rmtree(folder), "policy"),
        (_remove("config.json"), "config.json"),
        (_remove("model.safetensors"), "safetensors"),
        (_remove("tokenizer.json"), "tokenizer.json is missing"),
        (_truncate, "model.safetensors"),
        (_edit("config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2"), "is not supported"),
        (_edit("config.json", num_hidden_layers=5), "missing"),
        (_edit("config.json", vocab_size=300), "vocabulary"),
        (_edit("config.json", max_position_embeddings=32), "exceed the model's context of 32"),
        (lambda folder, prompts: prompts.write_text(""), "questions.jsonl"),
        (lambda folder, prompts: prompts.unlink(), "does not exist"),
        (_append('{"question": "half a li'), "line 25 is not valid JSON"),
        (_append('{"query": "no such column"}\n'), "line 25"),
        (_append(json.dumps({"question": "x " * 3000, "answer": "1"}) + "\n"), "line 25"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing_behind(
    break_it: Callable[[Path, Path], None],
    message: str,
    folder: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(folder, prompts)
    run = tmp_path / "run"
    assert main(["train", "--model", str(folder), "--prompts", str(prompts), "--out", str(run), *SMALL]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not run.exists()


def test_held_out_problems_are_never_trained_on(folder: Path, prompts: Path) -> None:
    prompts.write_text(prompts.read_text() * 2)  # every problem twice
    config = parse_options(["--model", str(folder), "--prompts", str(prompts), *SMALL]).config
    problems = build.build_problems(config, Tokenizer.from_folder(folder))
    held, trained = {p.text for p in problems.heldout}, {p.text for p in problems.train}
    assert len(held) == 2
    assert not held & trained
    assert len(problems.train) == 2 * (len(QUESTIONS) - 2)
    everything = replace(config, evaluation=replace(config.evaluation, problems=len(QUESTIONS)))
    with pytest.raises(ValueError, match="nothing would be left to train on"):
        build.build_problems(everything, Tokenizer.from_folder(folder))
