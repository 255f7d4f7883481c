"""What a run is: frozen plain data, made by pure functions, overridden by dotted paths."""

from sat_jax.config.experiment import (
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ExperimentConfig,
    LearnerConfig,
    MeshConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    WarmStartConfig,
    with_method,
)
from sat_jax.config.named import config_functions, load_config
from sat_jax.data.prompts import PromptOptions
from sat_jax.model import ModelConfig
from sat_jax.rollout.engine import SamplingParams
from sat_jax.rollout.schedule import Schedule, batchwise, fixed_delay, free_running, synchronous

__all__ = [
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "LearnerConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PromptOptions",
    "RewardConfig",
    "RolloutConfig",
    "SamplingParams",
    "Schedule",
    "WarmStartConfig",
    "batchwise",
    "config_functions",
    "fixed_delay",
    "free_running",
    "load_config",
    "synchronous",
    "with_method",
]
