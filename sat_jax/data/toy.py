"""A verifiable task small enough for two cores: sort the digits.

A prompt is a few digits and ``=``, the answer is the same digits in ascending order, the reward is exact match. The
warm start's demonstrations answer only some of the prompts that way; the others are sorted in descending order or
copied. The base model thus half-knows the task, and reinforcement learning has something to select.

Problems are split into ``train`` and ``test`` by their *multiset* of digits: a held-out problem is not even a
permutation of one that was trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sat_jax.checked import Checked, Range

Split = Literal["train", "test"]

PAD, EOS = "<pad>", "<eos>"
SYMBOLS = (PAD, EOS, "<bos>", "<unk>", "=", " ", *"0123456789")
"""The vocabulary: 16 symbols, id = position."""

_FIRST_DIGIT, _EQUALS = SYMBOLS.index("0"), SYMBOLS.index("=")


HELD_OUT, ASCENDING, DESCENDING = 0.1, 0.35, 0.35
"""Share of the multisets of digits that only the test split has; of demonstrations with the right answer; of those in
descending order, the rest being copies of the problem."""


@dataclasses.dataclass(frozen=True)
class SortTask(Checked):
    """Sort ``n_digits`` digits."""

    n_digits: Annotated[int, Range(1, 6, why="every problem is enumerated")] = 6

    def is_held_out(self, digits: np.ndarray) -> np.ndarray:
        """bool [N]: which rows of ``digits`` (int [N, n_digits]) belong to the test split; permutations agree."""
        return _held_out_table(self.n_digits)[np.sort(digits, axis=-1) @ self._powers]

    def problems(self, split: Split, n: int, seed: int = 0) -> list[str]:
        """``n`` different problems of one split, as digits, the same for the same seed."""
        everything = np.arange(10**self.n_digits)[:, None] // self._powers % 10
        available = np.flatnonzero(self.is_held_out(everything) == (split == "test"))
        if n > len(available):
            raise ValueError(
                f"{n} {split} problems wanted, {len(available)} of {self.n_digits} digits exist: ask for less"
            )
        chosen = np.random.default_rng(seed).permutation(available)[:n]
        return [f"{code:0{self.n_digits}d}" for code in chosen]

    def answer(self, problem: str) -> str:
        """The right answer to a problem."""
        return "".join(sorted(problem))

    def demonstrations(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """``n`` examples for the warm start, all from training problems, repetitions possible.

        Returns:
            ``prompt_ids`` int32 [n, n_digits + 1], which end in ``=``; ``target_ids`` int32 [n, n_digits + 1], which
            end in the end-of-sequence token.
        """
        rows, have = [], 0
        while have < n:
            drawn = rng.integers(0, 10, (2 * n + 64, self.n_digits))
            rows.append(drawn[~self.is_held_out(drawn)])
            have += len(rows[-1])
        digits = np.concatenate(rows)[:n]
        up = np.sort(digits, axis=-1)
        kind = rng.random(n)[:, None]
        shown = np.where(kind < ASCENDING, up, np.where(kind < ASCENDING + DESCENDING, up[:, ::-1], digits))
        prompt_ids = np.concatenate([digits + _FIRST_DIGIT, np.full((n, 1), _EQUALS)], axis=1)
        target_ids = np.concatenate([shown + _FIRST_DIGIT, np.full((n, 1), SYMBOLS.index(EOS))], axis=1)
        return prompt_ids.astype(np.int32), target_ids.astype(np.int32)

    @property
    def _powers(self) -> np.ndarray:
        return 10 ** np.arange(self.n_digits)[::-1]


@functools.lru_cache(maxsize=8)
def _held_out_table(n_digits: int) -> np.ndarray:
    """bool [10 ** n_digits], indexed by the sorted digits read as a number."""
    table = np.zeros(10**n_digits, bool)
    for multiset in itertools.combinations_with_replacement("0123456789", n_digits):
        text = "".join(multiset)
        digest = hashlib.sha256(f"sort:{text}".encode()).digest()
        table[int(text)] = int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64
    table.flags.writeable = False
    return table


def write_tokenizer(folder: str | Path) -> Path:
    """Write the toy's ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which is returned."""
    backend = tokenizers.Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([s for s in SYMBOLS if s.startswith("<")])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
