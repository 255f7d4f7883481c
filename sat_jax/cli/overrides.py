"""Fields of a configuration as options, by their dotted paths: ``--rollout.schedule.delay 1 --loss.sat.alpha 0.95``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sat_jax.cli.arguments import field_docs
from sat_jax.config import ExperimentConfig
from sat_jax.losses import Rule


class Leaf(NamedTuple):
    """One value of a configuration."""

    path: str
    hint: Any
    value: Any
    doc: str


def leaves(record: Any, prefix: str = "") -> Iterator[Leaf]:
    """Every value of a configuration that an option may change. The rules of a loss go by their names, ``loss.sat``."""
    cls: Any = type(record)
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(record):
        value, path = getattr(record, field.name), prefix + field.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from leaves(value, path + ".")
        elif _holds_rules(value):
            for rule in value:
                yield from leaves(rule, f"{prefix}{rule.name}.")
        elif not _is_record(hints[field.name]):
            yield Leaf(path, hints[field.name], value, docs.get(field.name, ""))


def apply(config: ExperimentConfig, values: Mapping[str, Any]) -> ExperimentConfig:
    """``config`` with other values at dotted paths, all at once: no state in between has to be possible."""
    changes: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        place = changes
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    changed: ExperimentConfig = _apply(config, changes)
    return changed


def _apply(record: Any, changes: Mapping[str, Any]) -> Any:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in changes:
            change = changes[field.name]
            fields[field.name] = _apply(value, change) if dataclasses.is_dataclass(value) else change
        elif _holds_rules(value) and any(rule.name in changes for rule in value):
            fields[field.name] = tuple(_apply(rule, changes.get(rule.name, {})) for rule in value)
    return dataclasses.replace(record, **fields) if fields else record


def switched_off(record: Any, prefix: str = "") -> Iterator[str]:
    """Paths of whole parts that are None."""
    hints = typing.get_type_hints(type(record))
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value is None and _is_record(hints[field.name]):
            yield prefix + field.name
        elif dataclasses.is_dataclass(value):
            yield from switched_off(value, f"{prefix}{field.name}.")


def _holds_rules(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Rule)


def _is_record(hint: Any) -> bool:
    return any(dataclasses.is_dataclass(option) for option in (hint, *typing.get_args(hint)))
