"""One run: its parts built from the configuration, and the shell that owns every thread, clock, file and counter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Trainer"]

if TYPE_CHECKING:
    from sat_jax.training.trainer import Trainer


def __getattr__(name: str) -> Any:
    """The trainer imports all that a run needs: only when it is asked for."""
    if name == "Trainer":
        from sat_jax.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'sat_jax.training' has no attribute {name!r}")
