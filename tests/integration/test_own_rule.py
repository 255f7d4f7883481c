"""A rule in a user's own file, outside of the package, works everywhere that ours do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sat_jax.cli.main import main
from sat_jax.losses import LossConfig
from sat_jax.testing.rules import sample_inputs
from tests.helpers import ROOT

pytestmark = pytest.mark.slow

# The example that docs/rules.md shows, as it stands there.
(RULE,) = re.findall(r"```python\n(# huber\.py\n.*?)```", (ROOT / "docs" / "rules.md").read_text(), flags=re.DOTALL)
CONFIG = """
from dataclasses import replace
from huber import Huber
from sat_jax.config import ExperimentConfig
from sat_jax.losses import LossConfig, Ppo, Sat
from tests.helpers.tiny import tiny

def mine() -> ExperimentConfig:
    return replace(tiny(), name="mine", steps=2, checkpoint_interval=2, warm_start=None,
                   loss=LossConfig(rules=(Ppo(), Sat(alpha=0.8), Huber(0.2))))

def loss():
    return mine().loss
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "huber.py").write_text(RULE)
    (folder / "mine.py").write_text(CONFIG)
    inputs = sample_inputs()
    arrays = {k: np.asarray(getattr(inputs, k)) for k in ("log_probs", "behavior_log_probs", "advantages", "loss_mask")}
    np.savez(folder / "batch.npz", **arrays)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    assert main(["train", f"{folder}/mine.py:mine", "--out", str(folder / "run"), "--loss.huber.weight", "0.3"]) == 0
    return folder / "run"


def test_the_example_runs_as_it_stands(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "huber.py"], cwd=folder, capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr


def test_it_is_stored_by_its_path_and_hash(folder: Path, run: Path) -> None:
    config = json.loads((run / "config.json").read_text())["config"]
    rules = config["loss"]["rules"]
    assert [rule["class"].rpartition(":")[2] for rule in rules] == ["Ppo", "Sat", "Huber"]
    assert rules[2]["class"] == f"{folder / 'huber.py'}:Huber"
    assert len(rules[2]["sha256"]) == 64
    assert (rules[1]["alpha"], rules[2]["weight"]) == (0.8, 0.3)
    assert "sha256" not in rules[0]


def test_a_run_with_it_resumes(run: Path) -> None:
    assert main(["train", "--resume", "--out", str(run), "--steps", "3", "--loss.huber.weight", "0.1"]) == 0
    stored = json.loads((run / "config.json").read_text())["config"]
    assert (stored["steps"], stored["loss"]["rules"][2]["weight"]) == (3, 0.1)


def test_a_changed_or_missing_file_is_refused_by_name(
    folder: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "huber.py"
    before, files = file.read_text(), {p: p.read_bytes() for p in run.iterdir() if p.is_file()}
    try:
        file.write_text(before + "# something else\n")
        assert main(["train", "--resume", "--out", str(run), "--steps", "4"]) == 2
        assert f"{file} has changed since the run stored Huber" in capsys.readouterr().err
        file.unlink()
        assert main(["train", "--resume", "--out", str(run), "--steps", "4"]) == 2
        assert f"there is no file {file}" in capsys.readouterr().err
        # What only looks at the run never imports it.
        assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
        assert "huber" in (tmp_path / "report.html").read_text()
        assert main(["ledger", str(run)]) == 0
        assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    finally:
        file.write_text(before)
    assert {p: p.read_bytes() for p in run.iterdir() if p.is_file()} == files


def test_inspect_and_geometry_take_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch, rule = str(folder / "batch.npz"), f"{folder}/huber.py:Huber"
    assert main(["inspect", batch, "--method", "sat-grpo", "--rule", rule, "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["rules"] == ["ppo", "sat", "huber"]
    assert main(["inspect", batch, "--method", "sat-grpo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] < own["loss"]
    assert main(["inspect", batch, "--method", f"{folder}/mine.py:loss", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "ppo+sat+huber"
    assert main(["geometry", "--rule", rule, "--out", str(tmp_path / "g.png")]) == 0
    assert (tmp_path / "g.png").stat().st_size > 10_000
    for wrong, message in (
        (f"{folder}/huber.py:Hubert", "has no 'Hubert'; did you mean 'Huber'?"),
        (f"{folder}/huber.py:make_loss", "name a class of rules"),
        (f"{folder}/nowhere.py:Huber", "there is no file"),
        ("Huber", "write package.module:name or file.py:name"),
    ):
        assert main(["inspect", batch, "--rule", wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_class_that_nothing_could_import_again_is_not_stored() -> None:
    import dataclasses

    from sat_jax.dataclass_json import to_dict
    from sat_jax.losses import Penalty, Ppo

    @dataclasses.dataclass(frozen=True)
    class Local(Penalty):
        pass

    with pytest.raises(ValueError, match="define it at the top level of a file"):
        to_dict(LossConfig(rules=(Ppo(), Local())))
