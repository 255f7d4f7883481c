"""A few rollouts as HTML, every token tinted by how far learner and engine disagree on it, its age or its surprise."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from sat_jax.losses.window import edges
from sat_jax.runs.reader import Run

MAX_TOKENS = 600
"""Tokens of a response that the page shows; a 32k-token response would make the page unreadable."""

MAX_PROMPT_CHARS = 4000

_SURPRISE_SCALE = 3.0  # nats; a token at or below e^-3 = 5 % gets the full tint
_MODES = (
    ("ratio", "log ratio", "learner less sure … surer than the engine"),
    ("advantage", "advantage", "pushed down … pushed up"),
    ("lag", "staleness", "fresh … oldest"),
    ("logp", "surprise", "certain … unlikely when sampled"),
)


def pick_samples(samples: Sequence[Mapping[str, Any]], phases: int = 3) -> list[Mapping[str, Any]]:
    """The best and the worst response from the start, the middle and the end: at most ``2 * phases`` of them."""
    samples = sorted(samples, key=lambda s: s["step"])
    picked: list[Mapping[str, Any]] = []
    for phase in range(phases):
        centre = round((len(samples) - 1) * phase / max(phases - 1, 1))
        width = max(len(samples) // 20, 4)
        near = samples[max(0, centre - width // 2) : centre + width // 2 + 1]
        near = [sample for sample in near if not any(sample is p for p in picked)]
        if near:
            ranked = sorted(near, key=lambda s: s.get("reward") or 0.0)
            picked += [ranked[-1]] + ([ranked[0]] if len(ranked) > 1 else [])
    return sorted(picked, key=lambda s: s["step"])


def samples_html(run: Run, samples: Sequence[Mapping[str, Any]]) -> str:
    """The cards of ``samples``, with a switch for what the tint means among what these samples carry."""
    carried = {
        "ratio": any(s.get("log_ratio") for s in samples),
        "advantage": any(s.get("advantage") is not None for s in samples),
        "lag": any(s.get("policy_versions") for s in samples),
        "logp": any(s.get("behavior_log_probs") for s in samples),
    }
    modes = [mode for mode in _MODES if carried[mode[0]]]
    group = f"tint-{html.escape(run.path.name)}"
    switches, keys = [], []
    for i, (name, label, meaning) in enumerate(modes):
        checked = " checked" if i == 0 else ""
        switches.append(f'<label><input type="radio" name="{group}" class="by-{name}"{checked}>{label}</label>')
        keys.append(f'<span class="key {name}"><i></i>{meaning}</span>')
    bar = (
        f'<div class="modes"><span class="muted">tint tokens by</span>{"".join(switches + keys)}</div>' if modes else ""
    )
    return f'<div class="samples">{bar}{"".join(_card(run, sample) for sample in samples)}</div>'


def _card(run: Run, sample: Mapping[str, Any]) -> str:
    facts = [f"step <b>{sample['step']}</b>", f"reward <b>{_number(sample.get('reward'))}</b>"]
    if sample.get("verdict"):
        facts.append(f"verdict <b>{_text(sample['verdict'])}</b>")
    if sample.get("advantage") is not None:
        facts.append(f"advantage <b>{_number(sample['advantage'], sign=True)}</b>")
    lags = _lags(sample)
    if lags:
        facts.append(f"lag <b>{min(lags)}</b>" if min(lags) == max(lags) else f"lag <b>{min(lags)} to {max(lags)}</b>")
    ratios = [r for r in sample.get("log_ratio") or () if r is not None]
    if ratios:
        facts.append(f"mean |log ratio| <b>{sum(map(abs, ratios)) / len(ratios):.3f}</b>")
    facts.append(f"{len(sample.get('tokens') or ())} tokens, ended by <b>{_text(sample.get('finish_reason', '?'))}</b>")
    if sample.get("answer"):
        facts.append(f"reference answer <b>{_text(sample['answer'])}</b>")
    prompt = str(sample.get("prompt", ""))
    cut = f"… ({len(prompt) - MAX_PROMPT_CHARS} more characters)" if len(prompt) > MAX_PROMPT_CHARS else ""
    head = "".join(f"<span>{fact}</span>" for fact in facts)
    return (
        f'<div class="card sample"><div class="head">{head}</div>'
        f'<pre class="prompt">{_text(prompt[:MAX_PROMPT_CHARS])}{cut}</pre>{_response(run, sample)}</div>'
    )


def _response(run: Run, sample: Mapping[str, Any]) -> str:
    tokens = sample.get("tokens") or ()
    negative = " class='neg'" if _advantage(sample) < 0 else ""
    if not tokens:
        return f"<pre{negative}>{_text(sample.get('response', ''))}</pre>"
    spans = "".join(_token(run, sample, i, str(token)) for i, token in enumerate(tokens[:MAX_TOKENS]))
    more = f"<span class='muted'> … {len(tokens) - MAX_TOKENS} more tokens</span>" if len(tokens) > MAX_TOKENS else ""
    return f"<pre{negative}>{spans}{more}</pre>"


def _token(run: Run, sample: Mapping[str, Any], i: int, token: str) -> str:
    """One token: its tints as CSS variables between 0 and 1, its numbers as a tooltip."""
    ratio, log_prob = _entry(sample, "log_ratio", i), _entry(sample, "behavior_log_probs", i)
    lags, tints, said = _lags(sample), [], []
    if ratio is not None:
        said.append(f"log ratio {ratio:+.3f}")
    low, high = edges(run.setting("loss.eps_low", 0.2), run.setting("loss.eps_high", 0.2))
    tints.append(("r", -ratio / low if ratio is not None and ratio < 0 else (ratio or 0.0) / high))
    if i < len(lags):
        said.append(f"lag {lags[i]}")
        tints.append(("l", lags[i] / max(1, _largest_lag(run))))
    if log_prob is not None:
        said.append(f"sampled at log-prob {log_prob:.3f}")
        tints.append(("p", -log_prob / _SURPRISE_SCALE))
    tints.append(("w", abs(_advantage(sample)) / 2.0))
    style = ";".join(f"--{name}:{min(max(value, 0.0), 1.0):.2g}" for name, value in tints)
    down = " d" if ratio is not None and ratio < 0 else ""
    return f'<span class="t{down}" style="{style}" title="{_text(", ".join(said))}">{_visible(token)}</span>'


def _lags(sample: Mapping[str, Any]) -> list[int]:
    """Versions between sampling and training; a sample's step is the learner version after training on it."""
    return [max(0, sample["step"] - 1 - version) for version in sample.get("policy_versions") or ()]


def _largest_lag(run: Run) -> float:
    _, values = run.series("async/staleness_max")
    return float(values.max()) if len(values) else 1.0


def _entry(sample: Mapping[str, Any], key: str, i: int) -> float | None:
    values = sample.get(key) or ()
    return values[i] if i < len(values) else None


def _advantage(sample: Mapping[str, Any]) -> float:
    """A number per response; the mean where it differs by token."""
    value = sample.get("advantage")
    if isinstance(value, list):
        known = [v for v in value if v is not None]
        return sum(known) / len(known) if known else 0.0
    return float(value or 0.0)


def _number(value: Any, sign: bool = False) -> str:
    if isinstance(value, list):
        return f"{len(value)} values"
    if value is None:
        return "none"
    return f"{value:+.3g}" if sign and value else f"{value:.3g}"


def _visible(token: str) -> str:
    """A token whose line break can be seen, and still breaks the line."""
    return _text(token).replace("\n", "⏎\n") or "∅"


def _text(value: Any) -> str:
    """Escaped, with control characters shown as the pictures Unicode has for them."""
    shown = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(value))
    # A lone surrogate cannot be encoded; the replacement character says that something was there.
    return html.escape(shown.encode("utf-8", errors="replace").decode())
