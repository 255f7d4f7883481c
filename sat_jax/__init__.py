"""Staleness-adaptive trust regions for asynchronous reinforcement learning, in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sat_jax.version import __version__

__all__ = ["__version__", "load_policy"]

if TYPE_CHECKING:
    from sat_jax.policy import load_policy


def __getattr__(name: str) -> Any:
    """``load_policy`` is imported when it is first used, so that the losses alone stay light."""
    if name == "load_policy":
        from sat_jax.policy import load_policy

        return load_policy
    raise AttributeError(f"module 'sat_jax' has no attribute {name!r}")
