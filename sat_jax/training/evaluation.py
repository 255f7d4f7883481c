"""avg@k and pass@k of a policy on problems with reference answers."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sat_jax.rollout.engine import MAX_SEED, Engine, Request, SamplingParams
from sat_jax.training.rollout_metrics import CORRECT
from sat_jax.types import Prompt, Trajectory

Grade = Callable[[Sequence[Prompt], Sequence[Trajectory]], Sequence[Trajectory]]
"""Returns finished trajectories in the same order, with ``reward`` set."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The learner version ``step``, evaluated with ``k`` samples per problem."""

    step: int
    k: int
    total: dict[str, Any]  # ``avg@k``, ``pass@k`` (both in 0 .. 1) and ``problems``
    sources: dict[str, dict[str, Any]]  # the same by prompt source
    response_len_mean: float
    truncated_ratio: float  # share of responses that the budget ended

    def record(self) -> dict[str, Any]:
        """The line of ``evaluations.jsonl``."""
        lengths = {"response_len_mean": self.response_len_mean, "truncated_ratio": self.truncated_ratio}
        return {"step": self.step, "k": self.k, **self.total, "sources": self.sources, **lengths}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that at least one of ``k`` samples is right, from ``c`` right ones among ``n``:
    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} from {c} correct of {n} samples: need 0 <= correct <= samples, 1 <= k <= samples")
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

    Each response has its own seed, derived from ``seed``, the problem's position and the sample's index: the same
    policy gives the same responses every time. ``progress`` is called with (finished, all) now and then.
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
    graded = grade([r.prompt for r in requests], trajectories)
    right = np.array([t.reward is not None and t.reward >= CORRECT for t in graded]).reshape(len(prompts), k)
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
    )


def _score(correct: np.ndarray, k: int) -> dict[str, Any]:
    passed = float(np.mean([pass_at_k(k, int(c), k) for c in correct]))
    return {"avg@k": float(np.mean(correct) / k), "pass@k": passed, "problems": len(correct)}
