"""A run on a mesh of 8 CPU devices is the run on one: same samples, same numbers, resumable on any other mesh."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from sat_jax.config import LearnerConfig, MeshConfig
from sat_jax.training import build
from tests.helpers.devices import report_of
from tests.helpers.tiny import tiny, variant

pytestmark = pytest.mark.slow

_TIMED = ("perf/", "rollout/tokens_per_s", "time", "async/queue_groups")
_OF_D = ("sat/", "train/clip_fraction")
"""What depends on which |log ratio| is larger; at lag 0 all of them are rounding."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.integration.mesh_main")


def _same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for a, b in zip(found, expected, strict=True):
        assert set(a) - {"rollout/tokens_per_s"} == set(b) - {"rollout/tokens_per_s"}
        left_out = _TIMED if b["train/d_bar"] > 1e-4 else (*_TIMED, *_OF_D)
        for name, value in b.items():
            if isinstance(value, int | float) and not name.startswith(left_out):
                assert a[name] == pytest.approx(value, rel=1e-4, abs=1e-4), (b["step"], name)


def test_the_run_on_a_mesh_is_the_run_on_one_device(report: dict[str, Any]) -> None:
    alone, mesh = report["alone"], report["mesh"]
    assert len(alone["metrics"]) == 4
    # At lag 0 the engine's weights are the learner's; at lag 1, after a swap, those of the step before.
    assert [line["async/staleness_mean"] for line in mesh["metrics"]] == [0, 1, 1, 1]
    assert mesh["metrics"][0]["train/d_bar"] < 1e-5
    assert min(line["train/d_bar"] for line in mesh["metrics"][1:]) > 1e-3
    _same(mesh["metrics"], alone["metrics"])
    assert [s["tokens"] for s in mesh["samples"]] == [s["tokens"] for s in alone["samples"]]
    assert [e["avg@k"] for e in mesh["evaluations"]] == [e["avg@k"] for e in alone["evaluations"]]


def test_a_checkpoint_of_a_mesh_is_read_on_one_device_and_holds_the_same_weights(report: dict[str, Any]) -> None:
    assert report["on one device"] < 1e-3


def test_a_checkpoint_of_one_device_resumes_on_a_mesh_and_in_packed_rows(report: dict[str, Any]) -> None:
    packed, alone = report["alone to packed other"], report["alone"]
    _same(packed["metrics"], alone["metrics"])
    assert [s["tokens"] for s in packed["samples"]] == [s["tokens"] for s in alone["samples"]]
    fill, before = (run["metrics"][-1]["perf/batch_fill"] for run in (packed, alone))
    assert before < 0.6
    assert fill == pytest.approx(2 * before)  # four rows of two where eight were


def test_state_and_engine_lie_on_the_mesh(report: dict[str, Any]) -> None:
    state, other = report["state"], report["other_state"]
    embed = {name: share for name, share in state.items() if name.endswith("['embed']")}
    gate = {name: share for name, share in state.items() if name.endswith("['gate']")}
    assert len(embed) == len(gate) == 3  # the parameter and both moments
    assert set(embed.values()) == {1 / 2}  # fsdp
    assert set(gate.values()) == {1 / 4}  # fsdp, expert
    assert {other[name] for name in gate} == {1 / 8}  # and tensor
    lies, compilations = report["mesh_engine"]
    assert lies["[1, 4, 16, 8]"] == [1 / 4, 1 / 2]  # an expert matrix: the reference's as the state's, and expert alone
    assert lies["[16, 16]"] == [1 / 2, 1]  # the embedding: the engine's is whole
    assert lies["[1, 8, 2, 15, 8]"] == [1 / 8]  # keys and values
    assert compilations["decode"] == 1  # for both engines, before and after every swap


def test_a_mesh_that_cannot_work_is_refused_before_anything_is_written(report: dict[str, Any]) -> None:
    assert "fsdp 4 x tensor 1 x expert 1 = 4 devices, and this process has 8 (cpu)" in report["count"]
    assert "choose sizes whose product is 8" in report["count"]
    assert "mesh axis 'expert' = 8 does not divide the expert dimension 4 of" in report["model"]
    assert not report["count left"]
    assert not report["model left"]


def test_rows_that_the_mesh_does_not_deal_out_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"deals rows 16 ways \(data 2 x fsdp 4 x expert 2\).* the 8 rows of a micro"):
        variant(mesh=MeshConfig(data=2, fsdp=4, expert=2, tensor=3))
    with pytest.raises(ValueError, match="does not divide the 4 rows of a micro-batch"):
        variant(mesh=MeshConfig(fsdp=8), learner=LearnerConfig(micro_batches=2))
    assert variant(mesh=MeshConfig(fsdp=8), learner=LearnerConfig(micro_batches=2, packing=True)).mesh.row_ways == 8
    with pytest.raises(ValueError, match=r"mesh\.expert = 0: must be at least 1"):
        variant(mesh=MeshConfig(expert=0))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"process 0 of 2: training runs in one process"):
        build.build_placement(tiny())
