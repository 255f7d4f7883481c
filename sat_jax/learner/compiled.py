"""The learner's functions, compiled: what is donated, and where their arrays lie on a mesh.

The trainer runs these programs and ``aot`` compiles them for machines that are not there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sat_jax import model
from sat_jax.learner import step
from sat_jax.learner.step import LearnerSpec, Scores
from sat_jax.types import Batch, TrainState


def abstract(tree: Any, shardings: Any) -> Any:
    """The shapes and types of ``tree``, lying as ``shardings`` say."""
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)


class Programs:
    """The compiled steps and passes of one run.

    On the mesh of ``spec.forward.placement`` the training state is cut as ``state_shardings`` says, rows of
    batches and of log-probs are dealt out, and metrics are on every device. Without a mesh all is on the first device.

    Attributes:
        row_ways: into how many parts rows are dealt; a batch has a multiple of it.
        train_step, supervised_step: ``(state, batch) -> (state, metrics)``; the old state is donated.
        score_native: ``(params, batch) -> Scores``, routed by the policy that scores.
        score_replayed: the same with the recorded experts where the run replays them, in one piece.
        score_sampler: the same with the recorded experts, in micro-batches.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self.spec = spec
        placement = spec.forward.placement
        self.row_ways = 1 if placement is None else placement.ways("batch")
        self._places: Any = None if placement is None else step.state_shardings(spec)
        self.train_step = self._step(step.train_step)
        self.supervised_step = self._step(step.supervised_step)
        # Under other weights a pass routes natively: the replayed sets belong to the policy in training.
        self.score_native = self._pass(dataclasses.replace(spec, routing_replay=False))
        self.score_replayed = self._pass(dataclasses.replace(spec, micro_batches=1))
        self.score_sampler = self._pass(spec)

    def init_state(self, params: Any) -> TrainState:
        """Step 0 from parameters that lie where they belong. They become part of the state, uncopied: its first step
        deletes them."""
        if self._places is None:
            return step.init_state(self.spec, params)
        moments = jax.jit(self.spec.optimizer.init, out_shardings=self._places.opt_state)(params)
        return TrainState(jax.device_put(jnp.zeros((), jnp.int32), self._places.step), params, moments)

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the training state: what a checkpoint is restored into, or compiled for."""
        state: TrainState = jax.eval_shape(partial(step.init_state, self.spec), model.abstract_params(self.spec.model))
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return abstract(state, self._places or jax.tree.map(lambda _: first, state))

    def place(self, batch: Batch) -> Batch:
        """``batch`` with its rows dealt over the mesh; unchanged without one."""
        return batch if self._places is None else jax.device_put(batch, step.batch_shardings(self.spec, batch))

    def _step(self, function: Callable[..., Any]) -> Any:
        placement = self.spec.forward.placement
        places = None if placement is None else (self._places, placement.sharding(()))
        return jax.jit(partial(function, self.spec), donate_argnums=0, out_shardings=places)

    def _pass(self, spec: LearnerSpec) -> Callable[[Any, Batch], Scores]:
        placement = spec.forward.placement
        rows = None if placement is None else placement.sharding(("batch",))
        return jax.jit(partial(step.score, spec), out_shardings=rows)
