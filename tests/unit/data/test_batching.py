from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.data.batching import make_batch, make_sft_batch, width_buckets
from sat_jax.data.records import Routes, Support
from sat_jax.types import NATIVE_ROUTE, NO_TOKEN, Group, Prompt, Trajectory

ROUTES = Routes(n_layers=2, top_k=2, n_experts=4)
FIELDS = ("tokens", "segment_ids", "positions", "loss_mask", "behavior_log_probs", "advantages", "policy_versions")


def trajectory(n_prompt: int = 2, n: int = 3, index: int = 0, seed: int = 0, **changes: Any) -> Trajectory:
    rng = np.random.default_rng((seed, index))
    experts = np.argsort(rng.random((n_prompt + n - 1, 2, 4)), axis=-1)[..., :2]
    base = Trajectory(
        prompt_id="p7",
        sample_index=index,
        prompt_ids=rng.integers(1, 90, n_prompt).astype(np.int32),
        response_ids=rng.integers(1, 90, n).astype(np.int32),
        log_probs=-rng.random(n).astype(np.float32),
        policy_versions=rng.integers(3, 6, n).astype(np.int32),
        routed_experts=experts,
        finish_reason="stop",
    )
    return dataclasses.replace(base, **changes)


def group(*members: Trajectory, advantages: Any = None) -> Group:
    prompt = Prompt("p7", "?", np.zeros(2, np.int32), "", "test")
    values = np.linspace(-1, 1, len(members)) if advantages is None else np.array(advantages)
    return Group("0:p7", prompt, members, values.astype(np.float32))


def test_every_array_is_aligned_with_its_token() -> None:
    t = trajectory(
        2, 3, prompt_ids=np.array([11, 12]), response_ids=np.array([21, 22, 1]), policy_versions=np.array([3, 4, 5])
    )
    batch = make_batch([group(t, advantages=[0.5])], widths=[8], routes=ROUTES, pad_id=99)
    np.testing.assert_array_equal(batch.tokens, [[11, 12, 21, 22, 1, 99, 99, 99]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 0, 0, 0]])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 0, 1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.behavior_log_probs[0, 2:5], t.log_probs)
    np.testing.assert_array_equal(batch.advantages, [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0]])
    np.testing.assert_array_equal(batch.policy_versions[0, 2:5], [3, 4, 5])
    np.testing.assert_array_equal(batch.routed_experts[0, :4], t.routed_experts)
    assert (batch.routed_experts[0, 4:] == NATIVE_ROUTE).all()
    kinds = {"tokens": np.int32, "loss_mask": np.bool_, "behavior_log_probs": np.float32, "routed_experts": np.int32}
    assert all(getattr(batch, name).dtype == dtype for name, dtype in kinds.items())


def test_eos_is_trained_on_and_lengths_survive_padding() -> None:
    """Fault 41: completions of 5 and 3 tokens, both ending in EOS."""
    batch = make_batch([group(trajectory(2, 5), trajectory(2, 3, 1))], widths=[7])
    np.testing.assert_array_equal(batch.loss_mask.sum(1), [5, 3])
    assert batch.routed_experts is None


@pytest.mark.parametrize("field", ["log_probs", "policy_versions"])
def test_one_number_too_many_is_refused(field: str) -> None:
    """Fault 17: nothing is cut off or filled up with probability 1."""
    for extra in (1, -1):
        value = np.full(3 + extra, -1.0, np.float32)
        bad = group(trajectory(index=0), trajectory(index=5, **{field: value}))
        with pytest.raises(
            ValueError, match=r"sample 5 of prompt p7 has 3 response tokens but .* one per sampled token"
        ):
            make_batch([bad], widths=[8])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.1])
def test_impossible_log_probs_are_refused(value: float) -> None:
    bad = trajectory(log_probs=np.array([-1, value, -2], np.float32))
    with pytest.raises(ValueError, match=r"sample 0 of prompt p7 has log-prob .* at response token 1"):
        make_batch([group(bad)], widths=[8])


def test_empty_response_and_bad_advantages_are_refused() -> None:
    nothing = np.zeros(0, np.float32)
    empty = trajectory(response_ids=nothing.astype(int), log_probs=nothing, policy_versions=nothing.astype(int))
    with pytest.raises(ValueError, match="2 prompt and 0 response tokens"):
        make_batch([group(empty)], widths=[8])
    with pytest.raises(ValueError, match="has advantage nan"):
        make_batch([group(trajectory(), advantages=[np.nan])], widths=[8])
    with pytest.raises(ValueError, match=r"advantages of shape \(0,\) for 1 trajectories"):
        make_batch([group(trajectory(), advantages=[])], widths=[8])


def test_full_route_record_is_accepted_and_its_last_row_ignored() -> None:
    t = trajectory()
    full = np.concatenate([t.routed_experts, [[[3, 2], [1, 0]]]])
    a = make_batch([group(t)], widths=[8], routes=ROUTES)
    b = make_batch([group(dataclasses.replace(t, routed_experts=full))], widths=[8], routes=ROUTES)
    np.testing.assert_array_equal(a.routed_experts, b.routed_experts)


def test_wrong_records_are_refused_by_name() -> None:
    wrong = trajectory(index=3)
    wrong.routed_experts[2, 1] = 1
    with pytest.raises(ValueError, match=r"sample 3 of prompt p7, token 2, layer 1: expert set \[1, 1\]"):
        make_batch([group(trajectory(), wrong)], widths=[8], routes=ROUTES)
    with pytest.raises(ValueError, match="sample 0 of prompt p7 comes without the supports"):
        make_batch([group(trajectory())], widths=[8], support=SUPPORT)


def test_unknown_rows_route_natively() -> None:
    """Fault 23: a row of -1 is the trainer's own top-k, and stays so."""
    t = trajectory()
    t.routed_experts[1] = NATIVE_ROUTE
    batch = make_batch([group(t)], widths=[8], routes=ROUTES)
    assert (batch.routed_experts[0, 1] == NATIVE_ROUTE).all()
    np.testing.assert_array_equal(batch.routed_experts[0, 0], t.routed_experts[0])


def test_shapes_repeat() -> None:
    assert width_buckets(300) == (64, 128, 256, 300)
    assert width_buckets(40) == (40,)
    lengths = [make_batch([group(trajectory(2, n))], widths=[16, 8, 32]).tokens.shape[1] for n in (3, 6, 7, 14, 15, 30)]
    assert lengths == [8, 8, 16, 16, 32, 32]
    with pytest.raises(ValueError, match="longest sequence has 33 tokens, the widest allowed row 32"):
        make_batch([group(trajectory(2, 31))], widths=[16, 8, 32])


def test_row_count_is_fixed_or_rounded_up() -> None:
    members = group(*(trajectory(index=i) for i in range(3)))
    assert make_batch([members], widths=[8], rows_multiple=4).tokens.shape == (4, 8)
    batch = make_batch([members], widths=[8], rows=6, rows_multiple=2, pad_id=7)
    assert batch.tokens.shape == (6, 8)
    assert (batch.tokens[3:] == 7).all()
    assert not batch.loss_mask[3:].any()
    assert not batch.segment_ids[3:].any()
    with pytest.raises(ValueError, match=r"3 sequences need 3 rows .* rows = 2: raise it to 3"):
        make_batch([members], widths=[8], rows=2)
    with pytest.raises(ValueError, match=r"multiple of 2, but rows = 3: raise it to 4"):
        make_batch([members], widths=[8], rows=3, rows_multiple=2)


def test_no_groups_is_an_all_padding_batch() -> None:
    batch = make_batch([], widths=[8], rows_multiple=2, routes=ROUTES)
    assert batch.tokens.shape == (2, 8)
    assert not batch.loss_mask.any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(0, 99))
def test_packed_rows_hold_what_unpacked_rows_hold(lengths: list[tuple[int, int]], seed: int) -> None:
    members = [trajectory(p, n, i, seed) for i, (p, n) in enumerate(lengths)]
    groups = [group(*members)]
    apart = make_batch(groups, widths=[24], routes=ROUTES)
    packed = make_batch(groups, widths=[24], routes=ROUTES, packing=True)
    assert len(packed.tokens) <= len(apart.tokens)

    def sequences(batch: Any) -> list[Any]:
        found = []
        for b in range(len(batch.tokens)):
            for s in range(1, batch.segment_ids[b].max() + 1):
                here = np.flatnonzero(batch.segment_ids[b] == s)
                assert (np.diff(here) == 1).all()
                fields = {f: getattr(batch, f)[b, here].tolist() for f in (*FIELDS[:1], *FIELDS[2:], "routed_experts")}
                found.append(fields)
        return sorted(found, key=lambda f: (f["advantages"], f["tokens"]))

    assert sequences(packed) == sequences(apart)
    assert len(sequences(packed)) == len(members)


def test_packing_is_first_fit() -> None:
    members = group(*(trajectory(2, n, i) for i, n in enumerate((4, 5, 2, 1))))
    batch = make_batch([members], widths=[10], packing=True)
    np.testing.assert_array_equal(batch.segment_ids, [[1] * 6 + [2] * 4, [1] * 7 + [2] * 3])


def test_sft_batch() -> None:
    batch = make_sft_batch(
        [np.array([5, 6]), np.array([7])], [np.array([8, 1]), np.array([9, 9, 1])], widths=[5], rows=3
    )
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 8, 1, 0], [7, 9, 9, 1, 0], [0] * 5])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 0, 1, 1, 0], [0, 1, 1, 1, 0], [0] * 5])
    np.testing.assert_array_equal(batch.advantages, batch.loss_mask.astype(np.float32))
    assert batch.routed_experts is None
    with pytest.raises(ValueError, match="1 prompts and 2 targets"):
        make_sft_batch([np.array([5])], [np.array([8])] * 2, widths=[5])
    with pytest.raises(ValueError, match="example 0 has 1 prompt and 0 target"):
        make_sft_batch([np.array([5])], [np.array([], int)], widths=[5])


SUPPORT = Support(size=3, vocab_size=90)


def drawn_from(t: Trajectory, **changes: Any) -> Trajectory:
    """``t`` with supports of one and two tokens."""
    support = np.full((len(t.response_ids), 3), NO_TOKEN, np.int32)
    support[:, 1] = t.response_ids
    support[::2, 0] = (t.response_ids[::2] + 1) % 90
    return dataclasses.replace(t, support=support, **changes)


@pytest.mark.parametrize("packing", [False, True])
def test_supports_lie_under_the_tokens_drawn_from_them(packing: bool) -> None:
    members = [drawn_from(trajectory(2, n, i)) for i, n in enumerate((3, 5, 2))]
    batch = make_batch([group(*members)], widths=[12], support=SUPPORT, packing=packing)
    assert batch.support.shape == (*batch.tokens.shape, 3)
    assert batch.support.dtype == np.int32
    mask = np.asarray(batch.loss_mask)
    assert (batch.support[~mask] == NO_TOKEN).all()
    assert (batch.support == batch.tokens[..., None]).any(-1)[mask].all()
    np.testing.assert_array_equal(batch.support[mask], np.concatenate([t.support for t in members]))
    assert len(batch.tokens) == (2 if packing else 3)


def test_supports_may_be_narrower_than_the_bound_and_padded_beyond_it() -> None:
    t = drawn_from(trajectory(2, 4))
    narrow = dataclasses.replace(t, support=t.support[:, 1:2])
    wide = dataclasses.replace(t, support=np.pad(t.support, ((0, 0), (0, 4)), constant_values=NO_TOKEN))
    batch = make_batch([group(narrow, wide)], widths=[6], support=SUPPORT)
    assert (batch.support[0, 2:, 0] == t.response_ids).all()
    assert (batch.support[0, :, 1:] == NO_TOKEN).all()
    np.testing.assert_array_equal(batch.support[1, 2:], t.support)


def test_supports_that_nobody_replays_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 0 of prompt p7 was drawn from recorded supports"):
        make_batch([group(drawn_from(trajectory()))], widths=[8])
