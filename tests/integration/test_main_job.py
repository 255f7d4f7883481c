"""The main job from end to end, at the smallest size: files, repeatability, interruption, resume, every regime."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sat_jax.cli.main import main
from sat_jax.config import ExperimentConfig, LearnerConfig, Schedule, batchwise, fixed_delay, free_running, synchronous
from sat_jax.losses import Decoupled, Dppo, LossConfig, Ppo, Tis
from sat_jax.metrics import METRICS
from sat_jax.rollout.ledger import audit, read_ledger
from sat_jax.runs.writer import MetricsWriter
from sat_jax.training.trainer import INTERRUPTED, Trainer
from tests.helpers.tiny import tiny, variant

# What a clock decides; everything else repeats.
_TIMED = ("perf/", "rollout/tokens_per_s", "time")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(_TIMED)} for line in _lines(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("main") / "run"
    assert Trainer(variant(report=True), run).run() == 0
    return run


def test_the_run_folder_is_what_the_interface_promises(finished: Path) -> None:
    record = json.loads((finished / "config.json").read_text())
    assert record["method"] == "sat-gspo-r3"
    assert set(record["versions"]) == {"sat_jax", "jax", "python"}
    lines = _lines(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    promised = {name for name in METRICS if name.startswith(("train/", "sat/", "async/", "rollout/", "perf/", "moe/"))}
    # These two only with learner.log_delta, those two only with rules that drop or weigh tokens.
    promised -= {"async/delta_pi", "async/delta_impl", "train/keep_fraction", "train/weight_mean"}
    promised.remove("train/outside_support")  # nothing is truncated here
    assert "rollout/tokens_per_s" in lines[0]
    promised.remove("rollout/tokens_per_s")  # the last steps train on what is waiting: nothing is sampled
    for line in lines:
        assert promised <= set(line), promised - set(line)
        assert "nonfinite" not in line
    evaluations = _lines(finished / "evaluations.jsonl")
    assert [e["step"] for e in evaluations] == [0, 3, 6]
    assert all(0 <= e["avg@k"] <= e["pass@k"] <= 1 and e["problems"] == 6 for e in evaluations)
    samples = _lines(finished / "samples.jsonl")
    assert len(samples) == 6
    assert all(len(s["tokens"]) == len(s["log_ratio"]) == len(s["behavior_log_probs"]) for s in samples)
    assert sorted(p.name for p in (finished / "checkpoints").iterdir() if p.name.isdigit()) == ["3", "6"]
    assert list((finished / "tensorboard").iterdir())
    assert "<html" in (finished / "report.html").read_text()


def test_every_group_has_one_end(finished: Path) -> None:
    report = audit(read_ledger(finished / "ledger.jsonl"))
    assert report.clean
    assert report.ends == {"trained": 12}
    assert main(["ledger", str(finished)]) == 0


def test_the_ledger_command_tells_what_is_wrong(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (finished / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_text("".join(lines[:-1] + lines[-2:-1]))
    assert main(["ledger", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "1 groups without an end" in shown
    assert "1 groups doubled" in shown
    assert main(["ledger", str(tmp_path / "nowhere")]) == 2


def test_the_lag_is_the_one_asked_for_and_the_rest_is_sane(finished: Path) -> None:
    lines = _lines(finished / "metrics.jsonl")
    assert [line["async/staleness_mean"] for line in lines] == [0, 1, 2, 2, 2, 2]
    first = lines[0]
    # At lag 0 in float32 engine and learner are the same function: anything else is a wrong mask, shift or cache.
    assert first["train/d_bar"] < 1e-5
    assert first["moe/router_agreement"] == 1.0
    assert lines[-1]["train/d_bar"] > 1e-3


def test_engine_and_learner_agree_on_every_token_at_lag_0(finished: Path) -> None:
    sample = _lines(finished / "samples.jsonl")[0]
    assert set(sample["policy_versions"]) == {0}
    assert np.abs(sample["log_ratio"]).max() < 1e-4


@pytest.mark.slow
def test_a_seed_repeats_and_another_does_not(finished: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    assert Trainer(tiny(), again).run() == 0
    assert Trainer(variant(seed=1, steps=1), other).run() == 0
    assert _metrics(again) == _metrics(finished)
    assert _metrics(other)[0] != _metrics(finished)[0]


@pytest.mark.slow
def test_threads_that_overlap_change_nothing(finished: Path, tmp_path: Path) -> None:
    config = replace(tiny(), rollout=replace(tiny().rollout, overlap=True))
    assert Trainer(config, tmp_path / "run").run() == 0
    # How many groups happened to be waiting is a matter of timing; what was trained on is not.
    strip = lambda lines: [{k: v for k, v in line.items() if k != "async/queue_groups"} for line in lines]  # noqa: E731
    assert strip(_metrics(tmp_path / "run")) == strip(_metrics(finished))


@contextmanager
def _at_step(step: int, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has ``do`` called when the metrics of ``step`` have been written."""
    log = MetricsWriter.log

    def log_and_do(self: MetricsWriter, at: int, metrics: Any) -> None:
        log(self, at, metrics)
        if at == step:
            do()

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "log", log_and_do)
        yield


def test_ctrl_c_checkpoints_says_how_to_resume_and_the_resumed_run_is_the_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with _at_step(4, lambda: os.kill(os.getpid(), signal.SIGINT), monkeypatch):
        assert Trainer(tiny(), run).run() == INTERRUPTED
    assert f"sat-jax train --resume --out {run}" in capsys.readouterr().out
    assert [line["step"] for line in _lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert _metrics(run) == _metrics(finished)
    assert _lines(run / "evaluations.jsonl") == _lines(finished / "evaluations.jsonl")
    assert audit(read_ledger(run / "ledger.jsonl")).clean


def test_a_crash_after_the_checkpoint_loses_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def fail() -> None:
        raise RuntimeError("power failure")

    with _at_step(5, fail, monkeypatch), pytest.raises(RuntimeError, match="power failure"):
        Trainer(tiny(), run).run()
    assert Trainer(tiny(), run, resume=True).run() == 0
    assert _metrics(run) == _metrics(finished)
    assert audit(read_ledger(run / "ledger.jsonl")).clean
    assert json.loads((run / "resumes.jsonl").read_text())["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "lags"),
    [(synchronous(), [0, 0, 0, 0]), (batchwise(2), [0, 1, 2, 1])],
)
def test_the_other_scheduled_regimes(schedule: Schedule, lags: list[int], tmp_path: Path) -> None:
    config = variant(steps=4, rollout=replace(tiny().rollout, schedule=schedule))
    assert Trainer(config, tmp_path / "run").run() == 0
    assert [line["async/staleness_mean"] for line in _metrics(tmp_path / "run")] == lags


@pytest.mark.slow
def test_a_batch_serves_several_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates of one group each: published, checkpointed and evaluated at batch ends, logged per update."""
    config = variant(
        steps=8,
        checkpoint_interval=3,
        rollout=replace(tiny().rollout, schedule=fixed_delay(1), max_staleness=3),
        learner=replace(tiny().learner, updates_per_batch=2),
        loss=LossConfig(rules=(Ppo(), Decoupled()), denominator="proximal"),
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert Trainer(config, whole).run() == 0
    lines = _metrics(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["async/staleness_mean"] for line in lines] == [0, 1, 2, 3, 2, 3, 2, 3]
    assert [e["step"] for e in _lines(whole / "evaluations.jsonl")] == [0, 4, 6, 8]  # every 3 steps, at batch ends
    assert {int(p.name) for p in (whole / "checkpoints").iterdir() if p.name.isdigit()} == {6, 8}
    # The proximal policy is that at the start of the batch: the first update's ratio is 1, the second's is not.
    assert all(line["train/ratio_max"] == pytest.approx(1, abs=1e-6) for line in lines[::2])
    assert any(abs(line["train/ratio_max"] - 1) > 1e-4 for line in lines[1::2])
    assert audit(read_ledger(whole / "ledger.jsonl")).clean
    # Asked to stop at step 6, it stops there; resumed, it is the same run.
    with _at_step(6, lambda: os.kill(os.getpid(), signal.SIGINT), monkeypatch):
        assert Trainer(config, broken).run() == INTERRUPTED
    assert [line["step"] for line in _lines(broken / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert Trainer(config, broken, resume=True).run() == 0
    assert _metrics(broken) == lines
    other = replace(
        config,
        steps=9,
        learner=replace(config.learner, updates_per_batch=3),
        rollout=replace(config.rollout, prompts_per_step=3, max_staleness=9),
    )
    with pytest.raises(ValueError, match=r"step 8 .* is not at the end of a batch of learner\.updates_per_batch = 3"):
        Trainer(other, broken, resume=True).run()


def test_free_running(tmp_path: Path) -> None:
    rollout = replace(tiny().rollout, schedule=free_running(), overlap=True)
    assert Trainer(variant(rollout=rollout), tmp_path / "run").run() == 0
    lines = _metrics(tmp_path / "run")
    assert len(lines) == 6
    assert max(line["async/staleness_max"] for line in lines) <= tiny().rollout.max_staleness
    assert audit(read_ledger(tmp_path / "run" / "ledger.jsonl")).clean


@pytest.mark.slow
def test_another_surrogate_unit_denominator_mask_and_weight(tmp_path: Path) -> None:
    """What the other methods of Table 1 are made of, in one run, without routing replay and in micro-batches."""
    config = variant(
        steps=4,
        loss=LossConfig(unit="sequence", rules=(Ppo(), Dppo(), Tis()), denominator="rollout_policy"),
        learner=LearnerConfig(routing_replay=False, micro_batches=2, log_delta=True),
    )
    assert Trainer(config, tmp_path / "run").run() == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["method"] == "ppo+dppo+tis"
    last = _metrics(tmp_path / "run")[-1]
    assert 0 <= last["async/delta_impl"] < 1e-4  # one machine, one precision, no noise: the engine is the learner
    assert last["async/delta_pi"] > 1e-3
    assert last["train/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert last["train/keep_fraction"] < 1


@pytest.mark.slow
def test_routing_replay_undoes_an_engine_that_selects_other_experts(tmp_path: Path) -> None:
    """Only the selection is perturbed: with the recorded experts learner and engine agree at lag 0, without they do
    not."""
    noisy = {
        "rollout": replace(tiny().rollout, schedule=synchronous()),
        "engine": replace(tiny().engine, selection_noise=1.0),
    }
    found = {}
    for replay in (True, False):
        run = tmp_path / str(replay)
        config = variant(steps=1, **noisy, learner=replace(tiny().learner, routing_replay=replay))
        assert Trainer(config, run).run() == 0
        found[replay] = _metrics(run)[0]
    assert found[True]["train/d_bar"] < 1e-5
    assert found[False]["train/d_bar"] > 1e-2
    assert found[True]["moe/router_agreement"] == found[False]["moe/router_agreement"] < 0.9


def test_a_refused_resume_leaves_the_run_as_it_was(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    for change, message in (
        (["--seed", "4"], "has seed = 0, this run has 4"),
        (["--policy.init.hidden_size", "32"], "does not fit this configuration"),
        (["--steps", "3"], "is at step 6 already"),
    ):
        assert main(["train", "--resume", "--out", str(run), *change]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == before


def test_waiting_groups_are_checked_against_what_a_resume_changes(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "6")  # step 3 has groups in its queue
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    for change in (["--sampling.top_k", "4"], ["--sampling.max_new_tokens", "1"]):
        assert main(["train", "--resume", "--out", str(run), *change]) == 2
        error = capsys.readouterr().err
        assert "wait in the checkpoint of step 3 were sampled under other settings" in error
        assert f"settings of {run / 'config.json'}" in " ".join(error.split())
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == before


@pytest.mark.slow
def test_a_second_process_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    def intrude() -> None:
        with pytest.raises(ValueError, match="by another process"):
            Trainer(tiny(), run, resume=True).run()

    with _at_step(1, intrude, monkeypatch):
        assert Trainer(variant(steps=1), run).run() == 0


def test_a_warm_start_needs_demonstrations(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"{i}=", "answer": str(i)}) + "\n" for i in range(20)))
    config: ExperimentConfig = variant(data=replace(tiny().data, source=str(prompts)))
    with pytest.raises(ValueError, match="warm_start needs demonstrations"):
        Trainer(config, tmp_path / "run").run()
    assert not (tmp_path / "run").exists()
