"""From a configuration to the parts of a run: policy, tokenizer, prompts, engine, learner. Everything that can be wrong
with the input is found here, before a step is taken."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

from sat_jax import hub, kernels, model
from sat_jax.config import ExperimentConfig
from sat_jax.data.prompts import load_prompts
from sat_jax.data.records import Routes, Support
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.data.toy import SortTask, write_tokenizer
from sat_jax.learner import LearnerSpec, adam, learning_rate
from sat_jax.model import SAMPLING_RULES, ForwardOptions, ModelConfig, Placement
from sat_jax.rewards.grader import Grader
from sat_jax.rollout.local import PREFILL_ROWS, LocalEngine
from sat_jax.types import Prompt

_TOY = "toy"


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is trained: architecture, initial float32 weights, and the mesh that they lie on, if any."""

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    folder: Path  # the tokenizer's files, copied into every export
    placement: Placement | None = None


@dataclasses.dataclass(frozen=True)
class Problems:
    """What it is trained and evaluated on. No problem is in both."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    task: SortTask | None  # makes demonstrations, where the source has any

    @property
    def longest_prompt(self) -> int:
        return max(len(p.token_ids) for p in (*self.train, *self.heldout))


def build_placement(config: ExperimentConfig) -> Placement | None:
    """The mesh of ``config.mesh`` over the devices of this process, whose number must fit; None for one device."""
    if jax.process_count() > 1:
        raise ValueError(
            f"this is process {jax.process_index()} of {jax.process_count()}: training runs in one process, with all "
            "devices of its machine; start it without jax.distributed"
        )
    sizes = dataclasses.asdict(config.mesh)
    if config.mesh.size == 1:
        return None
    if config.mesh.size != jax.device_count():
        kind = jax.devices()[0].platform
        remedy = f"--xla_force_host_platform_device_count={config.mesh.size} in XLA_FLAGS makes so many of a CPU"
        raise ValueError(
            f"mesh {' x '.join(f'{axis} {size}' for axis, size in sizes.items())} = {config.mesh.size} devices, and "
            f"this process has {jax.device_count()} ({kind}): choose sizes whose product is {jax.device_count()}"
            + (f"; {remedy}" if kind == "cpu" else "")
        )
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return Placement(mesh)


def build_policy(config: ExperimentConfig, run_dir: Path, placement: Placement | None = None) -> Policy:
    """The policy of ``config.policy``: read from a Hugging Face folder, or freshly initialised, on the mesh if any."""
    source = config.policy
    if source.path:
        folder = Path(source.path)
        model_config = hub.read_config(folder)
        tokenizer_folder = Path(source.tokenizer) if source.tokenizer else folder
    else:
        if source.init is None:
            raise ValueError("policy: neither path nor init is set; give --model HF_DIR, or a configuration with init")
        model_config = source.init
        if not source.tokenizer:
            raise ValueError("policy.tokenizer is empty: a fresh policy needs a tokenizer folder, or 'toy'")
        tokenizer_folder = run_dir / "tokenizer" if source.tokenizer == _TOY else Path(source.tokenizer)
        if source.tokenizer == _TOY and not (tokenizer_folder / "tokenizer.json").exists():
            write_tokenizer(tokenizer_folder)
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    tokenizer.check_vocabulary(model_config.vocab_size)
    if not tokenizer.eos_ids:
        raise ValueError(
            f"{tokenizer_folder} names no end-of-sequence token: set eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json, or every response runs into its budget"
        )
    where = None if placement is None else model.param_shardings(model_config, placement.mesh)
    params = (
        hub.load_params(source.path, model_config, "float32", where)
        if source.path
        else model.init_params(jax.random.key(config.seed), model_config, "float32", where)
    )
    return Policy(model_config, params, tokenizer, tokenizer_folder, placement)


def build_problems(config: ExperimentConfig, tokenizer: Tokenizer) -> Problems:
    """Training prompts and held-out prompts."""
    source, wanted = config.data.source, config.evaluation.problems
    prompts = load_prompts(source, tokenizer, config.data.prompts)
    task = SortTask(n_digits=int(source[len("toy:sort")])) if source.startswith("toy:sort") else None
    if config.evaluation.source:
        heldout = list(load_prompts(config.evaluation.source, tokenizer, config.data.prompts))[:wanted]
        texts = {p.text for p in heldout}
    else:
        distinct = sorted({p.text for p in prompts}, key=lambda text: hashlib.sha256(text.encode()).digest())
        if len(distinct) <= wanted:
            raise ValueError(
                f"{source} has {len(distinct)} different problems and evaluation.problems = {wanted} are to be held "
                "out: nothing would be left to train on; lower it, or name an evaluation.source"
            )
        texts = set(distinct[:wanted])
        held = {p.text: p for p in reversed(prompts) if p.text in texts}
        heldout = [held[text] for text in distinct[:wanted]]
    train = [p for p in prompts if p.text not in texts]
    if not train:
        raise ValueError(f"every problem of {source} is held out by evaluation.source: use different problems")
    return Problems(train, heldout, task)


def context_length(config: ExperimentConfig, policy: ModelConfig, longest_prompt: int) -> int:
    """Tokens of the longest sequence a run can meet; ``ValueError`` beyond the model's context."""
    longest = longest_prompt + config.sampling.max_new_tokens
    if longest > policy.max_position_embeddings:
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) and sampling.max_new_tokens = "
            f"{config.sampling.max_new_tokens} exceed the model's context of {policy.max_position_embeddings}: shorten "
            "one of them"
        )
    return longest


def build_learner(config: ExperimentConfig, policy: ModelConfig, placement: Placement | None = None) -> LearnerSpec:
    """The static description of every learner step of the run."""
    o, learner = config.optimizer, config.learner
    schedule = learning_rate(o.lr, o.warmup_steps, o.decay_steps)
    spread = () if placement is None else (placement.mesh, placement.mesh_axes("batch"))
    return LearnerSpec(
        model=policy,
        loss=kernels.make_loss(config.loss, *spread),
        optimizer=adam(schedule, o.b1, o.b2, o.eps, o.weight_decay, o.max_grad_norm),
        schedule=schedule,
        temperature=config.sampling.temperature,
        micro_batches=learner.micro_batches,
        routing_replay=learner.routing_replay and bool(policy.moe_layers),
        router_aux_loss_coef=learner.router_aux_loss_coef,
        router_z_loss_coef=learner.router_z_loss_coef,
        packed=learner.packing,
        head_chunk=learner.head_chunk,
        forward=ForwardOptions(
            compute_dtype=None if learner.compute_dtype == "float32" else learner.compute_dtype,
            remat=learner.remat,
            scan_layers=learner.scan_layers,
            attention_block=learner.attention_block,
            placement=placement,
        ),
    )


def build_engine(
    config: ExperimentConfig, policy: Policy, params: Any, version: int, max_len: int, support: Support | None = None
) -> LocalEngine:
    """An in-process engine that samples with a copy of ``params`` as ``version``, where they are: on one device, or on
    their mesh. With ``support`` it records what every token was drawn from.

    On a mesh its rows, slots and KV cache are dealt out like the learner's rows. Its copy of the weights is cut by
    ``tensor`` and ``expert`` only: gathering them over ``fsdp`` for every token would be all that it does.
    """
    settings = config.engine
    rows = config.rollout.prompts_per_step * config.rollout.n_samples_per_prompt
    placement = None if policy.placement is None else Placement(policy.placement.mesh, SAMPLING_RULES)
    ways = 1 if placement is None else placement.ways("batch")

    def dealt(n: int) -> int:
        return -(-n // ways) * ways

    return LocalEngine(
        policy.config,
        params,
        policy.tokenizer,
        version=version,
        n_slots=dealt(min(settings.slots, rows)),
        max_len=max_len,
        dtype=settings.dtype,
        prefill_rows=dealt(PREFILL_ROWS),
        selection_noise=settings.selection_noise,
        options=ForwardOptions(placement=placement),
        support=0 if support is None else support.size,
    )


def method_label(config: ExperimentConfig, policy: ModelConfig) -> str:
    """What the run is called by its method: ``-r3`` only where there are routes to replay."""
    return config.method if policy.moe_layers else config.loss.label


def build_grader(config: ExperimentConfig) -> Grader:
    """The reward function behind its workers."""
    reward = config.reward
    return Grader(reward.function, workers=reward.workers, timeout_s=reward.timeout_s, memory_mb=reward.memory_mb)


def recorded_routes(policy: ModelConfig) -> Routes | None:
    """What recorded experts must look like for this policy; None where it is dense."""
    layers = len(policy.moe_layers)
    return Routes(layers, policy.num_experts_per_tok, policy.num_experts) if layers else None


def recorded_support(config: ExperimentConfig, policy: ModelConfig) -> Support | None:
    """What recorded supports must look like in this run; None where there is nothing to replay."""
    if not config.replays_support:
        return None
    return Support(min(config.sampling.top_k, policy.vocab_size), policy.vocab_size)
