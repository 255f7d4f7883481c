"""The paper's recipe for a policy and prompts of your own: ``sat-jax train --model HF_DIR --prompts FILE``.

Sizes are for a first try on a laptop; raise ``rollout.prompts_per_step`` (the paper: 256), ``n_samples_per_prompt``
(16) and ``sampling.max_new_tokens`` (32k) on a pod.
"""

from dataclasses import replace

from sat_jax import losses
from sat_jax.config import (
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ExperimentConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    SamplingParams,
    fixed_delay,
)


def post_train() -> ExperimentConfig:
    """SAT-GSPO with routing replay (where the policy is a mixture of experts), Adam at 1e-6, KL 1e-3."""
    return ExperimentConfig(
        name="post_train",
        steps=100,
        data=DataConfig(),
        reward=RewardConfig(function="sat_jax.rewards.math:grade", workers=2),
        sampling=SamplingParams(max_new_tokens=256),
        engine=EngineConfig(slots=64),
        rollout=RolloutConfig(
            prompts_per_step=8,
            n_samples_per_prompt=8,
            schedule=fixed_delay(1),
            max_staleness=8,
        ),
        loss=replace(losses.method("sat-gspo"), kl_loss_coef=1e-3),
        optimizer=OptimizerConfig(lr=1e-6, b1=0.9, b2=0.98),
        evaluation=EvaluationConfig(problems=16, k=4, interval=25),
    )
