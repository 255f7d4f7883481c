"""Ahead of time: the real train step, compiled for devices that are not there, from shapes alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from sat_jax.learner.compiled import Programs, abstract
from sat_jax.learner.step import LearnerSpec, batch_shardings
from sat_jax.model import MESH_AXES
from sat_jax.types import Batch

__all__ = ["abstract_batch", "compile_train_step", "memory", "shard_bytes", "topology_mesh"]


def topology_mesh(topology: str, sizes: dict[str, int]) -> Mesh:
    """A mesh of the chips of a TPU slice such as ``v5p:4x4x4``; ``sizes`` must multiply to them. Needs libtpu."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if math.prod(shape) != len(devices):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape, strict=True))} has {math.prod(shape)} places, {topology} has "
            f"{len(devices)} chips: the product must be that number"
        )
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_batch(spec: LearnerSpec, rows: int, width: int) -> Batch:
    """Shapes, types and shardings of a training batch ``[rows, width]``, recorded experts included where replayed."""

    def shape(dtype: Any, *more: int) -> Any:
        return jax.ShapeDtypeStruct((rows, width, *more), dtype)

    routes = (len(spec.model.moe_layers), spec.model.num_experts_per_tok) if spec.routing_replay else None
    batch = Batch(
        tokens=shape(jnp.int32),
        segment_ids=shape(jnp.int32),
        positions=shape(jnp.int32),
        loss_mask=shape(jnp.bool_),
        behavior_log_probs=shape(jnp.float32),
        advantages=shape(jnp.float32),
        policy_versions=shape(jnp.int32),
        routed_experts=None if routes is None else shape(jnp.int32, *routes),
    )
    return abstract(batch, batch_shardings(spec, batch))


def compile_train_step(spec: LearnerSpec, rows: int, width: int) -> jax.stages.Compiled:
    """The program that ``Programs(spec).train_step`` would run on the devices of ``spec.forward.placement``."""
    programs = Programs(spec)
    return programs.train_step.lower(programs.abstract_state(), abstract_batch(spec, rows, width)).compile()


def shard_bytes(tree: Any) -> int:
    """What one device holds of arrays (or shapes) with shardings, in bytes."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def memory(program: jax.stages.Compiled) -> dict[str, int]:
    """The compiler's own account of one device's memory, in bytes: ``arguments`` (state and batch), ``temporaries``,
    ``outputs`` that are not written over an argument, and their sum ``total``."""
    found: Any = program.memory_analysis()
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    sizes = {"arguments": found.argument_size_in_bytes, "temporaries": found.temp_size_in_bytes, "outputs": outputs}
    return sizes | {"total": sum(sizes.values())}
