"""The import graph points down only (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "sat_jax"

# What each part may import from inside the package, beside itself.
NOUNS = {"types", "dataclass_json"}
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "dataclass_json": set(),
    "losses": NOUNS,
    "kernels": NOUNS | {"losses"},
    "model": NOUNS,
    "hub": NOUNS | {"model"},
    "learner": NOUNS | {"losses", "kernels", "model"},
    "runs": NOUNS | {"metrics", "version"},
    "signals": set(),
    "version": set(),
    "data": NOUNS,
    "rewards": NOUNS,
    "rollout": NOUNS | {"model"},  # model: rollout/local/ alone, checked below
    "evaluation": NOUNS | {"data", "rewards", "rollout"},
    "policy": NOUNS | {"model", "hub", "data", "rollout"},
    "metrics": NOUNS,
    "report": NOUNS | {"metrics", "runs"},
    "inspection": NOUNS | {"losses", "kernels"},
    "config": NOUNS | {"losses", "model", "data", "rollout"},
}
SHELL = {
    "trainer",
    "batches",
    "setup",
    "host_metrics",
    "cli",
    "commands",
    "__init__",
    "__main__",
}  # may import everything below them


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sat_jax":
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("sat_jax.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = _part(path)
    if part in SHELL:
        return
    assert part in ALLOWED, f"{part} is new: give it its place in this table and in docs/architecture.md"
    assert _imports(path) <= ALLOWED[part] | {part}


def test_only_the_local_engine_of_rollout_knows_the_model() -> None:
    assert not [p for p in (PACKAGE / "rollout").glob("*.py") if "model" in _imports(p)]


def test_losses_are_pure_maths() -> None:
    for path in (PACKAGE / "losses").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in {"optax", "orbax", "os", "pathlib", "threading", "time"}, path
