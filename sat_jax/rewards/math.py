"""The rule-based verifier for mathematics: find the final answer, compare it with the reference.

Verdicts: ``correct``, ``wrong``, and ``unparsed`` where the response has no final answer under the policy (see
``sat_jax.rewards.extract``); ``sat_jax.rewards.grader`` adds ``timeout`` and ``crashed``. Only ``correct`` is rewarded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from sat_jax.rewards.equality import equal_answers
from sat_jax.rewards.extract import Policy, extract_answer


@dataclasses.dataclass(frozen=True)
class Verification:
    """What the verifier says of one response."""

    verdict: Literal["correct", "wrong", "unparsed"]
    parsed: str | None  # the final answer as the response spells it


def verify(response: str, answer: str, policy: Policy = "marked") -> Verification:
    """Compare a response's final answer with ``answer``: a bare one, or a text that boxes it or marks it with
    ``####``."""
    parsed = extract_answer(response, policy)
    if parsed is None:
        return Verification("unparsed", None)
    reference = extract_answer(answer, "marked") or answer
    return Verification("correct" if equal_answers(parsed, reference) else "wrong", parsed)


def grade(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Reward 1 for a correct final answer that is boxed or marked as the answer."""
    return _reward(verify(response, answer))


def grade_boxed(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Reward 1 for a correct answer in ``\\boxed{...}``, nothing for any other form."""
    return _reward(verify(response, answer, "boxed"))


def grade_lenient(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Reward 1 for a correct final answer, which may be just the last number of the response."""
    return _reward(verify(response, answer, "number"))


def _reward(found: Verification) -> dict[str, Any]:
    return {"reward": float(found.verdict == "correct"), "verdict": found.verdict, "parsed": found.parsed}
