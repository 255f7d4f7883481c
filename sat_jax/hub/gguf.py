"""llama.cpp's GGUF files to Hugging Face folders: Llamas with a byte-level BPE tokenizer, quantised or not.

A GGUF holds all of a folder in one file: hyperparameters and tokenizer as metadata, tensors in names of its own. Two
things differ in substance. Quantised tensors become what llama.cpp computes with, scale times integer plus offset. And
llama.cpp rotates neighbouring elements of a head where the hub rotates element ``i`` with ``i + h / 2``, so GGUF stores
the rows of Q and K in another order, which is undone here.

Needs the package ``gguf`` (extra ``gguf``).
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sat_jax.hub.config import described
from sat_jax.hub.folder import write_folder
from sat_jax.hub.tensors import hub_names, hub_shape, layers_of
from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Parameter, parameter_table

# Last part of a parameter's path -> GGUF name.
_GLOBAL = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "out": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def import_gguf(file: str | Path, out: str | Path, dtype: str = "float32") -> ModelConfig:
    """Writes ``out``: weights, ``config.json``, ``generation_config.json``, ``tokenizer.json`` and
    ``tokenizer_config.json`` with the chat template, all from the one GGUF; returns the configuration.

    Tensors are dequantised one at a time; memory holds one shard (at most 2 GiB). ``float32`` keeps the quantised
    values to the bit.

    Raises:
        FileExistsError: ``out`` holds something.
        ValueError: the package ``gguf`` is missing; not a GGUF; an architecture, tokenizer or rotary scaling that is
            not implemented; tensors missing, left over, or of the wrong shape.
    """
    gguf = _package()
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a .gguf file")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is no readable GGUF file ({error}): fetch it again") from error
    meta = {key: field.contents() for key, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    cfg = _config(meta, set(stored), str(path))
    backend = _tokenizer(meta, str(path))
    table = parameter_table(cfg, dtype)
    _check(table, stored, str(path))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for p in table:
            for layer in layers_of(p):
                tensor = stored[_name(p, layer)]
                value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                if p.path[-1] in ("q", "k"):
                    value = _unpermute(value, cfg.head_dim)
                yield hub_names(p, layer)[0], np.ascontiguousarray(value, p.dtype)

    with tempfile.TemporaryDirectory() as side:
        backend.save(f"{side}/tokenizer.json")
        record = json.dumps(_tokenizer_config(meta, cfg), indent=2, ensure_ascii=False) + "\n"
        Path(side, "tokenizer_config.json").write_text(record, encoding="utf-8")
        write_folder(out, cfg, tensors(), str(jnp.dtype(dtype)), source=side)
    return cfg


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ValueError("reading GGUF needs the package gguf: pip install gguf") from error


def _config(meta: Mapping[str, Any], names: set[str], where: str) -> ModelConfig:
    kind = meta.get("general.architecture")
    if kind != "llama":
        raise ValueError(
            f"{where}: architecture {kind!r} is not implemented, only 'llama': get the Hugging Face folder"
        )
    for key, neutral in (("llama.expert_count", 0), ("llama.rope.scaling.type", "none")):
        if meta.get(key, neutral) != neutral:
            raise ValueError(f"{where}: {key} = {meta[key]!r} is not implemented: get the Hugging Face folder")

    def read(key: str) -> Any:
        if f"llama.{key}" not in meta:
            raise ValueError(f"{where} lacks llama.{key}: the file is incomplete; fetch it again")
        return meta[f"llama.{key}"]

    heads, width = read("attention.head_count"), read("embedding_length")
    head_dim = meta.get("llama.attention.key_length", width // heads)
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"{where}: rotary embedding of {meta['llama.rope.dimension_count']} out of {head_dim} elements of a head "
            "is not implemented: use another model"
        )
    eos = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return described(
        where,
        model_type="llama",
        vocab_size=len(meta["tokenizer.ggml.tokens"]) if "tokenizer.ggml.tokens" in meta else read("vocab_size"),
        hidden_size=width,
        num_hidden_layers=read("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=meta.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=read("feed_forward_length"),
        rms_norm_eps=_decimal(read("attention.layer_norm_rms_epsilon")),
        rope_theta=_decimal(meta.get("llama.rope.freq_base", 10_000.0)),
        max_position_embeddings=read("context_length"),
        tie_word_embeddings=_GLOBAL["head"] not in names,
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=tuple(dict.fromkeys(meta[key] for key in eos if key in meta)),
        pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
    )


def _decimal(value: float) -> float:
    """The number that was meant: GGUF keeps float32, and 1e-5 would come back as 9.999999747e-06."""
    return float(str(np.float32(value)))


def _name(p: Parameter, layer: int) -> str:
    return _GLOBAL[p.path[-1]] if p.path[-1] in _GLOBAL else f"blk.{layer}.{_LAYER[p.path[-1]]}"


def _check(table: tuple[Parameter, ...], stored: Mapping[str, Any], where: str) -> None:
    expected = {_name(p, layer): p for p in table for layer in layers_of(p)}
    missing, surplus = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    if missing or surplus:
        raise ValueError(
            f"{where} does not hold the tensors of a plain Llama: missing {', '.join(missing[:8]) or 'none'}; "
            f"left over {', '.join(surplus[:8]) or 'none'}: get the Hugging Face folder"
        )
    for name, p in expected.items():
        shape = list(hub_shape(p)[::-1])  # GGUF lists the fastest axis first
        if (found := [int(n) for n in stored[name].shape]) != shape:
            raise ValueError(f"{where}: {name} has shape {found}, expected {shape}: metadata and tensors do not match")


def _unpermute(value: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows ``[heads, head_dim / 2, 2]`` of llama.cpp back to the hub's ``[heads, 2, head_dim / 2]``."""
    rows = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
    return rows.swapaxes(1, 2).reshape(value.shape)


def _tokenizer(meta: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    algorithm, splitting = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if algorithm != "gpt2":
        raise ValueError(f"{where}: tokenizer {algorithm!r} is not implemented, only byte-level BPE ('gpt2')")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    # "smollm" takes every digit apart before GPT-2's expression sees it.
    known = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
    }
    if splitting not in known:
        raise ValueError(f"{where}: pre-tokenizer {splitting!r} is not implemented, only {' and '.join(known)}")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer, backend.decoder = known[splitting], decoders.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([tokenizers.AddedToken(token, normalized=False)])
    return backend


def _tokenizer_config(meta: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in ids.items()
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    if "tokenizer.chat_template" in meta:
        special["chat_template"] = meta["tokenizer.chat_template"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": cfg.max_position_embeddings,
        **special,
    }
