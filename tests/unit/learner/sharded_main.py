"""A learner step on meshes of 8 CPU devices against one device. Prints a JSON report for ``test_learner_sharding``."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import numpy as np

from sat_jax import learner, losses, model
from sat_jax.types import NO_TOKEN, Batch
from tests.helpers.models import MOE, init
from tests.unit.model.sharded_main import mesh_of

MESHES = {"mixed": {"data": 2, "fsdp": 2, "expert": 2}}
"""The forward pass on meshes of one axis is tests/unit/model/sharded_main.py's."""
B, T = 16, 6


def batch() -> Batch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, T + 1, B)
    routes = np.argsort(rng.random((B, T, len(MOE.moe_layers), MOE.num_experts)), -1)[..., : MOE.num_experts_per_tok]
    columns = np.arange(T)
    tokens = rng.integers(0, MOE.vocab_size, (B, T)).astype(np.int32)
    support = np.concatenate([tokens[..., None], rng.integers(-1, MOE.vocab_size, (B, T, 3))], axis=-1)
    support[::4] = NO_TOKEN  # rows that were drawn from the whole vocabulary
    segments = (columns < lengths[:, None]).astype(np.int32)
    return Batch(
        tokens=tokens,
        segment_ids=segments,
        positions=np.broadcast_to(columns, (B, T)).astype(np.int32),
        loss_mask=(columns >= 2) & (segments > 0),
        behavior_log_probs=-np.abs(rng.normal(size=(B, T))).astype(np.float32) * 4,
        advantages=np.broadcast_to(rng.normal(size=(B, 1)), (B, T)).astype(np.float32),
        policy_versions=np.zeros((B, T), np.int32),
        routed_experts=routes.astype(np.int32),
        support=support.astype(np.int32),
    )


def spec_of(micro_batches: int, options: model.ForwardOptions) -> learner.LearnerSpec:
    schedule = learner.learning_rate(1e-3)
    loss = losses.make_loss(losses.method("sat-grpo"))
    optimizer = learner.adam(schedule, 0.9, 0.98, 1e-8)
    # A small head_chunk: several chunks on every device, some of them with nothing to do.
    return learner.LearnerSpec(
        MOE, loss, optimizer, schedule, micro_batches=micro_batches, head_chunk=16, forward=options
    )


def run(mesh: dict[str, int] | None, micro_batches: int) -> tuple[Any, Any]:
    rows = batch()
    if mesh is None:
        spec = spec_of(micro_batches, model.ForwardOptions(moe="blocked"))
        return jax.jit(partial(learner.train_step, spec))(learner.init_state(spec, init(MOE)), rows)
    spec = spec_of(micro_batches, model.ForwardOptions(moe="blocked", placement=model.Placement(mesh_of(mesh))))
    places = learner.state_shardings(spec)
    state = jax.jit(partial(learner.init_state, spec), out_shardings=places)(jax.device_put(init(MOE), places.params))
    rows = jax.device_put(rows, learner.batch_shardings(spec, rows))
    return jax.jit(partial(learner.train_step, spec), out_shardings=(places, None))(state, rows)


def distance(a: Any, b: Any) -> float:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()) for x, y in leaves)


def largest(tree: Any) -> float:
    return max(float(np.abs(np.asarray(x)).max()) for x in jax.tree.leaves(tree))


def main() -> None:
    report = {}
    for micro_batches in (1, 2):
        state, metrics = run(None, micro_batches)
        for name, mesh in MESHES.items():
            there, found = run(mesh, micro_batches)
            mu = there.opt_state[0].mu
            report[f"{name}/{micro_batches}"] = {
                "metrics": {k: [float(metrics[k]), float(found[k])] for k in metrics},
                "moments": distance(state.opt_state[0].mu, mu) / largest(mu),
                "gate_rate": float(metrics["sat/gate_rate"]),
                "moment_shares": [x.addressable_shards[0].data.size / x.size for x in jax.tree.leaves(mu)],
                "param_shares": [x.addressable_shards[0].data.size / x.size for x in jax.tree.leaves(there.params)],
            }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
