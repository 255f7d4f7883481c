"""The learner's train step on two layers of Qwen3-30B-A3B, compiled for 64 TPU chips that are not there."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import ROOT

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
    pytest.mark.slow,
]

DATA, FSDP, TENSOR, EXPERT = 2, 4, 2, 4
ROWS, WIDTH, MICRO_BATCHES = 64, 4096, 2
HIDDEN, EXPERTS, TOP_K = 2048, 128, 8
HBM = 95 * 10**9


@functools.cache
def report() -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    sizes = {"layers": 2, "data": DATA, "fsdp": FSDP, "tensor": TENSOR, "expert": EXPERT, "rows": ROWS, "width": WIDTH}
    arguments = [f"--{name}={size}" for name, size in (sizes | {"micro-batches": MICRO_BATCHES}).items()]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "aot_memory.py"), "--topology=v5p:4x4x4", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_step_fits_with_what_its_arrays_explain() -> None:
    memory = report()["memory_bytes_per_chip"]
    gradient = report()["state_bytes_per_chip"] / 3  # parameters and two moments, all float32
    assert memory["total"] < HBM
    # Arguments are the state and the batch, up to tiles; the state is updated in place.
    asked_for = report()["state_bytes_asked_for"] + report()["batch_bytes_per_chip"]
    assert asked_for <= memory["arguments"] < 1.02 * asked_for
    assert memory["outputs"] < 2**20
    # Temporaries: the gradient's sum and one part of it, and a few copies of the rows that one mixture layer sorts by
    # expert, in bfloat16. Logits of whole rows, or a second copy of the parameters, would not fit into this.
    rows = ROWS // (DATA * FSDP * EXPERT * MICRO_BATCHES) * EXPERT  # each expert group sees the rows of its chips
    sorted_rows = rows * WIDTH * TOP_K * HIDDEN * 2
    assert memory["temporaries"] < 2 * gradient + 9 * sorted_rows


def test_parameters_and_moments_are_cut_as_asked_in_the_compiled_program() -> None:
    shares = report()["state_shares"]
    assert report()["state_bytes_per_chip"] == report()["state_bytes_asked_for"]
    groups: dict[str, list[float]] = {}
    for path, share in shares.items():
        groups.setdefault(re.sub(r"^\.(params|opt_state\S*?\.(mu|nu))", "", path), []).append(share)
    expected = {
        "['embed']": 1 / (FSDP * TENSOR),
        "['head']": 1 / (FSDP * TENSOR),
        "['layers_0']['attention']['q']": 1 / (FSDP * TENSOR),
        "['layers_0']['attention']['k']": 1 / (FSDP * TENSOR),
        "['layers_0']['mlp']['gate']": 1 / (FSDP * TENSOR * EXPERT),
        "['layers_0']['mlp']['down']": 1 / (FSDP * TENSOR * EXPERT),
    }
    for name, share in expected.items():
        assert groups[name] == [pytest.approx(share, abs=1e-5)] * 3, name  # the parameter and both moments
