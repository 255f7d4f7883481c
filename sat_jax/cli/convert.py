"""``sat-jax upcycle``, ``import-gguf`` and ``export``: one Hugging Face folder out of something else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import jax

from sat_jax import hub, model
from sat_jax.hub import gguf
from sat_jax.hub import upcycle as upcycling
from sat_jax.policy import load_policy
from sat_jax.training import build
from sat_jax.training.restore import checkpoint_params, stored_config

Dtype = Literal["float32", "bfloat16"]


def upcycle(
    hf_dir: Path, *, out: Path, experts: int = 4, top_k: int = 2, router_std: float = 0.02, seed: int = 0
) -> None:
    """Turn a dense folder into a mixture of experts with the same logits: copies of each MLP, and a random router.

    A Qwen3 becomes a Qwen3-MoE; a Llama becomes a Mixtral, which is the same transformer but for the mixture.

    Args:
        hf_dir: Hugging Face folder of a dense Qwen3 or Llama.
        out: Folder to write; must not exist, or be empty.
        experts: Copies of every MLP.
        top_k: How many of them process a token.
        router_std: Standard deviation of the router's weights.
        seed: Of the router.
    """
    cfg = upcycling.upcycle(hf_dir, out, experts, top_k, router_std, seed)
    print(f"{out}: {cfg.model_type}, {top_k} of {experts} experts in {len(cfg.moe_layers)} layers, {_size(cfg)}")


def import_gguf(file: Path, *, out: Path, dtype: Dtype = "float32") -> None:
    """Turn llama.cpp's GGUF of a Llama into a Hugging Face folder: weights, tokenizer and chat template.

    Args:
        file: GGUF file, quantised or not. Needs the package gguf.
        out: Folder to write; must not exist, or be empty.
        dtype: float32 keeps the quantised values to the bit.
    """
    cfg = gguf.import_gguf(file, out, dtype)
    print(f"{out}: {cfg.model_type}, {_size(cfg)}, {dtype}")


def export(source: Path, *, out: Path, dtype: Dtype = "float32") -> None:
    """Write a trained policy as a Hugging Face folder that transformers, vLLM, SGLang and sat-jax load.

    Args:
        source: Run folder (its newest checkpoint), one of its checkpoints (RUN/checkpoints/STEP), or a Hugging Face
            folder.
        out: Folder to write; must not exist, or be empty.
        dtype: Of the written weights; float32 is what training keeps.
    """
    step = int(source.name) if source.parent.name == "checkpoints" and source.name.isdigit() else None
    folder = source if step is None else source.parent.parent
    config = stored_config(folder, loss=False)
    if config is None:
        policy = load_policy(folder, dtype)
        cfg, params, files, origin = policy.config, policy.params, policy.source, str(folder)
    else:
        trained = build.build_policy(config, folder)
        stored, step = checkpoint_params(folder, config, trained, step)
        cfg, files, origin = _with_token_ids(trained), trained.folder, f"{folder}, step {step}"
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), stored)
    hub.save_hf(out, cfg, params, source=files)
    print(f"{out}: {cfg.model_type}, {_size(cfg)}, {dtype}, from {origin}")


def _with_token_ids(policy: build.Policy) -> model.ModelConfig:
    """The configuration with the tokenizer's ids, where a policy that was initialised here names none."""
    cfg, tokenizer = policy.config, policy.tokenizer
    return dataclasses.replace(
        cfg,
        eos_token_id=cfg.eos_token_id or tokenizer.eos_ids,
        pad_token_id=tokenizer.pad_id if cfg.pad_token_id is None else cfg.pad_token_id,
        bos_token_id=tokenizer.bos_id if cfg.bos_token_id is None else cfg.bos_token_id,
    )


def _size(cfg: model.ModelConfig) -> str:
    return f"{model.parameter_count(cfg):,} parameters"
