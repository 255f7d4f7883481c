"""Reward functions: how they are named, called and answered.

A reward is any importable ``module:function`` or ``file.py:function`` with the signature ``(prompt, response, answer,
metadata)`` or verl's ``compute_score(data_source, solution_str, ground_truth, extra_info)``, and returns a number or a
mapping with one.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from sat_jax.names import load_object

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_OWN = ("prompt", "response", "answer", "metadata")

FAILED_VERDICTS = frozenset({"timeout", "crashed", "error"})
"""Verdicts that say that the verifier failed, not the response."""


@dataclasses.dataclass(frozen=True)
class GradeJob:
    """One response to be graded."""

    prompt: str  # rendered
    response: str  # decoded, special tokens removed
    answer: str  # the reference
    source: str = ""  # name of the data source
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else the source said about the problem; has to survive pickling."""


@dataclasses.dataclass(frozen=True)
class Grade:
    """What a response is worth."""

    reward: float
    """Finite; 0 where ``failed``."""
    verdict: str
    """The reward function's own word (``correct``, ``wrong``, ``unparsed``; ``graded`` where it has none), or
    ``timeout``, ``crashed`` or ``error`` where there is no grade to be had."""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Whatever else the reward function returned; ``error`` says why a grading failed."""

    @property
    def failed(self) -> bool:
        """True where the verifier, not the response, failed."""
        return self.verdict in FAILED_VERDICTS


RewardFunction = Callable[[GradeJob], Grade]


def load_reward(spec: str) -> RewardFunction:
    """Import ``module:function`` or ``file.py:function`` and adapt it; ``ValueError`` where that cannot be."""
    try:
        function = load_object(spec, "reward")
    except Exception as error:  # a module may fail to import in any way
        if isinstance(error, ValueError) and str(error).startswith("reward"):
            raise
        raise ValueError(f"reward {spec}: its module cannot be imported ({error!r})") from error
    if not callable(function):
        raise ValueError(f"reward {spec} is of type {type(function).__name__}: name a function")
    return adapt_reward(function)


def adapt_reward(function: Callable[..., Any]) -> RewardFunction:
    """A reward function of either signature as a function from ``GradeJob`` to ``Grade``."""
    name = getattr(function, "__qualname__", repr(function))
    parameters = inspect.signature(function).parameters
    required = {
        k for k, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if {"solution_str", "ground_truth"} <= parameters.keys() and required <= set(_VERL):
        accepted = [key for key in _VERL if open_ended or key in parameters]

        def from_verl(job: GradeJob) -> Grade:
            extra = job.metadata.get("extra_info", job.metadata)
            values = dict(zip(_VERL, (job.source, job.response, job.answer, extra), strict=True))
            return to_grade(function(**{key: values[key] for key in accepted}))

        return from_verl
    if len(required) <= len(_OWN) <= len(parameters) or set(_OWN) <= parameters.keys():
        return lambda job: to_grade(function(job.prompt, job.response, job.answer, job.metadata))
    raise ValueError(
        f"reward {name}({', '.join(parameters)}): a reward takes ({', '.join(_OWN)}), or verl's ({', '.join(_VERL)})"
    )


def to_grade(value: Any) -> Grade:
    """What a reward function returned, as a ``Grade``: a finite number, or a mapping with ``reward`` (verl: ``score``).
    Anything else is a ``TypeError`` or ``ValueError``."""
    info: dict[str, Any] = {}
    if isinstance(value, Mapping):
        info = {str(k): v for k, v in value.items()}
        value = info.pop("reward", info.pop("score", None))
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise TypeError(f"a reward returned {value!r:.80}: a number, or a mapping with 'reward' or 'score' is expected")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"a reward returned {reward}: it must be finite")
    return Grade(reward, str(info.pop("verdict", "graded")), info)


def run_reward(function: RewardFunction, job: GradeJob) -> Grade:
    """Grade one job; what the reward function raises becomes a grade of verdict ``error``, told in ``info``."""
    try:
        return function(job)
    except Exception as error:  # noqa: BLE001 - it may raise anything, and one odd response must not end a long run
        return Grade(0.0, "error", {"error": f"{type(error).__name__}: {error}"})
