"""What a policy looks like, and how its layers run together."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import numpy as np

from sat_jax.checked import INT_MAX, Checked, Count, Natural, NonNegative, Positive, Range

ModelType = Literal["qwen3_moe", "qwen3", "llama", "mixtral"]

MOE_TYPES = ("qwen3_moe", "mixtral")


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked, section="policy.init"):
    """A decoder-only transformer: Qwen3, Qwen3-MoE, Llama or Mixtral. Hashable; fields are named as in ``config.json``.

    Qwen3 normalises every query and key head (RMSNorm); Llama does not. Mixtral is Llama with a mixture in every layer
    (arXiv:2401.04088): no biases, gate weights that sum to 1.
    """

    model_type: ModelType
    vocab_size: Count
    """V, rows of the embedding; may exceed the tokenizer's size."""
    hidden_size: Count
    """D."""
    num_hidden_layers: Count
    """All layers, dense and mixture-of-experts."""
    num_attention_heads: Count
    num_key_value_heads: Count
    """Divides ``num_attention_heads``."""
    head_dim: Annotated[int, Range(2, INT_MAX)]
    """Width of one head; even, for rotary embeddings turn pairs."""
    intermediate_size: Natural = 0
    """Width of a dense layer's MLP; may be 0 when no layer is dense."""
    moe_intermediate_size: Natural = 0
    """Width of one expert."""
    num_experts: Natural = 0
    """E; 0 makes every layer dense."""
    num_experts_per_tok: Natural = 0
    """K."""
    norm_topk_prob: bool = True
    """The K gate weights are a softmax over the chosen experts; False: the full softmax, gathered."""
    decoder_sparse_step: Count = 1
    """Layer ``i`` is a mixture only if ``(i + 1) % decoder_sparse_step == 0``."""
    mlp_only_layers: tuple[Natural, ...] = ()
    """Layers that are dense whatever the step says."""
    rms_norm_eps: NonNegative = 1e-6
    """Added to the mean square."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies."""
    max_position_embeddings: Count = 4096
    """Longest context the checkpoint was made for, in tokens."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""
    attention_bias: bool = False
    """Biases on the q, k, v and output projections."""
    mlp_bias: bool = False
    """Biases in dense MLPs (Llama only)."""
    initializer_range: NonNegative = 0.02
    """Standard deviation of freshly initialised matrices."""
    bos_token_id: Natural | None = None
    eos_token_id: tuple[Natural, ...] = ()
    """Every id that ends a response."""
    pad_token_id: Natural | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.section}.num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}: query heads share key heads in equal groups"
            )
        if self.head_dim % 2:
            raise ValueError(f"{self.section}.head_dim = {self.head_dim} is odd: rotary embeddings turn pairs")
        if self.num_experts and self.model_type not in MOE_TYPES:
            raise ValueError(
                f"{self.section}.num_experts = {self.num_experts} with model_type {self.model_type!r}: use one of "
                f"{', '.join(MOE_TYPES)}"
            )
        if self.model_type in MOE_TYPES and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"{self.section}.num_experts_per_tok = {self.num_experts_per_tok} with num_experts = "
                f"{self.num_experts}: a token needs between 1 and all experts"
            )
        dense = self.num_hidden_layers - len(self.moe_layers)
        if self.model_type == "mixtral" and (dense or not self.norm_topk_prob or self.attention_bias or self.mlp_bias):
            raise ValueError(
                f"{self.section}.model_type 'mixtral' with dense layers, biases or norm_topk_prob = False: its "
                "checkpoints cannot say so; use 'qwen3_moe'"
            )
        if self.moe_layers and not self.moe_intermediate_size:
            raise ValueError(f"{self.section}.moe_intermediate_size = 0: an expert needs a width of at least 1")
        if dense and not self.intermediate_size:
            raise ValueError(f"{self.section}.intermediate_size = 0: a dense layer needs a width of at least 1")

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
    """Consecutive layers of one kind."""

    name: str
    """Key of the run in the parameter tree."""
    first: int
    """Number of its first layer."""
    length: int
    moe: bool
    first_moe: int
    """MoE layers before this run: its layer ``i`` is MoE ordinal ``first_moe + i``."""
