from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sat_jax.data.prompts import load_prompts
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.data.toy import SYMBOLS, SortTask, write_tokenizer
from sat_jax.rewards.toy import exact_match


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path / "toy"))


def test_tokenizer_is_loaded_like_any_other(tokenizer: Tokenizer) -> None:
    assert len(SYMBOLS) == tokenizer.vocab_size == 16
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.pad_id == 0
    ids = tokenizer.encode("405=<eos>")
    assert ids == [SYMBOLS.index(s) for s in ("4", "0", "5", "=", "<eos>")]
    assert tokenizer.decode(ids) == "405="
    assert tokenizer.decode(ids, skip_special_tokens=False) == "405=<eos>"
    assert tokenizer.encode("x") == [SYMBOLS.index("<unk>")]


def test_no_permutation_of_a_test_problem_is_trained_on(tokenizer: Tokenizer) -> None:
    task = SortTask()
    train, test = (
        {task.answer(p) for p in task.problems(split, n)} for split, n in (("train", 20_000), ("test", 2_000))
    )
    assert not train & test
    demonstrated, _ = task.demonstrations(np.random.default_rng(0), 5_000)
    answers = {tokenizer.decode(sorted(row[:-1])) for row in demonstrated}
    assert not answers & test
    everything = np.arange(10**6)[:, None] // 10 ** np.arange(6)[::-1] % 10
    assert 0.07 < task.is_held_out(everything).mean() < 0.13


def test_prompts(tokenizer: Tokenizer) -> None:
    problems = SortTask().problems("train", 500, seed=3)
    assert len(set(problems)) == 500
    assert problems == SortTask().problems("train", 500, seed=3)
    assert problems != SortTask().problems("train", 500, seed=4)
    for problem, p in zip(problems, load_prompts("toy:sort6/train?size=50&seed=3", tokenizer), strict=False):
        assert p.text == problem + "="
        assert tokenizer.decode(p.token_ids) == p.text
        assert p.answer == "".join(sorted(problem))


def test_demonstrations_are_the_mixture(tokenizer: Tokenizer) -> None:
    prompt_ids, target_ids = SortTask().demonstrations(np.random.default_rng(1), 20_000)
    assert prompt_ids.shape == target_ids.shape == (20_000, 7)
    assert (prompt_ids[:, -1] == SYMBOLS.index("=")).all()
    assert (target_ids[:, -1] == SYMBOLS.index("<eos>")).all()
    problem, shown = prompt_ids[:, :-1], target_ids[:, :-1]
    np.testing.assert_array_equal(np.sort(problem), np.sort(shown))
    up, down = np.sort(problem), np.sort(problem)[:, ::-1]
    distinct = (problem != up).any(1) & (problem != down).any(1) & (up != down).any(1)
    for rows, share in ((up, 0.35), (down, 0.35), (problem, 0.30)):
        assert abs((rows == shown).all(1)[distinct].mean() - share) < 0.015


def test_demonstrations_repeat_with_the_seed() -> None:
    first = SortTask().demonstrations(np.random.default_rng(7), 64)
    again = SortTask().demonstrations(np.random.default_rng(7), 64)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_small_tasks_and_bad_ones() -> None:
    assert len(SortTask(n_digits=2).problems("train", 50)) == 50
    with pytest.raises(ValueError, match="200 train problems wanted"):
        SortTask(n_digits=2).problems("train", 200)
    for bad in (0, 7):
        with pytest.raises(ValueError, match=rf"SortTask.n_digits = {bad}: must lie in \[1, 6\]"):
            SortTask(bad)


@pytest.mark.parametrize(
    ("response", "reward"), [("012345", 1.0), (" 012345\n", 1.0), ("012354", 0.0), ("0123450", 0.0), ("", 0.0)]
)
def test_reward_is_exact_match(response: str, reward: float) -> None:
    out = exact_match("543210=", response, "012345", {})
    assert out["reward"] == reward
    assert out["verdict"] == ("correct" if reward else "wrong")
