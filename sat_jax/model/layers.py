"""Building blocks shared by the full forward pass and by cached decoding. Arrays are ``[B, T, ...]`` throughout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Params


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
        D, n, h = p[name].shape
        # As one matrix: contracting over or into two axes, XLA on CPUs transposes the weights first.
        y = (x @ p[name].reshape(D, n * h)).reshape(*x.shape[:-1], n, h)
        return y + p[f"{name}_bias"] if cfg.attention_bias else y

    q, k, v = project("q"), project("k"), project("v")
    if cfg.qk_norm:
        q, k = rms_norm(q, p["q_norm"], cfg.rms_norm_eps), rms_norm(k, p["k_norm"], cfg.rms_norm_eps)
    return rotate(q, angles), rotate(k, angles), v


def project_out(p: Params, cfg: ModelConfig, heads: jax.Array) -> jax.Array:
    """``[B, T, H, h] -> [B, T, D]``."""
    n, h, D = p["out"].shape
    y = heads.reshape(*heads.shape[:-2], n * h) @ p["out"].reshape(n * h, D)
    return y + p["out_bias"] if cfg.attention_bias else y


def dense_mlp(p: Params, cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """``down(silu(gate(x)) * up(x))``, ``[B, T, D]``."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        y = x @ p[name]
        return y + p[f"{name}_bias"] if cfg.mlp_bias else y

    return linear("down", jax.nn.silu(linear("gate", x)) * linear("up", x))
