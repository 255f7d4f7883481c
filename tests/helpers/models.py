"""Tiny models and the golden checkpoints (made with transformers 5.23, float32; tests/data/model)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax import hub, model
from tests.helpers import DATA

CHECKPOINTS = DATA / "model"
GOLDEN = ("moe_top4_norm", "moe_top4_nonorm", "moe_mixed_dense", "dense_tied")
ATOL = {"moe_top4_norm": 1.9e-4, "moe_top4_nonorm": 1.9e-4, "moe_mixed_dense": 1.3e-4, "dense_tied": 1.3e-4}

MOE = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    initializer_range=0.3,
)
MIXED = dataclasses.replace(
    MOE, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(3,), intermediate_size=24, norm_topk_prob=False
)
LLAMA = model.ModelConfig(
    model_type="llama",
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    initializer_range=0.3,
)
PLAIN_LLAMA = dataclasses.replace(LLAMA, attention_bias=False, mlp_bias=False)


def init(cfg: model.ModelConfig, seed: int = 0) -> model.Params:
    """Weights with random norms and biases too, so that dropping one shows."""
    params = model.init_params(jax.random.key(seed), cfg)
    rng = np.random.default_rng(seed)

    def shake(leaf: jax.Array) -> jax.Array:
        constant = float(jnp.ptp(leaf)) == 0.0
        return leaf + rng.uniform(-0.5, 0.5, leaf.shape).astype(np.float32) if constant else leaf

    return jax.tree.map(shake, params)


@functools.cache
def load(name: str) -> tuple[model.ModelConfig, model.Params]:
    cfg = hub.read_config(CHECKPOINTS / name)
    return cfg, hub.load_params(CHECKPOINTS / name, cfg)


DEFAULT = model.ForwardOptions()


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("options",))
def run(cfg, params, tokens, segment_ids=None, positions=None, routed_experts=None, options=DEFAULT):
    """Forward, logits and token log-probs in one program."""
    out = model.forward(params, cfg, tokens, segment_ids, positions, routed_experts, options)
    return out, model.logits(params, cfg, out.hidden), model.token_log_probs(params, cfg, out.hidden, tokens)


def agreement(router: model.RouterOutput) -> float:
    """Share of recorded (token, layer) expert sets that the router would choose too."""
    return float(router.agreed.sum() / router.recorded.sum())
