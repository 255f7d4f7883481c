"""Staleness-adaptive trust regions for asynchronous reinforcement learning, in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["__version__", "load_policy"]

if TYPE_CHECKING:
    from sat_jax.policy import load_policy

    __version__: str


def __getattr__(name: str) -> Any:
    """What is public here is imported when it is first used, so that the losses alone stay light."""
    if name == "load_policy":
        from sat_jax.policy import load_policy

        return load_policy
    if name == "__version__":
        from importlib.metadata import version

        return version("sat-jax")
    raise AttributeError(f"module 'sat_jax' has no attribute {name!r}")
