"""The parameter table: one row a tensor, from which shapes, initial values, shardings and checkpoint names all follow.

Parameters are a plain nested dict. Layers of one kind are stacked (leading axis ``layers``) per ``LayerRun``, so that a
48-layer model compiles one layer body::

    {"embed": [V, D], "layers_0": {"attention": {"q": [n, D, H, h], ...}, "mlp": {"gate": [n, E, D, F], ...}, ...},
     "final_norm": [D], "head": [V, D]}          # "head" is absent where the embedding is tied

Matrices are stored input-first (``[in..., out...]``), the embedding and the head ``[V, D]``; the hub stores
``[out, in]``.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from sat_jax.model.config import LayerRun, ModelConfig

Params = dict[str, Any]
# How the hub calls a mixture layer, and the matrices of its experts.
_QWEN_NAMES = ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
_MIXTRAL_NAMES = ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})
Initializer = Literal["normal", "ones", "zeros"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the table."""

    path: tuple[str, ...]  # keys from the root of the parameter tree
    shape: tuple[int, ...]  # of the stacked array
    dtype: np.dtype[Any]
    axes: tuple[str, ...]  # logical names: layers expert vocab embed heads kv_heads head_dim mlp expert_mlp router
    init: Initializer  # normal: with the standard deviation ``initializer_range``
    hub: str  # hub name, with {layer} and {expert} where the array is stacked over them
    first_layer: int = 0  # layer number of index 0 of a ``layers`` axis
    matrix: bool = False  # the hub holds the transpose, [out, in], of what is stored here (heads flattened)

    @property
    def name(self) -> str:
        """The path, dotted."""
        return ".".join(self.path)

    @property
    def stacked(self) -> int:
        """Leading axes that enumerate hub tensors (layers, experts): 0, 1 or 2."""
        return sum(axis in ("layers", "expert") for axis in self.axes[:2]) if self.axes[0] == "layers" else 0


def parameter_table(cfg: ModelConfig, dtype: DTypeLike = "float32") -> tuple[Parameter, ...]:
    """Every parameter of ``cfg``, in a fixed order."""
    kind, D, V = jnp.dtype(dtype), cfg.hidden_size, cfg.vocab_size
    rows = [Parameter(("embed",), (V, D), kind, ("vocab", "embed"), "normal", "model.embed_tokens.weight")]
    for run in cfg.runs:
        rows += _layer_rows(cfg, run, kind)
    rows.append(Parameter(("final_norm",), (D,), kind, ("embed",), "ones", "model.norm.weight"))
    if not cfg.tie_word_embeddings:
        rows.append(Parameter(("head",), (V, D), kind, ("vocab", "embed"), "normal", "lm_head.weight"))
    return tuple(rows)


def _layer_rows(cfg: ModelConfig, run: LayerRun, kind: np.dtype[Any]) -> list[Parameter]:
    D, H, KV, h = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    rows: list[Parameter] = []

    def add(path: str, sizes: Mapping[str, int], init: Initializer, hub: str, matrix: bool = False) -> None:
        shape, axes = (run.length, *sizes.values()), ("layers", *sizes)
        full = (run.name, *path.split("."))
        rows.append(Parameter(full, shape, kind, axes, init, "model.layers.{layer}." + hub, run.first, matrix))

    heads, kv_heads = {"heads": H, "head_dim": h}, {"kv_heads": KV, "head_dim": h}
    add("attention_norm", {"embed": D}, "ones", "input_layernorm.weight")
    for name, sizes in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        add(f"attention.{name}", {"embed": D, **sizes}, "normal", f"self_attn.{name}_proj.weight", matrix=True)
        if cfg.attention_bias:
            add(f"attention.{name}_bias", sizes, "zeros", f"self_attn.{name}_proj.bias")
        if cfg.qk_norm and name != "v":
            add(f"attention.{name}_norm", {"head_dim": h}, "ones", f"self_attn.{name}_norm.weight")
    add("attention.out", {**heads, "embed": D}, "normal", "self_attn.o_proj.weight", matrix=True)
    if cfg.attention_bias:
        add("attention.out_bias", {"embed": D}, "zeros", "self_attn.o_proj.bias")
    add("mlp_norm", {"embed": D}, "ones", "post_attention_layernorm.weight")
    if run.moe:
        E, F = {"expert": cfg.num_experts}, {"expert_mlp": cfg.moe_intermediate_size}
        block, names = _MIXTRAL_NAMES if cfg.model_type == "mixtral" else _QWEN_NAMES
        add("mlp.router", {"embed": D, "router": cfg.num_experts}, "normal", f"{block}.gate.weight", matrix=True)
        for name, hub in names.items():
            sizes = {**E, **F, "embed": D} if name == "down" else {**E, "embed": D, **F}
            add(f"mlp.{name}", sizes, "normal", f"{block}.experts.{{expert}}.{hub}.weight", matrix=True)
    else:
        F = {"mlp": cfg.intermediate_size}
        for name, hub in _QWEN_NAMES[1].items():
            source, target = (F, {"embed": D}) if name == "down" else ({"embed": D}, F)
            add(f"mlp.{name}", source | target, "normal", f"mlp.{hub}.weight", matrix=True)
            if cfg.mlp_bias:
                add(f"mlp.{name}_bias", target, "zeros", f"mlp.{hub}.bias")
    return rows


def parameter_count(cfg: ModelConfig) -> int:
    """Number of trainable scalars."""
    return sum(math.prod(p.shape) for p in parameter_table(cfg))


flatten, unflatten = traverse_util.flatten_dict, traverse_util.unflatten_dict
"""A tree of parameters as ``path -> leaf``, and back."""


def abstract_params(cfg: ModelConfig, dtype: DTypeLike = "float32", shardings: Params | None = None) -> Params:
    """The tree with ``jax.ShapeDtypeStruct`` leaves: enough to lower and compile a step without any weights."""
    where = flatten(shardings or {})
    rows = parameter_table(cfg, dtype)
    return unflatten({p.path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=where.get(p.path)) for p in rows})


def init_params(
    key: jax.Array, cfg: ModelConfig, dtype: DTypeLike = "float32", shardings: Params | None = None
) -> Params:
    """Fresh parameters: normal matrices, unit norms, zero biases.

    Each array has a stream of its own, seeded with the key and the parameter's name: adding a parameter changes no
    other, and the values depend neither on the sharding nor on the device. They are drawn on the host, one array at a
    time, for compiling a random generator for every shape would take longer than making a small model: the key has to
    be concrete. ``shardings`` are those of ``param_shardings``; None: the default device.
    """
    seed = [int(word) for word in np.asarray(jax.random.key_data(key)).ravel()]
    where = flatten(shardings or {})

    def make(p: Parameter) -> jax.Array:
        if p.init == "normal":
            stream = np.random.Generator(np.random.Philox([*seed, zlib.crc32(p.name.encode())]))
            value = cfg.initializer_range * stream.standard_normal(p.shape, np.float32)
        else:
            value = np.full(p.shape, 1 if p.init == "ones" else 0, np.float32)
        return jax.device_put(value.astype(p.dtype), where.get(p.path))

    return unflatten({p.path: make(p) for p in parameter_table(cfg, dtype)})
