"""One compilation cache for the whole session, its processes included; compilations that cost half as much; workers
that stay small.

Most of a test's time is spent compiling programs that then run for milliseconds, so LLVM does not optimise them and
keeps to old instructions: the order of operations in them, and with it every property that is tested, is XLA's.
``SAT_JAX_TEST_OPTIMISED=1`` compiles as users do.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports jax, and inherited by the processes that tests start.
if os.environ.get("SAT_JAX_TEST_OPTIMISED") != "1":
    os.environ["XLA_FLAGS"] = " ".join(
        (
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_max_isa=AVX",
        )
    ).strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

_STATM = Path("/proc/self/statm")
_MOST_BYTES = 1.1e9
"""Resident memory beyond which a worker forgets its compiled programs; the cache on disk still has them."""
_MORE_BYTES = 0.15e9
"""What has to be added before it does so again: forgetting costs, and not everything is given back."""


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _small_worker() -> Iterator[None]:
    global _MOST_BYTES
    yield
    if "jax" not in sys.modules or not _STATM.exists() or _resident_bytes() < _MOST_BYTES:
        return
    sys.modules["jax"].clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc keeps what is freed until it is asked
        ctypes.CDLL(None).malloc_trim(0)
    _MOST_BYTES = max(_MOST_BYTES, _resident_bytes() + _MORE_BYTES)
