"""Trains on meshes of 8 CPU devices and on one, and resumes across them, packed too. Prints JSON for ``test_mesh``."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sat_jax.config import ExperimentConfig, MeshConfig, fixed_delay
from sat_jax.rollout.local import LocalEngine
from sat_jax.runs.checkpoint import Checkpoints
from sat_jax.training import Trainer, build
from sat_jax.training.restore import checkpoint_params
from tests.helpers.tiny import tiny

MESH = MeshConfig(data=2, fsdp=2, expert=2)
OTHER = MeshConfig(fsdp=2, tensor=2, expert=2)
STEPS, MIDDLE = 4, 2


def config(mesh: MeshConfig, packing: bool = False) -> ExperimentConfig:
    """Room for twelve tokens where three are the rule: rows are half empty."""
    base = tiny()
    return replace(
        base,
        steps=STEPS,
        checkpoint_interval=MIDDLE,
        mesh=mesh,
        sampling=replace(base.sampling, max_new_tokens=12),
        rollout=replace(base.rollout, schedule=fixed_delay(1)),
        learner=replace(base.learner, packing=packing),
        loss=replace(base.loss, kl_loss_coef=1e-2),
        evaluation=replace(base.evaluation, interval=0),
    )


def shares(tree: Any) -> dict[str, float]:
    """What part of each array one device holds."""
    return {
        jax.tree_util.keystr(path): x.addressable_shards[0].data.size / x.size
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def beside(state: Any) -> dict[str, list[float]]:
    """What parts one device holds of all arrays that do not belong to the state, by their shape."""
    own = {id(x) for x in jax.tree.leaves(state)}
    found: dict[str, set[float]] = {}
    for x in jax.live_arrays():
        if id(x) not in own and x.size:
            found.setdefault(str(list(x.shape)), set()).add(x.addressable_shards[0].data.size / x.size)
    return {shape: sorted(parts) for shape, parts in found.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(run: Path) -> dict[str, Any]:
    return {name: lines(run / f"{name}.jsonl") for name in ("metrics", "evaluations", "samples")}


def resumed(run: Path, changed: ExperimentConfig, target: Path) -> dict[str, Any]:
    """Goes on from the middle of ``run``, as after a crash, on another mesh."""
    shutil.copytree(run, target)
    shutil.rmtree(target / "checkpoints" / str(STEPS))
    assert Trainer(changed, target, resume=True).run() == 0
    return outcome(target)


def stored(run: Path, written_by: ExperimentConfig) -> Any:
    """A run's last weights on one device, as ``eval`` and ``export`` read them."""
    params, step = checkpoint_params(run, written_by, build.build_policy(written_by, run))
    assert step == STEPS
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(params)} == {1}
    return params


def apart(a: Any, b: Any) -> float:
    """Largest difference of two trees, in standard deviations of the second."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - y).max() / max(np.std(y), 1e-6)) for x, y in pairs if np.std(y) > 0)


def main() -> None:
    report: dict[str, Any] = {"devices": jax.device_count()}
    states: list[dict[str, float]] = []
    engines: list[LocalEngine] = []
    save, make_engine = Checkpoints.save, build.build_engine

    def seen_save(self: Checkpoints, state: Any, host: Any, groups: Any) -> None:
        states.append(shares(state))
        report["engine"] = beside(state), engines[-1].compilations
        save(self, state, host, groups)

    def seen_engine(*args: Any) -> LocalEngine:
        engines.append(make_engine(*args))
        return engines[-1]

    Checkpoints.save, build.build_engine = seen_save, seen_engine  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        assert Trainer(config(MeshConfig()), runs / "alone").run() == 0
        report["alone"] = outcome(runs / "alone")
        states.clear()
        assert Trainer(config(MESH), runs / "mesh").run() == 0
        report["mesh"], report["state"] = outcome(runs / "mesh"), states[-1]
        report["mesh_engine"] = report.pop("engine")
        states.clear()
        report["alone to packed other"] = resumed(runs / "alone", config(OTHER, packing=True), runs / "onto")
        report["other_state"] = states[-1]
        report["on one device"] = apart(*(stored(runs / name, config(MESH)) for name in ("mesh", "alone")))
        for name, wrong in {"count": MeshConfig(fsdp=4), "model": MeshConfig(expert=8)}.items():
            try:
                Trainer(config(wrong), runs / "wrong").run()
            except ValueError as error:
                report[name] = str(error)
            report[f"{name} left"] = (runs / "wrong").exists()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
