"""A policy in three lines: load a Hugging Face folder, look at it, let it generate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sat_jax import hub, model
from sat_jax.data.records import Routes, check_routes
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.rollout.engine import Request, SamplingParams
from sat_jax.rollout.local import LocalEngine
from sat_jax.types import NATIVE_ROUTE, FinishReason, Prompt, Trajectory

_LENGTH_STEP = 64  # contexts are rounded up to a multiple of this, so that a few prompts more compile nothing new


@dataclasses.dataclass(frozen=True)
class Generation:
    """Responses in the order of their prompts; each list has one entry a response."""

    token_ids: list[list[int]]
    """Sampled ids, the end-of-sequence token included where one was sampled."""
    log_probs: list[np.ndarray]
    """Float32 ``[R]``, nats, at the sampling temperature (at temperature 0: at temperature 1)."""
    routed_experts: list[np.ndarray] | None
    """Int32 ``[P + R, L, K]``, of every token that was fed to the model and -1 behind them; None for a dense model."""
    texts: list[str]
    """Empty strings without a tokenizer."""
    finish_reasons: list[FinishReason]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Configuration, parameters and tokenizer of the folder ``source``. ``load_policy`` makes it.

    Without a ``tokenizer.json`` there the tokenizer is None, and prompts are lists of ids.
    """

    config: model.ModelConfig
    params: model.Params
    tokenizer: Tokenizer | None
    source: Path

    def logits(self, tokens: ArrayLike, attention_mask: ArrayLike | None = None) -> jax.Array:
        """Float32 ``[B, T, V]`` of ids ``[B, T]``, 0 at padding. For looking: training never holds this array.

        ``attention_mask`` ``[B, T]`` is 0 at padding, on either side; None: no padding. Raises ``ValueError`` for an id
        outside the vocabulary, a row longer than the model's context, a mask of another shape.
        """
        ids, mask = self._checked(tokens, attention_mask)
        return _logits(self.params, self.config, ids, mask)

    def log_probs(self, tokens: ArrayLike, attention_mask: ArrayLike | None = None) -> jax.Array:
        """Float32 ``[B, T - 1]``: entry ``t`` is ``log p(tokens[t + 1] | tokens[<= t])``, 0 where either is padding;
        arguments and errors as for ``logits``."""
        ids, mask = self._checked(tokens, attention_mask)
        return _log_probs(self.params, self.config, ids, mask)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = False,
        seed: int = 0,
        n_slots: int = 16,
    ) -> Generation:
        """One response to each prompt.

        Args:
            prompts: texts (encoded as they are: render chats first), or lists of ids.
            max_new_tokens, temperature, top_p, top_k, min_p, stop, ignore_eos: see ``SamplingParams``.
            seed: prompt ``i`` samples with ``seed + i``.
            n_slots: responses decoded side by side.

        Raises:
            ValueError: no or empty prompts, an id outside the vocabulary, texts without a tokenizer, a context longer
                than the model's.
        """
        if isinstance(prompts, str) or not len(prompts):
            raise ValueError(f"prompts = {prompts!r}: give a list with at least one prompt")
        rows = [self._encode(prompt, i) for i, prompt in enumerate(prompts)]
        longest = max(len(row) for row in rows) + max_new_tokens
        limit = self.config.max_position_embeddings
        if longest > limit:
            what = f"prompt and response take {longest} tokens, the model's context is {limit}"
            raise ValueError(f"{what}: shorten either")
        slots = min(n_slots, len(rows))
        max_len = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, limit)
        dtype = str(jax.tree.leaves(self.params)[0].dtype)
        engine = LocalEngine(self.config, self.params, self.tokenizer, n_slots=slots, max_len=max_len, dtype=dtype)
        sampling = SamplingParams(temperature, top_p, top_k, min_p, max_new_tokens, stop, ignore_eos)
        requests = [
            Request(str(i), Prompt(str(i), "", row, "", "generate"), i, sampling, seed + i)
            for i, row in enumerate(rows)
        ]
        done: dict[int, Trajectory] = {t.sample_index: t for t in engine.generate(requests)}
        engine.close()
        ordered = [done[i] for i in range(len(rows))]
        return Generation(
            token_ids=[t.response_ids.tolist() for t in ordered],
            log_probs=[t.log_probs for t in ordered],
            routed_experts=_routes(ordered, self.config) if self.config.moe_layers else None,
            texts=[t.text for t in ordered],
            finish_reasons=[t.finish_reason for t in ordered],
        )

    def save(self, hf_dir: str | Path) -> Path:
        """Writes a Hugging Face folder that loads back to the same bits; errors as for ``hub.save_hf``."""
        return hub.save_hf(hf_dir, self.config, self.params, source=self.source)

    def _encode(self, prompt: Any, number: int) -> np.ndarray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{self.source} has no tokenizer.json: give prompts as lists of token ids")
            return np.array(self.tokenizer.encode(prompt), np.int32)
        ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            wrap = "; one prompt alone is wrapped: [[1, 2, 3]]" if ids.ndim == 0 else ""
            raise ValueError(f"prompt {number} = {prompt!r:.60}: give prompts as texts or as lists of ids{wrap}")
        self.config.check_ids(ids, f"prompt {number}")
        return ids.astype(np.int32)

    def _checked(self, tokens: ArrayLike, attention_mask: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
        try:
            ids = np.asarray(tokens)
        except ValueError as error:
            raise ValueError("tokens are rows of several lengths: pad them, and give an attention_mask") from error
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            wrap = "; wrap a single row: [[1, 2, 3]]" if ids.ndim == 1 else ""
            raise ValueError(f"tokens are {ids.dtype}{list(ids.shape)}: give integers [B, T]{wrap}")
        for number, row in enumerate(ids):
            self.config.check_ids(row, f"row {number}")
        limit = self.config.max_position_embeddings
        if ids.shape[1] > limit:
            raise ValueError(f"rows of {ids.shape[1]} tokens exceed the model's context of {limit}: shorten them")
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
        if mask.shape != ids.shape:
            shapes = f"attention_mask has shape {list(mask.shape)}, tokens have {list(ids.shape)}"
            raise ValueError(f"{shapes}: give one entry each")
        return jnp.asarray(ids, jnp.int32), jnp.asarray(mask > 0, jnp.int32)


def load_policy(hf_dir: str | Path, dtype: str = "float32", shardings: model.Params | None = None) -> Policy:
    """The policy of a Hugging Face folder: Qwen3-MoE, dense Qwen3 or a Llama.

    The folder holds ``config.json``, safetensors and, where prompts are to be texts, the tokenizer's files; errors as
    for ``hub.read_config`` and ``hub.load_params``, and for a tokenizer with ids outside the model's vocabulary.

    Args:
        dtype: of the parameters, ``float32`` or ``bfloat16``.
        shardings: ``model.param_shardings`` where the model is spread over devices.
    """
    folder = Path(hf_dir)
    if (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is a run folder: `sat-jax export {folder} --out HF_DIR`, then load that")
    config = hub.read_config(folder)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    if tokenizer is not None:
        tokenizer.check_vocabulary(config.vocab_size)
    return Policy(config, hub.load_params(folder, config, dtype, shardings), tokenizer, folder)


def _routes(trajectories: Sequence[Trajectory], cfg: model.ModelConfig) -> list[np.ndarray]:
    """int32 ``[P + R, L, K]`` each: the last token was not fed to the model."""
    routes = Routes(len(cfg.moe_layers), cfg.num_experts_per_tok, cfg.num_experts, cfg.moe_layers)
    found = check_routes(trajectories, routes)
    return [np.pad(r.astype(np.int32), ((0, 1), (0, 0), (0, 0)), constant_values=NATIVE_ROUTE) for r in found]


@functools.partial(jax.jit, static_argnums=1)
def _logits(params: model.Params, cfg: model.ModelConfig, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    hidden = model.forward(params, cfg, tokens, segment_ids=mask).hidden
    return jnp.where(mask[..., None] > 0, model.logits(params, cfg, hidden), 0)


@functools.partial(jax.jit, static_argnums=1)
def _log_probs(params: model.Params, cfg: model.ModelConfig, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    hidden = model.forward(params, cfg, tokens, segment_ids=mask).hidden
    found = model.token_log_probs(params, cfg, hidden, tokens, with_entropy=False).log_probs
    return jnp.where(mask[:, 1:] * mask[:, :-1] > 0, found[:, 1:], 0)
