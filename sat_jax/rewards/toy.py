"""Rewards of tasks that are graded by comparing text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def exact_match(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Reward 1 where the response, surrounding blanks removed, is the answer, else 0."""
    parsed = response.strip()
    correct = parsed == answer.strip()
    return {"reward": float(correct), "verdict": "correct" if correct else "wrong", "parsed": parsed}
