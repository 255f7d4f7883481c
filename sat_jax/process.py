"""What a training process owns besides its computation: its signals, its lock on the run folder, ``config.json``."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import jax

from sat_jax import __version__
from sat_jax.config import ExperimentConfig
from sat_jax.dataclass_json import to_dict

CONFIG_FILE = "config.json"


class StopRequest:
    """Set by Ctrl-C or SIGTERM. Whoever waits for something that may never come registers how to wake it up."""

    def __init__(self) -> None:
        self.requested = False
        self.wake: Callable[[], None] = lambda: None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:  # the second one means it
            raise KeyboardInterrupt
        self.requested = True
        # Not print: a handler may interrupt one.
        os.write(2, b"\nstopping as soon as the step is done and checkpointed; once more to quit at once\n")
        self.wake()


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Ctrl-C and SIGTERM ask for a stop at the next safe point; a second one interrupts at once."""
    request = StopRequest()
    previous = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps a second process out of the folder; the lock ends with the process, however that ends."""
    with open(run_dir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{run_dir} is being trained in by another process: wait for it, or stop it") from None
        yield


def write_config(run_dir: Path, config: ExperimentConfig, resumed: bool) -> None:
    """``config.json``: what was asked for and what it runs on. Replaced whole, or not at all."""
    path = run_dir / CONFIG_FILE
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    before = json.loads(path.read_text(encoding="utf-8")) if resumed and path.exists() else {}
    record = {
        "name": config.name,
        "config": to_dict(config),
        "versions": {"sat_jax": __version__, "jax": jax.__version__, "python": platform.python_version()},
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "git_commit": _git_commit(),
        "command": before.get("command", command),
        "resumed_with": [*before.get("resumed_with", []), *([command] if resumed else [])],
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _git_commit() -> str | None:
    """Commit of the checkout that this code runs from, with ``+`` where it has changes; None outside of one."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        git = partial(subprocess.run, cwd=here, capture_output=True, text=True, check=True, timeout=10)
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def remove(run_dir: Path) -> None:
    """Takes back a run folder that was created for input which turned out not to work."""
    for path in sorted(run_dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run_dir.rmdir()
