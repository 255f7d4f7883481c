"""The smallest run that goes through every part: what the integration tests train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sat_jax.config import (
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ExperimentConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingParams,
    WarmStartConfig,
    fixed_delay,
    load_config,
)


def tiny() -> ExperimentConfig:
    """Two digits, one layer of four experts, two prompts by four samples, a lag of two."""
    base = load_config("mix6")
    assert base.policy.init is not None
    model = replace(
        base.policy.init,
        hidden_size=16,
        num_hidden_layers=1,
        head_dim=8,
        moe_intermediate_size=8,
        num_experts=4,
        max_position_embeddings=16,
    )
    return replace(
        base,
        name="tiny",
        steps=6,
        policy=replace(base.policy, init=model),
        data=DataConfig(source="toy:sort2/train?size=40"),
        sampling=SamplingParams(max_new_tokens=4),
        rollout=RolloutConfig(prompts_per_step=2, n_samples_per_prompt=4, schedule=fixed_delay(2), max_staleness=4),
        engine=EngineConfig(slots=8),
        optimizer=OptimizerConfig(lr=3e-3),
        warm_start=WarmStartConfig(steps=80, batch_size=32, lr=1e-2, warmup_steps=5),
        evaluation=EvaluationConfig(source="toy:sort2/test?size=6", problems=6, k=2, interval=3),
        checkpoint_interval=3,
        samples_per_step=1,
        report=False,
    )


def variant(**changes: Any) -> ExperimentConfig:
    """``tiny`` with top-level fields replaced."""
    return replace(tiny(), **changes)
