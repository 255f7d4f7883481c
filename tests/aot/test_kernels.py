"""Compiled by the real TPU compiler, without a TPU: Mosaic takes the kernels, and no program gathers tokens.

One process for all of it, because libtpu wants a process of its own; skipped where libtpu is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

CHIPS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")
SLICE = "v5e:8x8"


@functools.cache
def report() -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_kernels.py"), SLICE, *CHIPS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_mosaic_compiles_the_kernels(chip: str) -> None:
    found = report()[chip]
    assert set(found) == {"grpo", "sat-grpo", "sat-gspo", "kpop"}
    assert all(entry["mosaic_calls"] >= 1 for entry in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["reference", "pallas"])
@pytest.mark.parametrize("method", ["sat-grpo", "sat-gspo"])
def test_no_gather_on_64_chips(method: str, kernel: str) -> None:
    found = report()[SLICE][f"{method} {kernel}"]
    assert found["chips"] == 64
    assert set(found["collectives"]) == {"all-reduce"}
    assert found["largest_collective"] <= 64  # elements; a gather of tokens would have millions
