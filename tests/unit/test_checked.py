from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from sat_jax.checked import Checked, Count, Natural, NonNegative, Positive, Range


@dataclasses.dataclass(frozen=True)
class Inner(Checked):
    n: Count = 1


@dataclasses.dataclass(frozen=True)
class Record(Checked, section="record"):
    steps: Count = 10
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    delay: Natural = 0
    lr: NonNegative = 1e-6
    eps: Positive = 0.2
    b1: Annotated[float, Range(0, 1, below=True, why="it is a decay")] = 0.9
    share: Annotated[float, Range(0, 1)] | None = None
    kind: Literal["a", "b"] = "a"
    on: bool = True
    name: str = ""
    sizes: tuple[Count, ...] = (1, 2)
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("steps", 0, "record.steps = 0: must be at least 1 and below 2^31; the default is 10"),
        ("steps", 2.5, "record.steps = 2.5: must be a whole number, not float; the default is 10"),
        ("steps", True, "record.steps = True: must be a whole number, not bool; the default is 10"),
        ("steps", 2**40, "record.steps = 1099511627776: must be at least 1 and below 2^31"),
        ("seed", 2**40, "record.seed = 1099511627776: must lie in [0, 4294967295]"),
        ("delay", -1, "record.delay = -1: must be at least 0 and below 2^31"),
        ("lr", -1.0, "record.lr = -1.0: must be at least 0 and finite"),
        ("lr", math.nan, "record.lr = nan: must be at least 0 and finite"),
        ("lr", math.inf, "record.lr = inf: must be at least 0 and finite"),
        ("lr", "1e-6", "record.lr = '1e-6': must be a number, not str"),
        ("eps", 0, "record.eps = 0: must be above 0 and finite; the default is 0.2"),
        ("b1", 1.0, "record.b1 = 1.0: must lie in [0, 1): it is a decay; the default is 0.9"),
        ("share", 1.5, "record.share = 1.5: must lie in [0, 1]; the default is None"),
        ("kind", "c", "record.kind = 'c': must be one of a, b; the default is 'a'"),
        ("on", 1, "record.on = 1: must be bool, not int"),
        ("name", None, "record.name = None: must be str, not NoneType"),
        ("sizes", [1], "record.sizes = [1]: must be a tuple, not list"),
        ("sizes", (1, 0), "record.sizes = (1, 0): must be at least 1 and below 2^31"),
        ("inner", 3, "record.inner = 3: must be Inner, not int"),
    ],
)
def test_what_cannot_be_is_refused_on_construction(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        Record(**{field: value})
    assert str(caught.value).startswith(said)
    with pytest.raises(ValueError):
        dataclasses.replace(Record(), **{field: value})


def test_whole_numbers_and_numpy_scalars_become_plain_numbers() -> None:
    record = Record(lr=1, steps=np.int32(3), eps=np.float32(0.5), share=None, inner=Inner(2))
    assert (record.lr, record.steps, record.eps) == (1.0, 3, 0.5)
    assert [type(x) for x in (record.lr, record.steps, record.eps)] == [float, int, float]
    assert hash(record) == hash(dataclasses.replace(record))


def test_a_fields_own_rule_comes_after_its_range() -> None:
    @dataclasses.dataclass(frozen=True)
    class Band(Checked, section="band"):
        low: NonNegative = 0.5
        high: Positive = 2.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.low < self.high:
                raise ValueError(f"band [{self.low}, {self.high}] is empty")

    with pytest.raises(ValueError, match=r"band.low = nan"):
        Band(low=math.nan)
    with pytest.raises(ValueError, match=r"band \[3.0, 2.0\] is empty"):
        Band(low=3)
