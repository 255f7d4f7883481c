"""What a run is: frozen plain data, made by pure functions, overridden by dotted paths."""

from sat_jax.config.experiment import (
    DataConfig,
    EvaluationConfig,
    ExperimentConfig,
    LearnerConfig,
    MeshConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    WarmStartConfig,
    check,
    replays_support,
    schedule,
)
from sat_jax.config.named import config_functions, load_config

__all__ = [
    "DataConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "LearnerConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RewardConfig",
    "RolloutConfig",
    "WarmStartConfig",
    "check",
    "config_functions",
    "load_config",
    "replays_support",
    "schedule",
]
