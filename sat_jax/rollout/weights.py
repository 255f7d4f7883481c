"""Published weights on their way from the learner to the engine."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp


def copy_params(params: Any) -> Any:
    """The same arrays in buffers of their own: a learner that donates its state deletes the old ones, on CPUs too."""
    return jax.tree.map(jnp.copy, params)


class WeightStore:
    """Versions that were published and that no batch has been sampled with yet. Thread-safe.

    Fetching a version forgets it and all older ones, so at most ``delay // interval + 1`` of a schedule wait here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, Any] = {}
        self._closed = False

    def publish(self, params: Any, version: int) -> None:
        """Keeps a copy of ``params`` as ``version``, which has to be newer than those published before."""
        copies = copy_params(params)
        with self._changed:
            if self._waiting and version <= max(self._waiting):
                raise ValueError(f"version {version} after {max(self._waiting)}: versions are published in order, once")
            self._waiting[version] = copies
            self._changed.notify_all()

    def fetch(self, version: int) -> Any | None:
        """Blocks until ``version`` is published and returns its weights; None once the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or version in self._waiting)
            if self._closed:
                return None
            params = self._waiting[version]
            self._waiting = {v: p for v, p in self._waiting.items() if v > version}
            return params

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Wakes up whoever waits and frees the weights. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._waiting = {}
            self._changed.notify_all()
