"""The last pure layer: score a batch, take a supervised step, take a reinforcement step.

Nothing here owns a thread, a clock or a file. A ``LearnerSpec`` is static; jit ``partial(train_step, spec)``.

With one micro-batch a step is one forward and one backward pass: the batch summary (the quantile, the denominators) is
taken from that very forward pass. With more, a scoring pass without gradient comes first; the summary and every
gate are decided on its log-probs, so that all micro-batches see the same trust region. Rows of the micro-batches are
put back into their order before anything is summed, and are divided once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sat_jax import losses, model
from sat_jax.losses import LossInputs, LossRows
from sat_jax.losses.masked import masked_mean
from sat_jax.model import ModelConfig
from sat_jax.model.options import ForwardOptions
from sat_jax.types import Batch, TrainState

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class LearnerSpec:
    """Everything static about a learner step.

    Attributes:
        model: architecture.
        loss: the loss function, from ``losses.make_loss``.
        optimizer: optax transformation applied to the raw gradient.
        schedule: learning rate by step; only reported, the optimizer has its own reference to it.
        temperature: sampling temperature; the learner's log-probs are taken at the same one.
        micro_batches: slices of a batch; must divide its rows.
        routing_replay: route by ``batch.routed_experts`` (R3, eq. 40); if False they only feed
        ``moe/router_agreement``.
        router_aux_loss_coef: weight of the load-balancing loss.
        head_chunk: token positions per chunk of the vocabulary head.
        forward: compute type, remat, grouped-matmul choice.
    """

    model: ModelConfig
    loss: losses.Loss
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    temperature: float = 1.0
    micro_batches: int = 1
    routing_replay: bool = True
    router_aux_loss_coef: float = 0.0
    head_chunk: int = 1024
    forward: ForwardOptions = ForwardOptions()


class Scores(NamedTuple):
    """What a pass without gradient says about a batch; [B, T] float32, aligned with ``batch.tokens``."""

    log_probs: jax.Array
    entropy: jax.Array


class _Pass(NamedTuple):
    log_probs: jax.Array
    entropy: jax.Array
    agreement: jax.Array  # [2]: (agreeing, recorded) routed sets
    aux_loss: jax.Array


def adam(
    lr: optax.ScalarOrSchedule, b1: float, b2: float, eps: float, weight_decay: float = 0.0, max_grad_norm: float = 0.0
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay on every parameter, after clipping the global gradient norm (0: no clipping)."""
    step = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), step) if max_grad_norm > 0 else step


def learning_rate(lr: float, warmup_steps: int = 0, decay_steps: int = 0) -> optax.Schedule:
    """Constant ``lr``, or 0 -> lr over ``warmup_steps`` and lr -> 0 over the ``decay_steps`` after them."""
    parts: list[optax.Schedule] = []
    boundaries: list[int] = []
    if warmup_steps:
        parts.append(optax.linear_schedule(0.0, lr, warmup_steps))
        boundaries.append(warmup_steps)
    parts.append(optax.linear_schedule(lr, 0.0, decay_steps) if decay_steps else optax.constant_schedule(lr))
    return optax.join_schedules(parts, boundaries)


def init_state(spec: LearnerSpec, params: Any) -> TrainState:
    """Step 0 from parameters: a fresh optimizer state."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=spec.optimizer.init(params))


def score(spec: LearnerSpec, params: Any, batch: Batch) -> Scores:
    """Log-probs and entropies of ``batch.tokens`` under ``params``, without gradient, micro-batch by micro-batch.

    Serves the reference, the proximal and the rollout-policy pass and the scoring pass of ``train_step``.
    """

    def one(part: Batch) -> Scores:
        out = _forward(spec, params, part)
        return Scores(out.log_probs, out.entropy)

    if spec.micro_batches == 1:
        return one(batch)
    return _join(jax.lax.map(one, _split(batch, spec.micro_batches)))


def train_step(spec: LearnerSpec, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One optimizer update on one batch.

    Returns:
        the next state and scalar metrics. The update is withheld (parameters and optimizer state unchanged, the step
        still counted, ``train/update_skipped`` 1) when no token is active or the gradient is not finite.

    Raises:
        ValueError: at trace time, when the rows are not a multiple of ``spec.micro_batches``.
    """
    chex.assert_rank([batch.tokens, batch.loss_mask, batch.behavior_log_probs], 2)
    chex.assert_equal_shape([batch.tokens, batch.segment_ids, batch.positions, batch.loss_mask, batch.policy_versions])

    if spec.micro_batches == 1:
        gradient, (rows, summary, out) = jax.grad(_whole_batch_loss, argnums=1, has_aux=True)(spec, state.params, batch)
        agreement, aux_loss = out.agreement, out.aux_loss
    else:
        gradient, rows, summary, agreement, aux_loss = _accumulate(spec, state.params, batch)

    metrics = dict(spec.loss.metrics(rows, summary))
    metrics["train/loss"] = jnp.sum(rows.loss) + spec.router_aux_loss_coef * aux_loss
    metrics |= _staleness(state.step, batch)
    if spec.model.is_moe:
        metrics["moe/aux_loss"] = aux_loss
        if batch.routed_experts is not None:
            metrics["moe/router_agreement"] = agreement[0] / jnp.maximum(agreement[1], 1.0)
    metrics["train/grad_norm"] = grad_norm = optax.global_norm(gradient)
    metrics["train/lr"] = jnp.asarray(spec.schedule(state.step), jnp.float32)
    metrics["train/valid_tokens"] = valid = jnp.sum(batch.loss_mask)
    take = (valid > 0) & jnp.isfinite(grad_norm)
    metrics["train/update_skipped"] = 1.0 - take.astype(jnp.float32)
    return _apply(spec, state, gradient, take), metrics


def supervised_step(spec: LearnerSpec, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update of maximum likelihood: minimise the mean of -log p over the tokens under ``batch.loss_mask``."""

    def loss_fn(params: Any) -> jax.Array:
        out = _forward(spec, params, batch, temperature=1.0)
        return -masked_mean(out.log_probs, batch.loss_mask) + spec.router_aux_loss_coef * out.aux_loss

    loss, gradient = jax.value_and_grad(loss_fn)(state.params)
    grad_norm = optax.global_norm(gradient)
    take = jnp.any(batch.loss_mask) & jnp.isfinite(grad_norm)
    metrics = {"sft/loss": loss, "sft/grad_norm": grad_norm, "sft/lr": jnp.asarray(spec.schedule(state.step))}
    metrics["sft/update_skipped"] = 1.0 - take.astype(jnp.float32)
    return _apply(spec, state, gradient, take), metrics


def _forward(spec: LearnerSpec, params: Any, batch: Batch, temperature: float | None = None) -> _Pass:
    out = model.forward(
        params,
        spec.model,
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        routed_experts=batch.routed_experts,
        replay=spec.routing_replay,
        options=spec.forward,
    )
    head = model.token_log_probs(
        params,
        spec.model,
        out.hidden,
        batch.tokens,
        temperature=spec.temperature if temperature is None else temperature,
        chunk_size=spec.head_chunk,
    )
    if out.router is None:
        return _Pass(head.log_probs, head.entropy, jnp.zeros(2), jnp.zeros(()))
    return _Pass(head.log_probs, head.entropy, out.router.agreement, out.router.aux_loss)


def _inputs(batch: Batch, out: _Pass | Scores, scored: jax.Array | None = None) -> LossInputs:
    return LossInputs(
        log_probs=out.log_probs,
        behavior_log_probs=batch.behavior_log_probs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        segment_ids=batch.segment_ids,
        reference_log_probs=batch.reference_log_probs,
        rollout_policy_log_probs=batch.rollout_policy_log_probs,
        proximal_log_probs=batch.proximal_log_probs,
        scored_log_probs=scored,
        entropy=out.entropy,
    )


def _whole_batch_loss(spec: LearnerSpec, params: Any, batch: Batch) -> tuple[jax.Array, tuple[LossRows, Any, _Pass]]:
    out = _forward(spec, params, batch)
    inputs = _inputs(batch, out)
    summary = spec.loss.summarize(inputs)
    rows = spec.loss.rows(inputs, summary)
    return jnp.sum(rows.loss) + spec.router_aux_loss_coef * out.aux_loss, (rows, summary, out)


def _accumulate(spec: LearnerSpec, params: Any, batch: Batch) -> tuple[Any, LossRows, Any, jax.Array, jax.Array]:
    """Gradient, loss rows, summary, agreement and auxiliary loss of a batch, one micro-batch in memory at a time."""
    scores = score(spec, params, batch)
    summary = spec.loss.summarize(_inputs(batch, scores, scores.log_probs))

    def loss_fn(params: Any, part: Batch, scored: jax.Array) -> tuple[jax.Array, tuple[LossRows, jax.Array, jax.Array]]:
        out = _forward(spec, params, part)
        rows = spec.loss.rows(_inputs(part, out, scored), summary)
        aux = out.aux_loss / spec.micro_batches
        return jnp.sum(rows.loss) + spec.router_aux_loss_coef * aux, (rows, out.agreement, aux)

    def body(gradient: Any, xs: tuple[Batch, jax.Array]) -> tuple[Any, tuple[LossRows, jax.Array, jax.Array]]:
        part_gradient, aux = jax.grad(loss_fn, has_aux=True)(params, *xs)
        return jax.tree.map(jnp.add, gradient, part_gradient), aux

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
    xs = (_split(batch, spec.micro_batches), _split(scores.log_probs, spec.micro_batches))
    gradient, (rows, agreement, aux) = jax.lax.scan(body, zeros, xs)
    return gradient, _join(rows), summary, jnp.sum(agreement, axis=0), jnp.sum(aux)


def _split(tree: Any, parts: int) -> Any:
    """[B, ...] -> [parts, B / parts, ...], rows dealt in turn so that a batch sharded over devices stays where it
    is."""

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
