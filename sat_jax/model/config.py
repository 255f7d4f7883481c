"""What a policy looks like: ``ModelConfig``, and its two spellings in a Hugging Face folder's ``config.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from sat_jax.dataclass_json import nearest

ModelType = Literal["qwen3_moe", "qwen3", "llama", "mixtral"]

ARCHITECTURES: Mapping[str, ModelType] = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
}
_MOE_TYPES = ("qwen3_moe", "mixtral")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: Qwen3, Qwen3-MoE, Llama or Mixtral. Hashable; fields are named as in ``config.json``.

    Attributes:
        model_type: ``qwen3_moe`` | ``qwen3`` | ``llama`` | ``mixtral``. Qwen3 normalises every query and key head
            (RMSNorm); Llama does not. Mixtral is Llama with a mixture in every layer (arXiv:2401.04088): no biases,
            gate weights that sum to 1.
        vocab_size: V, rows of the embedding; may exceed the tokenizer's size.
        hidden_size: D.
        num_hidden_layers: all layers, dense and mixture-of-experts.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides ``num_attention_heads``.
        head_dim: width of one head; even (rotary halves).
        intermediate_size: width of a dense layer's MLP; may be 0 when no layer is dense.
        moe_intermediate_size: width of one expert.
        num_experts: E; 0 makes every layer dense.
        num_experts_per_tok: K.
        norm_topk_prob: True: the K gate weights are a softmax over the chosen experts. False: the full softmax,
            gathered.
        decoder_sparse_step: layer ``i`` is a mixture only if ``(i + 1) % decoder_sparse_step == 0``.
        mlp_only_layers: layers that are dense whatever the step says.
        rms_norm_eps: added to the mean square.
        rope_theta: base of the rotary frequencies.
        max_position_embeddings: longest context the checkpoint was made for, in tokens.
        tie_word_embeddings: True: the head is the embedding.
        attention_bias: biases on the q, k, v and output projections.
        mlp_bias: biases in dense MLPs (Llama only).
        initializer_range: standard deviation of freshly initialised matrices.
        router_aux_loss_coef: the checkpoint's own load-balancing coefficient; used only where a training config asks
            for it.
        bos_token_id: or None.
        eos_token_id: every id that ends a response.
        pad_token_id: or None.
    """

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0
    moe_intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    router_aux_loss_coef: float = 0.001
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in get_args(ModelType):
            raise ValueError(
                f"model_type = {self.model_type!r} is not supported{nearest(self.model_type, get_args(ModelType))}"
            )
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "decoder_sparse_step", "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1; correct the model's description")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}: query heads share key heads in equal groups; change one of them"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd: rotary embeddings turn pairs; use an even width")
        if self.num_experts and self.model_type not in _MOE_TYPES:
            raise ValueError(
                f"num_experts = {self.num_experts} with model_type {self.model_type!r}: use one of "
                f"{', '.join(_MOE_TYPES)}"
            )
        if self.model_type in _MOE_TYPES and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} with num_experts = {self.num_experts}: "
                "a token needs between 1 and all experts; change one of them"
            )
        if self.model_type == "mixtral" and (
            len(self.moe_layers) < self.num_hidden_layers
            or not self.norm_topk_prob
            or self.attention_bias
            or self.mlp_bias
        ):
            raise ValueError(
                "model_type 'mixtral' with dense layers, biases or norm_topk_prob = False: its checkpoints cannot say "
                "so; use 'qwen3_moe'"
            )
        if self.moe_layers and self.moe_intermediate_size < 1:
            raise ValueError(
                f"moe_intermediate_size = {self.moe_intermediate_size}: an expert needs a width of at least 1"
            )
        if len(self.moe_layers) < self.num_hidden_layers and self.intermediate_size < 1:
            raise ValueError(f"intermediate_size = {self.intermediate_size}: a dense layer needs a width of at least 1")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layer numbers of the mixture-of-experts layers, ascending: MoE ordinal -> layer."""
        if not self.num_experts:
            return ()
        step = self.decoder_sparse_step
        return tuple(i for i in range(self.num_hidden_layers) if (i + 1) % step == 0 and i not in self.mlp_only_layers)

    @property
    def qk_norm(self) -> bool:
        """True where query and key heads are RMS-normalised before the rotary embedding."""
        return self.model_type in ("qwen3", "qwen3_moe")

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """The stack as maximal runs of equal layers: parameters are stacked, and scanned over, per run."""
        sparse = set(self.moe_layers)
        runs: list[LayerRun] = []
        for layer in range(self.num_hidden_layers):
            moe = layer in sparse
            if runs and runs[-1].moe == moe:
                runs[-1] = dataclasses.replace(runs[-1], length=runs[-1].length + 1)
            else:
                ordinal = sum(m < layer for m in sparse)
                runs.append(LayerRun(name=f"layers_{len(runs)}", first=layer, length=1, moe=moe, first_moe=ordinal))
        return tuple(runs)


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one kind.

    Attributes:
        name: key of the run in the parameter tree.
        first: number of its first layer.
        length: how many layers.
        moe: mixture-of-experts or dense.
        first_moe: MoE layers before this run, so that run layer ``i`` is MoE ordinal ``first_moe + i``.
    """

    name: str
    first: int
    length: int
    moe: bool
    first_moe: int


# Keys that never change what the model computes.
_NEUTRAL = frozenset(
    (
        *("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "tokenizer_class"),
        *("use_cache", "output_router_logits", "output_attentions", "output_hidden_states", "return_dict"),
        *("_attn_implementation", "_attn_implementation_autoset", "torchscript", "pretraining_tp", "max_window_layers"),
        *("is_llama_config", "transformers.js_config"),
    )
)
# Keys that are fine at one value only: the value for which the maths is the one implemented here.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "shared_expert_intermediate_size": (0, None),
    "logit_scale": (1, 1.0, None),
    "is_decoder": (True, False, None),
    "router_jitter_noise": (0, 0.0, None),
}
_RENAMED = {"num_local_experts": "num_experts"}
_RENAMED_MIXTRAL = {**_RENAMED, "intermediate_size": "moe_intermediate_size"}
_MIXTRAL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 4096 * 32}  # transformers'
_FIELDS = {f.name: f for f in dataclasses.fields(ModelConfig)}
_REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "intermediate_size",
)
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
    cfg = config_from_hf(read_json(folder / "config.json"), where=str(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        extra = _token_ids(read_json(generation).get("eos_token_id"))
        cfg = dataclasses.replace(cfg, eos_token_id=tuple(dict.fromkeys(cfg.eos_token_id + extra)))
    return cfg


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """``ModelConfig`` of a parsed ``config.json``; ``where`` names it in errors, which are those of ``read_config``."""
    known = {**_architecture(raw, where)}
    model_type = known["model_type"]
    renamed = _RENAMED_MIXTRAL if model_type == "mixtral" else _RENAMED
    for key, value in raw.items():
        name = renamed.get(key, key)
        if name in _NEUTRAL or name == "model_type":
            continue
        if name == "eos_token_id":
            known[name] = _token_ids(value)
        elif name in ("rope_parameters", "layer_types", "sliding_window"):
            _check_structured(name, value, raw, known, where)
        elif name in _FIELDS:
            known[name] = _typed(name, value, where)
        elif name in _FIXED:
            if value not in _FIXED[name]:
                raise ValueError(
                    f"{where}: {key} = {value!r} is not implemented, only {_FIXED[name][0]!r}: use another model"
                )
        elif value is not None:
            raise ValueError(
                f"{where}: key {key!r} = {value!r} is unknown and may change the maths{nearest(key, _FIELDS)}; "
                "remove it if it does not matter"
            )
    if not _is_qwen(known) and known.get("head_dim") is None and raw.get("num_attention_heads"):
        known["head_dim"] = raw.get("hidden_size", 0) // raw["num_attention_heads"]
    if model_type == "llama":
        known.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
    elif known.pop("mlp_bias", False):
        raise ValueError(f"{where}: mlp_bias = true is not implemented for {model_type}: use another checkpoint")
    if model_type == "qwen3_moe":
        known.setdefault("norm_topk_prob", False)  # transformers' default
    required = _REQUIRED + (_MOE_REQUIRED if model_type in _MOE_TYPES else ())
    if model_type == "mixtral":
        known = {**_MIXTRAL_DEFAULTS, **known}
        required = tuple(name for name in required if name != "intermediate_size")
    missing = [name for name in required if known.get(name) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}: add what the checkpoint was trained with")
    return ModelConfig(**{k: v for k, v in known.items() if v is not None or k in ("bos_token_id", "pad_token_id")})


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
    moe_only = (
        "moe_intermediate_size num_experts num_experts_per_tok norm_topk_prob decoder_sparse_step mlp_only_layers "
    )
    foreign = (moe_only + "router_aux_loss_coef").split() if cfg.model_type not in _MOE_TYPES else []
    foreign += [] if cfg.model_type == "llama" else ["mlp_bias"]
    if cfg.model_type == "mixtral":
        raw |= {"num_local_experts": cfg.num_experts, "intermediate_size": cfg.moe_intermediate_size}
        raw |= {"router_jitter_noise": 0.0, "sliding_window": None}
        foreign += ["attention_bias", *(key for key in moe_only.split() if key != "num_experts_per_tok")]
    elif cfg.model_type != "llama":
        raw |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": cfg.num_hidden_layers}
    return {key: raw[key] for key in sorted(raw) if key not in foreign}


def _architecture(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = raw.get("architectures") or []
    if names and names[0] not in ARCHITECTURES:
        raise ValueError(f"{where}: architecture {names[0]!r} is not supported{nearest(names[0], ARCHITECTURES)}")
    model_type = raw.get("model_type") or (ARCHITECTURES[names[0]] if names else None)
    if model_type not in get_args(ModelType):
        raise ValueError(
            f"{where}: model_type {model_type!r} is not supported{nearest(str(model_type), get_args(ModelType))}"
        )
    if names and ARCHITECTURES[names[0]] != model_type:
        raise ValueError(
            f"{where}: architecture {names[0]!r} contradicts model_type {model_type!r}: correct one of them"
        )
    return {"model_type": model_type}


def _is_qwen(known: Mapping[str, Any]) -> bool:
    return known["model_type"] in ("qwen3", "qwen3_moe")


def _check_structured(name: str, value: Any, raw: Mapping[str, Any], known: dict[str, Any], where: str) -> None:
    if name == "rope_parameters" and value is not None:
        extra = {k: v for k, v in value.items() if k not in ("rope_theta", "rope_type")}
        if value.get("rope_type", "default") != "default" or any(v not in (1, 1.0, None) for v in extra.values()):
            raise ValueError(
                f"{where}: rope_parameters = {value!r}: only rope_type 'default' is implemented; use another checkpoint"
            )
        if "rope_theta" in value:
            known["rope_theta"] = float(value["rope_theta"])
    elif name == "layer_types" and value is not None and any(kind != "full_attention" for kind in value):
        raise ValueError(
            f"{where}: layer_types {sorted(set(value))}: only 'full_attention' is implemented; use another checkpoint"
        )
    elif name == "sliding_window" and value is not None and raw.get("use_sliding_window", not _is_qwen(known)):
        raise ValueError(f"{where}: sliding_window = {value!r} is in use and not implemented: use another checkpoint")


def _typed(name: str, value: Any, where: str) -> Any:
    hint = str(_FIELDS[name].type)
    if value is None:
        return None
    if hint.startswith("tuple") and isinstance(value, list):
        return tuple(value)
    kind = {"int": int, "float": float, "bool": bool}.get(hint.split(" ")[0], str)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: {name} = {value!r}: expected {kind.__name__}; correct it")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


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
