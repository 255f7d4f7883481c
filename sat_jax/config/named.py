"""Named configurations: functions in ``configs/``, or in a file of one's own, that return an ``ExperimentConfig``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from sat_jax.config.experiment import ExperimentConfig
from sat_jax.names import import_file, nearest


def configs_folder() -> Path:
    """``configs/`` of a checkout, else the copy inside the installed package."""
    here = Path(__file__).resolve().parents[1]
    checkout = here.parent / "configs"
    return checkout if checkout.is_dir() and (here.parent / "pyproject.toml").is_file() else here / "_configs"


def config_functions() -> dict[str, Callable[[], ExperimentConfig]]:
    """Every named configuration by its name, which must be unique: what ``configs/*.py`` define."""
    found: dict[str, Callable[[], ExperimentConfig]] = {}
    for path in sorted(configs_folder().glob("[!_]*.py")):
        module = import_file(path, "configuration")
        for name, function in _functions_of(module).items():
            if name in found:
                raise ValueError(f"two configurations are called '{name}' (the second in {path.name}): rename one")
            found[name] = function
    return found


def load_config(spec: str) -> ExperimentConfig:
    """The configuration that ``spec`` names: ``file.py:function``, or a function of ``configs/``."""
    if spec.endswith(".py"):
        raise ValueError(f"{spec} names no function: write {spec}:FUNCTION")
    if ":" in spec:
        file, _, name = spec.rpartition(":")
        module = import_file(Path(file), "configuration")
        functions = _functions_of(module)
        if name not in functions and callable(getattr(module, name, None)):
            rule = "takes no arguments and says '-> ExperimentConfig' to be a configuration"
            raise ValueError(f"{spec} {rule}: add that")
    else:
        name, functions = spec, config_functions()
    if name not in functions:
        raise ValueError(f"no configuration '{name}'{nearest(name, functions)}")
    config = functions[name]()
    return config if config.name != "unnamed" else replace(config, name=name)


def _functions_of(module: ModuleType) -> dict[str, Callable[[], ExperimentConfig]]:
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and function.__module__ == module.__name__
        and function.__annotations__.get("return") in (ExperimentConfig, "ExperimentConfig")
        and not inspect.signature(function).parameters
    }
