"""A run folder as a real run leaves it, made up but plausible, the same every time: what viewers are tested on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sat_jax.metrics import value_counts
from sat_jax.runs.writer import MetricsWriter

EPS = 0.2


RULES = [
    {"class": "sat_jax.losses.rules.ppo:Ppo"},
    {"class": "sat_jax.losses.rules.sat:Sat", "alpha": 0.9, "exponent": 2.0},
]


def write_config(folder: Path, name: str = "sat_gspo_demo", **loss: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "name": name,
        "seed": 0,
        "steps": 200,
        "rollout": {"schedule": {"delay": 8, "interval": 1}, "prompts_per_step": 32, "n_samples_per_prompt": 8},
        "loss": {"name": "sat-gspo", "eps_low": EPS, "eps_high": EPS, "rules": RULES, **loss},
        "optimizer": {"lr": 6e-4, "b1": 0.9, "b2": 0.98},
        "policy": {"path": "", "init": {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8}},
        "warm_start": None,
    }
    info = {
        "name": name,
        "config": config,
        "versions": {"sat_jax": "0.2.0", "jax": "0.10.2", "python": "3.11.7"},
        "devices": ["TFRT_CPU_0"],
        "git_commit": None,
        "command": ["sat-jax", "train", "--seed", "0"],
    }
    (folder / "config.json").write_text(json.dumps(info, indent=2))


def make_run(
    folder: Path,
    *,
    name: str = "sat_gspo_demo",
    steps: int = 200,
    eval_every: int = 40,
    samples_per_step: int = 2,
    sat: bool = True,
    seed: int = 0,
) -> Path:
    """Write a whole run folder; ``sat=False`` leaves out what only SAT logs."""
    rng = np.random.default_rng(seed)
    write_config(folder, name)
    now = iter(range(1_700_000_000, 2_000_000_000))
    with MetricsWriter(folder, clock=lambda: float(next(now))) as writer:
        writer.log_evaluation(0, evaluation(0.0, rng))
        for step in range(1, steps + 1):
            progress = step / steps
            writer.log(step, step_metrics(step, progress, sat, rng))
            writer.log_samples(step, [sample(step, progress, i, rng) for i in range(samples_per_step)])
            if step % eval_every == 0 or step == steps:
                writer.log_evaluation(step, evaluation(progress, rng))
    return folder


def accuracy(progress: float) -> float:
    return 0.26 + 0.68 * (1 - np.exp(-4 * progress)) / (1 - np.exp(-4))


def evaluation(progress: float, rng: np.random.Generator) -> dict[str, object]:
    hit = float(np.clip(accuracy(progress) + 0.01 * rng.normal(), 0, 1))
    best = 1 - (1 - hit) ** 2.5
    return {
        "avg@k": hit,
        "pass@k": best,
        "k": 8,
        "problems": 64,
        "sources": {"toy:mix6": {"avg@k": hit, "pass@k": best, "problems": 64}},
        "response_len_mean": 7.0 + 0.02 * rng.normal(),
        "truncated_ratio": 0.01 * (1 - progress),
    }


def step_metrics(step: int, progress: float, sat: bool, rng: np.random.Generator) -> dict[str, object]:
    spike = 4.0 if rng.random() < 0.02 else 1.0
    q = 0.03 * (1 + 5 * progress) * float(np.exp(0.25 * rng.normal())) * spike
    lag = min(step - 1, 8)
    reward = float(np.clip(accuracy(progress) + 0.04 * rng.normal(), 0, 1))
    wins = rng.binomial(256, reward)
    metrics: dict[str, object] = {
        "train/loss": np.float32(-0.002 * rng.normal()),
        "train/pg_loss": np.float32(-0.002 * rng.normal()),
        "train/kl_loss": 0.4 * progress + 0.01 * rng.random(),
        "train/entropy": 0.9 * (1 - 0.7 * progress) + 0.02 * rng.normal(),
        "train/grad_norm": 0.4 * float(np.exp(0.3 * rng.normal())) * spike,
        "train/lr": 6e-4,
        "train/clip_fraction": float(np.clip(0.02 * spike + 0.01 * rng.random(), 0, 1)),
        "train/d_bar": q / 2.2,
        "train/kl_train_rollout": q**2 / 3,
        "async/staleness_mean": float(lag),
        "async/staleness_max": lag,
        "async/staleness_histogram": value_counts(np.full(1792, lag)),
        "async/queue_groups": int(rng.integers(0, 4)),
        "async/dropped_stale": 0,
        "rollout/reward_mean": wins / 256,
        "rollout/reward_histogram": {"0": int(256 - wins), "1": int(wins)},
        "rollout/accuracy": wins / 256,
        "rollout/response_len_mean": 7 + 0.05 * rng.normal(),
        "rollout/truncated_ratio": 0.01 * rng.random(),
        "rollout/zero_std_groups": int(rng.binomial(32, 0.2 + 0.5 * progress)),
        "rollout/tokens_per_s": 37_600 * (1 + 0.05 * rng.normal()) if step > 1 else 900.0,
        "perf/step_time_s": 0.028 + 0.003 * rng.random() if step > 1 else 6.5,
        "perf/tokens_per_s": 110_000 * (1 + 0.05 * rng.normal()) if step > 1 else 500.0,
        "perf/rollout_wait_s": 0.046 + 0.004 * rng.random() if step > 1 else 4.0,
        "perf/train_wait_s": 0.001,
        "moe/router_agreement": 0.995 - 0.02 * progress + 0.002 * rng.normal(),
    }
    if sat:
        inside = q < np.log1p(EPS)
        metrics |= {
            "sat/q": q,
            "sat/gate_rate": 0.095 + 0.004 * rng.random(),
            "sat/eps_low_mean": EPS * (0.975 + 0.003 * rng.normal()),
            "sat/eps_high_mean": EPS * (0.972 + 0.003 * rng.normal()),
            "sat/c_low_min": 0.03 + 0.08 * rng.random(),
            "sat/c_high_min": 0.02 + 0.08 * rng.random(),
            "sat/intercept_rate": 0.012 + 0.004 * rng.random() if inside else 0.0,
        }
    return metrics


def sample(step: int, progress: float, index: int, rng: np.random.Generator) -> dict[str, object]:
    digits = rng.integers(0, 10, 6)
    answer = "".join(map(str, np.sort(digits)))
    solved = rng.random() < accuracy(progress)
    response = answer if solved else "".join(map(str, rng.permutation(np.sort(digits))))
    tokens = [*response, "<eos>"]
    log_ratio = 0.08 * rng.standard_t(3, len(tokens)) * (0.5 + progress)
    return {
        "group_id": f"0:{step}",
        "prompt_id": f"mix6-{step}",
        "sample_index": index,
        "prompt": f"sort {''.join(map(str, digits))} =",
        "response": response,
        "answer": answer,
        "reward": float(solved),
        "verdict": "correct" if solved else "wrong",
        "advantage": 0.8 if solved else -1.2,
        "policy_versions": [max(0, step - 1 - 8 + (i > 4)) for i in range(len(tokens))],
        "tokens": tokens,
        "log_ratio": log_ratio.astype(np.float32),
        "behavior_log_probs": (-rng.exponential(0.3, len(tokens))).astype(np.float32),
        "finish_reason": "stop",
    }
