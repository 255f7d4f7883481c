"""Verifiers of reasoning-gym's own tasks, for prompts read from ``reasoning_gym:NAME``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from sat_jax.rewards.extract import extract_answer

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The task's own score, 0 to 1; ``correct`` where it is full.

    The answer is what the last ``<answer>`` tags enclose, else what a box or "answer is" marks, else all of it.
    """
    entry = metadata.get("metadata", {})
    if "source_dataset" not in entry:
        raise ValueError(
            "this prompt names no reasoning-gym task: grade prompts of a reasoning_gym:NAME source with it"
        )
    try:
        gym = importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        raise ValueError("this reward needs the package reasoning-gym: pip install reasoning-gym") from error
    tagged = _TAGGED.findall(response)
    parsed = tagged[-1].strip() if tagged else extract_answer(response) or response.strip()
    verifier = gym.get_score_answer_fn(entry["source_dataset"])
    value = float(verifier(parsed, {"question": prompt, "answer": answer, "metadata": entry}))
    return {"reward": value, "verdict": "correct" if value >= 1 else "wrong", "parsed": parsed}
