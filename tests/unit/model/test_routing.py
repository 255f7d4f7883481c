"""Recorded routes from engines: what really came back from some, and what must become of it."""

import dataclasses

import numpy as np
import pytest

from sat_jax import model
from sat_jax.model import RouteLayout, validate_routes
from tests.helpers.models import LLAMA, MOE

CFG = dataclasses.replace(MOE, num_experts=4, num_experts_per_tok=2)  # 2 layers, both mixtures
FIRST_DENSE = dataclasses.replace(
    CFG, num_hidden_layers=4, mlp_only_layers=(0,), intermediate_size=8
)  # layer 0 dense; mixtures 1, 2, 3


def routes(tokens, layers=2, seed=0):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, 4)), -1)[..., :2]


def test_the_last_sampled_token_routes_natively():
    recorded = routes(4)
    found = validate_routes(recorded, CFG, 5, "p/0")
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[:4], recorded)
    np.testing.assert_array_equal(found[4], -1)  # never zero-filled as experts 0, 0
    np.testing.assert_array_equal(validate_routes(recorded, CFG, 4, "p/0"), recorded)


@pytest.mark.parametrize("rows", [3, 6, 10])
def test_any_other_number_of_rows_is_an_error(rows):
    """P = 3 and 2 + 2 sampled tokens: 6 rows are right for 7 tokens, 10 are two segments joined twice."""
    n_tokens = 7 if rows == 10 else 8 if rows == 6 else 5
    with pytest.raises(ValueError, match=rf"dapo-17/3: {rows} rows of routed experts for {n_tokens} tokens"):
        validate_routes(routes(rows), CFG, n_tokens, "dapo-17/3")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([2, -1], "a partly filled row of routed experts at token 1, layer 0"),
        ([4, 0], "routed expert 4 at token 1, layer 0, the model has experts 0 .. 3"),
        ([-2, 0], "routed expert -2 at token 1"),
        ([1, 1], "an expert is routed to twice at token 1, layer 0"),
    ],
)
def test_impossible_rows_are_named(row, says):
    recorded = routes(4)
    recorded[1, 0] = row
    with pytest.raises(ValueError) as error:
        validate_routes(recorded, CFG, 5, "gsm8k-12/0")
    assert str(error.value).startswith("gsm8k-12/0: ")
    assert says in str(error.value)


def test_rows_of_minus_one_mean_native_and_are_kept():
    recorded = routes(4)
    recorded[1] = -1
    found = validate_routes(recorded, CFG, 5, "p/0")
    np.testing.assert_array_equal(found[:4], recorded)


def test_zeros_from_a_prefix_cache_are_not_routes():
    """A warm prompt whose first two rows came back as zeros instead of routes."""
    recorded = routes(3)
    recorded[:2] = 0
    with pytest.raises(ValueError, match="routed to twice at token 0"):
        validate_routes(recorded, CFG, 4, "p/0")


def test_dense_layers_shift_the_wire_not_the_learner():
    wire = routes(4, layers=4)
    wire[:, 0] = -1  # some engines fill the dense layer with -1, some with anything
    found = validate_routes(wire, FIRST_DENSE, 5, "p/0", RouteLayout(layers="all"))
    np.testing.assert_array_equal(found[:4], wire[:, 1:])
    wire[:, 0] = 99
    np.testing.assert_array_equal(validate_routes(wire, FIRST_DENSE, 4, "p/0", RouteLayout(layers="all")), wire[:, 1:])
    np.testing.assert_array_equal(validate_routes(wire[:, 1:], FIRST_DENSE, 4, "p/0"), wire[:, 1:])


def test_the_layout_is_declared_not_guessed():
    with pytest.raises(ValueError, match="routed experts for 4 layers, expected 3"):
        validate_routes(routes(4, 4), FIRST_DENSE, 5, "p/0", RouteLayout(layers="moe"))
    with pytest.raises(ValueError, match="routed experts for 3 layers, expected 4"):
        validate_routes(routes(4, 3), FIRST_DENSE, 5, "p/0", RouteLayout(layers="all"))


def test_square_arrays_need_the_axis_order():
    """Three rows, three layers: the shape fits both orders, the declaration decides."""
    wire = routes(3, 3)
    token_first = validate_routes(wire, FIRST_DENSE, 4, "p/0", RouteLayout(axes="TLK"))
    layer_first = validate_routes(wire, FIRST_DENSE, 4, "p/0", RouteLayout(axes="LTK"))
    np.testing.assert_array_equal(token_first[:3], wire)
    np.testing.assert_array_equal(layer_first[:3], wire.swapaxes(0, 1))
    assert (token_first != layer_first).any()


def test_an_engine_that_reports_nothing_for_a_layer_is_stopped():
    recorded = routes(4, 3)
    recorded[:, 1] = -1
    with pytest.raises(ValueError, match="no routes at all for layer 2"):
        validate_routes(recorded, FIRST_DENSE, 5, "p/0")


def test_routes_of_another_model():
    with pytest.raises(ValueError, match="2 routed experts per token, the model has 3"):
        validate_routes(routes(4), dataclasses.replace(CFG, num_experts_per_tok=3), 5, "p/0")
    with pytest.raises(ValueError, match="dense model"):
        validate_routes(routes(4), LLAMA, 5, "p/0")
    with pytest.raises(ValueError, match="expected integers TLK"):
        validate_routes(routes(4).astype(np.float32), CFG, 5, "p/0")


def test_the_public_name():
    assert model.validate_routes is validate_routes
