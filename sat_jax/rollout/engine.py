"""What a sampling engine is: the records that go in and the protocol that every engine keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Protocol

from sat_jax.checked import Checked, Count, Natural, NonNegative, Range
from sat_jax.types import MIN_TEMPERATURE, Prompt, Trajectory

MAX_SEED = 2**32 - 1

MAX_SUPPORT = 1024
"""Largest ``top_k`` whose supports are recorded: 4 KiB a token in the engine, the queue and the learner's batch."""


@dataclasses.dataclass(frozen=True)
class SamplingParams(Checked, section="sampling"):
    """How requests are sampled.

    The filters apply in the order temperature, top-k, top-p, min-p, each on what the previous one left; the remaining
    tokens are renormalised, and that renormalised distribution is what is sampled *and* what log-probs are reported
    from.

    Attributes:
        temperature: logits are divided by it; 0 is greedy decoding, whose log-probs are reported at temperature 1 over
            the whole vocabulary (those of the sampled point mass would all be 0).
        top_p: the smallest set of tokens with at least this mass is kept; 1 is off.
        top_k: the ``top_k`` most likely tokens are kept; 0 is off. Ties with the last of them are kept too, except
            where the support is recorded: there the lower ids win, and at most ``top_k`` are kept.
        min_p: tokens less likely than ``min_p`` times the most likely one are removed; 0 is off.
        max_new_tokens: budget of response tokens, end-of-sequence included.
        stop: a response ends with the first token that completes one of these strings. The tokens stay in the response,
            the string and what follows it are cut from its text.
        ignore_eos: go on after an end-of-sequence token, for benchmarks and golden runs of a fixed length.
    """

    temperature: NonNegative = 1.0
    top_p: Annotated[float, Range(0, 1, above=True, why="1 turns it off")] = 1.0
    top_k: Natural = 0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    max_new_tokens: Count = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temperature < MIN_TEMPERATURE:
            rule = f"must be at least {MIN_TEMPERATURE}, or 0 for greedy decoding"
            raise ValueError(f"sampling.temperature = {self.temperature}: {rule}")
        if not all(self.stop):
            raise ValueError(f"sampling.stop = {self.stop!r}: an empty string ends every response; leave it out")

    @property
    def truncates(self) -> bool:
        """True where tokens are removed before sampling: a learner then has to replay the support, or must refuse."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


@dataclasses.dataclass(frozen=True)
class Request(Checked, section="request"):
    """One response wanted."""

    request_id: str  # unique among the requests in flight; comes back on the trajectory
    prompt: Prompt
    sample_index: Natural  # 0 .. G-1 within its group; comes back on the trajectory
    params: SamplingParams
    seed: Annotated[int, Range(0, MAX_SEED)]
    """One request with one seed gives the same tokens whatever else is in the batch. Greedy decoding ignores it."""


class Engine(Protocol):
    """Turns requests into trajectories. ``sat_jax.testing.check_engine`` tries whether an engine keeps this.

    One call of ``generate`` at a time; the other methods may be called from any thread, also while ``generate`` waits
    for a request.
    """

    @property
    def version(self) -> int:
        """The policy version of the weights that the next token will be sampled with."""

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Trajectory]:
        """Yields one trajectory a request, in the order in which they finish.

        ``requests`` is pulled in the thread that iterates, whenever the engine has room for another one. No token of a
        request is sampled with weights older than ``version`` was when it was pulled. ``None`` means that nothing is to
        be issued right now: the engine goes on with what it has and asks again later. An iterator that knows of nothing
        in flight should block rather than say ``None``. Abandoning the iterator aborts what is in flight.

        Raises:
            ValueError: a request that the engine cannot hold (an empty prompt; prompt and budget beyond its context),
                by its id. What was in flight is aborted.
        """

    def update_weights(self, params: Any, version: int) -> None:
        """Hands over new weights. They are copied before this returns, so the caller may donate its own afterwards, and
        are used from the next dispatch on, responses in flight included. A failed update leaves weights and version as
        they were."""

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Ends the named requests (all where None) as soon as possible; they come back with what they have, if only no
        token, and ``finish_reason = "abort"``. Unknown names are ignored: they may just have finished. The next call of
        ``generate`` knows nothing of it."""

    def close(self) -> None:
        """Frees what the engine holds. A second call does nothing."""
