"""One table from logical axes to mesh axes: parameters, activations and caches are all placed by it.

Mesh axes: ``data`` (rows), ``fsdp`` (rows, and the parameters' embed axis), ``tensor`` (heads, MLP and vocabulary
columns), ``expert`` (rows outside, experts inside the mixture layers). A mesh may lack any of them.
"""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Params, parameter_table, unflatten

RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("batch", ("data", "fsdp", "expert")),
    ("vocab", ("tensor",)),
    ("embed", ("fsdp",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("expert", ("expert",)),
    ("expert_mlp", ("tensor",)),
    # unsharded: layers, head_dim, length, router (a [D, E] matrix), and the width of activations
)
SAMPLING_RULES = tuple((axis, () if axis == "embed" else mesh_axes) for axis, mesh_axes in RULES)
"""For an engine: parameters are whole over ``fsdp``, or every token would gather them."""
MESH_AXES = ("data", "fsdp", "tensor", "expert")


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the rules by which arrays lie on it; hashable, so it can be a static argument."""

    mesh: Mesh  # axes among ``MESH_AXES``
    rules: tuple[tuple[str, tuple[str, ...]], ...] = RULES  # logical axis -> mesh axes; those that it lacks are skipped

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """Mesh axes that split this logical axis; empty where it is replicated."""
        return tuple(a for a in dict(self.rules).get(logical or "", ()) if a in self.mesh.shape)

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        entries = [self.mesh_axes(axis) for axis in axes]
        return PartitionSpec(*((e if len(e) > 1 else e[0]) if e else None for e in entries))

    def sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """``spec`` on this mesh."""
        return NamedSharding(self.mesh, self.spec(axes))

    def ways(self, logical: str) -> int:
        """Into how many parts a logical axis is cut."""
        return math.prod(self.mesh.shape[a] for a in self.mesh_axes(logical))


def cache_sharding(placement: Placement) -> NamedSharding:
    """Where a KV cache ``[n, S, KV, M, h]`` lies: slots are dealt out like rows."""
    return placement.sharding((None, "batch", "kv_heads", None, None))


def constrain(x: jax.Array, axes: tuple[str | None, ...], placement: Placement | None) -> jax.Array:
    """``x``, pinned to where ``axes`` says it lies; unchanged without a placement."""
    if placement is None:
        return x
    for size, axis in zip(x.shape, axes, strict=True):
        ways = placement.ways(axis) if axis else 1
        if size % ways:
            raise ValueError(
                f"{axis} dimension {size} is not divisible by mesh axes {placement.mesh_axes(axis)}, {ways} ways: "
                "pad it, or shrink those axes"
            )
    return jax.lax.with_sharding_constraint(x, placement.sharding(axes))


def check_mesh(cfg: ModelConfig, mesh: Mesh) -> None:
    """Raises ``ValueError`` where the mesh does not divide the model: which mesh axis, which dimension."""
    unknown = [a for a in mesh.axis_names if a not in MESH_AXES]
    if unknown:
        raise ValueError(f"mesh axis {unknown[0]!r} is unknown: name the axes {', '.join(MESH_AXES)}")
    placement = Placement(mesh)
    for p in parameter_table(cfg):
        for size, axis in zip(p.shape, p.axes, strict=True):
            for mesh_axis in placement.mesh_axes(axis):
                if size % mesh.shape[mesh_axis]:
                    raise ValueError(
                        f"mesh axis '{mesh_axis}' = {mesh.shape[mesh_axis]} does not divide the {axis} dimension "
                        f"{size} of {p.name}: choose a size that divides it"
                    )


def param_shardings(cfg: ModelConfig, mesh: Mesh, rules: tuple[tuple[str, tuple[str, ...]], ...] = RULES) -> Params:
    """A tree of ``NamedSharding``, one a parameter, by ``rules``; errors are those of ``check_mesh``."""
    check_mesh(cfg, mesh)
    placement = Placement(mesh, rules)
    return unflatten({p.path: placement.sharding(p.axes) for p in parameter_table(cfg)})
