from __future__ import annotations

import json

import numpy as np
import pytest

from sat_jax.data.pipeline import PromptStream
from sat_jax.types import Prompt


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"id{i}", str(i), np.array([i], np.int32), "", "test") for i in range(n)]


def take(stream: PromptStream, n: int) -> list[str]:
    return [next(stream).group_id for _ in range(n)]


def test_every_prompt_once_an_epoch() -> None:
    stream = PromptStream(prompts(7), seed=3)
    epochs = [take(stream, 7) for _ in range(4)]
    for epoch, ids in enumerate(epochs):
        assert sorted(ids) == sorted(f"{epoch}:id{i}" for i in range(7))
    orders = {tuple(i.split(":")[1] for i in ids) for ids in epochs}
    assert len(orders) > 1, "every epoch is shuffled anew"


def test_order_is_fixed_by_the_seed() -> None:
    assert take(PromptStream(prompts(50), seed=1), 120) == take(PromptStream(prompts(50), seed=1), 120)
    assert take(PromptStream(prompts(50), seed=1), 50) != take(PromptStream(prompts(50), seed=2), 50)
    assert take(PromptStream(prompts(3), shuffle=False), 4) == ["0:id0", "0:id1", "0:id2", "1:id0"]


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 20])
def test_resuming_continues_with_the_very_next_prompt(stop: int) -> None:
    whole = take(PromptStream(prompts(7), seed=5), 30)
    stream = PromptStream(prompts(7), seed=5)
    before = take(stream, stop)
    state = json.loads(json.dumps(stream.get_state()))
    resumed = PromptStream(prompts(7), seed=5)
    resumed.set_state(state)
    assert resumed.get_state()["position"] == stop
    assert before + take(resumed, 30 - stop) == whole


def test_an_issued_prompt_can_be_had_again() -> None:
    """Fault 37: {2, 3} were generated and never trained on; a crash must neither skip nor repeat others."""
    stream = PromptStream(prompts(8), seed=0)
    issued = [next(stream) for _ in range(4)]
    resumed = PromptStream(prompts(8), seed=0)
    resumed.set_state(stream.get_state())
    again = [resumed.at(t.position) for t in issued[2:]]
    assert [t.group_id for t in again] == [t.group_id for t in issued[2:]]
    seen = [t.group_id for t in issued[:2] + again] + take(resumed, 4)
    assert sorted(seen) == sorted(f"0:id{i}" for i in range(8))


def test_state_of_another_run_is_refused() -> None:
    state = PromptStream(prompts(7), seed=5).get_state()
    for other, key in (
        (PromptStream(prompts(8), seed=5), "n_prompts"),
        (PromptStream(prompts(7), seed=6), "seed"),
        (PromptStream(prompts(7)[::-1], seed=5), "fingerprint"),
        (PromptStream(prompts(7), seed=5, shuffle=False), "shuffle"),
    ):
        with pytest.raises(ValueError, match=rf"saved prompt cursor has {key} = "):
            other.set_state(state)
    with pytest.raises(ValueError, match="position = None"):
        PromptStream(prompts(7), seed=5).set_state(state | {"position": None})


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream([])
    with pytest.raises(ValueError, match="prompt_id 'id0' occurs twice"):
        PromptStream([*prompts(2), *prompts(1)])
    with pytest.raises(ValueError, match="position = -1"):
        PromptStream(prompts(2)).at(-1)
