"""A few rollouts as values for the page: of every token how far learner and engine disagree on it, age, surprise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sat_jax.losses.window import edges

Sample = Mapping[str, Any]
"""A line of samples.jsonl."""

MAX_TOKENS = 600
"""Tokens of a response that the page shows; a 32k-token response would make the page unreadable."""

MAX_PROMPT_CHARS = 4000

TINTS = {
    "ratio": ("log_ratio", "log ratio", "learner less sure … surer than the engine"),
    "advantage": ("advantage", "advantage", "pushed down … pushed up"),
    "lag": ("policy_versions", "staleness", "fresh … oldest"),
    "logp": ("behavior_log_probs", "surprise", "certain … unlikely when sampled"),
}
"""What a token's tint can mean: the field it needs, its switch, its legend."""

_SURPRISING = 3.0  # nats; a token at or below e^-3 = 5 % gets the full tint


def pick_samples(samples: Sequence[Sample], places: Sequence[float]) -> list[Sample]:
    """The best and the worst response from each place of a run, 0 its start and 1 its end."""
    samples = sorted(samples, key=lambda s: s["step"])
    picked: list[Sample] = []
    for place in places:
        centre, width = round((len(samples) - 1) * place), max(len(samples) // 20, 4)
        near = [s for s in samples[max(0, centre - width // 2) : centre + width // 2 + 1] if s not in picked]
        near.sort(key=lambda s: s.get("reward") or 0.0)
        picked += near[-1:] + near[:-1][:1]
    return sorted(picked, key=lambda s: s["step"])


def tints(samples: Sequence[Sample]) -> dict[str, tuple[str, str]]:
    """Switch and legend of every tint that these samples carry numbers for."""
    return {
        name: (label, meaning)
        for name, (field, label, meaning) in TINTS.items()
        if any(sample.get(field) not in (None, []) for sample in samples)
    }


def cards(samples: Sequence[Sample], radii: tuple[float, float]) -> list[dict[str, Any]]:
    """The rollouts for the page. A log ratio at the end of the nominal interval ``radii`` has the full tint."""
    low, high = edges(*radii)
    oldest = max((lag for sample in samples for lag in _lags(sample)), default=0)
    return [_card(sample, (min(low, 1.0), high), oldest) for sample in samples]


def _card(sample: Sample, ends: tuple[float, float], oldest: int) -> dict[str, Any]:
    tokens, ratios = sample.get("tokens") or (), sample.get("log_ratio") or ()
    lags, advantage = _lags(sample), _advantage(sample)
    far = [abs(ratio) for ratio in ratios if ratio is not None]
    facts = {
        "step": sample["step"],
        "reward": "none" if sample.get("reward") is None else f"{sample['reward']:.3g}",
        "verdict": sample.get("verdict"),
        "advantage": None if sample.get("advantage") is None else f"{advantage:+.3g}",
        "lag": " to ".join(map(str, sorted({min(lags), max(lags)}))) if lags else None,
        "mean |log ratio|": f"{sum(far) / len(far):.3f}" if far else None,
        "tokens": len(tokens),
        "ended by": sample.get("finish_reason", "?"),
        "reference answer": sample.get("answer") or None,
    }
    prompt = str(sample.get("prompt", ""))
    shown = tokens[:MAX_TOKENS]
    numbers = itertools.zip_longest(shown, ratios, lags, sample.get("behavior_log_probs") or ())
    return {
        "facts": {label: value for label, value in facts.items() if value is not None},
        "prompt": prompt[:MAX_PROMPT_CHARS],
        "prompt_left_out": max(0, len(prompt) - MAX_PROMPT_CHARS),
        "response": str(sample.get("response", "")),
        "pushed_down": advantage < 0,
        "tokens": [_token(token, advantage, ends, oldest) for token in itertools.islice(numbers, len(shown))],
        "tokens_left_out": len(tokens) - len(shown),
    }


def _token(token: tuple[Any, ...], advantage: float, ends: tuple[float, float], oldest: int) -> dict[str, Any]:
    """Tints as CSS variables between 0 and 1, numbers as a tooltip."""
    text, ratio, lag, log_prob = token
    tints, said = {"w": abs(advantage) / 2}, []
    if ratio is not None:
        said.append(f"log ratio {ratio:+.3f}")
        tints["r"] = abs(ratio) / ends[ratio > 0]
    if lag is not None:
        said.append(f"lag {lag}")
        tints["l"] = lag / max(1, oldest)
    if log_prob is not None:
        said.append(f"sampled at log-prob {log_prob:.3f}")
        tints["p"] = -log_prob / _SURPRISING
    return {
        # A line break can be seen, and still breaks the line; so can a token without text.
        "text": str(text).replace("\n", "⏎\n") or "∅",
        "style": ";".join(f"--{name}:{min(max(tint, 0.0), 1.0):.2g}" for name, tint in tints.items()),
        "numbers": ", ".join(said),
        "below": ratio is not None and ratio < 0,
    }


def _lags(sample: Sample) -> list[int]:
    """Versions between sampling and training; a sample's step is the learner version after training on it."""
    return [max(0, sample["step"] - 1 - version) for version in sample.get("policy_versions") or ()]


def _advantage(sample: Sample) -> float:
    """A number per response; the mean where it differs by token."""
    value = sample.get("advantage")
    known = [v for v in value if v is not None] if isinstance(value, list) else [value or 0.0]
    return sum(known) / len(known) if known else 0.0
