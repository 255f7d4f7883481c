"""One compilation cache for the whole session, its processes included: many tests compile the same small programs."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports jax, and inherited by the processes that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
