"""The import graph points down only, from every file (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "sat_jax"

# Every room from the ground up, with the rooms below that its files may import.
GROUND = {"names", "types", "dataclass_json", "checked", "metrics"}
ROOMS: dict[str, set[str]] = {
    "names": set(),
    "types": set(),
    "dataclass_json": {"names"},
    "checked": {"names"},
    "metrics": set(),
    "losses": GROUND,
    "model": GROUND,
    "data": GROUND,
    "rewards": GROUND,
    "runs": GROUND,
    "kernels": GROUND | {"losses"},
    "hub": GROUND | {"model"},
    "inspection": GROUND | {"losses"},
    "report": GROUND | {"losses", "runs"},
    "learner": GROUND | {"losses", "model"},
    "rollout": GROUND | {"model"},
    "testing": GROUND | {"losses", "data", "rollout"},
    "config": GROUND | {"losses", "model", "data", "rollout"},
    "policy": GROUND | {"model", "hub", "data", "rollout"},
    "__init__": GROUND | {"policy"},
    "training": GROUND
    | {"losses", "kernels", "model", "hub", "learner", "data", "rewards", "rollout", "runs", "report", "config"},
    "cli": GROUND
    | {"losses", "model", "hub", "learner", "data", "rewards", "rollout", "runs", "report", "config", "training"}
    | {"inspection", "policy", "__init__"},
    "__main__": {"cli"},
}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Rooms that a file imports anything from, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sat_jax":
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {a.name if a.name in ROOMS else "__init__" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {[*a.name.split("."), "__init__"][1] for a in node.names if a.name.split(".")[0] == "sat_jax"}
    return found


def test_the_table_has_no_way_up() -> None:
    below: set[str] = set()
    for room, allowed in ROOMS.items():
        assert allowed <= below, f"{room} may import {allowed - below}, which stand no lower"
        below.add(room)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = _room(path)
    assert room in ROOMS, f"{room} is new: give it its place in this table and in docs/architecture.md"
    assert _imports(path) <= ROOMS[room] | {room}


def test_only_the_local_engine_of_rollout_knows_the_model() -> None:
    assert not [p for p in (PACKAGE / "rollout").glob("*.py") if "model" in _imports(p)]


def test_losses_are_pure_maths() -> None:
    for path in (PACKAGE / "losses").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in {"optax", "orbax", "os", "pathlib", "threading", "time"}, path
