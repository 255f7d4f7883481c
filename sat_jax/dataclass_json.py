"""Frozen dataclasses to and from plain JSON, strictly: a misspelt or surplus key is an error that names the nearest.

Values are checked by the records themselves (``checked``); here is only structure. Where any subclass of a class may
stand (``open_to_subclasses``: the rules of a loss), it is stored by its import path.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from sat_jax.names import import_class, import_path, nearest

T = TypeVar("T")


def to_dict(record: Any) -> Any:
    """A dataclass as nested dicts, lists and scalars, ready for ``json.dumps``. Tuples become lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        origin = import_path(type(record)) if getattr(record, "open_to_subclasses", False) else {}
        return origin | {f.name: to_dict(getattr(record, f.name)) for f in dataclasses.fields(record)}
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
        ValueError: a key that ``cls`` does not have (with the nearest one), a missing required key, a class that cannot
            be imported; the message carries the dotted path. And what the record's own checks raise.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    where = path or cls.__name__
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object with the fields of {cls.__name__}, found {data!r}")
    for key in data:
        if key not in fields:
            raise ValueError(f"{where} has no field '{key}'{nearest(key, fields)}")
    for name, f in fields.items():
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} lacks the required field '{name}': add it")
    return cls(**{key: _decode(hints[key], value, f"{path}.{key}" if path else key) for key, value in data.items()})


def _decode(hint: Any, value: Any, path: str) -> Any:
    """JSON data as the type that a field asks for, as far as structure goes."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        option = next(option for option in args if option is not type(None))
        return None if value is None and type(None) in args else _decode(option, value, path)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        each = [args[0]] * len(value) if args[-1] is Ellipsis else args
        if len(each) != len(value):
            return tuple(value)  # the record's own check says how many there must be
        return tuple(_decode(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(each, value, strict=True)))
    if not dataclasses.is_dataclass(hint):
        return value
    if not getattr(hint, "open_to_subclasses", False):
        return from_dict(hint, value, path)  # type: ignore[arg-type]
    if not isinstance(value, Mapping) or "class" not in value:
        raise ValueError(f"{path} = {value!r}: expected an object with 'class', the import path of what stands here")
    cls = import_class(dict(value), path)
    if not issubclass(cls, hint):  # type: ignore[arg-type]
        raise ValueError(f"{path}: {value['class']} is no {hint.__name__}")  # type: ignore[union-attr]
    return from_dict(cls, {k: v for k, v in value.items() if k not in ("class", "sha256")}, path)
