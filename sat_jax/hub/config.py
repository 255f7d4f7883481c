"""``config.json`` of a model folder: the hub's (transformers 4) spelling and that of transformers 5, strictly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from sat_jax.model.config import MOE_TYPES, ModelConfig, ModelType
from sat_jax.names import nearest

ARCHITECTURES: Mapping[str, ModelType] = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
}
# Keys that never change what the model computes, or have been looked at by then. (How strongly training balances the
# router is `learner.*` here.)
_NEUTRAL = {
    "router_aux_loss_coef", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
    "tokenizer_class", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states", "return_dict",
    "_attn_implementation", "_attn_implementation_autoset", "torchscript", "pretraining_tp", "max_window_layers",
    "is_llama_config", "transformers.js_config", "is_decoder", "rope_parameters", "layer_types", "sliding_window",
}  # fmt: skip
# Keys that are fine at one value only: the value for which the maths is the one implemented here.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "shared_expert_intermediate_size": (0,),
    "logit_scale": (1,),
    "router_jitter_noise": (0,),
}
_RENAMED = {"num_local_experts": "num_experts"}
_RENAMED_MIXTRAL = {**_RENAMED, "intermediate_size": "moe_intermediate_size"}
_MIXTRAL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 4096 * 32}  # transformers'
_FIELDS = {f.name: f for f in dataclasses.fields(ModelConfig)}
_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size",
)  # fmt: skip
_MOE_REQUIRED = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def read_config(hf_dir: str | Path) -> ModelConfig:
    """The policy described by ``hf_dir/config.json``, in the hub's (transformers 4) or the transformers 5 layout.

    ``generation_config.json``, where there is one, adds its end-of-sequence ids: chat models stop at more than one.

    Raises:
        FileNotFoundError: no folder, or no ``config.json`` in it.
        ValueError: not JSON; an architecture, a value or a key that is not implemented (it could change the maths).
    """
    folder = Path(hf_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder: give a Hugging Face model folder (config.json, *.safetensors, ...)"
        )
    raw, generation = read_json(folder / "config.json"), folder / "generation_config.json"
    if generation.is_file():
        extra = _token_ids(read_json(generation).get("eos_token_id"))
        raw["eos_token_id"] = [*_token_ids(raw.get("eos_token_id")), *extra]
    return config_from_hf(raw, where=str(folder / "config.json"))


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """``ModelConfig`` of a parsed ``config.json``; ``where`` names it in errors, which are those of ``read_config``."""
    model_type = _model_type(raw, where)
    qwen = model_type in ("qwen3", "qwen3_moe")
    renamed = _RENAMED_MIXTRAL if model_type == "mixtral" else _RENAMED
    known: dict[str, Any] = {"model_type": model_type}
    said_by: dict[str, str] = {}

    def learn(name: str, value: Any, key: str) -> None:
        """``key`` of the file says that ``name`` is ``value``; another key must not have said otherwise."""
        if value is None or (value == -1 and name in ("bos_token_id", "pad_token_id")):
            return
        if known.setdefault(name, value) != value:
            raise ValueError(
                f"{where}: {said_by[name]} = {known[name]!r}, but {key} = {value!r}: remove the one that the "
                "checkpoint was not trained with"
            )
        said_by[name] = key

    for key, value in raw.items():
        name = renamed.get(key, key)
        if value is not None and (reason := _objection(name, value, raw, qwen)):
            raise ValueError(f"{where}: {reason}; use another checkpoint")
        if name == "eos_token_id":
            known[name] = tuple(dict.fromkeys(_token_ids(value)))
        elif name == "rope_parameters":
            learn("rope_theta", (value or {}).get("rope_theta"), "rope_parameters.rope_theta")
        elif name in _FIELDS:
            learn(name, tuple(value) if isinstance(value, list) else value, key)
        elif value is not None and name not in _NEUTRAL | _FIXED.keys():
            raise ValueError(
                f"{where}: key {key!r} = {value!r} is unknown and may change the maths{nearest(key, _FIELDS)}; "
                "remove it if it does not matter"
            )
    width, heads = known.get("hidden_size"), known.get("num_attention_heads")
    if not qwen and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        known.setdefault("head_dim", width // heads)
    if model_type == "llama":
        known.setdefault("num_key_value_heads", heads)
    elif known.pop("mlp_bias", False):
        raise ValueError(f"{where}: mlp_bias = true is not implemented for {model_type}: use another checkpoint")
    if model_type == "qwen3_moe":
        known.setdefault("norm_topk_prob", False)  # transformers' default
    required = _REQUIRED + (_MOE_REQUIRED if model_type in MOE_TYPES else ())
    if model_type == "mixtral":
        known = {**_MIXTRAL_DEFAULTS, **known}
        required = tuple(name for name in required if name != "intermediate_size")
    missing = [name for name in required if known.get(name) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}: add what the checkpoint was trained with")
    return described(where, **known)


def described(where: str, **fields: Any) -> ModelConfig:
    """``ModelConfig(**fields)``, whose errors name the file that says so."""
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix(ModelConfig.section + '.')}") from None


def config_to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """``config.json`` in the hub's layout, readable by every transformers since 4.51; ``dtype`` is the weights'."""
    eos = list(cfg.eos_token_id)
    raw: dict[str, Any] = {
        "architectures": [next(name for name, kind in ARCHITECTURES.items() if kind == cfg.model_type)],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rope_scaling": None,
        "torch_dtype": dtype,
        "use_cache": True,
        **dataclasses.asdict(cfg),
        "mlp_only_layers": list(cfg.mlp_only_layers),
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
    }
    foreign = {"mlp_bias"} if cfg.model_type != "llama" else set()
    if cfg.model_type != "qwen3_moe":
        foreign |= {*_MOE_REQUIRED, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
    if cfg.model_type == "mixtral":
        raw |= {"num_local_experts": cfg.num_experts, "intermediate_size": cfg.moe_intermediate_size}
        raw |= {"router_jitter_noise": 0.0, "sliding_window": None}
        foreign = foreign - {"num_experts_per_tok"} | {"attention_bias"}
    elif cfg.model_type != "llama":
        raw |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": cfg.num_hidden_layers}
    return {key: raw[key] for key in sorted(raw) if key not in foreign}


def _model_type(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures") or []
    if names and names[0] not in ARCHITECTURES:
        raise ValueError(f"{where}: architecture {names[0]!r} is not supported{nearest(names[0], ARCHITECTURES)}")
    model_type = raw.get("model_type") or (ARCHITECTURES[names[0]] if names else None)
    if model_type not in get_args(ModelType):
        near = nearest(str(model_type), get_args(ModelType))
        raise ValueError(f"{where}: model_type {model_type!r} is not supported{near}")
    if names and ARCHITECTURES[names[0]] != model_type:
        raise ValueError(
            f"{where}: architecture {names[0]!r} contradicts model_type {model_type!r}: correct one of them"
        )
    return str(model_type)


def _objection(name: str, value: Any, raw: Mapping[str, Any], qwen: bool) -> str | None:
    """Why the maths of this key's value is not the one implemented here; None where it is."""
    if name == "rope_parameters":
        plain = isinstance(value, Mapping) and value.get("rope_type", "default") == "default"
        if not plain or any(v not in (1, None) for k, v in value.items() if k not in ("rope_theta", "rope_type")):
            return f"rope_parameters = {value!r}: only rope_type 'default' is implemented"
    if name == "layer_types" and any(kind != "full_attention" for kind in value):
        return f"layer_types {sorted(set(value))}: only 'full_attention' is implemented"
    if name == "sliding_window" and raw.get("use_sliding_window", not qwen):
        return f"sliding_window = {value!r} is in use and not implemented"
    if name in _FIXED and value not in _FIXED[name]:
        return f"{name} = {value!r} is not implemented, only {_FIXED[name][0]!r}"
    return None


def _token_ids(value: Any) -> tuple[int, ...]:
    return () if value in (None, -1) else tuple(value) if isinstance(value, list) else (value,)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model folder's file; ``FileNotFoundError`` or ``ValueError`` say what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the folder is not a Hugging Face model, or was only half written")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}): the file is damaged or half written; fetch it again"
        ) from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds {type(raw).__name__}, not an object: the file is damaged; fetch it again")
    return raw
