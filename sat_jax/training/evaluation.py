"""avg@k and pass@k of a policy on problems with reference answers."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sat_jax.rollout.engine import MAX_SEED, Engine, Request, SamplingParams
from sat_jax.types import Prompt, Trajectory


class Grade(Protocol):
    """Grades finished trajectories: returns them, in the same order, with ``reward`` set."""

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], /) -> Sequence[Trajectory]: ...


@dataclasses.dataclass(frozen=True)
class Score:
    """avg@k and pass@k over ``problems`` problems, both in 0 .. 1."""

    avg: float
    passed: float
    problems: int


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        step: the learner version that was evaluated.
        k: samples per problem.
        total: over all problems.
        sources: the same by prompt source.
        response_len_mean: tokens.
        truncated_ratio: share of responses that the budget ended.
        correct: int [problems], correct samples of each, in the order of the prompts.
        trajectories: every response, problem by problem.
    """

    step: int
    k: int
    total: Score
    sources: dict[str, Score]
    response_len_mean: float
    truncated_ratio: float
    correct: np.ndarray
    trajectories: tuple[Trajectory, ...]

    def record(self) -> dict[str, Any]:
        """The line of ``evaluations.jsonl``."""
        return {
            "step": self.step,
            "k": self.k,
            **_record(self.total),
            "sources": {name: _record(score) for name, score in self.sources.items()},
            "response_len_mean": self.response_len_mean,
            "truncated_ratio": self.truncated_ratio,
        }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that at least one of ``k`` samples is right, from ``c`` right ones among ``n``.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Raises:
        ValueError: unless ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass@{k} from {c} correct of {n} samples: need 0 <= correct <= samples and 1 <= k <= samples"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    grade: Grade,
    params: SamplingParams,
    k: int,
    *,
    seed: int = 0,
    step: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Samples ``k`` responses per prompt with the engine's current weights and grades them.

    Each response has its own seed, derived from ``seed``, the problem's position and the sample's index: the
    same policy gives the same responses every time. A reward of at least 0.5 counts as correct.

    Args:
        progress: called with (finished, all) responses now and then.

    Raises:
        ValueError: no prompts, k below 1, a seed outside 0 .. 2**32 - 1.
    """
    if not prompts or k < 1:
        raise ValueError(f"nothing to evaluate: {len(prompts)} prompts, k = {k}; give at least one of each")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed = {seed}: must lie in 0 .. {MAX_SEED}")
    seeds = np.random.SeedSequence(seed).generate_state(len(prompts) * k)
    requests = [
        Request(f"eval:{p}:{i}", prompt, i, params, int(seeds[p * k + i]))
        for p, prompt in enumerate(prompts)
        for i in range(k)
    ]
    place = {request.request_id: i for i, request in enumerate(requests)}
    finished: list[Trajectory | None] = [None] * len(requests)
    for count, trajectory in enumerate(engine.generate(requests), 1):
        finished[place[trajectory.request_id]] = trajectory
        if progress is not None:
            progress(count, len(requests))
    lost = [r.request_id for r, t in zip(requests, finished, strict=True) if t is None]
    if lost:
        raise RuntimeError(f"the engine lost {len(lost)} of {len(requests)} responses, the first is {lost[0]}")
    trajectories = [t for t in finished if t is not None]
    graded = tuple(grade([r.prompt for r in requests], trajectories))
    right = np.array([t.reward is not None and t.reward >= 0.5 for t in graded], bool).reshape(len(prompts), k)
    correct = right.sum(axis=1)
    by_source: dict[str, list[int]] = defaultdict(list)
    for p, prompt in enumerate(prompts):
        by_source[prompt.source].append(p)
    return Evaluation(
        step=step,
        k=k,
        total=_score(correct, k),
        sources={name: _score(correct[rows], k) for name, rows in sorted(by_source.items())},
        response_len_mean=float(np.mean([len(t.response_ids) for t in graded])),
        truncated_ratio=float(np.mean([t.truncated for t in graded])),
        correct=correct,
        trajectories=graded,
    )


def _score(correct: np.ndarray, k: int) -> Score:
    return Score(
        avg=float(np.mean(correct) / k),
        passed=float(np.mean([pass_at_k(k, int(c), k) for c in correct])),
        problems=len(correct),
    )


def _record(score: Score) -> dict[str, Any]:
    return {"avg@k": score.avg, "pass@k": score.passed, "problems": score.problems}
