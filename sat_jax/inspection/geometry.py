"""The clip geometry of a loss, computed: ``vmap(grad)`` of its own code over a grid of log-ratios. No curve is drawn by
hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sat_jax.inspection.batch import Inspection
from sat_jax.losses import LossConfig, Sat, Token
from sat_jax.losses.masked import one_token
from sat_jax.losses.ratios import safe_exp
from sat_jax.losses.tokens import token_terms

INK, MUTED, POSITIVE, NEGATIVE, ACCENT = "#1f2a37", "#5c6773", "#0072b2", "#d55e00", "#009e73"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A loss along the log-ratio axis, for one advantage; arrays are [N].

    ``objective`` is what is maximised, ``gradient`` its derivative in log pi: what reaches the parameters.
    """

    log_ratio: np.ndarray
    objective: np.ndarray
    gradient: np.ndarray


def token_at(d: jax.Array, advantage: jax.Array, log_mu: jax.Array, before: jax.Array | None = None) -> Token:
    """The rules' record of lone tokens, arrays of shape [1]; ``d`` is the surrogate's log-ratio, differentiable.

    ``before = log pi_l - log mu = log pi_prox - log mu`` separates the denominator from the engine; None: 0, where the
    denominator is the engine itself.
    """
    before = jnp.zeros_like(d) if before is None else before
    frozen = jax.lax.stop_gradient(d)
    ratio = safe_exp(d)
    return Token(
        ratio=ratio,
        frozen_ratio=jax.lax.stop_gradient(ratio),
        log_ratio=frozen,
        advantage=advantage,
        log_prob=log_mu + before + d,
        frozen_log_prob=log_mu + before + frozen,
        behavior_log_prob=log_mu,
        implementation=before,
        proximal=before,
        sequences=one_token(),
    )


def curve(config: LossConfig, advantage: float, mu: float, q: float, span: float = 0.7, points: int = 1401) -> Curve:
    """Objective and gradient of a token over ``|log ratio| <= span``, the batch's quantile held at ``q``.

    The axis is the ratio that the loss is about: ``pi / mu``, or, where the surrogate divides by a recomputation and a
    weight corrects for the engine (TIS, IcePop, decoupled PPO), that correction ``pi_l / mu`` at ``pi = pi_l``.

    Raises:
        ValueError: mu outside (0, 1], q negative.
    """
    if not 0 < mu <= 1:
        raise ValueError(f"mu = {mu} is no probability: give the behaviour probability of the token, in (0, 1]")
    if not q >= 0:
        raise ValueError(f"q = {q} must not be negative: it is a quantile of |log ratio|; use 0.05")
    corrects = config.denominator != "rollout"

    def objective(x: jax.Array, at: jax.Array) -> jax.Array:
        # Records are arrays with a token axis; a grid point is a sequence of one. The gradient is taken in x at 0.
        frozen = jax.lax.stop_gradient(at)[None]
        d, before = (x[None], frozen) if corrects else (x[None] + frozen, None)
        token = token_at(d, jnp.full((1,), advantage, at.dtype), jnp.full((1,), np.log(mu), at.dtype), before)
        summaries = {rule.name: rule.summarize(token, lambda *_: jnp.full((), q, at.dtype)) for rule in config.rules}
        return -token_terms(config, token, summaries).loss[0]

    d = jnp.linspace(-span, span, points, dtype=jnp.float32)
    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(objective)))(jnp.zeros_like(d), d)
    return Curve(np.asarray(d), np.asarray(value), np.asarray(gradient))


def geometry_figure(config: LossConfig, mu: float = 0.2, q: float = 0.05) -> Figure:
    """Gradient and objective over the ratio for A = +1 and A = -1, and the gradient over (ratio, mu)."""
    figure = Figure(figsize=(10.5, 3.4), layout="constrained", facecolor="white")
    gradient_axes, objective_axes, plane = figure.subplots(1, 3)
    span = 0.7 if config.denominator == "rollout" else 2.0  # weights have wider bounds than clips
    for advantage, colour in ((1.0, POSITIVE), (-1.0, NEGATIVE)):
        c = curve(config, advantage, mu, q, span)
        ratio = np.exp(c.log_ratio)
        gradient_axes.plot(ratio, c.gradient, color=colour, label=f"A = {advantage:+.0f}", lw=1.6)
        objective_axes.plot(ratio, c.objective - c.objective[len(ratio) // 2], color=colour, lw=1.6)
    _frame(gradient_axes, config, "gradient, d objective / d log π")
    _frame(objective_axes, config, "objective − its value at r = 1")
    gradient_axes.legend(frameon=False, fontsize=8)

    mus = np.geomspace(1e-3, 1.0, 61)
    rows = [curve(config, 1.0, float(m), q, span, points=301) for m in mus]
    strength = np.stack([row.gradient for row in rows])
    limit = float(np.abs(strength).max()) or 1.0
    ratio = np.exp(rows[0].log_ratio)
    mesh = plane.pcolormesh(
        ratio, mus, strength, cmap="RdBu", vmin=-limit, vmax=limit, shading="nearest", rasterized=True
    )
    plane.set(yscale="log", xlabel=_axis(config), ylabel="μ, behaviour probability")
    plane.set_title("gradient for A = +1", fontsize=9, loc="left", color=INK)
    plane.plot(ratio, np.minimum(1.0, 1.0 / ratio), color=MUTED, lw=0.8, ls=":", label="π = 1")
    plane.legend(frameon=False, fontsize=7, loc="lower right")
    plane.set_ylim(mus[0], 1.0)
    figure.colorbar(mesh, ax=plane)
    rules = " + ".join(rule.name for rule in config.rules)
    shown = f", q = {q:g}" if config.get(Sat) is not None else ""
    figure.suptitle(f"{config.label}: {rules}, unit {config.unit}, μ = {mu:g}{shown}", fontsize=10, color=INK)
    return figure


def batch_figure(inspection: Inspection, config: LossConfig) -> Figure:
    """Histogram of d with q and the radii, and the (ratio, advantage) plane with the batch's tokens on it."""
    tokens, q = inspection.tokens, inspection.summary["q"]
    figure = Figure(figsize=(9.5, 3.8), layout="constrained", facecolor="white")
    histogram, plane = figure.subplots(1, 2)
    d = tokens["log_ratio"][np.isfinite(tokens["log_ratio"])]
    span = max(1.3 * np.log1p(config.eps_high), float(np.quantile(np.abs(d), 0.999)) if d.size else 0.0)
    histogram.hist(np.clip(d, -span, span), bins=121, range=(-span, span), color=POSITIVE, alpha=0.75)
    histogram.set(yscale="log", xlabel="d = log ratio", ylabel="active tokens", xlim=(-span, span))
    lines = [(np.log1p(config.eps_high), INK, "-", "nominal radii")]
    if config.eps_low < 1:
        lines.append((np.log1p(-config.eps_low), INK, "-", ""))
    lines += [(q, NEGATIVE, "--", f"±q = {q:.3g}"), (-q, NEGATIVE, "--", "")]
    for x, colour, style, label in lines:
        histogram.axvline(float(x), color=colour, ls=style, lw=1.1, label=label or None)
    histogram.legend(frameon=False, fontsize=8)
    histogram.set_title("mismatch of active tokens", fontsize=9, loc="left", color=INK)

    cut, new = tokens["cut"], tokens["intercepted"]
    dropped = tokens["dropped"] & ~cut
    for chosen, colour, size, label in (
        (~cut & ~dropped, MUTED, 4, "keeps its gradient"),
        (dropped, ACCENT, 6, "dropped by a mask"),
        (cut & ~new, POSITIVE, 6, "cut by the nominal interval"),
        (new, NEGATIVE, 9, "newly intercepted by SAT"),
    ):
        if chosen.any():
            few = np.flatnonzero(chosen)[:20_000]
            x = np.clip(tokens["ratio"][few], np.exp(-span), np.exp(span))
            text = f"{label} ({int(chosen.sum())})"
            plane.scatter(x, tokens["advantage"][few], s=size, color=colour, lw=0, alpha=0.7, label=text)
    for x in (1 - config.eps_low, 1 + config.eps_high):
        plane.axvline(x, color=INK, lw=1.0)
    plane.axhline(0, color=MUTED, lw=0.6)
    plane.set(xlabel="ratio r", ylabel="advantage A")
    plane.legend(frameon=False, fontsize=7, loc="best")
    plane.set_title("where the tokens stand", fontsize=9, loc="left", color=INK)
    figure.suptitle(f"{config.label}: {inspection.summary.get('sat', {}).get('window', '')}", fontsize=9, color=INK)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix picks the format, and must be one that matplotlib knows."""
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise ValueError(f"{path} ends in '{path.suffix}': figures are written as {', '.join(sorted(known))}; use .png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _axis(config: LossConfig) -> str:
    return {
        "rollout": "ratio r = π / μ",
        "rollout_policy": "k = π_l / μ, at π = π_l",
        "proximal": "π_prox / μ, at π = π_prox",
    }[config.denominator]


def _frame(axes: Axes, config: LossConfig, title: str) -> None:
    for x in (1 - config.eps_low, 1 + config.eps_high):
        axes.axvline(x, color=MUTED, lw=0.8, ls="--")
    axes.axhline(0, color=MUTED, lw=0.6)
    axes.axvline(1, color=MUTED, lw=0.4)
    axes.set_xlabel(_axis(config))
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
