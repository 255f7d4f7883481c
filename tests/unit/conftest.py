from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sat_jax.data.tokenizer import Tokenizer
from tests.helpers import DATA
from tests.helpers.chatml import CHATML

TOKENIZER_FILES = DATA / "tokenizer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a tokenizer and no chat template."""
    target = tmp_path / "hf"
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TOKENIZER_FILES / name, target / name)
    return target


@pytest.fixture
def plain_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def chat_tokenizer(folder: Path) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(CHATML)
    return Tokenizer.from_folder(folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a file below the test's folder; returns its path."""

    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file
