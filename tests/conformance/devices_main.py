"""The quantile, the loss and the kernels on meshes of 8 devices. Prints JSON for ``test_devices``."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sat_jax import kernels, losses
from sat_jax.testing.rules import sample_inputs

GATHER = re.compile(r"= [a-z0-9]+\[([\d,]*)\]\S* (all-gather|all-to-all|collective-permute)(?:-start)?\(")
SPLITS = ((8, 1), (2, 4), (1, 8))
"""Rows x tokens; the quantile is found on all of them, the whole loss where both are split."""


def mesh_of(*shape: int) -> Any:
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def main() -> None:
    inputs = sample_inputs(16, 32)
    found: dict[str, Any] = {"devices": jax.device_count(), "q": {}, "loss": {}, "collectives": []}
    rows = mesh_of(8)
    for method in ("sat-grpo", "sat-gspo"):
        loss_fn = losses.make_loss(losses.method(method))
        alone, metrics = jax.jit(loss_fn)(inputs)
        qs, values = [float(metrics["sat/q"])], [float(alone)]
        for shape in SPLITS:
            spread = jax.device_put(inputs, NamedSharding(mesh_of(*shape), P("data", "model")))
            quantile = jax.jit(lambda x, loss_fn=loss_fn: loss_fn.summarize(x).rules["sat"].q).lower(spread).compile()
            qs.append(float(quantile(spread)))
            sizes = [[int(n) for n in dims.split(",") if n] for dims, _ in GATHER.findall(quantile.as_text())]
            found["collectives"] += [int(np.prod(size)) for size in sizes]
            if min(shape) > 1:
                value, metrics = jax.jit(loss_fn)(spread)
                qs.append(float(metrics["sat/q"]))
                values.append(float(value))

        # Inside shard_map, counts are summed over the named axis.
        inside = jax.shard_map(
            lambda x, loss_fn=loss_fn: loss_fn.summarize(x, axis_names=("data",)),
            mesh=rows,
            in_specs=P("data"),
            out_specs=P(),
            check_vma=False,
        )
        summary = jax.jit(inside)(inputs)
        qs.append(float(summary.rules["sat"].q))
        found["tokens"] = [float(summary.tokens), int(inputs.loss_mask.sum())]

        # And the kernels, their partial counts reduced across devices.
        config = dataclasses.replace(losses.method(method), kernel="pallas")
        value, metrics = jax.jit(kernels.make_loss(config, mesh=rows, row_axes=("data",)))(inputs)
        qs.append(float(metrics["sat/q"]))
        values.append(float(value))
        found["q"][method], found["loss"][method] = qs, values

    # Scope device: each device's rows have a quantile of their own.
    local = losses.LossConfig(rules=(losses.Ppo(), losses.Sat(scope="device", shards=8)))
    _, metrics = jax.jit(losses.make_loss(local))(jax.device_put(inputs, NamedSharding(rows, P("data"))))
    d = np.abs(np.asarray(inputs.log_probs) - np.asarray(inputs.behavior_log_probs))
    mask, gated = np.asarray(inputs.loss_mask), 0
    for i in range(8):
        active = np.sort(d[2 * i : 2 * i + 2][mask[2 * i : 2 * i + 2]])
        gated += int((active > active[-(-9 * len(active) // 10) - 1]).sum())
    found["device_scope"] = [float(metrics["sat/gate_rate"]) * float(mask.sum()), gated]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
