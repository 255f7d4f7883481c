"""A run's folder: the names of its files, the lock on it, ``config.json``."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

CONFIG_FILE = "config.json"
METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"
RESUMES_FILE, LEDGER_FILE, TENSORBOARD_DIR = "resumes.jsonl", "ledger.jsonl", "tensorboard"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps a second process out of the folder; the lock ends with the process, however that ends."""
    with open(run_dir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{run_dir} is being trained in by another process: wait for it, or stop it") from None
        yield


def write_config(run_dir: Path, name: str, method: str, config: Mapping[str, Any], resumed: bool) -> None:
    """``config.json``: what was asked for and what it runs on. Replaced whole, or not at all."""
    path = run_dir / CONFIG_FILE
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    before = json.loads(path.read_text(encoding="utf-8")) if resumed and path.exists() else {}
    record = {
        "name": name,
        "method": method,
        "config": config,
        "versions": {"sat_jax": version("sat-jax"), "jax": jax.__version__, "python": platform.python_version()},
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "git_commit": _git_commit(),
        "command": before.get("command", command),
        "resumed_with": [*before.get("resumed_with", []), *([command] if resumed else [])],
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def read_config(folder: Path) -> dict[str, Any] | None:
    """``config.json`` of a run folder as it was written; None where it describes something else (a model)."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        what = f"holds no {CONFIG_FILE}" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"{folder} {what}: give a run folder, as `sat-jax train --out` wrote it, or a Hugging Face folder where a "
            "policy is asked for"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or start the run again") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} is damaged: it holds {type(record).__name__}, not an object; restore it")
    return record if isinstance(record.get("config"), dict) and "versions" in record else None


def _git_commit() -> str | None:
    """Commit of the checkout that this code runs from, with ``+`` where it has changes; None outside of one."""
    here = Path(__file__).resolve().parents[2]
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
