"""A real pretrained model on a CPU: SmolLM2-135M-Instruct on GSM8K and on reasoning-gym sums, dense and upcycled.

docs/smollm2.md says how the two folders ``smollm2`` and ``smollm2-moe`` are made, and what the runs showed and cost.
Sums of one-digit numbers are what a model of this size learns from within minutes.
"""

from dataclasses import replace

from sat_jax import losses
from sat_jax.config import (
    DataConfig,
    EvaluationConfig,
    ExperimentConfig,
    OptimizerConfig,
    PolicyConfig,
    PromptOptions,
    RewardConfig,
    RolloutConfig,
    SamplingParams,
    fixed_delay,
)


def smollm2_sums() -> ExperimentConfig:
    """SAT-GSPO on sums and differences of two one-digit numbers; any last number in the response counts as the answer.

    Temperature 0.6: at 1.0 the 4-bit weights wander off, and too few groups hold both a right and a wrong response.
    """
    return ExperimentConfig(
        name="smollm2-sums",
        steps=24,
        policy=PolicyConfig(path="smollm2"),
        data=DataConfig(source="reasoning_gym:chain_sum?size=1000&min_terms=2&max_terms=2&min_digits=1&max_digits=1"),
        reward=RewardConfig(function="sat_jax.rewards.math:grade_lenient", workers=1),
        sampling=SamplingParams(temperature=0.6, max_new_tokens=16),
        rollout=RolloutConfig(prompts_per_step=4, n_samples_per_prompt=8, schedule=fixed_delay(1), max_staleness=4),
        loss=losses.method("sat-gspo"),
        optimizer=OptimizerConfig(lr=1e-5, max_grad_norm=1.0),
        evaluation=EvaluationConfig(problems=32, k=4, interval=0, temperature=0.6),
        checkpoint_interval=20,
    )


def smollm2_sums_moe() -> ExperimentConfig:
    """The same run, the policy upcycled to 2 of 4 experts, with routing replay."""
    return replace(smollm2_sums(), name="smollm2-sums-moe", policy=PolicyConfig(path="smollm2-moe"))


def smollm2_gsm8k() -> ExperimentConfig:
    """GSM8K, short worked solutions; the reward is as lenient. Minutes a step on two cores."""
    base = smollm2_sums()
    return replace(
        base,
        name="smollm2-gsm8k",
        data=DataConfig(
            source="gsm8k_train.jsonl",
            prompts=PromptOptions(
                suffix="\nSolve it in at most three short lines. End with: The answer is",
                max_prompt_len=192,
                over_long="filter",
            ),
        ),
        sampling=replace(base.sampling, max_new_tokens=96),
    )


def smollm2_gsm8k_moe() -> ExperimentConfig:
    """GSM8K with the upcycled policy and routing replay."""
    return replace(smollm2_gsm8k(), name="smollm2-gsm8k-moe", policy=PolicyConfig(path="smollm2-moe"))
