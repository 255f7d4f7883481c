"""From hidden states to log-probabilities, never holding ``[B, T, V]``.

``token_log_probs`` is the one place where the shift by one happens: training, reference, proximal and evaluation passes
all call it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Params
from sat_jax.model.sharding import Placement, constrain


@struct.dataclass
class TokenLogProbs:
    """Token-aligned, float32 ``[B, T]``, nats.

    Attributes:
        log_probs: entry ``t`` is ``log p(tokens[t] | tokens[<t])`` at the temperature asked for; entry 0 is 0.
        entropy: of the distribution that ``tokens[t]`` was drawn from; entry 0 is 0. None where not asked for.
    """

    log_probs: jax.Array
    entropy: jax.Array | None


def head_matrix(params: Params, cfg: ModelConfig) -> jax.Array:
    """``[V, D]``: the head, which is the embedding where tied."""
    matrix: jax.Array = params["embed"] if cfg.tie_word_embeddings else params["head"]
    return matrix


def logits(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Float32 ``[..., V]`` of ``hidden [..., D]``, accumulated in float32. For single positions: decoding, looking."""
    return _project(hidden, head_matrix(params, cfg))


def token_log_probs(
    params: Params,
    cfg: ModelConfig,
    hidden: jax.Array,
    tokens: jax.Array,
    temperature: float | jax.Array = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = True,
    placement: Placement | None = None,
) -> TokenLogProbs:
    """Log-probability of every token given those before it, differentiable in ``params`` and ``hidden``.

    ``log_probs[b, t] = log_softmax(logits(hidden[b, t - 1]) / temperature)[tokens[b, t]]``. In packed rows the first
    token of a segment gets the log-prob under the segment before it: mask it, as ``Batch.loss_mask`` does.

    Args:
        params: the policy's.
        cfg: the model.
        hidden: ``[B, T, D]``, after the final norm.
        tokens: int ``[B, T]``.
        temperature: what the sampler divided its logits by (eq. (1) compares the two policies at the same temperature);
            a constant, no gradient flows to it.
        chunk_size: tokens whose logits are in memory at once: ``chunk_size * V * 4`` bytes. The backward pass makes
            them again.
        with_entropy: also return ``-sum p log p``.
        placement: mesh and rules, or None; then the head is gathered over ``fsdp`` once and not in every chunk.
    """
    B, T, D = hidden.shape
    width = max(1, min(chunk_size // B, T - 1))
    chunks = max(1, -(-(T - 1) // width))
    pad = chunks * width - (T - 1)
    matrix = constrain(head_matrix(params, cfg), ("vocab", None), placement)
    # Chunks run along T, so that rows stay where a mesh has put them.
    before = jnp.pad(hidden[:, :-1], ((0, 0), (0, pad), (0, 0))).reshape(B, chunks, width, D)
    target = jnp.pad(tokens[:, 1:], ((0, 0), (0, pad))).reshape(B, chunks, width)
    log_probs, entropy = _chunked(
        before.swapaxes(0, 1),
        matrix,
        target.swapaxes(0, 1),
        jax.lax.stop_gradient(jnp.float32(temperature)),
        with_entropy,
    )

    def align(x: jax.Array) -> jax.Array:
        return jnp.pad(x.swapaxes(0, 1).reshape(B, chunks * width)[:, : T - 1], ((0, 0), (1, 0)))

    return TokenLogProbs(align(log_probs), align(entropy) if with_entropy else None)


def _project(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("...d,vd->...v", hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    hidden: jax.Array, matrix: jax.Array, target: jax.Array, temperature: jax.Array, with_entropy: bool
) -> tuple[jax.Array, jax.Array]:
    """``hidden [chunks, B, C, D]``, ``target [chunks, B, C]`` -> log-probs and entropies ``[chunks, B, C]``."""
    outputs, _ = _chunked_forward(hidden, matrix, target, temperature, with_entropy)
    return outputs


def _chunked_forward(
    hidden: jax.Array, matrix: jax.Array, target: jax.Array, temperature: jax.Array, with_entropy: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    def chunk(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, index = args
        scaled = _project(x, matrix) / temperature
        log_z = jax.nn.logsumexp(scaled, axis=-1)
        chosen = jnp.take_along_axis(scaled, index[..., None], axis=-1)[..., 0] - log_z
        if not with_entropy:
            return chosen, log_z, log_z
        log_p = scaled - log_z[..., None]  # summing p log p cancels less than log_z - sum p z
        return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), log_z

    log_probs, entropy, log_z = jax.lax.map(chunk, (hidden, target))
    return (log_probs, entropy), (hidden, matrix, target, temperature, entropy, log_z)


def _chunked_backward(with_entropy: bool, saved: Any, g: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    hidden, matrix, target, temperature, entropy, log_z = saved
    weight = matrix.astype(hidden.dtype)

    def chunk(d_matrix: jax.Array, args: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, index, entropy, log_z, g_log_prob, g_entropy = args
        log_p = _project(x, matrix) / temperature - log_z[..., None]
        p = jnp.exp(log_p)
        one_hot = index[..., None] == jnp.arange(log_p.shape[-1])
        # d log p_target / d z = 1[target] - p;   d H / d z = -p (log p + H)
        d_scaled = jnp.where(one_hot, g_log_prob[..., None], 0) - p * g_log_prob[..., None]
        if with_entropy:
            d_scaled -= p * (log_p + entropy[..., None]) * g_entropy[..., None]
        d_logits = (d_scaled / temperature).astype(x.dtype)
        d_x = jnp.einsum("bcv,vd->bcd", d_logits, weight)
        # [D, V]: this way round no [.., V] array is transposed for the matmul.
        return d_matrix + jnp.einsum("bcd,bcv->dv", x, d_logits, preferred_element_type=jnp.float32), d_x

    zero = jnp.zeros(matrix.shape[::-1], jnp.float32)
    d_matrix, d_hidden = jax.lax.scan(chunk, zero, (hidden, target, entropy, log_z, *g))
    return d_hidden, d_matrix.T.astype(matrix.dtype), None, jnp.zeros_like(temperature)


_chunked.defvjp(_chunked_forward, _chunked_backward)
