"""The embedded default: a small Qwen3-MoE policy that half-knows how to sort six digits, and learns the rest.

Sizes and learning rates suit two CPU cores. Every function is one run; a variant is the base with something replaced.
"""

from dataclasses import replace

from sat_jax.config import (
    DataConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    SamplingParams,
    WarmStartConfig,
    fixed_delay,
    free_running,
    synchronous,
    with_method,
)

POLICY = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=16,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    initializer_range=0.1,
)


def mix6() -> ExperimentConfig:
    """SAT-GSPO with routing replay at a fixed lag of 8 policy versions."""
    return _mix6("sat-gspo-r3")


def _mix6(method: str) -> ExperimentConfig:
    base = ExperimentConfig(
        name="mix6" if method == "sat-gspo-r3" else f"mix6-{method}",
        steps=250,
        policy=PolicyConfig(init=POLICY, tokenizer="toy"),
        data=DataConfig(source="toy:sort6/train?size=8192"),
        reward=RewardConfig(function="sat_jax.rewards.toy:exact_match"),
        sampling=SamplingParams(max_new_tokens=8),
        rollout=RolloutConfig(prompts_per_step=32, n_samples_per_prompt=8, schedule=fixed_delay(8)),
        optimizer=OptimizerConfig(lr=1e-4),
        warm_start=WarmStartConfig(steps=500, batch_size=128, lr=2e-3),
        evaluation=EvaluationConfig(source="toy:sort6/test?size=128", problems=128, k=8, interval=50),
    )
    return with_method(base, method, kl_loss_coef=1e-3)


def mix6_sync() -> ExperimentConfig:
    """The default without asynchrony: lag 0, every clip idle."""
    base = mix6()
    return replace(base, name="mix6-sync", rollout=replace(base.rollout, schedule=synchronous()))


def mix6_free_running() -> ExperimentConfig:
    """Threads run freely; weights are swapped in while responses are being decoded. Does not repeat by seed."""
    base = mix6()
    rollout = replace(base.rollout, schedule=free_running(), overlap=True)
    return replace(base, name="mix6-free-running", rollout=rollout)


# The other rows of the paper's Table 1: the same run, another loss or forward pass.


def mix6_grpo() -> ExperimentConfig:
    """PPO's clip on token ratios."""
    return _mix6("grpo")


def mix6_gspo() -> ExperimentConfig:
    """PPO's clip on the sequence ratio."""
    return _mix6("gspo")


def mix6_grpo_r3() -> ExperimentConfig:
    """GRPO with routing replay."""
    return _mix6("grpo-r3")


def mix6_gspo_r3() -> ExperimentConfig:
    """GSPO with routing replay."""
    return _mix6("gspo-r3")


def mix6_grpo_tis() -> ExperimentConfig:
    """GRPO with truncated importance sampling."""
    return _mix6("grpo-tis")


def mix6_gspo_tis() -> ExperimentConfig:
    """GSPO with truncated importance sampling."""
    return _mix6("gspo-tis")


def mix6_grpo_tis_r3() -> ExperimentConfig:
    """GRPO with truncated importance sampling and routing replay."""
    return _mix6("grpo-tis-r3")


def mix6_gspo_tis_r3() -> ExperimentConfig:
    """GSPO with truncated importance sampling and routing replay."""
    return _mix6("gspo-tis-r3")


def mix6_dppo() -> ExperimentConfig:
    """GRPO with DPPO's total-variation mask."""
    return _mix6("dppo")


def mix6_sat_grpo() -> ExperimentConfig:
    """SAT on token ratios."""
    return _mix6("sat-grpo")


def mix6_sat_gspo() -> ExperimentConfig:
    """SAT on the sequence ratio, without routing replay."""
    return _mix6("sat-gspo")


def mix6_sat_grpo_r3() -> ExperimentConfig:
    """SAT on token ratios with routing replay."""
    return _mix6("sat-grpo-r3")
