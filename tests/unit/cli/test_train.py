"""The command line: what is understood, and how a mistake is answered (one line, status 2, nothing written)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sat_jax.cli.main import COMMANDS, main
from sat_jax.cli.train import parse_options
from sat_jax.config import ExperimentConfig, config_functions, load_config
from sat_jax.dataclass_json import from_dict, to_dict
from sat_jax.losses import Sat


def _mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name}" in out


def test_a_misspelt_command_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no command 'trian'; did you mean 'train'?" in _mistake(capsys, "trian")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code in (0, None)
    assert "--help" in capsys.readouterr().out


def test_overrides_are_dotted_paths() -> None:
    options = parse_options(
        ["--loss.sat.alpha", "0.95", "--loss.kl_loss_coef=0.01", "--steps", "7", "--rollout.overlap", "True"]
    )
    config = options.config
    assert config.name == "mix6"
    assert (config.loss.get(Sat), config.loss.kl_loss_coef, config.steps) == (Sat(alpha=0.95), 0.01, 7)
    assert config.rollout.overlap
    assert options.out is None


@pytest.mark.parametrize("args", [["mix6_grpo", "--steps", "3"], ["--steps", "3", "mix6_grpo"]])
def test_the_configuration_may_stand_first_or_last(args: list[str]) -> None:
    config = parse_options(args).config
    assert config.loss.name == "grpo"
    assert config.steps == 3


def test_a_list_takes_all_that_follows() -> None:
    config = parse_options(["--sampling.stop", "a", "b", "--steps", "3"]).config
    assert (config.sampling.stop, config.steps) == (("a", "b"), 3)


def test_overrides_apply_at_once() -> None:
    """Neither of the two alone would be possible."""
    config = parse_options(["--rollout.schedule.delay", "20", "--rollout.max_staleness", "20"]).config
    assert (config.rollout.schedule.delay, config.rollout.max_staleness) == (20, 20)
    loss = parse_options(["--loss.sat.q-cap", "0.1", "--loss.loss_scale_factor", "None"]).config.loss
    assert (loss.get(Sat), loss.loss_scale_factor) == (Sat(q_cap=0.1), None)


def test_paths_are_stored_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    config = parse_options(["--model", ".", "--prompts", "p.jsonl"]).config
    assert (config.policy.path, config.data.source) == (str(tmp_path), str(tmp_path / "p.jsonl"))
    assert parse_options([]).config.data.source.startswith("toy:")


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    script = f"{sys.executable} -m sat_jax train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=os.environ)
    assert done.stderr == ""
    assert done.stdout.startswith("usage: sat-jax train")


def test_a_configuration_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from sat_jax.config import ExperimentConfig, load_config\n"
        "def half() -> ExperimentConfig:\n"
        "    return replace(load_config('mix6'), name='half', steps=100)\n"
    )
    assert parse_options([f"{file}:half"]).config.steps == 100
    with pytest.raises(ValueError, match=r"no configuration 'hlaf'; did you mean 'half'\?"):
        load_config(f"{file}:hlaf")
    file.write_text(file.read_text().replace(" -> ExperimentConfig", ""))
    with pytest.raises(ValueError, match="says '-> ExperimentConfig'"):
        load_config(f"{file}:half")
    with pytest.raises(ValueError, match="there is no file"):
        load_config(f"{tmp_path}/other.py:half")


@pytest.mark.parametrize("name", sorted(config_functions()))
def test_every_named_configuration_survives_json(name: str) -> None:
    config = load_config(name)
    assert from_dict(ExperimentConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--loss.sat.alhpa", "0.9"], "no field '--loss.sat.alhpa'; did you mean '--loss.sat.alpha'?"),
        (["--stepz", "3"], "no field '--stepz'; did you mean '--steps'?"),
        (["mix7"], "no configuration 'mix7'; did you mean 'mix6'?"),
        (["--loss.sta.alpha", "0.9"], "did you mean '--loss.sat.alpha'?"),
        (["--loss.tis.cap", "3"], "is made of the rules ppo, sat, whose settings may be overridden"),
        (["mix6_grpo", "--loss.sat.alpha", "0.9"], "the loss of 'mix6-grpo' is made of the rules ppo,"),
        (["--loss.rules", "ppo"], "other rules are composed in a configuration function"),
        (["--warm-start.steps", "3", "--model", "m", "--prompts", "p"], "'warm_start' is off in configuration"),
        (["--steps", "three"], "argument --steps: invalid int value: 'three'"),
        (["--steps", "0"], "steps = 0: must be at least 1"),
        (["--seed", str(2**40)], "seed = 1099511627776: must lie in [0, 4294967295]"),
        (["--learner.packing", "maybe"], "'maybe' is neither True nor False"),
        (["--rollout.stale_policy", "dorp"], "invalid choice: 'dorp'"),
        (["--rollout.n_samples_per_prompt", "1"], "a group of one has no baseline"),
        (["--rollout.schedule.delay", "30"], "rollout.max_staleness = 16 drops them"),
        (["--rollout.queue_groups", "40"], "cannot hold a lag of 8"),
        (["--rollout.schedule.interval", "40"], "set max_staleness >= 47"),
        (["--learner.updates_per_batch", "3"], "does not divide rollout.prompts_per_step = 32"),
        (["--learner.updates_per_batch", "4", "--steps", "248"], "set max_staleness >= 35"),
        (
            ["--learner.updates_per_batch", "4", "--rollout.max_staleness", "35"],
            "steps = 250 is not a multiple of learner.updates_per_batch = 4: a run ends with a batch; use 248",
        ),
        (["--sampling.top_p", "0.9"], "set sampling.top_k to 1 .. 1024"),
        (["--sampling.min_p", "0.1"], "set sampling.top_k to 1 .. 1024"),
        (["--sampling.top_k", "1025"], "top_k = 1025, min_p = 0.0: the learner replays"),
        (["--sampling.temperature", "0"], "greedy decoding explores nothing"),
        (["--learner.micro_batches", "7"], "does not divide the 256 rows"),
        (["--loss.sat.alpha", "1.5"], "sat.alpha = 1.5: must lie in (0, 1)"),
        (["--loss.eps_low", "-1"], "loss.eps_low = -1.0: must be above 0"),
        (["--lr", "1"], "did you mean '--optimizer.lr' or '--warm-start.lr'?"),
        (["--optimizer.lr", "nan"], "optimizer.lr = nan: must be at least 0 and finite"),
        (["--optimizer.b1", "1.0"], "optimizer.b1 = 1.0: must lie in [0, 1)"),
        (["--warm-start.lr", "nan"], "warm_start.lr = nan: must be at least 0"),
        (["--evaluation.temperature", "-1"], "evaluation.temperature = -1.0"),
        (["--evaluation.top-p", "0"], "evaluation.top_p = 0.0: must lie in"),
        (["--evaluation.interval", "-1"], "evaluation.interval = -1"),
        (["--policy.path", "x"], "policy.path = 'x' and policy.init are both given"),
        (["mine.py"], "write mine.py:FUNCTION"),
        (["mix6", "mix6_grpo"], "one CONFIG at most"),
        (["--resume"], "--resume needs --out"),
        (["--prompts", "nowhere.jsonl"], "no policy: give --model HF_DIR"),
        (["--model", "nowhere"], "no prompts: give --prompts FILE"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _mistake(capsys, "train", *args)


def test_an_existing_run_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    assert "holds another run" in _mistake(capsys, "train", "--out", str(run))
    assert (run / "config.json").read_text() == "{}"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("dear")
    assert "is not empty" in _mistake(capsys, "train", "--out", str(other))
    assert "is a file" in _mistake(capsys, "train", "--out", str(other / "thesis.tex"))
    assert "holds no run to resume" in _mistake(capsys, "train", "--resume", "--out", str(other))
    assert "holds no run to resume" in _mistake(capsys, "train", "--resume", "--out", str(run))
    (run / "config.json").write_text('{"config": {')
    assert "is damaged" in _mistake(capsys, "train", "--resume", "--out", str(run))
    assert "leave out 'mix6'" in _mistake(capsys, "train", "mix6", "--resume", "--out", str(run))


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise KeyError("a defect, not a user's mistake")

    monkeypatch.setattr("sat_jax.cli.report.report", broken)
    with pytest.raises(KeyError):
        main(["report"])
