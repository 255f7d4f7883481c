"""What engines report beside tokens: what really came back from some, and what must become of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sat_jax.data.records import RouteLayout, Routes, Support, check_routes, check_support
from sat_jax.types import NATIVE_ROUTE, NO_TOKEN, Trajectory

BOTH = Routes(n_layers=2, top_k=2, n_experts=4)
FIRST_DENSE = Routes(n_layers=3, top_k=2, n_experts=4, numbers=(1, 2, 3))  # layer 0 is dense
ALL_FOUR = RouteLayout(n_layers=4)


def some_routes(tokens: int, layers: int = 2, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, 4)), -1)[..., :2]


def trajectory(routes: Any = None, tokens: int = 5, index: int = 0, **changes: Any) -> Trajectory:
    """Two prompt tokens and the rest sampled."""
    n = tokens - 2
    base = Trajectory(
        prompt_id="gsm8k-12",
        sample_index=index,
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.arange(11, 11 + n, dtype=np.int32),
        log_probs=np.zeros(n, np.float32),
        policy_versions=np.zeros(n, np.int32),
        routed_experts=routes,
        finish_reason="stop",
    )
    return dataclasses.replace(base, **changes)


def checked(routes: Any, tokens: int = 5, wanted: Routes = BOTH, layout: RouteLayout | None = None) -> np.ndarray:
    (found,) = check_routes([trajectory(routes, tokens)], wanted, layout)
    return found


def test_one_row_for_every_token_that_was_an_input() -> None:
    """A row for the last sampled token, which never was one, is dropped, whatever it holds."""
    recorded = some_routes(5)
    np.testing.assert_array_equal(checked(recorded[:4]), recorded[:4])
    recorded[4] = 0
    np.testing.assert_array_equal(checked(recorded), recorded[:4])


@pytest.mark.parametrize("rows", [3, 6, 10])
def test_any_other_number_of_rows_is_an_error(rows: int) -> None:
    """P = 3 and 2 + 2 sampled tokens: 6 rows are right for 7 tokens, 10 are two segments joined twice."""
    tokens = {3: 5, 6: 8, 10: 7}[rows]
    says = (
        rf"sample 0 of prompt gsm8k-12 has routed experts int64\[{rows}, 2, 2\]: integers of {tokens - 1} or {tokens}"
    )
    with pytest.raises(ValueError, match=says):
        checked(some_routes(rows), tokens)


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 2, 1), (4, 2, 3), (2, 4, 2), (4, 4)])
def test_records_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Of another model, with dense layers on the wire, with axes swapped."""
    with pytest.raises(ValueError, match=r"integers of 4 or 5 input tokens, 2 layers, top-2 \(axes TLK\) are needed"):
        checked(np.zeros(shape, int))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([2, -1], r"\[2, -1\] is partly filled"),
        ([4, 0], r"\[4, 0\] is outside 0..3"),
        ([-2, 0], r"\[-2, 0\] is outside 0..3"),
        ([1, 1], r"\[1, 1\] names an expert twice"),
    ],
)
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_impossible_sets_are_named(row: list[int], problem: str, dtype: Any) -> None:
    """In the middle of many trajectories of several lengths."""
    some = [trajectory(some_routes(n - 1).astype(dtype), n, i) for i, n in enumerate((3, 7, 5, 4))]
    some[2].routed_experts[1, 1] = row
    with pytest.raises(ValueError, match=rf"sample 2 of prompt gsm8k-12, token 1, layer 1: expert set {problem}"):
        check_routes(some, BOTH)


def test_unsigned_records_are_read_too() -> None:
    recorded = some_routes(4).astype(np.uint8)
    np.testing.assert_array_equal(checked(recorded), recorded)
    recorded[3, 0] = 255  # what -1 becomes
    with pytest.raises(ValueError, match=r"token 3, layer 0: expert set .* is outside"):
        checked(recorded)


def test_rows_of_minus_one_mean_native_and_are_kept() -> None:
    recorded = some_routes(4)
    recorded[1] = NATIVE_ROUTE
    np.testing.assert_array_equal(checked(recorded), recorded)


def test_zeros_from_a_prefix_cache_are_not_routes() -> None:
    """A warm prompt whose first two rows came back as zeros instead of routes."""
    recorded = some_routes(4)
    recorded[:2] = 0
    with pytest.raises(ValueError, match=r"token 0, layer 0: expert set \[0, 0\] names an expert twice"):
        checked(recorded)


def test_dense_layers_shift_the_wire_not_the_learner() -> None:
    wire = some_routes(4, layers=4)
    for filling in (-1, 99):  # some engines fill the dense layer with -1, some with anything
        wire[:, 0] = filling
        np.testing.assert_array_equal(checked(wire, wanted=FIRST_DENSE, layout=ALL_FOUR), wire[:, 1:])
    np.testing.assert_array_equal(checked(wire[:, 1:], wanted=FIRST_DENSE), wire[:, 1:])


def test_the_layout_is_declared_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"\[4, 4, 2\]: .* 3 layers"):
        checked(some_routes(4, 4), wanted=FIRST_DENSE)
    with pytest.raises(ValueError, match=r"\[4, 3, 2\]: .* 4 layers"):
        checked(some_routes(4, 3), wanted=FIRST_DENSE, layout=ALL_FOUR)


def test_square_arrays_need_the_axis_order() -> None:
    """Three rows, three layers: the shape fits both orders, the declaration decides."""
    wire = some_routes(3, 3)
    np.testing.assert_array_equal(checked(wire, 4, FIRST_DENSE, RouteLayout(axes="TLK")), wire)
    np.testing.assert_array_equal(checked(wire, 4, FIRST_DENSE, RouteLayout(axes="LTK")), wire.swapaxes(0, 1))


def test_layer_first_with_dense_layers() -> None:
    wire = some_routes(5, 4).swapaxes(0, 1)
    found = checked(wire, wanted=FIRST_DENSE, layout=RouteLayout("LTK", n_layers=4))
    np.testing.assert_array_equal(found, wire[1:, :4].swapaxes(0, 1))


def test_an_engine_that_reports_nothing_for_a_layer_is_stopped() -> None:
    """Also where other trajectories have it."""
    silent = some_routes(4, 3)
    silent[:, 1] = NATIVE_ROUTE
    both = [trajectory(some_routes(4, 3)), trajectory(silent, index=1)]
    with pytest.raises(ValueError, match="sample 1 of prompt gsm8k-12 has no recorded expert in layer 2: the engine"):
        check_routes(both, FIRST_DENSE)


def test_nothing_was_fed_nothing_is_missing() -> None:
    """One prompt token and no response, as an aborted request leaves it."""
    empty = trajectory(some_routes(0), prompt_ids=np.array([1]), response_ids=np.zeros(0, np.int32))
    assert [r.shape for r in check_routes([empty], BOTH)] == [(0, 2, 2)]
    assert [len(r) for r in check_routes([empty, trajectory(some_routes(4)), empty], BOTH)] == [0, 4, 0]
    assert check_routes([], BOTH) == []


def test_records_that_cannot_be_replayed_at_all() -> None:
    with pytest.raises(ValueError, match="comes without routed experts"):
        checked(None)
    with pytest.raises(ValueError, match="has routed experts float32"):
        checked(some_routes(4).astype(np.float32))
    with pytest.raises(ValueError, match=r"routes.n_layers = 0: .*a dense model has nothing to replay"):
        Routes(0, 0, 0)


SUPPORT = Support(size=3, vocab_size=90)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda s: None, "comes without the supports that its tokens were drawn from"),
        (lambda s: s[:-1], r"has 4 response tokens but supports int32\[3, 3\]"),
        (lambda s: s.astype(float), r"supports float64\[4, 3\]"),
        (lambda s: np.full_like(s, NO_TOKEN), r"response token 0 .* its support \[\] lacks the sampled token"),
        (lambda s: np.where(np.arange(4)[:, None] == 2, 33, s), "token 2 .* names a token twice"),
        (lambda s: np.where(np.arange(4)[:, None] == 1, s[::-1], s), r"response token 1 .* lacks the sampled token"),
        (lambda s: np.where(s == NO_TOKEN, 90, s), "names an id outside 0..89"),
        (lambda s: np.where(s == NO_TOKEN, -2, s), "names an id outside 0..89"),
        (lambda s: np.hstack([s, s + 40]), r"supports of 6 tokens, more than sampling.top_k = 3"),
    ],
    ids=["none", "rows", "floats", "empty", "twice", "without the token", "too large", "negative", "too many"],
)
def test_wrong_supports_are_rejected_by_name(damage: Any, says: str) -> None:
    ids = np.array([11, 22, 33, 44], np.int32)
    support = np.full((4, 3), NO_TOKEN, np.int32)
    support[:, 1], support[::2, 0] = ids, ids[::2] + 1
    right = trajectory(response_ids=ids, index=1, support=support)
    np.testing.assert_array_equal(check_support(right, SUPPORT), support)
    with pytest.raises(ValueError, match=f"sample 1 of prompt gsm8k-12.*{says}"):
        check_support(dataclasses.replace(right, support=damage(support)), SUPPORT)
