"""The in-process engine: continuous batching over a KV cache, on the learner's devices or a mesh of its own."""

from sat_jax.rollout.local.engine import PREFILL_ROWS, LocalEngine

__all__ = ["PREFILL_ROWS", "LocalEngine"]
