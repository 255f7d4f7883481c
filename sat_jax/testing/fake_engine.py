"""An engine without a model, for whatever has to be tried without one: queue, worker, trainer, an HTTP client."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from sat_jax.rollout.engine import Request
from sat_jax.types import NO_TOKEN, FinishReason, Trajectory


@dataclasses.dataclass(eq=False)
class _Flight:
    request: Request
    tokens: list[int]
    versions: list[int]


class FakeEngine:
    """Every token is a hash of (seed, position, policy version): a token shows which weights sampled it.

    Temperature 0 stands for one more seed; the other filters are not looked at.

    Args:
        vocab_size: tokens are 2 .. vocab_size - 1; ``eos_id`` 1 ends a response.
        slots: requests in flight.
        max_len: longest prompt plus budget.
        tokens_per_round: each request in flight gets so many tokens in a round, all of one version.
        routes: ``(n_layers, top_k, n_experts)`` of made-up routed experts; None for a dense policy.
        support: size of made-up supports; 0: none are reported.
        on_round: called with the round's number before each round; may update weights, abort, raise.
        lose: requests it says True to are swallowed and never come back.
    """

    eos_id = 1

    def __init__(
        self,
        vocab_size: int = 32,
        *,
        slots: int = 64,
        max_len: int = 2**20,
        tokens_per_round: int = 4,
        routes: tuple[int, int, int] | None = None,
        support: int = 0,
        on_round: Callable[[int], None] = lambda _: None,
        lose: Callable[[Request], bool] = lambda _: False,
        decode: Callable[[np.ndarray], str] = lambda ids: " ".join(map(str, ids)),
        version: int = 0,
    ) -> None:
        self._vocab_size, self._slots, self._max_len = vocab_size, slots, max_len
        self._tokens_per_round = tokens_per_round
        self._routes, self._support = routes, support
        self._on_round, self._lose, self._decode = on_round, lose, decode
        self._version = version
        self._lock = threading.Lock()
        self._aborted: set[str] | None = set()
        self.params: Any = None
        self.rounds = 0
        self.closed = False

    @property
    def version(self) -> int:
        """The version that the next token is stamped with."""
        return self._version

    def update_weights(self, params: Any, version: int) -> None:
        """Remembers a copy of ``params`` and stamps ``version`` from the next round on."""
        copies = jax.tree.map(np.array, params)
        with self._lock:
            self.params, self._version = copies, version

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Ends requests at the next round."""
        with self._lock:
            self._aborted = None if request_ids is None or self._aborted is None else self._aborted | set(request_ids)

    def close(self) -> None:
        """Notes that it was called."""
        self.closed = True

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Trajectory]:
        """One trajectory a request, as they finish."""
        source, more = iter(requests), True
        flying: list[_Flight] = []
        with self._lock:
            self._aborted = set()
        while more or flying:
            while more and len(flying) < self._slots:
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    break
                self._check(request)
                if not self._lose(request):
                    flying.append(_Flight(request, [], []))
            self._on_round(self.rounds)
            self.rounds += 1
            with self._lock:
                version, aborted, self._aborted = self._version, self._aborted, set()
            finished: list[tuple[_Flight, FinishReason]] = []
            for flight in flying:
                if aborted is None or flight.request.request_id in aborted:
                    finished.append((flight, "abort"))
                elif (reason := self._round(flight, version)) is not None:
                    finished.append((flight, reason))
            for flight, reason in finished:
                flying.remove(flight)
                yield self._trajectory(flight, reason)

    def _check(self, request: Request) -> None:
        n, budget = len(request.prompt.token_ids), request.params.max_new_tokens
        if n < 1 or n + budget > self._max_len:
            raise ValueError(
                f"request {request.request_id}: {n} prompt tokens and a budget of {budget}; at least one and together "
                f"at most max_len = {self._max_len} are possible"
            )

    def _round(self, flight: _Flight, version: int) -> FinishReason | None:
        """A few more tokens; why the response ended with the last of them, if it did."""
        params = flight.request.params
        for _ in range(self._tokens_per_round):
            seed = flight.request.seed if params.temperature > 0 else -1
            flight.tokens.append(self._token(seed, len(flight.tokens), version))
            flight.versions.append(version)
            if flight.tokens[-1] == self.eos_id and not params.ignore_eos:
                return "stop"
            if params.stop and any(stop in self._decode(np.array(flight.tokens, np.int32)) for stop in params.stop):
                return "stop"
            if len(flight.tokens) == params.max_new_tokens:
                return "length"
        return None

    def _token(self, seed: int, position: int, version: int) -> int:
        digest = hashlib.blake2b(f"{seed}/{position}/{version}".encode(), digest_size=4).digest()
        return 1 + int.from_bytes(digest, "little") % (self._vocab_size - 1)

    def _trajectory(self, flight: _Flight, reason: FinishReason) -> Trajectory:
        request, ids = flight.request, np.array(flight.tokens, np.int32)
        routed, support, text = None, None, self._decode(ids)
        if self._routes is not None:
            layers, top_k, experts = self._routes
            n_inputs = len(request.prompt.token_ids) + len(ids) - 1
            rng = np.random.default_rng(request.seed)
            routed = np.argsort(rng.random((n_inputs, layers, experts)), axis=-1)[..., :top_k].astype(np.int32)
        if self._support:
            likely = (ids[:, None] + np.arange(self._support, dtype=np.int32)) % self._vocab_size
            support = np.where(np.arange(self._support) < self._vocab_size, likely, NO_TOKEN)
        return Trajectory(
            prompt_id=request.prompt.prompt_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt.token_ids,
            response_ids=ids,
            log_probs=np.full(len(ids), -np.log(self._vocab_size - 1), np.float32),
            policy_versions=np.array(flight.versions, np.int32),
            routed_experts=routed,
            finish_reason=reason,
            text=text[: min((at for stop in request.params.stop if (at := text.find(stop)) >= 0), default=len(text))],
            request_id=request.request_id,
            support=support,
        )
