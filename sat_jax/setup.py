"""From a configuration to the parts of a run: policy, tokenizer, prompts, engine, learner. Everything that can be wrong
with the input is found here, before a step is taken."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sat_jax import kernels, losses, model
from sat_jax.config import ExperimentConfig
from sat_jax.data.batching import Routes
from sat_jax.data.prompts import PromptReport, load_prompts
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.data.toy import SortTask, write_tokenizer
from sat_jax.learner import LearnerSpec, adam, learning_rate
from sat_jax.model import ForwardOptions, ModelConfig
from sat_jax.rewards.functions import FAILED_VERDICTS
from sat_jax.rewards.grader import Grader
from sat_jax.rollout.local import LocalEngine
from sat_jax.types import Group, Prompt, Trajectory

_TOY = "toy"


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is trained.

    Attributes:
        config: architecture.
        params: initial weights, float32.
        tokenizer: text <-> ids.
        folder: the tokenizer's files, copied into every export.
    """

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    folder: Path


@dataclasses.dataclass(frozen=True)
class Problems:
    """What it is trained and evaluated on. No problem is in both.

    Attributes:
        train: prompts of the stream.
        heldout: prompts of the evaluations.
        report: what loading found, duplicates and filtered prompts included.
        task: the generator of demonstrations, where the source has one.
    """

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    report: PromptReport
    task: SortTask | None

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(len(p.token_ids) for p in (*self.train, *self.heldout))


def build_policy(config: ExperimentConfig, run_dir: Path) -> Policy:
    """The policy of ``config.policy``: read from a Hugging Face folder, or freshly initialised.

    Raises:
        ValueError, FileNotFoundError: the folder is missing, incomplete or not supported; the tokenizer does not fit.
    """
    source = config.policy
    if source.path:
        folder = Path(source.path)
        model_config = model.read_config(folder)
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
    params = (
        model.load_params(source.path, model_config, "float32")
        if source.path
        else model.init_params(jax.random.key(config.seed), model_config, "float32")
    )
    return Policy(model_config, params, tokenizer, tokenizer_folder)


def build_problems(config: ExperimentConfig, tokenizer: Tokenizer) -> Problems:
    """Training prompts and held-out prompts.

    Raises:
        ValueError: whatever is wrong with a source; too few problems to hold any out.
    """
    source, wanted = config.data.source, config.evaluation.problems
    prompts = load_prompts(source, tokenizer, config.data.prompts)
    task = SortTask(n_digits=int(source[len("toy:sort")])) if source.startswith("toy:sort") else None
    if config.evaluation.source:
        heldout = list(load_prompts(config.evaluation.source, tokenizer, config.data.prompts))[:wanted]
        texts = {p.text for p in heldout}
        train = [p for p in prompts if p.text not in texts]
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
    return Problems(train, heldout, prompts.report, task)


def context_length(config: ExperimentConfig, policy: ModelConfig, longest_prompt: int) -> int:
    """Tokens of the longest sequence a run can meet.

    Raises:
        ValueError: longer than the model's context.
    """
    longest = longest_prompt + config.sampling.max_new_tokens
    if longest > policy.max_position_embeddings:
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) and sampling.max_new_tokens = "
            f"{config.sampling.max_new_tokens} exceed the model's context of {policy.max_position_embeddings}: shorten "
            "one of them"
        )
    return longest


def build_learner(config: ExperimentConfig, policy: ModelConfig) -> LearnerSpec:
    """The static description of every learner step of the run."""
    o, learner = config.optimizer, config.learner
    schedule = learning_rate(o.lr, o.warmup_steps, o.decay_steps)
    return LearnerSpec(
        model=policy,
        loss=kernels.make_loss(config.loss),
        optimizer=adam(schedule, o.b1, o.b2, o.eps, o.weight_decay, o.max_grad_norm),
        schedule=schedule,
        temperature=config.sampling.temperature,
        micro_batches=learner.micro_batches,
        routing_replay=learner.routing_replay and bool(policy.moe_layers),
        router_aux_loss_coef=learner.router_aux_loss_coef,
        router_z_loss_coef=learner.router_z_loss_coef,
        head_chunk=learner.head_chunk,
        forward=ForwardOptions(
            compute_dtype=None if config.policy.compute_dtype == "float32" else config.policy.compute_dtype,
            remat=config.policy.remat,
        ),
    )


def build_engine(config: ExperimentConfig, policy: Policy, params: Any, version: int, max_len: int) -> LocalEngine:
    """An in-process engine that samples with ``params`` as ``version``."""
    rollout = config.rollout
    rows = rollout.prompts_per_step * rollout.n_samples_per_prompt
    return LocalEngine(
        policy.config,
        params,
        policy.tokenizer,
        version=version,
        n_slots=min(rollout.engine_slots, rows),
        max_len=max_len,
        dtype=rollout.engine_dtype,
        selection_noise=rollout.selection_noise,
    )


def build_grader(config: ExperimentConfig) -> Grader:
    """The reward function behind its workers."""
    reward = config.reward
    return Grader(reward.function, workers=reward.workers, timeout_s=reward.timeout_s, memory_mb=reward.memory_mb)


def graded_with_advantages(config: ExperimentConfig, grader: Grader) -> Callable[[Sequence[Group]], list[Group]]:
    """What the rollout thread does with finished groups: rewards first, then advantages over the whole group.

    A response whose grading failed (not one that is wrong) is left out of its group's baseline; its own advantage is 0.
    """

    def grade(groups: Sequence[Group]) -> list[Group]:
        graded = grader.grade_groups(groups)
        if not graded:
            return []
        rewards = np.stack([group.rewards for group in graded])
        failed = np.array([[t.reward_info["verdict"] in FAILED_VERDICTS for t in g.trajectories] for g in graded])
        advantages = losses.group_advantages(rewards, kind=config.advantage, failed=failed)
        return [dataclasses.replace(g, advantages=row) for g, row in zip(graded, advantages, strict=True)]

    return grade


def graded(grader: Grader, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories with their rewards, outside of any group: what an evaluation needs."""
    groups = [Group(f"eval:{i}", p, (t,)) for i, (p, t) in enumerate(zip(prompts, trajectories, strict=True))]
    return [group.trajectories[0] for group in grader.grade_groups(groups)]


def recorded_routes(policy: ModelConfig) -> Routes | None:
    """What recorded experts must look like for this policy; None where it is dense."""
    if not policy.moe_layers:
        return None
    return Routes(len(policy.moe_layers), policy.num_experts_per_tok, policy.num_experts)


def demonstrations(task: SortTask, seed: int, step: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The warm start's batch of ``step``: prompts and targets, a function of the seed and the step alone."""
    return task.demonstrations(np.random.default_rng([seed, step]), n)
