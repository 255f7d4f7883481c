"""What a loss does to a batch that any trainer has dumped: the numbers behind ``sat-jax inspect``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax import losses
from sat_jax.losses import Aggregation, LossConfig, LossInputs, Ppo, Rule, Sat
from sat_jax.losses.tokens import prepare, rule_summaries, token_terms
from sat_jax.losses.window import window
from sat_jax.names import load_object, nearest

ALIASES: dict[str, tuple[str, ...]] = {
    "log_probs": ("log_prob", "per_token_logps", "logps", "new_log_probs", "current_log_probs"),
    "behavior_log_probs": ("rollout_log_probs", "sampling_per_token_logps", "rollout_logps", "inference_log_probs"),
    "advantages": ("token_advantages",),
    "loss_mask": ("response_mask", "completion_mask", "loss_masks", "mask"),
    "segment_ids": (),
    "reference_log_probs": ("ref_log_prob", "ref_log_probs", "ref_per_token_logps", "ref_logps"),
    "rollout_policy_log_probs": ("old_log_probs", "old_per_token_logps", "old_logps"),
    "proximal_log_probs": ("prox_log_probs",),
}
"""Our names, and what verl, slime and TRL call the same arrays. ``tool_mask`` (TRL) multiplies the mask."""

REQUIRED = ("log_probs", "behavior_log_probs", "advantages", "loss_mask")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """One batch under one method."""

    summary: dict[str, Any]
    """What ``--json`` prints."""
    gradient: np.ndarray
    """[B, T], d loss / d log_probs."""
    tokens: dict[str, np.ndarray]
    """Arrays over active tokens: ``ratio, log_ratio, advantage, cut, intercepted, gate, dropped``."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a named method's loss, and of the rules in it that have them."""

    loss_agg_mode: Aggregation | None = None
    """How tokens become a loss; by default seq-mean-token-mean."""
    eps_low: float = 0.2
    """Lower radius."""
    eps_high: float = 0.2
    """Upper radius."""
    alpha: float = 0.90
    """SAT's quantile level."""
    exponent: float = 2.0
    """SAT's Hill exponent."""
    tis_cap: float = 2.0
    """Cap of the -tis methods and of tis-reinforce."""
    kl_loss_coef: float = 0.0
    """Add the KL term with this weight; needs reference_log_probs."""
    count_empty_rows: bool = False
    """Rows without an active token count in the mean over responses, as in TRL and slime."""

    @property
    def sat(self) -> Sat:
        return Sat(alpha=self.alpha, exponent=self.exponent)


def batch_files(path: Path) -> list[Path]:
    """The file itself, or every ``.npz`` in a directory, sorted by name; ``ValueError`` where there is none."""
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise ValueError(f"{path} holds no .npz file: dump batches with numpy.savez, one file a batch")
        return files
    if not path.exists():
        raise ValueError(f"{path} does not exist: name an .npz file or a directory of them")
    return [path]


def load_batch(path: Path) -> tuple[LossInputs, list[str]]:
    """One dumped batch, checked, and notes about names that were translated.

    Raises:
        ValueError: not an npz, arrays missing (the message lists what is there), shapes or values that cannot be.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, AttributeError) as error:
        what = f"{path} is not an .npz archive of plain arrays ({error})"
        raise ValueError(f"{what}: write it with numpy.savez") from error
    arrays, notes = _translate(found, path)
    mask = arrays["loss_mask"]
    if "tool_mask" in found and found["tool_mask"].shape == mask.shape:
        arrays["loss_mask"] = mask * found["tool_mask"]
        notes.append("loss_mask = completion mask x tool_mask")
    inputs = LossInputs(**arrays)
    try:
        losses.check_values(inputs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    cast = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]  # set by jax at run time

    def to_device(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, cast) if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x)

    return jax.tree.map(to_device, inputs), notes


def configure(method: str, *, rules: Sequence[str] = (), settings: Settings = Settings()) -> LossConfig:
    """The loss that ``inspect`` and ``geometry`` look at.

    Args:
        method: a named method, or ``file.py:name`` of a ``LossConfig`` or of a function that returns one.
        rules: import paths of more rules, each of which joins the loss or takes the place of the one of its name.
        settings: of a named method.

    Raises:
        ValueError: no such method, file or rule.
    """
    if ":" in method:
        found = load_object(method, "method")
        config = found() if inspect.isfunction(found) else found
        if not isinstance(config, LossConfig):
            raise ValueError(f"method {method} is {config!r}: it must be a LossConfig, or a function that returns one")
    else:
        config = losses.method(method)
        if config.get(Sat):
            config = config.with_rules(settings.sat)
        capped: list[Rule] = [dataclasses.replace(rule, cap=settings.tis_cap) for rule in config.active(losses.Tis)]
        capped += [dataclasses.replace(r, cap=settings.tis_cap) for r in config.active(losses.TisReinforce)]
        config = config.with_rules(*capped)
        config = dataclasses.replace(
            config,
            eps_low=settings.eps_low,
            eps_high=settings.eps_high,
            loss_agg_mode=settings.loss_agg_mode or config.loss_agg_mode,
            kl_loss_coef=settings.kl_loss_coef,
            count_empty_rows=settings.count_empty_rows,
        )
    for path in rules:
        found = load_object(path, "rule")
        rule = found() if isinstance(found, type) else found
        if not isinstance(rule, Rule):
            raise ValueError(f"rule {path} is {found!r}: name a class of rules, or an object of one")
        config = config.with_rules(rule)
    return config


def inspect_batch(config: LossConfig, inputs: LossInputs, sat: Sat | None = None) -> Inspection:
    """Loss, gradient, Table 10's diagnostics and where the batch stands in SAT's window; ``sat`` is what a loss without
    it is compared to."""
    value, metrics, gradient, tokens = _evaluate(config, inputs)
    sat = config.get(Sat) or sat or Sat()
    # The quantile that SAT ranks |d| by, on the method's own unit and denominator, whether SAT is on or not.
    ranked = losses.make_loss(dataclasses.replace(config, rules=(Ppo(), sat), kl_loss_coef=0.0)).summarize(inputs)
    summary = {
        "method": config.label,
        "rules": [rule.name for rule in config.rules],
        "unit": config.unit,
        "denominator": config.denominator,
        "tokens": int(metrics["train/tokens"]),
        "sequences": int(ranked.sequences),
        "loss": value,
        "d_bar": metrics["train/d_bar"],
        "q": float(ranked.rules[sat.name].q),
        "gate_rate": metrics.get("sat/gate_rate", 0.0),
        "eps_low_mean": metrics.get("sat/eps_low_mean", config.eps_low),
        "eps_high_mean": metrics.get("sat/eps_high_mean", config.eps_high),
        "c_low_min": metrics.get("sat/c_low_min", 1.0),
        "c_high_min": metrics.get("sat/c_high_min", 1.0),
        "c_low_mean": metrics.get("sat/c_low_mean", 1.0),
        "c_high_mean": metrics.get("sat/c_high_mean", 1.0),
        "clip_fraction": metrics["train/clip_fraction"],
        "intercept_rate": metrics.get("sat/intercept_rate", 0.0),
        "keep_fraction": metrics.get("train/keep_fraction", 1.0),
        "weight_mean": metrics.get("train/weight_mean", 1.0),
        "kl_train_rollout": metrics["train/kl_train_rollout"],
        "kl_loss": metrics["train/kl_loss"],
        "ratio_max": metrics["train/ratio_max"],
        "grad_l1": float(np.abs(gradient).sum()),
    }
    twin = _sat_twin(config, sat)
    if twin is not None:
        here, there = (metrics, gradient, tokens), _evaluate(twin, inputs)[1:]
        without, with_sat = (there, here) if config.get(Sat) else (here, there)
        (_, base_gradient, _), (sat_metrics, sat_gradient, sat_tokens) = without, with_sat
        mass = float(np.abs(base_gradient).sum())
        lost = float(np.maximum(np.abs(base_gradient) - np.abs(sat_gradient), 0).sum())
        q = sat_metrics["sat/q"]
        stands = window(q, config.eps_low, config.eps_high, sat.exponent, sat.q_floor, sat.q_cap)
        summary["sat"] = {
            "newly_intercepted_tokens": int(sat_tokens["intercepted"].sum()),
            "newly_intercepted_gradient_share": lost / mass if mass > 0 else 0.0,
            "window": stands.text,
        }
    return Inspection(summary, gradient, tokens)


def _evaluate(
    config: LossConfig, inputs: LossInputs
) -> tuple[float, dict[str, float], np.ndarray, dict[str, np.ndarray]]:
    """Loss, metrics, gradient [B, T] and the arrays over active tokens."""
    loss_fn = losses.make_loss(config)

    @jax.jit
    def compute(inputs: LossInputs) -> Any:
        (value, metrics), gradient = jax.value_and_grad(
            lambda log_probs: loss_fn(dataclasses.replace(inputs, log_probs=log_probs)), has_aux=True
        )(inputs.log_probs)
        prepared = prepare(config, inputs)
        terms = token_terms(config, prepared.token, rule_summaries(config, prepared, loss_fn.summarize(inputs)))
        none = jnp.zeros((1, 1), bool)
        per_token = {
            "ratio": prepared.token.frozen_ratio,
            "log_ratio": prepared.token.log_ratio,
            "advantage": prepared.token.advantage,
            "cut": terms.cut,
            "gate": none if terms.gate is None else terms.gate,
            "intercepted": none if terms.intercepted is None else terms.intercepted,
            "dropped": none if terms.keep is None else ~terms.keep,
        }
        per_token = {k: jnp.broadcast_to(x, inputs.log_probs.shape) for k, x in per_token.items()}
        return value, metrics, gradient, per_token

    value, metrics, gradient, per_token = jax.device_get(compute(inputs))
    mask = np.asarray(inputs.loss_mask) != 0
    numbers = {k: float(v) for k, v in metrics.items()}
    return float(value), numbers, np.asarray(gradient), {k: np.asarray(v)[mask] for k, v in per_token.items()}


def _sat_twin(config: LossConfig, sat: Sat) -> LossConfig | None:
    """The same loss with SAT switched on or off; None where SAT has no interval to contract."""
    if config.get(Sat) is not None:
        return config.without(Sat)
    soft = config.get(losses.Unclipped) and not config.get(losses.Spo)
    return config.with_rules(sat) if config.surrogate.has_interval and not soft else None


def _translate(found: Mapping[str, np.ndarray], path: Path) -> tuple[dict[str, Any], list[str]]:
    arrays: dict[str, Any] = {}
    notes: list[str] = []
    for name, aliases in ALIASES.items():
        for candidate in (name, *aliases):
            if candidate in found:
                arrays[name] = found[candidate]
                if candidate != name:
                    notes.append(f"{name} = {candidate}")
                break
    if "behavior_log_probs" not in arrays and "rollout_policy_log_probs" in arrays:
        arrays["behavior_log_probs"] = arrays["rollout_policy_log_probs"]
        notes.append("behavior_log_probs is missing: the recomputed (old) log-probs stand in for the engine's own")
    for name in REQUIRED:
        if name not in arrays:
            raise ValueError(
                f"{path} has no array '{name}'{nearest(name, found)}; there are: {', '.join(sorted(found)) or 'none'}; "
                f"also recognised: {', '.join(ALIASES[name]) or 'no other name'}"
            )
    return arrays, notes


def table_rows(inspections: Sequence[Inspection]) -> list[tuple[str, list[str]]]:
    """(label, one cell an inspection) of the readable table."""
    labels = {
        "tokens": "active tokens",
        "loss": "loss",
        "grad_l1": "gradient, L1",
        "d_bar": "d_bar, mean |log ratio|",
        "q": "q, alpha-quantile of |d|",
        "gate_rate": "gate rate",
        "eps_low_mean": "mean lower radius",
        "eps_high_mean": "mean upper radius",
        "c_low_min": "min c_-",
        "c_high_min": "min c_+",
        "clip_fraction": "clip fraction",
        "intercept_rate": "intercept rate",
        "keep_fraction": "kept by masks",
        "weight_mean": "mean weight",
        "ratio_max": "largest ratio",
        "kl_train_rollout": "KL(engine || learner), k3",
    }
    rows = [(text, [_cell(i.summary[key]) for i in inspections]) for key, text in labels.items()]
    sat = [i.summary.get("sat") for i in inspections]
    rows.append(("SAT cuts, or would cut: tokens", [_cell(s and s["newly_intercepted_tokens"]) for s in sat]))
    shares = [s and f"{s['newly_intercepted_gradient_share']:.2%}" for s in sat]
    rows.append(("SAT cuts, or would cut: gradient", [_cell(share) for share in shares]))
    return rows


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
