"""The loss with its hot parts in Pallas, and the choice between it and the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sat_jax import losses
from sat_jax.kernels.clip_path import Operands, clip_path
from sat_jax.kernels.order_statistic import order_statistic
from sat_jax.losses import Loss, LossConfig, LossSummary
from sat_jax.losses.diagnostics import Reductions
from sat_jax.losses.quantile import rank_from_alpha
from sat_jax.losses.tokens import Prepared, Ranker, ranker, rule_summaries, unit_log_ratios


@dataclasses.dataclass(frozen=True)
class KernelLoss(Loss):
    """A ``Loss`` whose policy term is one Pallas kernel and whose quantile is a counting kernel."""

    mesh: Mesh | None = None
    """Where rows are sharded over several devices; the kernels then run under ``shard_map``. None: one device."""
    row_axes: tuple[str, ...] = ()
    """The mesh axes that rows are sharded over."""
    interpret: Any = None
    """As for ``pallas_call``; None interprets on a CPU and compiles elsewhere."""

    def __post_init__(self) -> None:
        whole = [rule.name for rule in self.config.rules if not rule.elementwise()]
        if whole:
            raise ValueError(
                f"loss.kernel = 'pallas' with rule {whole[0]}, which looks at whole responses: "
                "use kernel 'reference' (or 'auto')"
            )

    def policy_rows(self, prepared: Prepared, summary: LossSummary, scale: jax.Array) -> tuple[jax.Array, Reductions]:
        """One pass over the tokens."""
        if not self._takes(prepared):
            return super().policy_rows(prepared, summary, scale)
        config, mask = self.config, prepared.mask
        d, frozen_d = None, None
        if config.unit != "token":
            d, frozen_d = unit_log_ratios(config, prepared.arrays, prepared.sequences)
        summaries = rule_summaries(config, prepared, summary, self.ranker)
        operands = Operands(
            # As they came: the kernel selects and casts on the chip, so each array is read once and never copied.
            tokens=prepared.raw | {"advantages": jnp.broadcast_to(prepared.raw["advantages"], mask.shape)},
            mask=mask,
            scale=scale,
            d=d,
            frozen_d=frozen_d if "scored_log_probs" in prepared.raw else None,
            summaries=jax.tree.map(lambda x: jnp.broadcast_to(x, (len(mask), 1)).astype(jnp.float32), summaries),
        )
        interpret = self._interpret()
        loss, diagnostics = self._over_rows(lambda operands: clip_path(config, interpret, operands), operands)
        return loss, diagnostics

    def ranker(self, prepared: Prepared, axis_names: tuple[str, ...] = (), shards: int = 1) -> Ranker:
        """Counting passes for one number a token; one number a row is ranked by the reference, which is as fast."""
        reference = ranker(prepared, axis_names, shards)
        mask, takes = prepared.mask, self._takes(prepared)

        def quantile(x: jax.Array, alpha: float) -> jax.Array:
            if not takes or shards > 1 or x.shape != mask.shape or x.shape[-1] == 1:
                return reference(x, alpha)
            interpret = self._interpret()

            def ranked(x: jax.Array, mask: jax.Array) -> jax.Array:
                axes = (*axis_names, *self.row_axes) if self.mesh is not None else axis_names
                n = jnp.sum(mask, dtype=jnp.uint32)
                for axis in axes:
                    n = jax.lax.psum(n, axis)
                return order_statistic(x, mask, rank_from_alpha(n, alpha), axes, interpret)

            if self.mesh is None:
                return ranked(x, mask)
            spec = P(self.row_axes)
            return jax.shard_map(ranked, mesh=self.mesh, in_specs=(spec, spec), out_specs=P(), check_vma=False)(x, mask)

        return quantile

    def _takes(self, prepared: Prepared) -> bool:
        """Whether the kernels compute in this batch's type; what was chosen automatically gives way where not."""
        fits = prepared.token.ratio.dtype == jnp.float32
        if not fits and self.config.kernel == "pallas":
            raise ValueError(
                f"loss.kernel = 'pallas' with {prepared.token.ratio.dtype} log_probs: the kernels compute in float32; "
                "cast log_probs, or use kernel 'reference'"
            )
        return fits

    def _over_rows(self, f: Any, operands: Operands) -> Any:
        if self.mesh is None:
            return f(operands)
        spec = P(self.row_axes)
        return jax.shard_map(f, mesh=self.mesh, in_specs=(spec,), out_specs=spec, check_vma=False)(operands)

    def _interpret(self) -> Any:
        return _platform(self.mesh) == "cpu" if self.interpret is None else self.interpret


def make_loss(
    config: LossConfig, mesh: Mesh | None = None, row_axes: tuple[str, ...] = (), interpret: Any = None
) -> Loss:
    """The loss that ``config`` describes, with the implementation that ``config.kernel`` names.

    ``auto`` takes the kernels where their compiled programs move fewer bytes (docs/rules.md has the figures): on TPUs,
    for token ratios and elementwise rules, on one device or with ``mesh`` given. Everywhere else it is the reference.

    Args:
        config: the loss.
        mesh, row_axes: where rows are sharded, for ``pallas``.
        interpret: for ``pallas``; None interprets on a CPU.
    """
    if config.kernel == "pallas" or (config.kernel == "auto" and _wins(config, mesh)):
        return KernelLoss(config, mesh, row_axes, interpret)
    return losses.make_loss(config)


def _wins(config: LossConfig, mesh: Mesh | None) -> bool:
    fits = config.unit == "token" and all(rule.elementwise() for rule in config.rules)
    return fits and _platform(mesh) == "tpu" and (mesh is not None or jax.device_count() == 1)


def _platform(mesh: Mesh | None) -> str:
    """Of the devices that will run it: those of the mesh need not be this process's own (ahead-of-time compilation)."""
    return jax.default_backend() if mesh is None else str(mesh.devices.flat[0].platform)
