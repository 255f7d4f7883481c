"""Compiles losses for TPU topologies and prints one JSON line: ``compile_kernels.py SLICE CHIP...``."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sat_jax import kernels, losses

COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def compiled(method: str, kernel: str, topology: str, chips: int, rows: int) -> Any:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:chips]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    config = dataclasses.replace(losses.method(method), kernel=kernel)
    spread = {"mesh": mesh, "row_axes": ("data",)} if chips > 1 else {}
    loss_fn = kernels.make_loss(config, interpret=False, **spread)
    sharding = NamedSharding(mesh, P("data"))
    numbers = jax.ShapeDtypeStruct((rows, 2048), jnp.float32, sharding=sharding)
    mask = jax.ShapeDtypeStruct((rows, 2048), jnp.bool_, sharding=sharding)

    def step(inputs: losses.LossInputs) -> Any:
        return jax.value_and_grad(lambda x: loss_fn(inputs.replace(log_probs=x)), has_aux=True)(inputs.log_probs)

    return jax.jit(step).lower(losses.LossInputs(numbers, numbers, numbers, mask)).compile()


def main(topology: str, chips: list[str]) -> None:
    found: dict[str, dict[str, Any]] = {topology: {}}
    for method in ("sat-grpo", "sat-gspo"):
        for kernel in ("reference", "pallas"):
            text = compiled(method, kernel, topology, 64, 512).as_text()
            matches = COLLECTIVE.findall(text)
            sizes = [
                math.prod(map(int, dims.split(",")))
                for shape, _ in matches
                for dims in re.findall(r"\[([\d,]+)\]", shape)
            ]
            found[topology][f"{method} {kernel}"] = {
                "chips": 64,
                "collectives": sorted({kind for _, kind in matches}),
                "largest_collective": max(sizes, default=1),
            }
    for chip in chips:
        found[chip] = {}
        for method in ("grpo", "sat-grpo", "sat-gspo", "kpop"):
            program = compiled(method, "pallas", chip, 1, 64)
            found[chip][method] = {
                "mosaic_calls": program.as_text().count('custom_call_target="tpu_custom_call"'),
                "bytes": program.cost_analysis()["bytes accessed"],
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
