from __future__ import annotations

from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sat_jax.runs.checkpoint import Checkpoints, restore_params, save_params
from sat_jax.types import Group, Prompt, TrainState, Trajectory


def _state(step: int, width: int = 3) -> TrainState:
    params = {"w": jnp.arange(width * 2, dtype=jnp.float32).reshape(2, width), "b": jnp.ones(width)}
    return TrainState(step=jnp.asarray(step, jnp.int32), params=params, opt_state=optax.adam(1e-3).init(params))


def _group(name: str, lengths: tuple[int, ...], routes: bool) -> Group:
    rng = np.random.default_rng(len(name))
    prompt = Prompt(name, "text " + name, np.arange(4, dtype=np.int32), "42", "unit", {"difficulty": 3})
    members = tuple(
        Trajectory(
            prompt_id=name,
            sample_index=i,
            prompt_ids=prompt.token_ids,
            response_ids=rng.integers(0, 9, n).astype(np.int32),
            log_probs=rng.normal(size=n).astype(np.float32),
            policy_versions=np.full(n, i, np.int32),
            routed_experts=rng.integers(0, 8, (3 + n, 2, 2)).astype(np.int32) if routes else None,
            finish_reason="stop" if i else "length",
            text=f"answer {i}",
            reward=float(i) if n else None,
            reward_info={"verdict": "correct"},
            request_id=f"{name}/{i}",
            support=rng.integers(-1, 9, (n, 3)).astype(np.int32) if routes else None,
        )
        for i, n in enumerate(lengths)
    )
    return Group(f"0:{name}", prompt, members, np.linspace(-1, 1, len(lengths), dtype=np.float32))


@pytest.mark.parametrize("routes", [True, False])
def test_a_checkpoint_gives_back_state_queue_and_counters(tmp_path: Path, routes: bool) -> None:
    groups = [_group("a", (2, 5), routes), _group("bb", (1, 0), routes)]
    saved = Checkpoints(tmp_path / "c")
    saved.save(_state(7), {"cursor": 12, "seed": 3}, groups)
    saved.close()

    loaded = Checkpoints(tmp_path / "c")
    assert loaded.latest_step() == 7
    state, host, back = loaded.restore(7, _state(0))
    loaded.close()

    chex.assert_trees_all_equal(state, _state(7))
    assert host == {"cursor": 12, "seed": 3}
    assert len(back) == 2
    for one, two in zip(groups, back, strict=True):
        assert (one.group_id, one.prompt.prompt_id, dict(one.prompt.metadata)) == (
            two.group_id,
            two.prompt.prompt_id,
            dict(two.prompt.metadata),
        )
        np.testing.assert_array_equal(one.advantages, two.advantages)
        for t, u in zip(one.trajectories, two.trajectories, strict=True):
            assert (t.finish_reason, t.text, t.reward, t.reward_info) == (
                u.finish_reason,
                u.text,
                u.reward,
                u.reward_info,
            )
            for name in ("prompt_ids", "response_ids", "log_probs", "policy_versions"):
                np.testing.assert_array_equal(getattr(t, name), getattr(u, name))
                assert getattr(t, name).dtype == getattr(u, name).dtype
            if routes:
                np.testing.assert_array_equal(t.routed_experts, u.routed_experts)
                np.testing.assert_array_equal(t.support, u.support)
            else:
                assert u.routed_experts is None
                assert u.support is None


def test_an_empty_queue_and_a_repeated_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    for step in (1, 2, 3, 3):
        checkpoints.save(_state(step), {"cursor": step}, [])
    assert checkpoints.latest_step() == 3
    _, host, groups = checkpoints.restore(3, _state(0))
    assert host == {"cursor": 3}
    assert groups == []
    checkpoints.close()


def test_another_model_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(_state(1), {}, [])
    with pytest.raises(ValueError, match="does not fit this configuration"):
        checkpoints.restore(1, _state(0, width=4))
    checkpoints.close()


def test_bare_parameters_round_trip(tmp_path: Path) -> None:
    params = _state(0).params
    save_params(tmp_path / "reference", params)
    chex.assert_trees_all_equal(restore_params(tmp_path / "reference", params), params)
