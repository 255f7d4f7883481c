"""Engine, queue and worker together, with a real model and a learner that nudges its weights."""

import dataclasses

import jax
import numpy as np

from sat_jax import model
from sat_jax.rollout.engine import SamplingParams
from sat_jax.rollout.ledger import Ledger, audit, read_ledger
from sat_jax.rollout.local import LocalEngine
from sat_jax.rollout.queue import GroupQueue
from sat_jax.rollout.schedule import fixed_delay, free_running
from sat_jax.rollout.worker import RolloutWorker
from tests.unit.rollout.local.test_engine import CFG, LEAN, score

GROUPS, SIZE, STEPS = 2, 3, 6


def graded(groups):
    return [dataclasses.replace(g, advantages=np.zeros(SIZE, np.float32)) for g in groups]


def train(stream, schedule, ledger=None, max_staleness=3):
    """Batches of ``STEPS`` steps, and the weights of every version; each step donates and so deletes the last ones."""
    params = model.init_params(jax.random.key(0), CFG, dtype="float32")
    nudge = jax.jit(lambda p: jax.tree.map(lambda x: x * 1.02, p), donate_argnums=0)
    engine = LocalEngine(CFG, params, **LEAN)
    queue = GroupQueue(GROUPS, max_staleness, ledger=ledger)
    worker = RolloutWorker(
        engine,
        queue,
        stream(),
        graded,
        group_size=SIZE,
        params=SamplingParams(max_new_tokens=24, ignore_eos=True),
        schedule=schedule,
        seed=1,
    )
    worker.start()
    batches, weights = [], {0: jax.device_get(params)}
    try:
        for step in range(STEPS):
            batches.append(queue.take(GROUPS, step, timeout=120))
            params = nudge(params)
            queue.trained(batches[-1], step + 1)
            weights[step + 1] = jax.device_get(params)
            worker.publish(params, step + 1)
    finally:
        assert worker.stop(timeout=60)
        queue.close()
        engine.close()
    return batches, weights


def test_a_scheduled_run_repeats_bit_for_bit_and_says_who_sampled_what(stream):
    (first, weights), (second, _) = (train(stream, fixed_delay(2)) for _ in range(2))
    for step, (batch, again) in enumerate(zip(first, second, strict=True)):
        assert [g.group_id for g in batch] == [g.group_id for g in again]
        for one, other in zip(batch, again, strict=True):
            for t, u in zip(one.trajectories, other.trajectories, strict=True):
                assert set(t.policy_versions.tolist()) == {max(0, step - 2)}
                np.testing.assert_array_equal(t.response_ids, u.response_ids)
                np.testing.assert_array_equal(t.log_probs, u.log_probs)
        t = batch[0].trajectories[0]
        np.testing.assert_allclose(t.log_probs, score(weights[max(0, step - 2)], t)[0], atol=1e-5)


def test_what_waited_for_a_publication_is_sampled_with_it(stream, tmp_path):
    """Without staleness every batch waits for the last one's weights, inside the engine, and starts with them."""
    path = tmp_path / "ledger.jsonl"
    batches, _ = train(stream, free_running(), Ledger(path), max_staleness=0)
    for step, batch in enumerate(batches):
        assert {v for g in batch for t in g.trajectories for v in t.policy_versions.tolist()} == {step}
    assert "stale" not in audit(read_ledger(path)).ends


def test_a_free_running_response_can_span_versions(stream, tmp_path):
    path = tmp_path / "ledger.jsonl"
    batches, weights = train(stream, free_running(), Ledger(path))
    spans = set()
    for step, batch in enumerate(batches):
        for group in batch:
            assert 0 <= step - group.oldest_version <= 3
            for t in group.trajectories:
                assert (np.diff(t.policy_versions) >= 0).all()
                spans.add(len(set(t.policy_versions.tolist())))
                first = t.policy_versions[0]
                prefix = int((t.policy_versions == first).sum())
                # Up to the swap, the log-probs are those of the version that they are stamped with.
                np.testing.assert_allclose(t.log_probs[:prefix], score(weights[int(first)], t)[0][:prefix], atol=1e-5)
    assert max(spans) > 1, "no swap happened in the middle of a response"
    report = audit(read_ledger(path))
    assert report.clean
    assert report.ends["trained"] == STEPS * GROUPS
