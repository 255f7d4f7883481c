"""What a run is: one frozen record, made by a pure function in ``configs/``, overridden by dotted paths.

Plain data that cannot contradict itself: every number declares its range, and what relates several fields is checked on
construction, whoever constructs. Building things from it is the trainer's business.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from sat_jax import losses
from sat_jax.checked import Checked, Count, Natural, NonNegative, Positive, Range
from sat_jax.data.prompts import PromptOptions
from sat_jax.losses import LossConfig
from sat_jax.losses.advantages import AdvantageKind
from sat_jax.losses.methods import REPLAY_SUFFIX
from sat_jax.model import ModelConfig
from sat_jax.rollout.engine import MAX_SUPPORT, SamplingParams
from sat_jax.rollout.schedule import Schedule, fixed_delay

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class PolicyConfig(Checked, section="policy"):
    """Where the policy comes from: a Hugging Face folder, or a fresh initialisation of ``init``."""

    path: str = ""
    """Hugging Face folder (config.json, safetensors, tokenizer.json). Empty: ``init``, from the run's seed."""
    init: ModelConfig | None = None
    """Shape of a policy that starts from random weights."""
    tokenizer: str = ""
    """Tokenizer folder, or ``toy`` for that of the sorting task. Empty: the policy's own folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path and self.init is not None:
            raise ValueError(f"policy.path = {self.path!r} and policy.init are both given: keep one of them")


@dataclass(frozen=True)
class DataConfig(Checked, section="data"):
    """Where prompts come from."""

    source: str = ""
    """A ``.jsonl`` or ``.parquet`` file, ``tfds:NAME/SPLIT``, ``reasoning_gym:TASK`` or ``toy:sort6/train``."""
    prompts: PromptOptions = field(default_factory=lambda: PromptOptions(max_prompt_len=1024))
    """Columns, chat template, length limit, duplicates."""
    shuffle: bool = True
    """Shuffle every epoch by the run's seed."""


@dataclass(frozen=True)
class RolloutConfig(Checked, section="rollout"):
    """How generation and optimisation interleave (paper, Sec. 2.1 and App. B)."""

    prompts_per_step: Count = 32
    """Prompt groups of one batch: what is sampled together, and trained on in ``learner.updates_per_batch`` updates."""
    n_samples_per_prompt: Annotated[int, Range(2, 2**20, why="a group of one has no baseline of its own")] = 8
    """Responses per group (G)."""
    schedule: Schedule = field(default_factory=lambda: fixed_delay(8))
    """Which policy version samples which batch: ``synchronous()``, ``fixed_delay(n)``, ``batchwise(n)`` or
    ``free_running()``. All but the last follow a fixed order and repeat by seed."""
    max_staleness: Natural = 16
    """Bound on a group's oldest token at its own update, in versions. Older groups meet ``stale_policy``."""
    stale_policy: Literal["drop", "requeue"] = "drop"
    """A group beyond the bound is dropped, or its prompt is issued again; both are counted."""
    overlap: bool = False
    """Engine and learner compute at the same time: right where they have devices of their own. In scheduled regimes it
    changes no result."""
    queue_groups: Natural = 0
    """Capacity of the rollout queue in groups; 0: what the schedule needs."""
    group_timeout_s: Positive = 600.0
    """A group that takes longer fails the run, by name."""


@dataclass(frozen=True)
class EngineConfig(Checked, section="engine"):
    """The in-process engine that samples."""

    slots: Count = 256
    """Responses decoded side by side; with the context length it fixes the memory of the KV cache."""
    dtype: Dtype = "float32"
    """Type of the engine's weights and cache; ``bfloat16`` is a real source of mismatch."""
    selection_noise: NonNegative = 0.0
    """Standard deviation of noise on the engine's router logits when it *selects* experts: a laboratory stand-in for an
    engine whose kernels route differently. 0 in every honest run."""


@dataclass(frozen=True)
class OptimizerConfig(Checked, section="optimizer"):
    """Adam with the paper's betas."""

    lr: NonNegative = 1e-6
    warmup_steps: Natural = 0
    """Linear warm-up from 0."""
    decay_steps: Natural = 0
    """Linear decay to 0 over this many steps after the warm-up; 0: constant."""
    b1: Annotated[float, Range(0, 1, below=True)] = 0.9
    b2: Annotated[float, Range(0, 1, below=True)] = 0.98
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    """Decoupled, on every parameter."""
    max_grad_norm: NonNegative = 0.0
    """Clip the global gradient norm to this; 0: off."""


@dataclass(frozen=True)
class LearnerConfig(Checked, section="learner"):
    """What a learner step computes, and how."""

    updates_per_batch: Count = 1
    """Optimizer updates that one batch is split into (verl's mini-batches): whole groups go to one update, quantile and
    denominators are per update. Weights are published, checkpoints written and evaluations made at batch ends."""
    routing_replay: bool = True
    """R3 (40): the learner's mixture of experts uses the expert sets recorded at rollout; ``-r3`` in the method's
    label. A dense policy has none to replay."""
    support_replay: bool = True
    """Top-p replay (50): the learner's log-probs are over the tokens that each one was drawn from, as the engine
    recorded them. Where sampling truncates it needs a ``sampling.top_k`` of at most 1024, which ``top_p`` and ``min_p``
    narrow further; elsewhere there is nothing to replay. False is for comparison: ratios are then off by the mass
    outside."""
    router_aux_loss_coef: NonNegative = 0.0
    """Weight of the load-balancing loss; the paper uses none."""
    router_z_loss_coef: NonNegative = 0.0
    """Weight of the router z-loss."""
    compute_dtype: Dtype = "float32"
    """Matmul type. Master weights, logits and everything after them are float32."""
    log_delta: bool = False
    """Recompute each batch under the weights that sampled it, which are kept, and report the two halves of d (2):
    ``async/delta_pi`` and ``async/delta_impl``."""
    micro_batches: Count = 1
    """Slices an update's rows are processed in. With more than one, a scoring pass without gradient comes first, so
    that the quantile and every gate are those of the whole update."""
    packing: bool = False
    """Put several sequences into a row. Saves the work on padding where lengths differ."""
    remat: Literal["none", "dots", "full"] = "none"
    """What a layer keeps for the backward pass: everything, matmul outputs, or only its input (least memory)."""
    scan_layers: bool = True
    """Compile one layer and loop over it; False unrolls the layers, which compiles longer."""
    head_chunk: Count = 1024
    """Tokens per chunk of the vocabulary head: ``head_chunk`` times the vocabulary, in float32, are in memory."""
    attention_block: Count = 1024
    """Queries whose attention scores are in memory at once."""


@dataclass(frozen=True)
class MeshConfig(Checked, section="mesh"):
    """How learner and engine are spread over all devices of this process; all 1: on the first device alone."""

    data: Count = 1
    """Rows are dealt out; every device holds the whole policy."""
    fsdp: Count = 1
    """Rows are dealt out, and parameters and optimizer state too: gathered layer by layer in the learner, once a
    version in the engine."""
    tensor: Count = 1
    """Attention heads, MLP columns and the vocabulary are split: for layers that are too large for one device."""
    expert: Count = 1
    """Experts are split; outside of the mixture layers the axis deals out rows."""

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor * self.expert

    @property
    def row_ways(self) -> int:
        """Into how many parts the rows of a batch are dealt."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True)
class WarmStartConfig(Checked, section="warm_start"):
    """Supervised learning before RL, on demonstrations that the data source makes."""

    steps: Count = 500
    batch_size: Count = 128
    lr: NonNegative = 2e-3
    warmup_steps: Natural = 20


@dataclass(frozen=True)
class EvaluationConfig(Checked, section="evaluation"):
    """avg@k and pass@k on held-out problems."""

    source: str = ""
    """Like ``data.source``. Empty: ``problems`` of the training source are set apart, by problem, never by sample."""
    problems: Count = 64
    """Held-out problems."""
    k: Count = 8
    """Samples per problem."""
    interval: Natural = 25
    """Learner steps between evaluations; 0: only before and after."""
    temperature: NonNegative = 1.0
    """0 is greedy decoding."""
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0


@dataclass(frozen=True)
class RewardConfig(Checked, section="reward"):
    """Who grades."""

    function: str = "sat_jax.rewards.toy:exact_match"
    """``module:function`` or ``file.py:function``; sat_jax's signature or verl's ``compute_score``."""
    workers: Annotated[int, Range(0, 4096)] = 0
    """Worker processes that can be killed; 0: in the rollout thread, for trusted and cheap functions."""
    timeout_s: Positive = 10.0
    """Limit for one grading, counted from when it starts; beyond it the reward is 0 and the verdict ``timeout``."""
    memory_mb: Annotated[int, Range(256, 2**31 - 1, why="an interpreter needs that much")] = 4096
    """Address space of one worker."""


@dataclass(frozen=True)
class ExperimentConfig(Checked, section=""):
    """One run. A function in ``configs/`` returns it; ``config.json`` in the run folder holds it."""

    name: str = "unnamed"
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Drives initialisation, data order, sampling and demonstrations."""
    steps: Count = 200
    """Learner updates."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineConfig = field(default_factory=EngineConfig)
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
    checkpoint_interval: Natural = 50
    """Learner steps between checkpoints; one is also written at the end and on Ctrl-C. 0: only then."""
    samples_per_step: Natural = 2
    """Rollouts written to samples.jsonl at every step."""
    report: bool = True
    """Draw report.html when the run ends; ``sat-jax report`` does so at any time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_updates(self)
        self.rollout.schedule.check(
            self.rollout.max_staleness,
            self.rollout.prompts_per_step,
            self.rollout.queue_groups or None,
            self.learner.updates_per_batch,
        )
        _check_rows(self)
        _check_sampling(self)

    @property
    def method(self) -> str:
        """The method's label: that of the loss, and ``-r3`` where routes are replayed."""
        return self.loss.label + REPLAY_SUFFIX * self.learner.routing_replay

    @property
    def groups_per_update(self) -> int:
        return self.rollout.prompts_per_step // self.learner.updates_per_batch

    @property
    def rows_per_update(self) -> int:
        return self.groups_per_update * self.rollout.n_samples_per_prompt

    @property
    def replays_support(self) -> bool:
        """Whether the engine records what every token was drawn from, and the learner renormalises over it (50)."""
        return self.sampling.truncates and self.learner.support_replay


def with_method(config: ExperimentConfig, name: str, **settings: Any) -> ExperimentConfig:
    """``config`` under another method: one of Table 1 (``sat-gspo-r3``) or any named loss; ``settings`` are the loss's.

    KL, entropy, radii and aggregation of the run stay; ``-r3`` replays the rollout's experts.
    """
    loss, replay = losses.split_method(name)
    kept = {key: getattr(config.loss, key) for key in _KEPT}
    return dataclasses.replace(
        config,
        loss=dataclasses.replace(loss, **(kept | settings)),
        learner=dataclasses.replace(config.learner, routing_replay=replay),
    )


_KEPT = (
    *("eps_low", "eps_high", "loss_agg_mode", "loss_scale_factor", "count_empty_rows", "kernel"),
    *("kl_loss_coef", "kl_loss_type", "kl_unit", "kl_unbiased", "entropy_coef"),
)
"""What of a loss is no matter of the method."""


def _check_updates(config: ExperimentConfig) -> None:
    updates, prompts = config.learner.updates_per_batch, config.rollout.prompts_per_step
    if prompts % updates:
        raise ValueError(
            f"learner.updates_per_batch = {updates} does not divide rollout.prompts_per_step = {prompts}: whole groups "
            "go to one update; choose a divisor"
        )
    if config.steps % updates:
        raise ValueError(
            f"steps = {config.steps} is not a multiple of learner.updates_per_batch = {updates}: a run ends with a "
            f"batch; use {config.steps // updates * updates or updates}"
        )
    if updates == 1 and "proximal_log_probs" in config.loss.needs():
        raise ValueError(
            f"loss {config.loss.label} takes its ratio to the proximal policy, the learner at the start of a batch, "
            "and with learner.updates_per_batch = 1 that is the current one: the ratio is 1 and cannot clip; use at "
            "least 2 updates per batch, or another loss"
        )


def _check_rows(config: ExperimentConfig) -> None:
    learner, mesh, rows = config.learner, config.mesh, config.rows_per_update
    if rows % learner.micro_batches:
        raise ValueError(
            f"learner.micro_batches = {learner.micro_batches} does not divide the {rows} rows of an update "
            f"({config.groups_per_update} prompts x {config.rollout.n_samples_per_prompt} samples): choose a divisor"
        )
    # Packing makes its own number of rows, padded to what the mesh needs.
    if rows // learner.micro_batches % mesh.row_ways and not learner.packing:
        raise ValueError(
            f"the mesh deals rows {mesh.row_ways} ways (data {mesh.data} x fsdp {mesh.fsdp} x expert {mesh.expert}), "
            f"which does not divide the {rows // learner.micro_batches} rows of a micro-batch: choose other "
            "rollout.prompts_per_step or learner.micro_batches, or a smaller mesh"
        )


def _check_sampling(config: ExperimentConfig) -> None:
    sampling = config.sampling
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature = 0: greedy decoding explores nothing; use a value above 0")
    if config.replays_support and not 1 <= sampling.top_k <= MAX_SUPPORT:
        raise ValueError(
            f"sampling: top_p = {sampling.top_p}, top_k = {sampling.top_k}, min_p = {sampling.min_p}: the learner "
            "replays the tokens that each one was drawn from, and their number needs a bound: set sampling.top_k to "
            f"1 .. {MAX_SUPPORT} (top_p and min_p narrow it further), or train with top_p 1, top_k 0, min_p 0 "
            "(evaluation may truncate as it likes)"
        )
