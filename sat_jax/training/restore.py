"""Run folders and their checkpoints, as several commands read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from sat_jax import learner
from sat_jax.config import ExperimentConfig
from sat_jax.dataclass_json import from_dict
from sat_jax.runs.checkpoint import Checkpoints
from sat_jax.training import build


def run_config(folder: Path) -> ExperimentConfig | None:
    """The configuration of a run folder; None for a Hugging Face folder, whose config.json describes a model.

    Raises:
        ValueError: neither of the two, or ``config.json`` is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no config.json: give a Hugging Face folder or a run folder")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no valid JSON ({error}): restore it") from error
    return from_dict(ExperimentConfig, record["config"]) if "versions" in record and "config" in record else None


def checkpoint_params(
    folder: Path, config: ExperimentConfig, policy: build.Policy, step: int | None = None
) -> tuple[Any, int]:
    """The policy's parameters in a run's checkpoint of ``step`` (None: the newest), and that step.

    Raises:
        ValueError: there is no such checkpoint, or it is of another model.
    """
    stored = sorted(int(p.name) for p in folder.glob("checkpoints/*") if p.name.isdigit())
    if not stored:
        raise ValueError(f"{folder} has no checkpoint yet: wait for one, or use the policy that it started from")
    if step is not None and step not in stored:
        raise ValueError(f"{folder} has no checkpoint of step {step}: choose one of {', '.join(map(str, stored))}")
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        step = stored[-1] if step is None else step
        like = learner.init_state(build.build_learner(config, policy.config), policy.params)
        state, _, _ = checkpoints.restore(step, like)
        return jax.block_until_ready(state.params), step
    finally:
        checkpoints.close()
