from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sat_jax.metrics import METRICS, metrics_markdown, value_counts
from sat_jax.runs.writer import MetricsWriter
from tests.helpers import ROOT

# The names that users' scripts rely on.
PROMISED = re.findall(
    r"\S+",
    """
train/loss train/pg_loss train/kl_loss train/entropy train/grad_norm train/lr train/clip_fraction train/d_bar
train/kl_train_rollout sat/q sat/gate_rate sat/eps_low_mean sat/eps_high_mean sat/c_low_min sat/c_high_min
sat/intercept_rate async/staleness_mean async/staleness_max async/queue_groups async/dropped_stale async/delta_pi
async/delta_impl rollout/reward_mean rollout/response_len_mean rollout/truncated_ratio rollout/zero_std_groups
rollout/tokens_per_s perf/step_time_s perf/tokens_per_s perf/rollout_wait_s perf/train_wait_s moe/router_agreement
""",
)


def strict(text: str) -> dict:
    """JSON without Python's NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict]:
    return [strict(line) for line in path.read_text().splitlines()]


def writer(folder: Path, resume_step: int | None = None) -> MetricsWriter:
    return MetricsWriter(folder, resume_step=resume_step, clock=lambda: 1.7e9)


# ---------------------------------------------------------------------------------------------------- the register


def test_the_register_explains_every_promised_name() -> None:
    assert [name for name in PROMISED if not METRICS.get(name) or not METRICS[name].description] == []


def test_the_documentation_is_the_register() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert metrics_markdown() in page, "docs/metrics.md is out of date: paste metrics_markdown() into it"


def test_value_counts() -> None:
    assert value_counts([1, 1, 8]) == {"1": 2, "8": 1}
    assert value_counts(np.array([[0.0, -0.0], [0.25, 0.249]])) == {"0": 2, "0.25": 2}
    assert value_counts([10, 100], decimals=0) == {"10": 1, "100": 1}
    assert value_counts([0.1 + 0.2, -1, 1e9]) == {"-1": 1, "0.3": 1, "1000000000": 1}
    assert value_counts([]) == {}
    with pytest.raises(ValueError, match="nan"):
        value_counts([1.0, math.nan])


# ------------------------------------------------------------------------------------------------------ the writer


def test_every_kind_of_scalar_becomes_a_json_number(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        w.log(
            np.int64(3),
            {
                "int": 2,
                "float32": np.float32(0.1),
                "jax": jnp.float32(0.25),
                "bfloat16": jnp.bfloat16(1.5),
                "jax_int": jnp.int32(7),
                "flag": np.bool_(True),
                "async/staleness_histogram": {"0": np.int64(5)},
            },
        )
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line == {
        "step": 3,
        "time": 1.7e9,
        "int": 2,
        "float32": 0.1,
        "jax": 0.25,
        "bfloat16": 1.5,
        "jax_int": 7,
        "flag": True,
        "async/staleness_histogram": {"0": 5},
    }


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_a_float32_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    folder, array = tmp_path_factory.mktemp("floats"), np.array(values, np.float32)
    with writer(folder) as w:
        w.log_samples(1, [{"x": array}])
    (line,) = lines(folder / "samples.jsonl")
    assert np.array(line["x"], np.float32).tobytes() == array.tobytes()


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        w.log(1, {"train/loss": math.nan, "train/grad_norm": jnp.float32(math.inf), "train/lr": 1.0})
        w.log_evaluation(1, {"avg@k": math.nan, "sources": {"a": {"avg@k": math.nan}}})
        w.log_samples(1, [{"log_ratio": np.array([0.5, -math.inf], np.float32)}])
    (metric,), (evaluation,), (sample,) = (
        lines(tmp_path / f"{name}.jsonl") for name in ("metrics", "evaluations", "samples")
    )
    assert metric["train/loss"] is None
    assert metric["train/lr"] == 1.0
    assert metric["nonfinite"] == ["train/loss", "train/grad_norm"]
    assert evaluation["nonfinite"] == ["avg@k", "sources.a.avg@k"]
    assert sample == {"step": 1, "log_ratio": [0.5, None], "nonfinite": ["log_ratio[1]"]}


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    w = writer(tmp_path)
    w.log(1, {"train/loss": 1.0})
    assert lines(tmp_path / "metrics.jsonl")[0]["train/loss"] == 1.0
    w.close()


def test_any_text_survives(tmp_path: Path) -> None:
    response = 'é "quoted"\n\u2028 \x00 \ud83d'  # a line separator of Unicode and half of a surrogate pair
    with writer(tmp_path) as w:
        w.log_samples(1, [{"response": response}])
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert json.loads(raw)["response"] == response


@pytest.mark.parametrize("bad", [np.zeros(3), "high", None, [1, 2]])
def test_what_is_no_scalar_is_refused_by_name(tmp_path: Path, bad: object) -> None:
    with writer(tmp_path) as w, pytest.raises(ValueError, match="metric 'train/loss'"):
        w.log(1, {"train/loss": bad})


def test_a_step_is_logged_once_and_in_order(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        w.log(5, {})
        for step in (5, 4):
            with pytest.raises(ValueError, match=f"step {step} .* after step 5"):
                w.log(step, {})
        w.log_samples(5, [{}, {}])  # several samples a step are fine
        with pytest.raises(ValueError, match=r"samples\.jsonl"):
            w.log_samples(4, [{}])


def test_a_fresh_start_never_writes_into_another_run(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        w.log_evaluation(0, {"avg@k": 0.5})
    before = (tmp_path / "evaluations.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"already holds records .* resume"):
        writer(tmp_path)
    assert (tmp_path / "evaluations.jsonl").read_bytes() == before


# ------------------------------------------------------------------------------------------------------ resuming


def train(w: MetricsWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        w.log(step, {"train/loss": 1 / step})
        w.log_samples(step, [{"response": f"{step}a"}, {"response": f"{step}b"}])
        if step % 2 == 0:
            w.log_evaluation(step, {"avg@k": step / 10, "k": 8})


def test_a_resumed_run_leaves_the_files_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with writer(whole) as w:
        train(w, 1, 10)
    with writer(broken) as w:
        train(w, 1, 7)
    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "time": 17')  # the crash came in the middle of a line
    with writer(broken, resume_step=5) as w:
        assert [str(t) for t in w.truncations] == [
            "2 lines (steps 6 to 7) and a half-written line of metrics.jsonl",
            "1 line (steps 6 to 6) of evaluations.jsonl",
            "4 lines (steps 6 to 7) of samples.jsonl",
        ]
        train(w, 6, 10)
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_what_a_resume_removes_is_counted_and_kept(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        train(w, 1, 3)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "resp')
    writer(tmp_path, resume_step=2).close()
    (resume,) = lines(tmp_path / "resumes.jsonl")
    assert resume["step"] == 2
    assert [(t["file"], t["lines"], t["half_written"]) for t in resume["truncated"]] == [
        ("metrics.jsonl", 1, 0),
        ("samples.jsonl", 2, 1),
    ]
    assert resume["removed"]["metrics.jsonl"][0]["train/loss"] == pytest.approx(1 / 3)
    assert resume["removed"]["samples.jsonl"][1:] == [{"step": 3, "response": "3b"}, '{"step": 3, "resp']


def test_a_clean_resume_removes_nothing_and_is_on_record(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        train(w, 1, 4)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    w = writer(tmp_path, resume_step=4)
    w.close()
    assert w.truncations == ()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert lines(tmp_path / "resumes.jsonl") == [{"step": 4, "time": 1.7e9, "truncated": [], "removed": {}}]


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        train(w, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    with writer(tmp_path, resume_step=2) as w:
        assert w.truncations == ()
        train(w, 3, 3)
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("damage", "message"),
    [(b"rubbish\n", "line 3 is no record"), (b'{"step": 9}\n{"step": 1}\n', "goes back to step 1")],
)
def test_a_damaged_file_stops_the_resume_untouched(tmp_path: Path, damage: bytes, message: str) -> None:
    with writer(tmp_path) as w:
        train(w, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + damage)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        writer(tmp_path, resume_step=2)
    assert path.read_bytes() == before


# --------------------------------------------------------------------------------------------------- TensorBoard


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        train(w, 1, 4)
        w.log_evaluation(4, {"avg@k": 0.5, "k": 8, "sources": {"gsm8k": {"avg@k": 0.25}}})
        w.log(5, {"train/loss": math.nan, "async/staleness_histogram": {"0": 3}})
    losses = scalars(tmp_path, "train/loss")
    assert losses[:4] == [(step, pytest.approx(1 / step)) for step in range(1, 5)]
    assert math.isnan(losses[4][1])
    assert scalars(tmp_path, "eval/avg@8")[-1] == (4, 0.5)
    assert scalars(tmp_path, "eval/gsm8k/avg@8") == [(4, 0.25)]
    assert "tensorflow" not in sys.modules


def test_tensorboard_forgets_what_a_resume_cut_off(tmp_path: Path) -> None:
    with writer(tmp_path) as w:
        train(w, 1, 7)
    with writer(tmp_path, resume_step=5) as w:
        for step in (6, 7, 8):
            w.log(step, {"train/loss": -1.0})
    values = scalars(tmp_path, "train/loss")
    assert [step for step, _ in values] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [value for _, value in values[5:]] == [-1.0] * 3
