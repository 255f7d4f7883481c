"""A whole learner step on meshes of 8 CPU devices equals the step on one."""

from __future__ import annotations

from typing import Any

import pytest

from sat_jax import learner
from tests.helpers.devices import report_of
from tests.unit.learner.test_step import _spec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.unit.learner.sharded_main")


@pytest.mark.parametrize("case", ["mixed/1", "mixed/2"])
def test_a_mesh_changes_nothing(report: dict[str, Any], case: str) -> None:
    found = report[case]
    assert found["gate_rate"] > 0
    assert found["moments"] < 1e-5
    for name, (alone, there) in found["metrics"].items():
        assert there == pytest.approx(alone, rel=1e-4, abs=1e-5), name


def test_the_state_lies_on_the_mesh(report: dict[str, Any]) -> None:
    """Parameters and both moments are cut alike; embeddings and experts, the bulk, are."""
    found = report["mixed/1"]
    assert found["moment_shares"] == found["param_shares"]
    assert min(found["param_shares"]) <= 1 / 4
    assert sum(share < 1 for share in found["param_shares"]) >= len(found["param_shares"]) / 2


def test_without_a_mesh_there_are_no_shardings() -> None:
    with pytest.raises(ValueError, match="has no mesh"):
        learner.state_shardings(_spec())
