from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from sat_jax.checked import Checked
from sat_jax.dataclass_json import from_dict, to_dict
from sat_jax.names import nearest


@dataclass(frozen=True)
class _Inner(Checked, section="inner"):
    alpha: float = 0.9
    mode: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class _Outer(Checked, section=""):
    steps: int
    inner: _Inner = field(default_factory=_Inner)
    maybe: _Inner | None = None
    names: tuple[str, ...] = ()
    on: bool = False


def test_round_trip_through_json() -> None:
    record = _Outer(3, _Inner(0.95, "b"), _Inner(0.5), ("x", "y"), True)
    assert from_dict(_Outer, json.loads(json.dumps(to_dict(record)))) == record
    assert from_dict(_Outer, {"steps": 1}) == _Outer(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": 1, "iner": {}}, r"no field 'iner'; did you mean 'inner'\?"),
        ({"steps": 1, "inner": {"alhpa": 1.0}}, r"inner has no field 'alhpa'; did you mean 'alpha'\?"),
        ({}, "lacks the required field 'steps'"),
        ({"steps": "three"}, "steps = 'three': must be a whole number"),
        ({"steps": True}, "steps = True: must be a whole number"),
        ({"steps": 1, "on": 1}, "on = 1: must be bool"),
        ({"steps": 1, "inner": {"mode": "c"}}, "inner.mode = 'c': must be one of a, b"),
        ({"steps": 1, "names": "xy"}, "names = 'xy': must be a tuple"),
        ({"steps": 1, "maybe": 3}, "maybe: expected an object"),
    ],
)
def test_a_wrong_entry_is_named_with_its_path(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(_Outer, data)


def test_an_integer_is_a_float_but_not_the_reverse() -> None:
    assert from_dict(_Inner, {"alpha": 1}).alpha == 1.0
    with pytest.raises(ValueError, match=r"steps = 1.5: must be a whole number"):
        from_dict(_Outer, {"steps": 1.5})


def test_nearest_lists_what_is_there_when_nothing_is_close() -> None:
    assert nearest("zzz", ["alpha", "beta"]) == "; known: alpha, beta"


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot write"):
        to_dict({"f": object()})
