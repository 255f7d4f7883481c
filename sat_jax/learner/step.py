"""The last pure layer: score a batch, take a supervised step, take a reinforcement step.

Nothing here owns a thread, a clock or a file. A ``LearnerSpec`` is static; jit ``partial(train_step, spec)``.

With one micro-batch the batch summary (the quantile, the denominators) is taken from the step's own forward pass. With
more, a scoring pass without gradient comes first; the summary and every gate are decided on its log-probs, so that all
micro-batches see the same trust region. Their rows are put back into order before anything is summed and divided, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sat_jax import losses, model
from sat_jax.losses import LossInputs, LossRows, LossSummary
from sat_jax.losses.masked import masked_mean
from sat_jax.model import ForwardOptions, ModelConfig, Placement, RouterOutput
from sat_jax.types import NATIVE_ROUTE, Batch, TrainState

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class LearnerSpec:
    """Everything static about a learner step.

    Attributes:
        optimizer: optax transformation applied to the raw gradient.
        schedule: learning rate by step; only reported, the optimizer has its own reference to it.
        temperature: sampling temperature; the learner's log-probs are taken at the same one.
        micro_batches: slices of a batch; must divide its rows.
        routing_replay: route by ``batch.routed_experts`` (R3, eq. 40); if False they only feed
            ``moe/router_agreement``.
        router_aux_loss_coef, router_z_loss_coef: weights of the load-balancing loss and of the router z-loss.
        packed: rows hold several sequences, told apart by ``batch.segment_ids``; if False a row is one sequence.
        head_chunk: most token positions whose logits are in memory at once.
        forward: compute type, remat, placement.
    """

    model: ModelConfig
    loss: losses.Loss
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    temperature: float = 1.0
    micro_batches: int = 1
    routing_replay: bool = True
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    packed: bool = False
    head_chunk: int = 1024
    forward: ForwardOptions = field(default_factory=ForwardOptions)


class Scores(NamedTuple):
    """Of a pass without gradient: [B, T] float32, aligned with ``batch.tokens``, 0 outside its ``loss_mask``."""

    log_probs: jax.Array
    entropy: jax.Array | None


class _Routing(NamedTuple):
    """Router statistics of a batch or a part of it, as sums that add up over parts."""

    load: jax.Array  # [L, E]
    tokens: jax.Array
    recorded: jax.Array  # routed (token, layer) sets with a record ...
    agreed: jax.Array  # ... and those that the learner would have chosen itself
    balance: jax.Array  # load-balancing loss: this part's share of the whole batch's
    z: jax.Array  # router z-loss, likewise


class _Pass(NamedTuple):
    log_probs: jax.Array
    entropy: jax.Array | None
    outside: jax.Array | None  # probability outside the replayed support; None where there is none
    routing: _Routing | None  # None for a dense policy


def adam(
    lr: optax.ScalarOrSchedule, b1: float, b2: float, eps: float, weight_decay: float = 0.0, max_grad_norm: float = 0.0
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay on every parameter, after clipping the global gradient norm (0: no clipping)."""
    step = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), step) if max_grad_norm > 0 else step


def learning_rate(lr: float, warmup_steps: int = 0, decay_steps: int = 0) -> optax.Schedule:
    """Constant ``lr``, or 0 -> lr over ``warmup_steps`` and lr -> 0 over the ``decay_steps`` after them."""
    after = optax.linear_schedule(lr, 0.0, decay_steps) if decay_steps else optax.constant_schedule(lr)
    if not warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, lr, warmup_steps), after], [warmup_steps])


def supervised_spec(spec: LearnerSpec, lr: float, warmup_steps: int) -> LearnerSpec:
    """``spec`` for ``supervised_step``: Adam with its usual betas, no replay, one micro-batch."""
    schedule = learning_rate(lr, warmup_steps)
    optimizer = adam(schedule, 0.9, 0.98, 1e-8)
    return replace(spec, optimizer=optimizer, schedule=schedule, routing_replay=False, micro_batches=1)


def init_state(spec: LearnerSpec, params: Any) -> TrainState:
    """Step 0 from parameters: a fresh optimizer state."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=spec.optimizer.init(params))


def state_shardings(spec: LearnerSpec) -> Any:
    """A ``TrainState`` of shardings on the mesh of ``spec.forward.placement``.

    Moments lie like the parameters they belong to; counters are replicated. Raises ``ValueError`` without a placement,
    and for a mesh that does not divide the model.
    """
    placement = _placement(spec)
    params = model.param_shardings(spec.model, placement.mesh)
    replicated = placement.sharding(())
    state: Any = jax.eval_shape(partial(init_state, spec), model.abstract_params(spec.model))
    opt_state = optax.tree_map_params(
        spec.optimizer, lambda _, sharding: sharding, state.opt_state, params, transform_non_params=lambda _: replicated
    )
    return state.replace(step=replicated, params=params, opt_state=opt_state)


def batch_shardings(spec: LearnerSpec, batch: Batch) -> Batch:
    """The rows of ``batch`` (arrays or shapes) dealt over the mesh of ``spec.forward.placement``."""
    placement = _placement(spec)
    return jax.tree.map(lambda x: placement.sharding(("batch", *(None,) * (len(x.shape) - 1))), batch)


def _placement(spec: LearnerSpec) -> Placement:
    if spec.forward.placement is None:
        raise ValueError("this LearnerSpec has no mesh: set forward=ForwardOptions(placement=Placement(mesh))")
    return spec.forward.placement


def score(spec: LearnerSpec, params: Any, batch: Batch) -> Scores:
    """Log-probs and entropies of the tokens under ``batch.loss_mask``, without gradient, micro-batch by micro-batch."""
    scores = _score(spec, params, batch)
    return Scores(scores.log_probs, scores.entropy)


def train_step(spec: LearnerSpec, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One optimizer update on one batch: the next state, and scalar metrics.

    The update is withheld (parameters and optimizer state unchanged, the step still counted, ``train/update_skipped``
    1) when no token is active or the gradient is not finite. Rows must be a multiple of ``spec.micro_batches``.
    """
    chex.assert_rank([batch.tokens, batch.loss_mask, batch.behavior_log_probs], 2)
    chex.assert_equal_shape([batch.tokens, batch.segment_ids, batch.positions, batch.loss_mask, batch.policy_versions])

    whole = _whole_batch if spec.micro_batches == 1 else _accumulate
    gradient, rows, summary, outside, routing = whole(spec, state.params, batch)
    metrics = dict(spec.loss.metrics(rows, summary))
    metrics["train/loss"] = metrics["train/loss"] + _router_penalty(spec, routing)
    metrics |= _staleness(state.step, batch) | _routing_metrics(routing)
    if outside is not None:
        metrics["train/outside_support"] = masked_mean(outside, batch.loss_mask)
    metrics["train/grad_norm"] = grad_norm = optax.tree.norm(gradient)
    metrics["train/lr"] = jnp.asarray(spec.schedule(state.step), jnp.float32)
    metrics["train/valid_tokens"] = valid = jnp.sum(batch.loss_mask)
    take = (valid > 0) & jnp.isfinite(grad_norm)
    metrics["train/update_skipped"] = 1.0 - take.astype(jnp.float32)
    return _apply(spec, state, gradient, take), metrics


def supervised_step(spec: LearnerSpec, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update of maximum likelihood: minimise the mean of -log p over the tokens under ``batch.loss_mask``."""

    def loss_fn(params: Any) -> jax.Array:
        out = _forward(spec, params, batch, temperature=1.0)
        return -masked_mean(out.log_probs, batch.loss_mask) + _router_penalty(spec, out.routing)

    loss, gradient = jax.value_and_grad(loss_fn)(state.params)
    grad_norm = optax.tree.norm(gradient)
    take = jnp.any(batch.loss_mask) & jnp.isfinite(grad_norm)
    metrics = {"sft/loss": loss, "sft/grad_norm": grad_norm, "sft/lr": jnp.asarray(spec.schedule(state.step))}
    metrics["sft/update_skipped"] = 1.0 - take.astype(jnp.float32)
    return _apply(spec, state, gradient, take), metrics


def _forward(
    spec: LearnerSpec, params: Any, batch: Batch, temperature: float | None = None, whole: _Routing | None = None
) -> _Pass:
    """One pass over a batch, or over a part of the batch whose router statistics are ``whole``.

    Without a ``temperature`` it is over what the tokens were sampled from: the spec's temperature and the recorded
    supports (50), so that every ratio and KL compares distributions over the same tokens.
    """
    out = model.forward(
        params,
        spec.model,
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        routed_experts=batch.routed_experts if spec.routing_replay else None,
        options=spec.forward,
    )
    head = model.token_log_probs(
        params,
        spec.model,
        out.hidden,
        batch.tokens,
        temperature=spec.temperature if temperature is None else temperature,
        chunk_size=spec.head_chunk,
        placement=spec.forward.placement,
        active=batch.loss_mask,  # losses, metrics and readable samples look at nothing else
        support=batch.support if temperature is None else None,
    )
    routing = None if out.router is None else _routing(spec, out.router, batch, whole)
    return _Pass(head.log_probs, head.entropy, head.outside, routing)


def _routing(spec: LearnerSpec, router: RouterOutput, batch: Batch, whole: _Routing | None) -> _Routing:
    recorded, agreed = jnp.sum(router.recorded), jnp.sum(router.agreed)
    if batch.routed_experts is not None and not spec.routing_replay:
        # The forward pass routed natively: compare its expert sets with the record, order aside.
        known = jnp.all(batch.routed_experts != NATIVE_ROUTE, axis=-1)
        same = jnp.all(jnp.sort(batch.routed_experts, axis=-1) == jnp.sort(router.indices, axis=-1), axis=-1)
        recorded, agreed = jnp.sum(known, dtype=jnp.float32), jnp.sum(known & same, dtype=jnp.float32)
    return _Routing(
        load=jax.lax.stop_gradient(router.load),
        tokens=router.tokens,
        recorded=recorded,
        agreed=agreed,
        balance=model.load_balancing_loss(router, *((whole.load, whole.tokens) if whole else ())),
        z=model.router_z_loss(router, whole.tokens if whole else None),
    )


def _router_penalty(spec: LearnerSpec, routing: _Routing | None) -> jax.Array:
    if routing is None:
        return jnp.zeros(())
    return spec.router_aux_loss_coef * routing.balance + spec.router_z_loss_coef * routing.z


def _routing_metrics(routing: _Routing | None) -> Metrics:
    if routing is None:
        return {}
    metrics = {"moe/aux_loss": routing.balance, "moe/z_loss": routing.z}
    # How far the busiest expert is above an even share; 1 is perfect balance.
    share = routing.load / jnp.maximum(jnp.sum(routing.load, axis=-1, keepdims=True), 1.0)
    metrics["moe/load_max"] = jnp.max(share) * routing.load.shape[-1]
    metrics["moe/router_agreement"] = jnp.where(
        routing.recorded > 0, routing.agreed / jnp.maximum(routing.recorded, 1.0), 1.0
    )
    return metrics


def _inputs(spec: LearnerSpec, batch: Batch, out: _Pass, scored: jax.Array | None = None) -> LossInputs:
    return LossInputs(
        log_probs=out.log_probs,
        behavior_log_probs=batch.behavior_log_probs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        segment_ids=batch.segment_ids if spec.packed else None,
        reference_log_probs=batch.reference_log_probs,
        rollout_policy_log_probs=batch.rollout_policy_log_probs,
        proximal_log_probs=batch.proximal_log_probs,
        scored_log_probs=scored,
        entropy=out.entropy,
    )


_Whole = tuple[Any, LossRows, LossSummary, jax.Array | None, _Routing | None]
"""Gradient, loss rows, summary, probability outside the support, router statistics."""


def _whole_batch(spec: LearnerSpec, params: Any, batch: Batch) -> _Whole:
    """From one forward and one backward pass."""

    def loss_fn(params: Any) -> tuple[jax.Array, tuple[LossRows, LossSummary, jax.Array | None, _Routing | None]]:
        out = _forward(spec, params, batch)
        inputs = _inputs(spec, batch, out)
        summary = spec.loss.summarize(inputs)
        rows = spec.loss.rows(inputs, summary)
        return jnp.sum(rows.loss) + _router_penalty(spec, out.routing), (rows, summary, out.outside, out.routing)

    gradient, aux = jax.grad(loss_fn, has_aux=True)(params)
    return gradient, *aux


def _accumulate(spec: LearnerSpec, params: Any, batch: Batch) -> _Whole:
    """The same, one micro-batch in memory at a time, after a scoring pass that fixes what they must agree on."""
    scores = _score(spec, params, batch)
    summary = spec.loss.summarize(_inputs(spec, batch, scores, scores.log_probs))

    def loss_fn(params: Any, part: Batch, scored: jax.Array) -> tuple[jax.Array, tuple[LossRows, _Routing | None]]:
        out = _forward(spec, params, part, whole=scores.routing)
        rows = spec.loss.rows(_inputs(spec, part, out, scored), summary)
        return jnp.sum(rows.loss) + _router_penalty(spec, out.routing), (rows, out.routing)

    def body(gradient: Any, xs: tuple[Batch, jax.Array]) -> tuple[Any, tuple[LossRows, _Routing | None]]:
        part_gradient, aux = jax.grad(loss_fn, has_aux=True)(params, *xs)
        return jax.tree.map(jnp.add, gradient, part_gradient), aux

    zeros = jax.tree.map(jnp.zeros_like, params)
    xs = (_split(batch, spec.micro_batches), _split(scores.log_probs, spec.micro_batches))
    gradient, (rows, routing) = jax.lax.scan(body, zeros, xs)
    return gradient, _join(rows), summary, scores.outside, jax.tree.map(lambda x: jnp.sum(x, axis=0), routing)


def _score(spec: LearnerSpec, params: Any, batch: Batch) -> _Pass:
    if spec.micro_batches == 1:
        return _forward(spec, params, batch)
    out = jax.lax.map(lambda part: _forward(spec, params, part), _split(batch, spec.micro_batches))
    log_probs, entropy, outside = _join((out.log_probs, out.entropy, out.outside))
    return _Pass(log_probs, entropy, outside, jax.tree.map(lambda x: jnp.sum(x, axis=0), out.routing))


def _split(tree: Any, parts: int) -> Any:
    """[B, ...] -> [parts, B / parts, ...], rows dealt in turn, so that a sharded batch stays where it is."""

    def leaf(x: jax.Array) -> jax.Array:
        if x.shape[0] % parts:
            raise ValueError(
                f"{x.shape[0]} rows are not a multiple of micro_batches = {parts}: pad the batch or choose a divisor"
            )
        return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)

    return jax.tree.map(leaf, tree)


def _join(tree: Any) -> Any:
    """Undo ``_split``: rows in their original order, so that sums over them do not depend on the split."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def _staleness(step: jax.Array, batch: Batch) -> Metrics:
    lag = jnp.where(batch.loss_mask, step - batch.policy_versions, 0)
    return {
        "async/staleness_mean": masked_mean(lag.astype(jnp.float32), batch.loss_mask),
        "async/staleness_max": jnp.max(lag).astype(jnp.float32),
    }


def _apply(spec: LearnerSpec, state: TrainState, gradient: Any, take: jax.Array) -> TrainState:
    updates, opt_state = spec.optimizer.update(gradient, state.opt_state, state.params)
    new = (optax.apply_updates(state.params, updates), opt_state)
    params, opt_state = jax.tree.map(lambda a, b: jnp.where(take, a, b), new, (state.params, state.opt_state))
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state)
