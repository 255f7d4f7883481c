"""Policies: Qwen3-MoE, dense Qwen3 and Llama. Pure functions of a parameter tree that one table describes."""

from sat_jax.model.config import LayerRun, ModelConfig
from sat_jax.model.head import TokenLogProbs, logits, token_log_probs
from sat_jax.model.moe import RouterOutput, load_balancing_loss, router_z_loss
from sat_jax.model.parameters import Parameter, Params, abstract_params, init_params, parameter_count, parameter_table
from sat_jax.model.sharding import MESH_AXES, SAMPLING_RULES, Placement, cache_sharding, check_mesh, param_shardings
from sat_jax.model.transformer import (
    ExtendOutput,
    ForwardOptions,
    ForwardOutput,
    KVCache,
    cache_bytes,
    extend,
    forward,
    init_cache,
    split_layers,
)

__all__ = [
    "MESH_AXES",
    "SAMPLING_RULES",
    "ExtendOutput",
    "ForwardOptions",
    "ForwardOutput",
    "KVCache",
    "LayerRun",
    "ModelConfig",
    "Parameter",
    "Params",
    "Placement",
    "RouterOutput",
    "TokenLogProbs",
    "abstract_params",
    "cache_bytes",
    "cache_sharding",
    "check_mesh",
    "extend",
    "forward",
    "init_cache",
    "init_params",
    "load_balancing_loss",
    "logits",
    "param_shardings",
    "parameter_count",
    "parameter_table",
    "router_z_loss",
    "split_layers",
    "token_log_probs",
]
