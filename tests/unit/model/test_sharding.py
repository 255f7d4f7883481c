"""Meshes of 8 CPU devices against one device, in a process of their own."""

import jax
import pytest
from jax.sharding import AxisType

from sat_jax import model
from tests.helpers.devices import report_of
from tests.helpers.models import MOE

from .sharded_main import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report():
    return report_of("tests.unit.model.sharded_main")


@pytest.mark.parametrize("name", CASES)
def test_every_mesh_equals_one_device(report, name):
    found = report["meshes"][name]
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-5
    assert found["updated"] < 1e-5
    assert found["agreement"] < 1e-6
    assert found["routes"]


@pytest.mark.parametrize(
    ("name", "share"), [("data", 1), ("fsdp", 1 / 8), ("tensor", 1 / 2), ("expert", 1 / 8), ("mixed", 1 / 8)]
)
def test_experts_lie_where_the_rules_say(report, name, share):
    assert report["meshes"][name]["experts_share"] == share


def test_fsdp_splits_everything_that_is_large(report):
    shares = report["meshes"]["fsdp"]["shares"]
    whole = {name for name, share in shares.items() if share == 1}
    assert whole == {"layers_0.attention.q_norm", "layers_0.attention.k_norm"}


def test_reading_and_making_weights_in_place(report):
    assert report["loading"] == {"equal": True, "placed": True, "init": True}


def test_decoding_on_a_mesh(report):
    assert report["decoding"] < 1e-5


def mesh(**sizes):
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"expert": 3}, "mesh axis 'expert' = 3 does not divide the expert dimension 8 of layers_0.mlp.gate"),
        ({"tensor": 4}, "mesh axis 'tensor' = 4 does not divide the kv_heads dimension 2 of layers_0.attention.k"),
        ({"fsdp": 5}, "mesh axis 'fsdp' = 5 does not divide the embed dimension 32 of embed"),
        ({"model": 2}, "mesh axis 'model' is unknown"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model(sizes, says):
    with pytest.raises(ValueError, match=says):
        model.check_mesh(MOE, mesh(**sizes))
