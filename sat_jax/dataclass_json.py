"""Frozen dataclasses to and from plain JSON, strictly: a misspelt or surplus key is an error that names the nearest
one."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or the list of what is there when nothing is close."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def to_dict(record: Any) -> Any:
    """A dataclass as nested dicts, lists and scalars, ready for ``json.dumps``. Tuples become lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_dict(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {str(k): to_dict(v) for k, v in record.items()}
    if isinstance(record, list | tuple):
        return [to_dict(v) for v in record]
    if record is None or isinstance(record, bool | int | float | str):
        return record
    raise ValueError(
        f"cannot write {record!r} as JSON: configurations hold dataclasses, tuples, mappings and scalars only"
    )


def from_dict(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Rebuild dataclass ``cls`` from what ``to_dict`` wrote.

    Raises:
        ValueError: a key that ``cls`` does not have (with the nearest one), a missing required key, a value of the
            wrong type; the message carries the dotted path.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    where = path or cls.__name__
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object with the fields of {cls.__name__}, found {data!r}")
    for key in data:
        if key not in fields:
            raise ValueError(f"{where} has no field '{key}'{nearest(key, fields)}")
    values = {key: _decode(hints[key], value, f"{path}.{key}" if path else key) for key, value in data.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where} lacks the required field '{missing[0]}': add it")
    return cls(**values)


def field_paths(record: Any, prefix: str = "") -> list[str]:
    """Every dotted path that names a leaf of ``record``: what a command-line override may address."""
    paths: list[str] = []
    for f in dataclasses.fields(record):
        value, name = getattr(record, f.name), prefix + f.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            paths += field_paths(value, name + ".")
        else:
            paths.append(name)
    return paths


def _decode(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in (a for a in args if a is not type(None)):
            try:
                return _decode(option, value, path)
            except ValueError as error:
                errors.append(str(error))
        raise ValueError(errors[0])
    if origin is typing.Literal:
        if value not in args:
            close = nearest(str(value), map(str, args))
            raise ValueError(f"{path} = {value!r} is not one of its choices{close}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path} = {value!r}: expected a list")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
        if len(args) != len(value):
            raise ValueError(f"{path} = {value!r}: expected {len(args)} entries")
        return tuple(_decode(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        return {k: _decode(args[1], v, f"{path}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, path)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise ValueError(f"{path} = {value!r}: expected {hint.__name__}")
    return value
