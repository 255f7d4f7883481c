from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from sat_jax.data import Tokenizer, load_prompts
from sat_jax.rewards.reasoning_gym import score

METADATA = {"metadata": {"source_dataset": "countdown", "target": 126}}


@pytest.fixture
def fake_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full marks for the right value, half of them for any other number."""

    def get_score_answer_fn(name: str) -> Callable[[str, dict[str, Any]], float]:
        assert name == "countdown"
        return lambda text, entry: 1.0 if text == str(entry["metadata"]["target"]) else 0.5 if text.isdigit() else 0.0

    factory = types.ModuleType("reasoning_gym.factory")
    monkeypatch.setattr(factory, "get_score_answer_fn", get_score_answer_fn, raising=False)
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.usefixtures("fake_gym")
@pytest.mark.parametrize(
    ("response", "reward", "parsed"),
    [
        ("<answer>1</answer> no, <answer> 126 </answer>", 1.0, "126"),
        (r"\boxed{126}", 1.0, "126"),
        ("The answer is 127.", 0.5, "127"),
        (" 126 ", 1.0, "126"),
        ("none", 0.0, "none"),
    ],
)
def test_the_tasks_own_score(response: str, reward: float, parsed: str) -> None:
    verdict = "correct" if reward == 1 else "wrong"
    assert score("?", response, "", METADATA) == {"reward": reward, "verdict": verdict, "parsed": parsed}


@pytest.mark.usefixtures("fake_gym")
def test_prompts_of_other_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="names no reasoning-gym task"):
        score("?", "1", "1", {})


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        score("?", "1", "1", METADATA)


def test_the_real_package() -> None:
    pytest.importorskip("reasoning_gym")
    for name in ("chain_sum", "countdown"):
        for p in load_prompts(f"reasoning_gym:{name}?size=5&seed=1", Tokenizer.of_bytes()):
            assert score(p.text, f"<answer>{p.answer}</answer>", p.answer, p.metadata)["reward"] == 1.0
            assert score(p.text, "<answer>no</answer>", p.answer, p.metadata)["reward"] < 1.0
