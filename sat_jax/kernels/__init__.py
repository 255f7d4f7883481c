"""Pallas twins of the pure losses: the clip path in one pass over the tokens, an order statistic by counting passes.

    loss_fn = kernels.make_loss(config)      # config.kernel: auto | reference | pallas

Same object, same methods, same results up to rounding as ``losses.make_loss``.
"""

from sat_jax.kernels.loss import KernelLoss, make_loss
from sat_jax.kernels.order_statistic import order_statistic

__all__ = ["KernelLoss", "make_loss", "order_statistic"]
