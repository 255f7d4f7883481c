"""Eight devices: the same quantile to the bit for every split, the same loss, and no token leaves its device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.helpers import ROOT

PROGRAM = r"""
import dataclasses, json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.helpers import ROOT
from sat_jax import kernels, losses
from sat_jax.testing.rules import sample_inputs as batch

inputs = batch(16, 32)
found = {"devices": jax.device_count(), "q": {}, "loss": {}, "collectives": []}
GATHER = re.compile(r"= [a-z0-9]+\[([\d,]*)\]\S* (all-gather|all-to-all|collective-permute)(?:-start)?\(")
for method in ("sat-grpo", "sat-gspo"):
    loss_fn = losses.make_loss(losses.method(method))
    alone, metrics = jax.jit(loss_fn)(inputs)
    qs, values = [float(metrics["sat/q"])], [float(alone)]
    for shape in ((8, 1), (4, 2), (2, 4), (1, 8), (2, 1)):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        spread = jax.device_put(inputs, NamedSharding(mesh, P("data", "model")))
        program = jax.jit(loss_fn).lower(spread).compile()
        value, metrics = program(spread)
        qs.append(float(metrics["sat/q"]))
        values.append(float(value))
        quantile = jax.jit(lambda x: loss_fn.summarize(x).rules["sat"].q).lower(spread).compile().as_text()
        sizes = [[int(n) for n in dims.split(",") if n] for dims, _ in GATHER.findall(quantile)]
        found["collectives"] += [int(np.prod(size)) for size in sizes]

    # Inside shard_map, counts are summed over the named axis.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    inside = jax.shard_map(
        lambda x: loss_fn.summarize(x, axis_names=("data",)),
        mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False,
    )
    summary = jax.jit(inside)(inputs)
    qs.append(float(summary.rules["sat"].q))
    found["tokens"] = [float(summary.tokens), int(inputs.loss_mask.sum())]

    # And the kernels, their partial counts reduced across devices.
    config = dataclasses.replace(losses.method(method), kernel="pallas")
    value, metrics = jax.jit(kernels.make_loss(config, mesh=mesh, row_axes=("data",)))(inputs)
    qs.append(float(metrics["sat/q"]))
    values.append(float(value))
    found["q"][method], found["loss"][method] = qs, values

# Scope device: each device's rows have a quantile of their own.
local = losses.LossConfig(rules=(losses.Ppo(), losses.Sat(scope="device", shards=8)))
_, metrics = jax.jit(losses.make_loss(local))(jax.device_put(inputs, NamedSharding(mesh, P("data"))))
d = np.abs(np.asarray(inputs.log_probs) - np.asarray(inputs.behavior_log_probs))
mask, gated = np.asarray(inputs.loss_mask), 0
for i in range(8):
    active = np.sort(d[2 * i : 2 * i + 2][mask[2 * i : 2 * i + 2]])
    gated += int((active > active[-(-9 * len(active) // 10) - 1]).sum())
found["device_scope"] = [float(metrics["sat/gate_rate"]) * mask.sum(), gated]
print(json.dumps(found))
"""


def test_eight_devices() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["devices"] == 8
    assert len(set(found["q"]["sat-grpo"])) == 1  # to the bit, for every split
    reference = found["q"]["sat-gspo"][0]  # here d itself is a mean, whose rounding depends on how T is split
    assert max(abs(q - reference) for q in found["q"]["sat-gspo"]) <= 1e-6 * reference
    for values in found["loss"].values():
        assert max(abs(v - values[0]) for v in values) < 1e-6
    assert all(size <= 64 for size in found["collectives"])
    assert found["tokens"][0] == found["tokens"][1]
    assert round(found["device_scope"][0]) == found["device_scope"][1]
