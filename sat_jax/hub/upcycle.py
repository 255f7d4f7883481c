"""Sparse upcycling (arXiv:2212.05055): a dense checkpoint becomes a mixture of experts that computes the same function.

Every expert is a copy of the dense MLP and the gate weights of the K chosen ones sum to 1, so whatever the router says,
``sum_k w_k * mlp(x) = mlp(x)``. The router is random, and small: the experts start with nearly equal weights, receive
different tokens, and part ways in training.

A Qwen3 becomes a Qwen3-MoE. A Llama becomes a Mixtral, for a Qwen3-MoE normalises query and key heads, and no norm
weight makes that the identity; Mixtral is the same transformer as Llama but for the mixture.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sat_jax.hub.config import read_config
from sat_jax.hub.folder import write_folder
from sat_jax.hub.tensors import Checkpoint, hub_names, layers_of
from sat_jax.model.config import ModelConfig, ModelType
from sat_jax.model.parameters import Parameter, parameter_table

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KINDS: dict[str, ModelType] = {"qwen3": "qwen3_moe", "llama": "mixtral"}


def upcycled_config(cfg: ModelConfig, experts: int, top_k: int) -> ModelConfig:
    """The mixture of ``experts`` copies of ``cfg``'s MLP, ``top_k`` of them for each token, in every layer.
    ``ValueError`` where ``cfg`` is a mixture already, or has biases that a Mixtral cannot hold."""
    if cfg.model_type not in _KINDS:
        raise ValueError(f"model_type {cfg.model_type!r} is a mixture already: upcycle a dense Qwen3 or Llama")
    if not 1 <= top_k <= experts:
        raise ValueError(f"--top-k {top_k} with --experts {experts}: a token needs between 1 and all experts")
    if cfg.model_type == "llama" and (cfg.attention_bias or cfg.mlp_bias):
        raise ValueError(
            "this Llama has biases (attention_bias or mlp_bias in config.json) and a Mixtral has none: upcycle another "
            "checkpoint"
        )
    return dataclasses.replace(
        cfg,
        model_type=_KINDS[cfg.model_type],
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=cfg.intermediate_size,
        intermediate_size=0 if cfg.model_type == "llama" else cfg.intermediate_size,
        norm_topk_prob=True,
    )


def upcycle(
    hf_dir: str | Path, out: str | Path, experts: int, top_k: int, router_std: float = 0.02, seed: int = 0
) -> ModelConfig:
    """Writes ``out``: the dense folder ``hf_dir`` as a mixture with the same logits; returns its configuration.

    Tensors are copied one at a time in their stored type, so memory holds one shard and never a model. Logits are equal
    up to rounding. Errors are those of ``read_config``, ``load_params``, ``save_hf`` and ``upcycled_config``.

    The router's weights have standard deviation ``router_std``. Its input has a mean square of about 1, so router
    logits have one of ``router_std * sqrt(hidden_size)``; 0 would tie all experts, which then receive the same
    gradients for ever.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed}: must not be negative")
    if not router_std > 0:
        raise ValueError(f"router_std = {router_std}: equal router logits keep all experts equal; use a value above 0")
    cfg = read_config(hf_dir)
    sparse = upcycled_config(cfg, experts, top_k)
    checkpoint = Checkpoint(Path(hf_dir))
    dense = {p.path: p for p in parameter_table(cfg)}
    checkpoint.check(cfg, tuple(dense.values()))
    names = [name for p in dense.values() for layer in layers_of(p) for name in hub_names(p, layer)]
    stored = {checkpoint.unread(name).get_dtype() for name in names}
    if len(stored) > 1:
        raise ValueError(f"{hf_dir} stores tensors as {', '.join(sorted(stored))}: export it in one type first")
    dtype = _DTYPES[stored.pop()]

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for p in parameter_table(sparse, dtype):
            for layer in layers_of(p):
                if p.path not in dense:
                    yield hub_names(p, layer)[0], _router(p, layer, router_std, seed)
                else:
                    tensor = checkpoint.read(hub_names(dense[p.path], layer)[0])
                    yield from ((name, tensor) for name in hub_names(p, layer))

    write_folder(out, sparse, tensors(), dtype, source=hf_dir)
    return sparse


def _router(p: Parameter, layer: int, std: float, seed: int) -> np.ndarray:
    """``[E, D]``, a stream of its own for every layer."""
    D, E = p.shape[1:]
    stream = np.random.Generator(np.random.Philox([seed, zlib.crc32(p.hub.format(layer=layer).encode())]))
    return (std * stream.standard_normal((E, D), np.float32)).astype(p.dtype)
