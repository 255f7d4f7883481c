"""What every rule and every loss must do, whatever it is made of: sat_jax's own pass it, and so must a user's.

    check_rule(Huber())

raises an ``AssertionError`` that says which property fails, and where. It needs no test framework.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax.dataclass_json import from_dict, to_dict
from sat_jax.losses import (
    METRIC_REDUCTIONS,
    LossConfig,
    LossInputs,
    Mask,
    Penalty,
    Ppo,
    Radius,
    Rule,
    Surrogate,
    Unclipped,
    Weight,
    make_loss,
)
from sat_jax.losses.tokens import prepare, rule_summaries, token_terms

B, T = 4, 10
_KINDS = (Surrogate, Radius, Mask, Weight, Penalty)


def check_rule(rule: Rule, loss: LossConfig | None = None) -> None:
    """The conformance suite for one rule: ``AssertionError`` says what fails.

    A rule must say where it comes from and what it does, be hashable and survive JSON, keep its settings in annotated
    fields; its loss must pass ``check_loss``. ``loss`` is one that it stands in; by default the plainest one: itself
    where it is a surrogate, else on PPO (a penalty: on the unclipped surrogate).
    """
    _must(
        isinstance(rule, _KINDS), rule, "is none of the five kinds: subclass Surrogate, Radius, Mask, Weight, Penalty"
    )
    for attribute in ("source", "summary"):
        _must(bool(getattr(rule, attribute)), rule, f"has no {attribute}: give the class one line, {attribute} = '...'")
    known = {field.name for field in dataclasses.fields(LossInputs)}
    _must(set(rule.needs) <= known, rule, f"needs {set(rule.needs) - known}, which LossInputs does not have")
    config = around(rule) if loss is None else loss
    _must(rule in config.rules, rule, "does not stand in the loss that it is to be checked in")
    check_loss(config)
    if rule.elementwise():
        _is_elementwise(rule, config)


def around(rule: Rule) -> LossConfig:
    """The plainest loss that has the rule in it."""
    base = () if isinstance(rule, Surrogate) else (Unclipped() if isinstance(rule, Penalty) else Ppo(),)
    denominator: Any = "proximal" if "proximal_log_probs" in rule.needs else "rollout"
    return LossConfig(name=f"rule {rule.name}", rules=(*base, rule), denominator=denominator)


def check_loss(config: LossConfig) -> None:
    """The conformance suite for a loss: the properties in ``PROPERTIES``, one after the other. ``AssertionError`` says
    which one fails, and where."""
    for check in PROPERTIES:
        try:
            check(config)
        except AssertionError as error:
            said = (check.__doc__ or "").strip().rstrip(".")
            raise AssertionError(f"loss {config.label}: {said} - it does not: {error}") from error


def sample_inputs(rows: int = B, tokens: int = T, seed: int = 0) -> LossInputs:
    """Ragged rows with holes in the mask, every optional array there; one response almost on-policy."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, tokens)) < 0.75) & (
        np.arange(tokens) < rng.integers(min(3, tokens), tokens + 1, (rows, 1))
    )
    base = -rng.gamma(0.7, 1.0, (rows, tokens)) - 0.6

    def near(scale: float) -> jax.Array:
        return jnp.asarray(np.minimum(base + scale * rng.normal(size=(rows, tokens)), 0), jnp.float32)

    log_probs = near(0.2)
    # One response is almost on-policy: the narrowest band must keep something.
    behavior = near(0.2).at[0].set(log_probs[0] - jnp.asarray(1e-3 * rng.random(tokens), jnp.float32))
    return LossInputs(
        log_probs=log_probs,
        behavior_log_probs=behavior,
        advantages=jnp.asarray(rng.normal(size=(rows, tokens)), jnp.float32),
        loss_mask=jnp.asarray(mask),
        reference_log_probs=near(0.3),
        rollout_policy_log_probs=near(0.1),
        proximal_log_probs=near(0.1),
        entropy=jnp.asarray(rng.random((rows, tokens)), jnp.float32),
    )


@functools.cache
def compiled(config: LossConfig) -> Any:
    """``inputs -> ((loss, metrics), gradient)``, jitted once for each loss."""
    # Most of a small program's time is its compilation: skip the passes that only pay on large arrays.
    return jax.jit(_loss_and_gradient(config), compiler_options={"xla_llvm_disable_expensive_passes": True})


def _loss_and_gradient(config: LossConfig) -> Callable[[LossInputs], Any]:
    loss_fn = make_loss(config)

    def run(inputs: LossInputs) -> Any:
        def loss(log_probs: jax.Array) -> Any:
            return loss_fn(_replace(inputs, log_probs=log_probs))

        return jax.value_and_grad(loss, has_aux=True)(inputs.log_probs)

    return run


# ------------------------------------------------------------------ the properties


def _scalar_loss(config: LossConfig) -> None:
    """Gives a float32 scalar, a gradient of the inputs' shape that is not all zero, and finite known metrics."""
    inputs = sample_inputs()
    (loss, metrics), gradient = compiled(config)(inputs)
    _expect((loss.shape, loss.dtype) == ((), jnp.float32), f"loss is {loss.dtype}{loss.shape}")
    _expect(gradient.shape == inputs.log_probs.shape, f"gradient has shape {gradient.shape}")
    _expect(gradient.dtype == jnp.float32, f"gradient is {gradient.dtype}")
    _expect(np.abs(gradient).sum() > 0, "no token has a gradient")
    unknown = metrics.keys() - METRIC_REDUCTIONS.keys()
    _expect(not unknown, f"metrics {sorted(unknown)} are not in the register")
    odd = [name for name, x in metrics.items() if x.shape != () or not np.isfinite(x)]
    _expect(not odd, f"{odd} are no finite scalars")
    loss_fn = make_loss(config)
    rows = jax.eval_shape(lambda x: loss_fn.rows(x, loss_fn.summarize(x)), inputs)
    shapes = {x.shape for x in jax.tree.leaves(rows)}
    _expect(shapes == {(B,)}, f"shares of rows have shapes {shapes}")


def _jit_and_vmap(config: LossConfig) -> None:
    """Gives the same under jit and vmap as eagerly."""
    loss_fn = make_loss(config)
    two = [sample_inputs(seed=s) for s in (1, 2)]
    eager = [loss_fn(inputs) for inputs in two]
    _close(eager[0], compiled(config)(two[0])[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *two)
    _close(jax.vmap(loss_fn)(stacked), jax.tree.map(lambda *x: jnp.stack(x), *eager))


def _masked_positions(config: LossConfig) -> None:
    """Ignores whatever stands under a zero mask, NaN and infinities included, to the bit."""
    inputs = sample_inputs()
    spoiled = {}
    for i, field in enumerate(dataclasses.fields(inputs)):
        x = getattr(inputs, field.name)
        if x is not None and x.dtype == jnp.float32:
            spoiled[field.name] = jnp.where(inputs.loss_mask, x, (jnp.nan, jnp.inf, -jnp.inf)[i % 3])
    want, got = compiled(config)(inputs), compiled(config)(_replace(inputs, **spoiled))
    jax.tree.map(np.testing.assert_array_equal, want, got)
    _expect((np.asarray(got[1])[~np.asarray(inputs.loss_mask)] == 0).all(), "a masked token has a gradient")


def _order_of_rows(config: LossConfig) -> None:
    """Does not depend on the order of rows."""
    inputs = sample_inputs()
    order = np.array([2, 0, 3, 1])
    (loss, metrics), gradient = compiled(config)(inputs)
    (loss2, metrics2), gradient2 = compiled(config)(jax.tree.map(lambda x: x[order], inputs))
    _close((loss, metrics, gradient[order]), (loss2, metrics2, gradient2))


def _padding(config: LossConfig) -> None:
    """Does not depend on padding, of rows or of tokens."""
    if config.loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
        return  # divides by the padded length, as verl does
    inputs = sample_inputs()
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 2), (3, 4)), constant_values=x.dtype.type(0)), inputs)
    want = compiled(config)(inputs)[0]
    if not config.count_empty_rows:
        _close(make_loss(config)(padded), want)


def _packed(config: LossConfig) -> None:
    """Gives the same for packed rows as for one response a row."""
    inputs = sample_inputs()
    (loss, metrics), gradient = compiled(config)(inputs)
    ids = jnp.broadcast_to(jnp.asarray([[7], [3]]), (2, T))
    packed = jax.tree.map(lambda x: x.reshape(2, 2 * T), inputs)
    packed = packed.replace(segment_ids=jnp.concatenate([ids, ids + 1], axis=1))
    # Operation by operation: another program for this shape would cost as much as all other properties.
    (loss2, metrics2), gradient2 = _loss_and_gradient(config)(packed)
    _close((loss, metrics, gradient), (loss2, metrics2, gradient2.reshape(B, T)), rtol=1e-5)


def _one_compilation(config: LossConfig) -> None:
    """Compiles once for a shape, and is equal and hashable as a value."""
    traced = compiled(config)
    traced(sample_inputs(seed=1))
    size = traced._cache_size()
    traced(sample_inputs(seed=2))
    _expect(traced._cache_size() == size, "a second call compiled again")
    _expect(hash(make_loss(config)) == hash(make_loss(dataclasses.replace(config))), "equal losses hash differently")


def _json(config: LossConfig) -> None:
    """Survives JSON."""
    stored = json.loads(json.dumps(to_dict(config)))
    _expect(from_dict(LossConfig, stored) == config, f"came back otherwise from {stored['rules']}")


def _micro_batches(config: LossConfig) -> None:
    """Decides alike for the whole batch and for its micro-batches."""
    inputs = sample_inputs()
    loss_fn = make_loss(config)
    summary = loss_fn.summarize(inputs)
    whole = loss_fn.rows(inputs, summary)
    parts = [loss_fn.rows(jax.tree.map(lambda x, i=i: x[i : i + 1], inputs), summary) for i in range(B)]
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    if any(rule.summary_scope()[0] != "batch" for rule in config.rules):
        return  # it is asked to look at the micro-batch
    _close(rows, whole)
    for name in ("train/clip_fraction", "sat/gate_rate", "train/keep_fraction"):
        if name in whole.diagnostics.sums:
            np.testing.assert_array_equal(rows.diagnostics.sums[name], whole.diagnostics.sums[name])


def _extremes(config: LossConfig) -> None:
    """Stays finite for log-ratios of 200 nats, and gives 0 for an empty batch."""
    inputs = sample_inputs()
    d = jnp.asarray(np.random.default_rng(0).choice([-200.0, -30, 0, 30, 200], (B, T)), jnp.float32)
    (loss, _), gradient = compiled(config)(_replace(inputs, log_probs=inputs.behavior_log_probs + d))
    _expect(np.isfinite(loss), f"loss is {loss}")
    _expect(np.isfinite(gradient).all(), "a gradient is not finite")
    empty = _replace(inputs, loss_mask=jnp.zeros_like(inputs.loss_mask))
    (loss, metrics), gradient = compiled(config)(empty)
    _expect(loss == 0, f"an empty batch has loss {loss}")
    _expect((gradient == 0).all(), "an empty batch has a gradient")
    _expect(all(np.isfinite(x) for x in metrics.values()), "an empty batch has metrics that are not finite")


def _needs(config: LossConfig) -> None:
    """Names an array that it needs and that is missing, while tracing."""
    for array in config.needs():
        try:
            jax.eval_shape(make_loss(config), _replace(sample_inputs(), **{array: None}))
        except ValueError as error:
            _expect(array in str(error), f"the error without {array} does not name it: {error}")
        else:
            _expect(False, f"{array} may be missing although it is needed")


PROPERTIES: tuple[Callable[[LossConfig], None], ...] = (
    _scalar_loss,
    _jit_and_vmap,
    _masked_positions,
    _order_of_rows,
    _padding,
    _packed,
    _one_compilation,
    _json,
    _micro_batches,
    _extremes,
    _needs,
)
"""What ``check_loss`` checks, in this order."""


def _is_elementwise(rule: Rule, config: LossConfig) -> None:
    """One token's share may not depend on another's, given the batch's summary."""
    if config.unit != "token":
        return
    inputs, loss_fn = sample_inputs(), make_loss(config)
    summary = loss_fn.summarize(inputs)

    def terms(inputs: LossInputs) -> np.ndarray:
        prepared = prepare(config, inputs)
        loss = token_terms(config, prepared.token, rule_summaries(config, prepared, summary)).loss
        return np.broadcast_to(np.asarray(loss), (B, T))

    mask = np.asarray(inputs.loss_mask)
    last = mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    other = _replace(inputs, log_probs=inputs.log_probs - 0.3 * last)
    unmoved = mask & ~last
    _must(
        np.allclose(terms(inputs)[unmoved], terms(other)[unmoved], rtol=2e-6, atol=1e-7),
        rule,
        "looks at other tokens of the response: let elementwise() return False, so that it stays out of the kernel",
    )


def _replace(inputs: LossInputs, **changes: Any) -> LossInputs:
    return dataclasses.replace(inputs, **changes)


def _close(a: Any, b: Any, rtol: float = 2e-6, atol: float = 1e-7) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def _expect(holds: Any, otherwise: str) -> None:
    """``assert``, also under ``python -O``."""
    if not holds:
        raise AssertionError(otherwise)


def _must(holds: bool, rule: Rule, what: str) -> None:
    _expect(holds, f"rule {type(rule).__name__} {what}")
