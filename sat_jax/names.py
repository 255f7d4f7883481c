"""Names and what they stand for: the nearest known one, and objects by their import path.

``package.module:name`` or ``file.py:name``: one rule for configurations, rules and rewards.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or the list of what is there when nothing is close."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def snake_case(name: str) -> str:
    """``DualClip`` -> ``dual_clip``, ``SAT`` -> ``sat``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def load_object(spec: str, what: str = "object") -> Any:
    """What ``package.module:name`` or ``path/to/file.py:name`` names; ``what`` it is, for the errors: ``reward``.

    Raises:
        ValueError: no such form, file, module or name (with the nearest one). What the module itself raises while it is
            imported goes through.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"{what} {spec!r}: write package.module:name or file.py:name")
    module = import_file(Path(where), what) if where.endswith(".py") else _import_module(where, what)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ValueError(f"{what} {spec}: {where} has no '{name}'{nearest(name, public)}")
    return getattr(module, name)


def import_file(path: Path, what: str = "object") -> ModuleType:
    """A Python file as a module; the same content is imported once in a process. Its folder joins the import path, so
    that it may import its neighbours as a script does."""
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"{what}: there is no file {path}: check the path, or restore the file")
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and getattr(module, "__sha256__", content) == content:
            return module
    name = f"_sat_jax_file_{content[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{what}: {path} is not a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    module.__sha256__ = content  # type: ignore[attr-defined]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise ValueError(f"{what}: {path}, line {error.lineno}: {error.msg}") from error
        raise
    return module


def import_path(cls: type) -> dict[str, str]:
    """How a class is found again: ``class`` is ``module:Class`` where the module is installed, else ``file.py:Class``
    absolute; ``sha256`` of its file where it is not sat_jax's own.

    Classes that nothing could import, defined in a function or in an interactive session, are refused.
    """
    module = sys.modules.get(cls.__module__)
    file = _file_of(module)
    if module is None or file is None or "<locals>" in cls.__qualname__:
        raise ValueError(
            f"class {cls.__qualname__} of {cls.__module__} cannot be stored: nothing could import it again; define it "
            "at the top level of a file"
        )
    if cls.__module__.partition(".")[0] == "sat_jax":
        return {"class": f"{cls.__module__}:{cls.__qualname__}"}
    content = getattr(module, "__sha256__", None) or hashlib.sha256(file.read_bytes()).hexdigest()
    where = cls.__module__ if _is_installed(module.__name__, file) else str(file)
    return {"class": f"{where}:{cls.__qualname__}", "sha256": content}


def import_class(entry: dict[str, Any], where: str) -> type:
    """The class that ``import_path`` described; ``where`` names the place in the configuration for the errors.

    It is refused where its file has changed since.
    """
    path = str(entry["class"])
    file, content = Path(path.rpartition(":")[0]), entry.get("sha256")
    if content and file.suffix == ".py" and file.is_file():
        _refuse_changed(file, content, path, where)
    try:
        cls = load_object(path, where)
    except ImportError as error:
        what = f"{where}: {path} cannot be imported ({error})"
        raise ValueError(f"{what}: install what it needs, as in the run") from error
    if not isinstance(cls, type):
        raise ValueError(f"{where}: {path} is {cls!r}, not a class: restore the file that defined it")
    module_file = _file_of(sys.modules.get(cls.__module__))
    if content and file.suffix != ".py" and module_file is not None:
        _refuse_changed(module_file, content, path, where)
    return cls


def _refuse_changed(file: Path, content: str, path: str, where: str) -> None:
    if hashlib.sha256(file.read_bytes()).hexdigest() != content:
        raise ValueError(
            f"{where}: {file} has changed since the run stored {path.rpartition(':')[2]} (SHA-256 {content[:12]}...): "
            "restore the file, or start a new run with the new one"
        )


def _import_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"{what}: there is no module {name}: install it, or name a file.py") from error
        raise


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def _is_installed(name: str, file: Path) -> bool:
    """Whether another process finds the module by its name: a part of a package, or a file in site-packages."""
    folders = {Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib", "stdlib")}
    return name != "__main__" and ("." in name or any(file.is_relative_to(folder) for folder in folders))
