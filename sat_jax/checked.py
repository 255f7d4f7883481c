"""Frozen records that cannot exist in an impossible state: every number declares its range where it is declared.

    @dataclasses.dataclass(frozen=True)
    class Adam(Checked, section="optimizer"):
        lr: NonNegative = 1e-6
        b1: Annotated[float, Range(0, 1, below=True)] = 0.9

Types and ranges are checked on construction, whoever constructs: Python, the command line, JSON. What relates several
fields belongs into ``__post_init__``, after ``super().__post_init__()``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Annotated, Any, ClassVar

import numpy as np

from sat_jax.names import nearest

INT_MAX = 2**31 - 1
"""Where an integer has no bound of its own: what int32 on a device holds."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field may take; infinity and nan never are. No bound: integers go up to ``INT_MAX``."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    """The lower bound is exclusive."""
    below: bool = False
    """The upper bound is exclusive."""
    why: str = ""
    """What the number is, for the error: "it bounds an importance weight"."""

    def holds(self, value: float) -> bool:
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        return self.high is None or value < self.high or (value == self.high and not self.below)

    def __str__(self) -> str:
        low, high = _digits(self.low), _digits(self.high)
        if high == _digits(INT_MAX):
            return f"must be at least {low} and below 2^31"
        if low and high:
            return f"must lie in {'(' if self.above else '['}{low}, {high}{')' if self.below else ']'}"
        if low:
            return f"must be {'above' if self.above else 'at least'} {low} and finite"
        return f"must be {'below' if self.below else 'at most'} {high} and finite" if high else "must be finite"


def _digits(bound: float | None) -> str:
    return "" if bound is None else f"{int(bound)}" if bound == int(bound) else f"{bound:g}"


Count = Annotated[int, Range(1, INT_MAX)]
"""1, 2, ..."""
Natural = Annotated[int, Range(0, INT_MAX)]
"""0, 1, 2, ..."""
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]


class Checked:
    """Base of checked records; subclasses are frozen dataclasses.

    ``section`` is what the record's fields are called by in errors: ``optimizer`` for ``optimizer.lr``, nothing for the
    fields of a whole configuration; by default the class's own name.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.section = cls.__name__ if section is None else section

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(record: Any) -> None:
    """Every field of a dataclass against its type and its ``Range``; whole numbers in float fields become floats.

    ``ValueError`` for the first field that does not fit: name, value, rule, and the default as a remedy.
    """
    cls: Any = type(record)
    for field, hint in _hints(cls):
        value = getattr(record, field.name)
        try:
            checked = _conform(value, hint)
        except _Unfit as unfit:
            default = "" if field.default in (dataclasses.MISSING, value) else f"; the default is {field.default!r}"
            name = f"{record.section}.{field.name}".removeprefix(".")
            raise ValueError(f"{name} = {value!r}: {unfit}{default}") from None
        if checked is not value:
            object.__setattr__(record, field.name, checked)


class _Unfit(Exception):  # noqa: N818 - becomes a ValueError once the field's name is known
    pass


@functools.cache
def _hints(cls: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ValueError(
            f"the annotations of {cls.__qualname__} cannot be read ({error}): import what they name in its file"
        ) from error
    return tuple((field, hints[field.name]) for field in dataclasses.fields(cls))


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _plain(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _range(hint: Any) -> Range | None:
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, Range)), None)


def _conform(value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` has it; raises ``_Unfit`` where it is not of that type or outside of its range."""
    options = _options(hint)
    if len(options) > 1:
        if value is None and type(None) in options:
            return None
        (hint, *others) = [option for option in options if option is not type(None)]
        if others:
            return value if any(isinstance(value, _plain(o)) for o in (hint, *others)) else _wrong_type(value, hint)
    kind, origin = _plain(hint), typing.get_origin(_plain(hint))
    if kind is Any:
        return value
    if kind in (int, float):
        return _number(value, kind, _range(hint) or Range())
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        if value not in choices or isinstance(value, bool) != any(isinstance(c, bool) for c in choices):
            close = nearest(str(value), map(str, choices))
            raise _Unfit(f"must be one of {', '.join(map(str, choices))}" + close * close.startswith("; did"))
        return value
    if origin is tuple:
        if not isinstance(value, tuple):
            raise _Unfit(f"must be a tuple, not {type(value).__name__}")
        args = typing.get_args(kind)
        each = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(each) != len(value):
            raise _Unfit(f"must have {len(each)} entries")
        return tuple(_conform(v, h) for v, h in zip(value, each, strict=True))
    expected = origin or kind
    return value if isinstance(value, expected) else _wrong_type(value, expected)


def _wrong_type(value: Any, expected: Any) -> Any:
    raise _Unfit(f"must be {getattr(expected, '__name__', expected)}, not {type(value).__name__}")


def _number(value: Any, kind: type, allowed: Range) -> Any:
    wanted = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise _Unfit(f"must be {'a whole number' if kind is int else 'a number'}, not {type(value).__name__}")
    if kind is int and allowed.high is None:
        allowed = dataclasses.replace(allowed, high=INT_MAX)
    if not math.isfinite(value) or not allowed.holds(float(value)):
        raise _Unfit(f"{allowed}" + (f": {allowed.why}" if allowed.why else ""))
    return value if type(value) is kind else kind(value)
