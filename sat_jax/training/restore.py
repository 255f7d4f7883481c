"""Run folders and their checkpoints, as several commands read them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from sat_jax import learner
from sat_jax.config import ExperimentConfig
from sat_jax.dataclass_json import from_dict
from sat_jax.runs.checkpoint import Checkpoints
from sat_jax.runs.folder import CONFIG_FILE, read_config
from sat_jax.training import build


def stored_config(folder: Path, loss: bool = True) -> ExperimentConfig | None:
    """The configuration of a run folder; None for a Hugging Face folder, whose config.json describes a model.

    Without ``loss``, whose rules may stand in files that have changed, it is enough to look at a policy. Raises
    ``ValueError`` for other folders, and for a ``config.json`` that is damaged or of a version that cannot be read.
    """
    record = read_config(folder)
    if record is None:
        return None
    fields = record["config"] if loss else {k: v for k, v in record["config"].items() if k != "loss"}
    try:
        return from_dict(ExperimentConfig, fields)
    except ValueError as error:
        written, now = record["versions"].get("sat_jax"), version("sat-jax")
        if written == now:
            raise ValueError(f"{folder / CONFIG_FILE}: {error}") from error
        raise ValueError(
            f"{folder} was written by sat_jax {written}, whose configuration sat_jax {now} cannot read ({error}): go "
            "on with that version, or start a new run"
        ) from error


def checkpoint_params(
    folder: Path, config: ExperimentConfig, policy: build.Policy, step: int | None = None
) -> tuple[Any, int]:
    """The policy's parameters in a run's checkpoint of ``step`` (None: the newest), and that step."""
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
