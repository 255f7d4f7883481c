"""Programs that need several devices run in a process of their own, with that many CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.helpers import ROOT


def report_of(module: str, devices: int = 8) -> Any:
    """What ``python -m module`` prints as its last line, as JSON."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
