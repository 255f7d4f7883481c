"""What a policy looks like, and how its layers run together."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np

from sat_jax.names import nearest

ModelType = Literal["qwen3_moe", "qwen3", "llama", "mixtral"]

MOE_TYPES = ("qwen3_moe", "mixtral")


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
        if self.num_experts and self.model_type not in MOE_TYPES:
            raise ValueError(
                f"num_experts = {self.num_experts} with model_type {self.model_type!r}: use one of "
                f"{', '.join(MOE_TYPES)}"
            )
        if self.model_type in MOE_TYPES and not 1 <= self.num_experts_per_tok <= self.num_experts:
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

    def check_ids(self, ids: np.ndarray, name: str) -> None:
        """Raises ``ValueError`` where one of ``ids`` is outside of the vocabulary: a lookup would clip it silently."""
        if (outside := np.flatnonzero((ids < 0) | (ids >= self.vocab_size))).size:
            raise ValueError(
                f"{name}, token {outside[0]}: id {ids[outside[0]]} lies outside the model's vocabulary of "
                f"{self.vocab_size}: use the tokenizer that belongs to the model"
            )

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
