"""Reward functions that misbehave in every way that has been seen."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

NOT_CALLABLE = 3


def behave(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> Any:
    """Do what the response says."""
    word, _, rest = response.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "spin":  # holds the interpreter in C: neither signals handlers nor other threads run
        return len(str(9 ** (9**9)))
    elif word == "die":
        os._exit(7)
    elif word == "grandchild":
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
    elif word == "shout":
        print("x" * 100_000)
        print("to stderr", file=sys.stderr)
    elif word == "raise":
        raise RuntimeError(f"no grade for {rest}")
    elif word == "exit":
        sys.exit(3)
    elif word == "hoard":
        return len(b"x" * (8 << 30))
    elif word == "recurse":
        return behave(prompt, response, answer, metadata)
    elif word == "nan":
        return float("nan")
    elif word == "text":
        return "1.0"
    elif word == "unpicklable":
        return {"reward": 1.0, "why": lambda: None}
    elif word == "pid":
        return {"reward": 1.0, "pid": os.getpid()}
    return 1.0 if response == answer else 0.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """verl's signature."""
    return {"score": float(solution_str == ground_truth), "acc": True, "source": data_source, "extra": extra_info}


def compute_score_short(solution_str: str, ground_truth: str, method: str = "strict") -> float:
    """verl's per-data-set signature."""
    return 0.5 if method == "strict" else 0.0


def two(a: str, b: str) -> float:
    return 0.0
