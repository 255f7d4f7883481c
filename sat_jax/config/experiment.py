"""What a run is: one frozen record, made by a pure function in ``configs/``, overridden by dotted paths.

The record is plain data. It knows how to be checked (``check``) and loaded (``load_config``); building things from it
is the trainer's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from sat_jax import losses
from sat_jax.data.prompts import PromptOptions
from sat_jax.losses import LossConfig
from sat_jax.losses.advantages import AdvantageKind
from sat_jax.model import ModelConfig
from sat_jax.rollout.engine import MAX_SUPPORT, SamplingParams
from sat_jax.rollout.schedule import Schedule, batchwise, fixed_delay, free_running, synchronous


@dataclass(frozen=True)
class PolicyConfig:
    """Where the policy comes from: a Hugging Face folder, or a fresh initialisation of ``init``."""

    path: str = ""
    """Hugging Face folder (config.json, safetensors, tokenizer.json). Empty: initialise ``init`` from the run's
    seed."""
    init: ModelConfig | None = None
    """Shape of a policy that starts from random weights; ignored when ``path`` is given."""
    tokenizer: str = ""
    """Tokenizer folder, or ``toy`` for that of the sorting task. Empty: the policy's own folder."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Matmul type of the learner. Master weights, logits and everything after them are float32."""
    remat: Literal["none", "dots", "full"] = "none"
    """What a layer keeps for the backward pass: everything, matmul outputs, or only its input (least memory)."""
    scan_layers: bool = True
    """Compile one layer and loop over it; False unrolls the learner's layers, which compiles longer."""


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from."""

    source: str = ""
    """A ``.jsonl`` or ``.parquet`` file, ``tfds:NAME/SPLIT``, ``reasoning_gym:TASK`` or ``toy:sort6/train``."""
    prompts: PromptOptions = field(default_factory=lambda: PromptOptions(max_prompt_len=1024))
    """Columns, chat template, length limit, duplicates."""
    shuffle: bool = True
    """Shuffle every epoch by the run's seed."""


@dataclass(frozen=True)
class RolloutConfig:
    """How generation and optimisation interleave (paper, Sec. 2.1 and App. B)."""

    prompts_per_step: int = 32
    """Prompt groups in one learner step."""
    n_samples_per_prompt: int = 8
    """Responses per group (G)."""
    regime: Literal["sync", "fixed_delay", "interval", "async"] = "fixed_delay"
    """``sync``: lag 0. ``fixed_delay``: every batch exactly ``fixed_delay`` versions old. ``interval``: weights are
    broadcast every ``update_weights_interval`` steps while the next batches are generated, so the lag cycles.
    ``async``: threads run freely and a response may span versions. All but ``async`` follow a fixed order and repeat
    by seed."""
    fixed_delay: int = 8
    """Policy versions between sampling and training in regime ``fixed_delay``; the first steps have less."""
    update_weights_interval: int = 8
    """Learner steps between two broadcasts in regime ``interval`` (in ``async``: 1 swaps as soon as possible)."""
    max_staleness: int = 16
    """Bound on a group's oldest token, in versions. Older groups are handled by ``stale_policy``, and counted."""
    stale_policy: Literal["drop", "requeue"] = "drop"
    """A group beyond the bound is dropped, or its prompt is issued again."""
    overlap: bool = False
    """Engine and learner compute at the same time. Right where they have devices of their own; on shared cores they
    only slow each other down. In scheduled regimes it changes no result."""
    queue_groups: int = 0
    """Capacity of the rollout queue in groups; 0: what the regime needs."""
    engine_slots: int = 256
    """Responses decoded side by side; with the context length it fixes the memory of the KV cache."""
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engine's weights and cache; ``bfloat16`` is a real source of mismatch."""
    selection_noise: float = 0.0
    """Standard deviation of noise on the engine's router logits when it *selects* experts: a laboratory stand-in for an
    engine whose kernels route differently. 0 in every honest run."""
    group_timeout_s: float = 600.0
    """A group that takes longer fails the run, by name."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the paper's betas."""

    lr: float = 1e-6
    warmup_steps: int = 0
    """Linear warm-up from 0."""
    decay_steps: int = 0
    """Linear decay to 0 over this many steps after the warm-up; 0: constant."""
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, on every parameter."""
    max_grad_norm: float = 0.0
    """Clip the global gradient norm to this; 0: off."""


@dataclass(frozen=True)
class LearnerConfig:
    """How a learner step is computed; changes cost, not results."""

    micro_batches: int = 1
    """Slices a batch is processed in. With more than one, a scoring pass without gradient comes first, so that the
    quantile and every gate are those of the whole batch."""
    routing_replay: bool = True
    """R3 (40): the learner's mixture of experts uses the expert sets recorded at rollout. Ignored for dense
    policies."""
    support_replay: bool = True
    """Top-p replay (50): the learner's log-probs are over the tokens that each one was drawn from, as the engine
    recorded them. Where sampling truncates it needs a ``sampling.top_k`` of at most 1024, which ``top_p`` and ``min_p``
    narrow further; elsewhere there is nothing to replay. False is for comparison: ratios are then off by the mass
    outside."""
    log_delta: bool = False
    """Also recompute each batch under the weights that sampled it, and report ``async/delta_pi`` and
    ``async/delta_impl``, the two halves of d (2). Keeps up to ``max_staleness + 1`` versions of the weights."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss; the paper uses none."""
    router_z_loss_coef: float = 0.0
    """Weight of the router z-loss."""
    packing: bool = False
    """Put several sequences into a row. Saves the work on padding where lengths differ; results are those of one
    sequence a row, up to rounding."""
    head_chunk: int = 1024
    """Tokens per chunk of the vocabulary head: ``head_chunk`` times the vocabulary, in float32, are in memory."""
    attention_block: int = 1024
    """Queries whose attention scores are in memory at once."""


@dataclass(frozen=True)
class MeshConfig:
    """How learner and engine are spread over the devices of this process; all 1: on the first device alone.

    The product must be the number of devices.
    """

    data: int = 1
    """Rows are dealt out; every device holds the whole policy."""
    fsdp: int = 1
    """Rows are dealt out, and parameters and optimizer state too: gathered layer by layer in the learner, once a
    version in the engine."""
    tensor: int = 1
    """Attention heads, MLP columns and the vocabulary are split: for layers that are too large for one device."""
    expert: int = 1
    """Experts are split; outside of the mixture layers the axis deals out rows."""

    @property
    def size(self) -> int:
        """Devices."""
        return self.data * self.fsdp * self.tensor * self.expert

    @property
    def row_ways(self) -> int:
        """Into how many parts the rows of a batch are dealt."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised learning before RL, on demonstrations that the data source makes."""

    steps: int = 500
    batch_size: int = 128
    lr: float = 2e-3
    warmup_steps: int = 20


@dataclass(frozen=True)
class EvaluationConfig:
    """avg@k and pass@k on held-out problems."""

    source: str = ""
    """Like ``data.source``. Empty: ``problems`` of the training source are set apart, by problem, never by sample."""
    problems: int = 64
    """Held-out problems."""
    k: int = 8
    """Samples per problem."""
    interval: int = 25
    """Learner steps between evaluations; 0: only before and after."""
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class RewardConfig:
    """Who grades."""

    function: str = "sat_jax.rewards.toy:exact_match"
    """``module:function``; sat_jax's signature or verl's ``compute_score``."""
    workers: int = 0
    """Worker processes that can be killed; 0: in the rollout thread, for trusted and cheap functions."""
    timeout_s: float = 10.0
    """Limit for one grading, counted from when it starts; beyond it the reward is 0 and the verdict ``timeout``."""
    memory_mb: int = 4096
    """Address space of one worker."""


@dataclass(frozen=True)
class ExperimentConfig:
    """One run. A function in ``configs/`` returns it; ``config.json`` in the run folder holds it."""

    name: str = "unnamed"
    seed: int = 0
    """Drives initialisation, data order, sampling and demonstrations."""
    steps: int = 200
    """Learner steps."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageKind = "group_std_unbiased"
    """Baseline and scale of a group; see ``losses.group_advantages``."""
    loss: LossConfig = field(default_factory=lambda: losses.method("sat-gspo"))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    warm_start: WarmStartConfig | None = None
    """None: RL starts from the policy as it is."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint_interval: int = 50
    """Learner steps between checkpoints; one is also written at the end and on Ctrl-C. 0: only then."""
    samples_per_step: int = 2
    """Rollouts written to samples.jsonl at every step."""


def check(config: ExperimentConfig) -> None:
    """Reject a configuration that cannot work, before anything is built or written.

    Raises:
        ValueError: the first contradiction found: its value, the rule and the remedy.
    """
    rollout, learner = config.rollout, config.learner
    for name, value in (
        ("steps", config.steps),
        ("rollout.prompts_per_step", rollout.prompts_per_step),
        ("rollout.n_samples_per_prompt", rollout.n_samples_per_prompt),
        ("rollout.engine_slots", rollout.engine_slots),
        ("rollout.update_weights_interval", rollout.update_weights_interval),
        ("learner.micro_batches", learner.micro_batches),
        ("learner.head_chunk", learner.head_chunk),
        ("learner.attention_block", learner.attention_block),
        ("mesh.data", config.mesh.data),
        ("mesh.fsdp", config.mesh.fsdp),
        ("mesh.tensor", config.mesh.tensor),
        ("mesh.expert", config.mesh.expert),
        ("sampling.max_new_tokens", config.sampling.max_new_tokens),
        ("evaluation.k", config.evaluation.k),
        ("evaluation.problems", config.evaluation.problems),
    ):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    for name, value in (
        ("seed", config.seed),
        ("rollout.fixed_delay", rollout.fixed_delay),
        ("rollout.max_staleness", rollout.max_staleness),
        ("rollout.queue_groups", rollout.queue_groups),
        ("checkpoint_interval", config.checkpoint_interval),
        ("samples_per_step", config.samples_per_step),
        ("evaluation.interval", config.evaluation.interval),
    ):
        if value < 0:
            raise ValueError(f"{name} = {value}: must not be negative")
    if rollout.n_samples_per_prompt == 1:
        raise ValueError(
            f"rollout.n_samples_per_prompt = 1 with advantage = '{config.advantage}': a group of one has no baseline "
            "of its own, every advantage would be 0; use at least 2 samples per prompt"
        )
    schedule(rollout).check(rollout.max_staleness, rollout.prompts_per_step, rollout.queue_groups or None)
    rows = rollout.prompts_per_step * rollout.n_samples_per_prompt
    if rows % learner.micro_batches:
        raise ValueError(
            f"learner.micro_batches = {learner.micro_batches} does not divide the {rows} rows of a batch "
            f"({rollout.prompts_per_step} prompts x {rollout.n_samples_per_prompt} samples): choose a divisor"
        )
    # Packing makes its own number of rows, padded to what the mesh needs.
    if rows // learner.micro_batches % config.mesh.row_ways and not learner.packing:
        raise ValueError(
            f"the mesh deals rows {config.mesh.row_ways} ways (data {config.mesh.data} x fsdp {config.mesh.fsdp} x "
            f"expert {config.mesh.expert}), which does not divide the {rows // learner.micro_batches} rows of a "
            "micro-batch: choose other rollout.prompts_per_step or learner.micro_batches, or a smaller mesh"
        )
    if replays_support(config) and not 1 <= config.sampling.top_k <= MAX_SUPPORT:
        raise ValueError(
            f"sampling: top_p = {config.sampling.top_p}, top_k = {config.sampling.top_k}, min_p = "
            f"{config.sampling.min_p}: the learner replays the tokens that each one was drawn from, and their number "
            f"needs a bound: set sampling.top_k to 1 .. {MAX_SUPPORT} (top_p and min_p narrow it further), or train "
            "with top_p 1, top_k 0, min_p 0 (evaluation may truncate as it likes)"
        )
    if config.sampling.temperature <= 0:
        raise ValueError(
            f"sampling.temperature = {config.sampling.temperature}: greedy decoding explores nothing; use a "
            "value above 0"
        )
    rates = {"optimizer.lr": config.optimizer.lr, "evaluation.temperature": config.evaluation.temperature}
    if config.warm_start is not None:
        rates["warm_start.lr"] = config.warm_start.lr
    for name, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise ValueError(f"{name} = {rate}: must be finite and not negative")
    if not 0 < config.evaluation.top_p <= 1:
        raise ValueError(f"evaluation.top_p = {config.evaluation.top_p}: must lie in (0, 1]; 1 turns it off")


def replays_support(config: ExperimentConfig) -> bool:
    """Whether the engine records what every token was drawn from, and the learner's log-probs are over that (50)."""
    return config.sampling.truncates and config.learner.support_replay


def schedule(rollout: RolloutConfig) -> Schedule:
    """The regime as arithmetic: which policy version samples the batch of which learner step."""
    if rollout.regime == "sync":
        return synchronous()
    if rollout.regime == "fixed_delay":
        return fixed_delay(rollout.fixed_delay)
    if rollout.regime == "interval":
        return batchwise(rollout.update_weights_interval)
    return free_running(rollout.update_weights_interval)
