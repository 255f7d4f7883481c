"""A loss with its Pallas kernels, to be compared with the reference."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from sat_jax import kernels
from sat_jax.losses import LossConfig, LossInputs


@functools.cache
def kernel(config: LossConfig, interpret: Any = None) -> Any:
    """``inputs -> ((loss, metrics), gradient)``, jitted once for each loss."""
    loss_fn = kernels.make_loss(dataclasses.replace(config, kernel="pallas"), interpret=interpret)

    def run(inputs: LossInputs) -> Any:
        return jax.value_and_grad(lambda lp: loss_fn(inputs.replace(log_probs=lp)), has_aux=True)(inputs.log_probs)

    return jax.jit(run)


def same(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-6, atol=2e-7), got, want)
