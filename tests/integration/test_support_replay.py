"""Training with truncated sampling: what the engine drew from is what the learner renormalises over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sat_jax import losses
from sat_jax.config import ExperimentConfig, LearnerConfig, synchronous
from sat_jax.rollout.engine import SamplingParams
from sat_jax.training import Trainer
from tests.helpers.tiny import tiny, variant
from tests.integration.test_main_job import _at_step

pytestmark = pytest.mark.slow

TRUNCATED = SamplingParams(max_new_tokens=4, top_k=6, top_p=0.7, min_p=0.01)


def _lines(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def _metrics(run: Path) -> list[dict[str, Any]]:
    timed = ("perf/", "rollout/tokens_per_s", "time")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in _lines(run)]


def _config(**changes: Any) -> ExperimentConfig:
    return variant(sampling=TRUNCATED, **changes)


def test_at_lag_0_engine_and_learner_agree_over_the_support(tmp_path: Path) -> None:
    config = _config(steps=3, rollout=replace(tiny().rollout, schedule=synchronous()))
    assert Trainer(config, tmp_path / "on").run() == 0
    for line in _metrics(tmp_path / "on"):
        assert line["train/d_bar"] < 1e-5
        assert line["train/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert line["train/outside_support"] > 0.01
    for sample in _lines(tmp_path / "on", "samples.jsonl"):
        assert np.abs(sample["log_ratio"]).max() < 1e-4
    # Without the replay every ratio is off by the mass outside, at the very weights that sampled (fault 14).
    off = replace(config, steps=1, learner=replace(config.learner, support_replay=False))
    assert Trainer(off, tmp_path / "off").run() == 0
    (first,) = _metrics(tmp_path / "off")
    assert first["train/d_bar"] > 0.01
    assert first["train/ratio_max"] < 1.0001
    assert "train/outside_support" not in first


def test_every_pass_replays(tmp_path: Path) -> None:
    """Packed rows, micro-batches, the reference policy and the weights that sampled: one set of tokens for all."""
    config = _config(
        steps=3,
        loss=replace(losses.method("sat-gspo"), kl_loss_coef=1e-3),
        learner=LearnerConfig(micro_batches=2, log_delta=True, packing=True),
    )
    assert Trainer(config, tmp_path / "run").run() == 0
    lines = _metrics(tmp_path / "run")
    assert [line["async/staleness_mean"] for line in lines] == [0, 1, 2]
    assert lines[0]["train/kl_loss"] == pytest.approx(0, abs=1e-8)
    assert all(line["async/delta_impl"] < 1e-5 for line in lines)
    assert lines[-1]["async/delta_pi"] > 1e-3


def test_supports_that_wait_in_the_queue_survive_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert Trainer(_config(), whole).run() == 0

    def fail() -> None:
        raise RuntimeError("power failure")

    with _at_step(4, fail, monkeypatch), pytest.raises(RuntimeError, match="power failure"):
        Trainer(_config(), resumed).run()
    assert Trainer(_config(), resumed, resume=True).run() == 0
    assert _metrics(resumed) == _metrics(whole)
