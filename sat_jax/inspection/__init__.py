"""A batch dumped by any trainer under a loss, and the clip geometry of that loss."""

from sat_jax.inspection.batch import Inspection, configure, inspect_batch, load_batch

__all__ = ["Inspection", "configure", "inspect_batch", "load_batch"]
