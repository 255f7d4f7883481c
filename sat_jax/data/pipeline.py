"""The order in which prompts are issued: seeded, reshuffled every epoch, and exactly resumable.

Every position of the endless stream is a pure function of (seed, position), so the whole state is one number, and a
prompt that was issued but never trained on can be issued again from its position alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sat_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Ticket:
    """One prompt at its place in the stream."""

    position: int  # 0, 1, 2, ... over the whole run
    epoch: int  # how often every prompt was issued before this one
    prompt: Prompt

    @property
    def group_id(self) -> str:
        """``<epoch>:<prompt_id>``: unique within a run, for within an epoch every prompt comes once."""
        return f"{self.epoch}:{self.prompt.prompt_id}"


class PromptStream(Iterator[Ticket]):
    """Endless iterator over prompts, every one exactly once an epoch, in an order fixed by ``seed``."""

    def __init__(self, prompts: Sequence[Prompt], seed: int = 0, *, shuffle: bool = True) -> None:
        if not prompts:
            raise ValueError("there are no prompts to iterate over: check the source and its length filter")
        ids = [p.prompt_id for p in prompts]
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(
                f"prompt_id {twice!r} occurs twice: ids must be unique, drop duplicates or name another key"
            )
        self._prompts = prompts
        self._seed, self._shuffle = seed, shuffle
        self._fingerprint = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]
        import grain  # here, for it takes most of a second, and looking at data needs no order

        order = grain.MapDataset.range(len(prompts))
        self._order = (order.shuffle(seed=seed) if shuffle else order).repeat()
        self._next = 0

    def at(self, position: int) -> Ticket:
        """The ticket at ``position``, whatever has been issued so far."""
        if position < 0:
            raise ValueError(f"position = {position}: positions in the prompt stream start at 0")
        return Ticket(position, position // len(self._prompts), self._prompts[int(self._order[position])])

    def __next__(self) -> Ticket:
        ticket = self.at(self._next)
        self._next += 1
        return ticket

    def get_state(self) -> dict[str, Any]:
        """JSON-able state, from which ``set_state`` continues with the very next prompt."""
        return {
            "position": self._next,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "n_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, with the same prompts, order and seed, or ``ValueError``."""
        mine = self.get_state()
        for key in ("n_prompts", "fingerprint", "seed", "shuffle"):
            if state.get(key) != mine[key]:
                raise ValueError(
                    f"the saved prompt cursor has {key} = {state.get(key)!r}, this run has {mine[key]!r}: resume with "
                    "the prompts and the seed that the run was started with"
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise ValueError(f"the saved prompt cursor has position = {position!r}: it must be a count of prompts")
        self._next = position
