"""One compilation cache for the whole session, its processes included, and compilations that cost half as much.

Most of a test's time is spent compiling programs that then run for milliseconds, so LLVM does not optimise them: the
order of operations in them, and with it every property that is tested, is XLA's. ``SAT_JAX_TEST_OPTIMISED=1`` compiles
as users do.
"""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports jax, and inherited by the processes that tests start.
if os.environ.get("SAT_JAX_TEST_OPTIMISED") != "1":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
