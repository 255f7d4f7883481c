"""An engine without a model, for whatever has to be tried without one: queue, worker, trainer, an HTTP client."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from sat_jax.rollout.engine import Request
from sat_jax.types import FinishReason, Trajectory


class FakeEngine:
    """Every token is a hash of (seed, position, policy version): a token shows which weights sampled it.

    Args:
        vocab_size: tokens are 2 .. vocab_size - 1; ``eos_id`` 1 ends a response.
        slots: requests in flight.
        tokens_per_round: each request in flight gets so many tokens in a round, all of one version.
        routes: ``(n_layers, top_k, n_experts)`` of made-up routed experts; None for a dense policy.
        on_round: called with the round's number before each round; may update weights, abort, raise.
        lose: requests it says True to are swallowed and never come back.
        decode: text of response ids.
        version: of the first weights.
    """

    eos_id = 1

    def __init__(
        self,
        vocab_size: int = 32,
        *,
        slots: int = 64,
        tokens_per_round: int = 4,
        routes: tuple[int, int, int] | None = None,
        on_round: Callable[[int], None] = lambda _: None,
        lose: Callable[[Request], bool] = lambda _: False,
        decode: Callable[[np.ndarray], str] = lambda ids: " ".join(map(str, ids)),
        version: int = 0,
    ) -> None:
        self._vocab_size, self._slots, self._tokens_per_round = vocab_size, slots, tokens_per_round
        self._routes, self._on_round, self._lose, self._decode = routes, on_round, lose, decode
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
        """Remembers ``params`` and stamps ``version`` from the next round on."""
        with self._lock:
            self.params, self._version = params, version

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
        flying: list[tuple[Request, list[int], list[int]]] = []
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
                if not self._lose(request):
                    flying.append((request, [], []))
            self._on_round(self.rounds)
            self.rounds += 1
            with self._lock:
                version, aborted, self._aborted = self._version, self._aborted, set()
            finished: list[tuple[tuple[Request, list[int], list[int]], FinishReason]] = []
            for flight in flying:
                request, tokens, versions = flight
                if aborted is None or request.request_id in aborted:
                    finished.append((flight, "abort"))
                    continue
                for _ in range(self._tokens_per_round):
                    tokens.append(self._token(request.seed, len(tokens), version))
                    versions.append(version)
                    if tokens[-1] == self.eos_id or len(tokens) == request.params.max_new_tokens:
                        finished.append((flight, "stop" if tokens[-1] == self.eos_id else "length"))
                        break
            for flight, reason in finished:
                flying.remove(flight)
                yield self._trajectory(*flight, reason)

    def _token(self, seed: int, position: int, version: int) -> int:
        digest = hashlib.blake2b(f"{seed}/{position}/{version}".encode(), digest_size=4).digest()
        return 1 + int.from_bytes(digest, "little") % (self._vocab_size - 1)

    def _trajectory(self, request: Request, tokens: list[int], versions: list[int], reason: FinishReason) -> Trajectory:
        ids, n_inputs = np.array(tokens, np.int32), len(request.prompt.token_ids) + len(tokens) - 1
        routed = None
        if self._routes is not None:
            layers, top_k, experts = self._routes
            rng = np.random.default_rng(request.seed)
            routed = np.argsort(rng.random((n_inputs, layers, experts)), axis=-1)[..., :top_k].astype(np.int32)
        return Trajectory(
            prompt_id=request.prompt.prompt_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt.token_ids,
            response_ids=ids,
            log_probs=np.full(len(ids), -np.log(self._vocab_size - 1), np.float32),
            policy_versions=np.array(versions, np.int32),
            routed_experts=routed,
            finish_reason=reason,
            text=self._decode(ids),
            request_id=request.request_id,
        )
