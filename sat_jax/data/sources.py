"""Rows of plain Python out of whatever holds a data set: JSONL, Parquet, TFDS, reasoning-gym, the toy.

A source names itself (``FILE line 3``) so that an error about a row can say where it stands. Optional packages are
imported only when a spec asks for them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sat_jax.data.toy import SortTask

Row = tuple[str, dict[str, Any]]
"""Where the row stands, and its columns."""


def read_rows(spec: str) -> tuple[str, Iterator[Row]]:
    """The name of a source and its rows; whatever is wrong with it is a ``ValueError``, with the line.

    ``spec`` is a ``.jsonl`` or ``.parquet`` file, ``tfds:NAME/SPLIT``, ``reasoning_gym:NAME``, or ``toy:sort6/SPLIT``.
    The generated ones take parameters: ``reasoning_gym:chain_sum?size=500&seed=7``.
    """
    kind, _, rest = spec.partition(":")
    if kind == "tfds":
        return rest.rpartition("/")[0] or rest, _tfds_rows(rest)
    if kind in ("reasoning_gym", "toy"):
        name, parameters = _parameters(rest, spec)
        rows = _gym_rows(name, parameters) if kind == "reasoning_gym" else _toy_rows(name, parameters, spec)
        return name, rows
    path = Path(spec)
    if not path.is_file():
        raise ValueError(
            f"prompt file {spec} does not exist: give a .jsonl or .parquet file, tfds:NAME/SPLIT, "
            "reasoning_gym:NAME or toy:sort6/SPLIT"
        )
    return path.stem, _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{path} line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                value = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 ({error.reason}): convert the file") from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where} is not valid JSON ({error.msg} at column {error.colno}): one object per line is "
                    "expected; mend or remove the line"
                ) from error
            if not text:
                continue
            if not isinstance(value, dict):
                raise ValueError(f"{where} holds a {type(value).__name__}: one JSON object per line is expected")
            yield where, value


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet = _optional("pyarrow.parquet", "pyarrow", f"to read {path}", "pip install pyarrow, or convert it to JSONL")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own hierarchy, which exists only where it is installed
        raise ValueError(f"{path} is no readable Parquet file ({error}): write it again") from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                yield f"{path} row {number}", value
                number += 1


def _tfds_rows(rest: str) -> Iterator[Row]:
    name, _, split = rest.rpartition("/")
    if not name:
        raise ValueError(f"tfds:{rest} names no split: write tfds:NAME/SPLIT, like tfds:gsm8k/train")
    tfds = _optional(
        "tensorflow_datasets", "tensorflow-datasets", f"for tfds:{rest}", "pip install tensorflow-datasets"
    )
    try:
        # TFDS itself reads the variable once, when it is imported.
        source = tfds.data_source(name, split=split, data_dir=os.environ.get("TFDS_DATA_DIR"))
    except Exception as error:  # TFDS raises its own and the network's errors, all meaning the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"tfds:{rest} cannot be opened ({reason}): prepare it in the array_record format, and point "
            "TFDS_DATA_DIR at it"
        ) from error
    for number in range(len(source)):
        yield f"tfds:{rest} row {number}", {key: _plain(value) for key, value in source[number].items()}


def _gym_rows(name: str, parameters: dict[str, int]) -> Iterator[Row]:
    gym = _optional("reasoning_gym", "reasoning-gym", f"for reasoning_gym:{name}", "pip install reasoning-gym")
    try:
        dataset = gym.create_dataset(name, **({"size": 1000, "seed": 0} | parameters))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"reasoning_gym:{name} cannot be made ({error}): correct the name or its parameters"
        ) from error
    for number, entry in enumerate(dataset):
        yield f"reasoning_gym:{name} row {number}", {**entry, "data_source": f"reasoning_gym/{name}"}


def _toy_rows(name: str, parameters: dict[str, int], spec: str) -> Iterator[Row]:
    match = re.fullmatch(r"sort([1-6])/(train|test)", name)
    if match is None or parameters.keys() - {"size", "seed"} or min(parameters.values(), default=0) < 0:
        raise ValueError(
            f"{spec} is no toy task: write toy:sort6/train or toy:sort6/test, with ?size=N&seed=N if wanted"
        )
    task = SortTask(n_digits=int(match[1]))
    split: Any = match[2]
    for problem in task.problems(split, parameters.get("size", 256), parameters.get("seed", 0)):
        row = {"question": problem + "=", "answer": task.answer(problem), "data_source": f"sort{match[1]}"}
        yield f"{spec} problem {problem}", row


def _parameters(rest: str, spec: str) -> tuple[str, dict[str, int]]:
    """``name?size=500&seed=7`` taken apart."""
    name, _, query = rest.partition("?")
    try:
        return name, {key: int(value) for key, value in urllib.parse.parse_qsl(query, strict_parsing=bool(query))}
    except ValueError as error:
        raise ValueError(f"{spec}: parameters are whole numbers written as ?size=500&seed=7") from error


def _optional(module: str, package: str, why: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {package} is needed {why} and is not installed: {remedy}") from error


def _plain(value: Any) -> Any:
    """numpy and bytes, as TFDS hands them out, to plain Python."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return value
