"""``sat-jax eval``: avg@k and pass@k of a Hugging Face folder or of a run's newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sat_jax.checked import Checked, Count, Natural, NonNegative, Range
from sat_jax.config import ExperimentConfig, PolicyConfig, RewardConfig
from sat_jax.data.prompts import PromptOptions, load_prompts
from sat_jax.rewards.grader import Grader
from sat_jax.rollout.engine import SamplingParams
from sat_jax.rollout.local import LocalEngine
from sat_jax.training import build, grading
from sat_jax.training.evaluation import Evaluation, evaluate
from sat_jax.training.restore import checkpoint_params, stored_config
from sat_jax.types import Prompt


@dataclass(frozen=True)
class EvalOptions(Checked, section="eval"):
    """On what, and how to sample."""

    prompts: str | None = None
    """Prompts with reference answers: JSONL, Parquet, tfds:NAME/SPLIT, ... For a run, its own held-out problems."""
    k: Count = 8
    """Samples per problem."""
    problems: Natural = 0
    """Use only the first so many problems; 0: all."""
    temperature: NonNegative = 1.0
    """0 is greedy decoding."""
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Nucleus; 1 is off."""
    max_new_tokens: Count | None = None
    """Budget of a response; by default 512, for a run its own."""
    reward: str | None = None
    """``module:function`` or ``file.py:function`` that grades; by default the math verifier, for a run its own."""
    workers: Annotated[int, Range(0, 4096)] = 2
    """Grading processes; 0: in this one."""
    slots: Count = 64
    """Responses decoded side by side."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Of the sampling."""
    json: bool = False
    """Print one JSON object instead of a table."""


def main(model: Path, *, options: EvalOptions = EvalOptions()) -> int:
    """avg@k and pass@k of a policy.

    Args:
        model: Hugging Face folder, or run folder (its newest checkpoint).
    """
    run = stored_config(model, loss=False)
    config = run or ExperimentConfig(
        policy=PolicyConfig(path=str(model)),
        reward=RewardConfig(function="sat_jax.rewards.math:grade", workers=options.workers),
        sampling=SamplingParams(max_new_tokens=512),
    )
    policy = build.build_policy(config, model)
    params, step = (policy.params, 0) if run is None else checkpoint_params(model, config, policy)
    prompts = _prompts(options, run, policy)
    sampling = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens or config.sampling.max_new_tokens,
        stop=config.sampling.stop,
    )
    longest = max(len(p.token_ids) for p in prompts)
    sized = dataclasses.replace(config, sampling=sampling)
    engine = LocalEngine(
        policy.config,
        params,
        policy.tokenizer,
        n_slots=min(options.slots, len(prompts) * options.k),
        max_len=build.context_length(sized, policy.config, longest),
    )
    console = Console(stderr=True)
    reward = options.reward or config.reward.function
    workers = config.reward.workers if options.reward is None and run is not None else options.workers
    with Grader(reward, workers=workers) as grader, Progress(console=console, transient=True) as progress:
        task = progress.add_task("sampling", total=len(prompts) * options.k)
        result = evaluate(
            engine,
            prompts,
            partial(grading.graded, grader),
            sampling,
            options.k,
            seed=options.seed,
            step=step,
            progress=lambda done, _: progress.update(task, completed=done),
        )
        verdicts = dict(grader.counts)
    engine.close()
    _show(options, model, result, verdicts, of_run=run is not None)
    return 0


def _prompts(options: EvalOptions, run: ExperimentConfig | None, policy: build.Policy) -> list[Prompt]:
    if options.prompts is not None:
        rules = run.data.prompts if run is not None else PromptOptions()
        prompts = list(load_prompts(options.prompts, policy.tokenizer, rules))
    elif run is not None:
        prompts = list(build.build_problems(run, policy.tokenizer).heldout)
    else:
        raise ValueError("no prompts: give --prompts FILE")
    return prompts[: options.problems] if options.problems else prompts


def _show(options: EvalOptions, model: Path, result: Evaluation, verdicts: dict[str, int], of_run: bool) -> None:
    if options.json:
        print(json.dumps({"model": str(model), **result.record(), "verdicts": verdicts}))
        return
    table = Table(title=f"{model}, step {result.step}" if of_run else str(model))
    for name in ("source", "problems", f"avg@{result.k}", f"pass@{result.k}"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for name, score in {**result.sources, "all": result.total}.items():
        table.add_row(name, str(score["problems"]), f"{score['avg@k']:.3f}", f"{score['pass@k']:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"{result.response_len_mean:.1f} tokens a response, {result.truncated_ratio:.1%} truncated; verdicts: "
        + ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items()))
    )
