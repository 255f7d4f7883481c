from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from sat_jax.runs.reader import MAX_SAMPLES, flatten, outcome, read_run
from sat_jax.runs.writer import MetricsWriter
from tests.helpers.synthetic_run import make_run, write_config


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=20, eval_every=5))
    assert run.name == "sat_gspo_demo"
    assert run.steps.tolist() == list(range(1, 21))
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert run.series("train/d_bar")[1][0] == first["train/d_bar"]
    assert run.histograms["async/staleness_histogram"][0] == {"0": 1792}
    assert [e["step"] for e in run.evaluations] == [0, 5, 10, 15, 20]
    assert len(run.samples) == 40
    assert run.setting("loss.sat.alpha") == 0.9
    assert run.setting("loss.sat.beta", "none") == "none"
    assert run.setting("warm_start.steps") is None
    assert run.notices == []


def test_a_folder_with_nothing_but_a_configuration_is_an_empty_run(tmp_path: Path) -> None:
    write_config(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert len(run.steps) == len(run.evaluations) == len(run.samples) == len(run.groups) == 0
    assert run.series("train/loss")[1].shape == (0,)
    assert outcome(run) is None


def test_a_metric_that_starts_late_or_is_not_finite_has_gaps(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"a": 1.0})
        writer.log(2, {"a": math.nan, "b": 5})
        writer.log(4, {"a": 3.0})
    run = read_run(tmp_path)
    np.testing.assert_array_equal(run.columns["a"], [1, np.nan, 3])
    assert [x.tolist() for x in run.series("b")] == [[2], [5.0]]
    assert run.notices == ["a was not finite at 1 step, first at step 2"]


@pytest.mark.parametrize("name", ["metrics", "evaluations", "samples"])
def test_a_half_written_last_line_is_skipped_and_said(tmp_path: Path, name: str) -> None:
    whole = read_run(make_run(tmp_path, steps=6, eval_every=3))
    path = tmp_path / f"{name}.jsonl"
    number = len(path.read_bytes().splitlines()) + 1
    with path.open("ab") as file:
        file.write(b'{"step": 7, "train/lo')
    run = read_run(tmp_path)
    assert run.notices == [f"the last line of {name}.jsonl (line {number}) is half-written and was skipped"]
    assert (len(run.steps), len(run.evaluations), len(run.samples)) == (6, len(whole.evaluations), 12)


@pytest.mark.parametrize("name", ["metrics", "evaluations", "samples"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, name: str) -> None:
    make_run(tmp_path, steps=6, eval_every=3)
    path = tmp_path / f"{name}.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    rows[1] = rows[1][: len(rows[1]) // 2] + b"\n"
    path.write_bytes(b"".join(rows))
    with pytest.raises(ValueError, match=rf"{name}\.jsonl line 2 is not JSON"):
        read_run(tmp_path)


def test_what_is_no_run_folder_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is no folder: give a run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"config": ')
    with pytest.raises(ValueError, match=r"is damaged"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"it holds list, not an object"):
        read_run(tmp_path)


def test_only_some_samples_of_a_long_run_are_read_first_and_last_included(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1000, samples_per_step=1)
    steps = [sample["step"] for sample in read_run(tmp_path).samples]
    assert len(steps) == MAX_SAMPLES
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert max(np.diff(steps)) <= 3


def test_a_resume_and_what_it_removed_is_said(tmp_path: Path) -> None:
    make_run(tmp_path, steps=6, eval_every=3)
    MetricsWriter(tmp_path, resume_step=4).close()
    (notice,) = read_run(tmp_path).notices
    assert notice.startswith(
        "resumed at step 4; 2 lines (steps 5 to 6) of metrics.jsonl, 1 line (steps 6 to 6) of evalu"
    )


def test_withheld_updates_and_failed_gradings_are_said(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"train/update_skipped": 1.0, "rollout/ungraded": 3})
        writer.log(2, {"train/update_skipped": 0.0, "rollout/ungraded": 0})
    notices = read_run(tmp_path).notices
    assert re.search(r"withheld at 1 step:", notices[0])
    assert re.search(r"^3 responses could not be graded", notices[1])


def test_groups_are_counted_by_their_newest_state(tmp_path: Path) -> None:
    write_config(tmp_path)
    states = [
        ("a", "issued"),
        ("b", "issued"),
        ('q"\\', "issued"),
        ("a", "generated"),
        ("a", "trained"),
        ("b", "failed"),
    ]
    rows = [{"group_id": g, "prompt_id": "p", "state": s, "version": 0, "step": 1, "time": 0.0} for g, s in states]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path).groups == {"trained": 1, "failed": 1, "issued": 1}


def test_the_last_evaluation_of_a_step_counts(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for value in (0.1, 0.2):
            writer.log_evaluation(0, {"avg@k": value})
    assert [e["avg@k"] for e in read_run(tmp_path).evaluations] == [0.2]


def test_the_outcome_shows_a_collapse_that_the_best_evaluation_hides(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for step, value in enumerate((0.2, 0.8, 0.9, 0.3, 0.5)):
            writer.log_evaluation(step, {"avg@k": value})
    result = outcome(read_run(tmp_path))
    assert result is not None
    assert (result.before, result.final, result.best, result.best_step) == (0.2, 0.5, 0.9, 2)
    assert result.max_drawdown == pytest.approx(0.6)
    assert result.below_half_peak


def test_flatten() -> None:
    assert flatten({"a": 1, "b": {"c": {"d": 2}, "e": [1, 2], "f": {}}}) == {
        "a": 1,
        "b.c.d": 2,
        "b.e": [1, 2],
        "b.f": {},
    }


def test_rules_written_as_objects_go_by_the_name_of_their_class(tmp_path: Path) -> None:
    rules = [
        {"class": "sat_jax.losses.rules.dual_clip:DualClip"},
        {"class": "sat_jax.losses.rules.sat:Sat", "alpha": 0.95, "exponent": 2.0},
        {"class": "/home/me/rules.py:HuberKL", "sha256": "ab12", "weight": 0.1},
    ]
    write_config(tmp_path, rules=rules, sat={})
    run = read_run(tmp_path)
    assert run.setting("loss.rules") == ["dual_clip", "sat", "huber_kl"]
    assert run.setting("loss.sat.alpha") == 0.95
    assert run.setting("loss.sat.beta", "none") == "none"
    assert run.setting("loss.huber_kl.class") == "/home/me/rules.py:HuberKL"
    assert run.setting("loss.huber_kl.sha256") == "ab12"
    assert run.setting("loss.sat.class") is None
    assert "loss.dual_clip" not in str(flatten(run.info["config"]))


def test_rules_written_as_names_stay_as_they_are() -> None:
    config = {"loss": {"rules": ["ppo", "sat"], "sat": {"alpha": 0.9}}}
    assert flatten(config) == {"loss.rules": ["ppo", "sat"], "loss.sat.alpha": 0.9}


def test_two_rules_of_one_name_are_both_kept() -> None:
    rules = [{"class": f"/{place}.py:Huber", "weight": i} for i, place in enumerate("ab")]
    flat = flatten({"rules": rules})
    assert flat["rules"] == ["huber", "huber_1"]
    assert (flat["huber.weight"], flat["huber_1.weight"]) == (0, 1)
