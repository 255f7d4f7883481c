"""Building blocks shared by the full forward pass and by cached decoding. Arrays are ``[B, T, ...]`` throughout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Params

_MASKED = -1e30  # finite: a row without any visible key must give a finite (and unused) softmax, not NaN


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """``weight * x / sqrt(mean(x**2) + eps)`` over the last axis, in float32, returned in ``x.dtype``."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of ``position * theta**(-2i / head_dim)``: two float32 ``[B, T, 1, head_dim / 2]``."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of heads ``[B, T, H, h]``: element ``i`` is paired with ``i + h / 2``, as on the hub."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def project_qkv(
    p: Params, cfg: ModelConfig, x: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries ``[B, T, H, h]``, keys and values ``[B, T, KV, h]``, normalised (Qwen3) and rotated."""

    def project(name: str) -> jax.Array:
        y = jnp.einsum("btd,dnh->btnh", x, p[name])
        return y + p[f"{name}_bias"] if cfg.attention_bias else y

    q, k, v = project("q"), project("k"), project("v")
    if cfg.qk_norm:
        q, k = rms_norm(q, p["q_norm"], cfg.rms_norm_eps), rms_norm(k, p["k_norm"], cfg.rms_norm_eps)
    return rotate(q, angles), rotate(k, angles), v


def project_out(p: Params, cfg: ModelConfig, heads: jax.Array) -> jax.Array:
    """``[B, T, H, h] -> [B, T, D]``."""
    y = jnp.einsum("btnh,nhd->btd", heads, p["out"])
    return y + p["out_bias"] if cfg.attention_bias else y


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Grouped-query attention, softmax in float32.

    Args:
        q: ``[B, T, H, h]``.
        k: ``[B, KV, S, h]``; query head ``n`` reads key head ``n // (H / KV)``. Heads come before positions, the layout
            in which a cache is read without a copy.
        v: like ``k``.
        visible: bool ``[B, T, S]``.

    Returns:
        ``[B, T, H, h]``; meaningless where nothing is visible.
    """
    B, T, H, h = q.shape
    groups = k.shape[1]
    # [B, KV, G * T, h]: one matmul per key head serves all of its query heads.
    grouped = q.reshape(B, T, groups, H // groups, h).transpose(0, 2, 3, 1, 4).reshape(B, groups, -1, h)
    scores = jnp.einsum("bkqh,bksh->bkqs", grouped, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = scores.reshape(B, groups, H // groups, T, -1)
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(B, groups, -1, scores.shape[-1])
    out = jnp.einsum("bkqs,bksh->bkqh", weights, v)
    return out.reshape(B, groups, H // groups, T, h).transpose(0, 3, 1, 2, 4).reshape(B, T, H, h)


def self_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int) -> jax.Array:
    """Causal attention within segments; ``[B, T, H, h]``.

    Scores are made for at most ``block`` queries at a time, so memory grows with ``B * H * block * T`` instead of
    ``B * H * T * T``.
    """
    T = q.shape[1]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    column = jnp.arange(T)

    def rows(q_rows: jax.Array, segments: jax.Array, index: jax.Array) -> jax.Array:
        visible = (segments[:, :, None] == segment_ids[:, None, :]) & (index[:, None] >= column)
        return attend(q_rows, k, v, visible)

    # Scores that outweigh the queries are made again in the backward pass instead of being kept.
    attend_rows = jax.checkpoint(rows) if q.shape[-1] < T else rows
    if block >= T:
        return attend_rows(q, segment_ids, column)
    blocks = -(-T // block)
    pad = blocks * block - T

    def split(x: jax.Array) -> jax.Array:
        widths = [(0, pad) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return jnp.moveaxis(jnp.pad(x, widths).reshape(x.shape[0], blocks, block, *x.shape[2:]), 1, 0)

    inputs = (split(q), split(segment_ids), jnp.arange(blocks * block).reshape(blocks, block))
    out = jax.lax.map(lambda args: attend_rows(*args), inputs)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], blocks * block, *q.shape[2:])[:, :T]


def dense_mlp(p: Params, cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """``down(silu(gate(x)) * up(x))``, ``[B, T, D]``."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        y = x @ p[name]
        return y + p[f"{name}_bias"] if cfg.mlp_bias else y

    return linear("down", jax.nn.silu(linear("gate", x)) * linear("up", x))
