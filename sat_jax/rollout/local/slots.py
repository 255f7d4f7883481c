"""The host's half of the in-process engine: what every slot holds, in numpy, written a dispatch at a time."""

from __future__ import annotations

import numpy as np

from sat_jax.rollout.engine import Request, SamplingParams
from sat_jax.rollout.local.compiled import Decoded, EngineShape, SlotState
from sat_jax.rollout.local.sampling import RowParams
from sat_jax.types import NO_TOKEN, FinishReason, Trajectory


class Records:
    """Responses in flight. Arrays over positions count from the prompt's first token, as ``Batch`` does."""

    def __init__(self, shape: EngineShape) -> None:
        S, M, L = shape.slots, shape.max_len, len(shape.cfg.moe_layers)
        self.requests: list[Request | None] = [None] * S  # None: the slot is free
        self.tokens = np.zeros((S, M), np.int32)  # prompt, then response
        self.position = np.zeros(S, np.int32)  # of the newest token, which is fed next: keys and values lie below it
        self.active = np.zeros(S, bool)  # False: free, or the response has ended and waits to be handed out
        self._log_probs = np.zeros((S, M), np.float32)
        self._versions = np.zeros((S, M), np.int32)
        self._routes = np.zeros((S, M, L, shape.cfg.num_experts_per_tok), np.int16) if L else None
        self._support = np.full((S, M, shape.support), NO_TOKEN, np.int32) if shape.support else None
        self._prompt_len, self._budget = np.zeros(S, np.int32), np.zeros(S, np.int32)
        self._ignore_eos = np.zeros(S, bool)
        self._rows = RowParams.of([SamplingParams()] * S, [0] * S)

    @property
    def nbytes(self) -> int:
        """Of the arrays over positions."""
        arrays = (self.tokens, self._log_probs, self._versions, self._routes, self._support)
        return sum(a.nbytes for a in arrays if a is not None)

    @property
    def free(self) -> np.ndarray:
        """Slots without a request."""
        return np.flatnonzero([request is None for request in self.requests])

    @property
    def ended(self) -> np.ndarray:
        """Slots whose response has ended."""
        return np.flatnonzero([request is not None for request in self.requests] & ~self.active)

    def assign(self, slot: int, request: Request) -> None:
        """Starts ``request`` in a free slot."""
        ids, params = request.prompt.token_ids, request.params
        self.requests[slot] = request
        self.tokens[slot, : len(ids)] = ids
        self._prompt_len[slot], self.position[slot] = len(ids), len(ids) - 1
        self._budget[slot], self._ignore_eos[slot] = params.max_new_tokens, params.ignore_eos
        self.active[slot] = True
        for name, value in vars(RowParams.of([params], [request.seed])).items():
            getattr(self._rows, name)[slot] = value[0]

    def state(self) -> SlotState:
        """The decode program's input. Copies: the device may still be reading when these arrays change again."""
        slots = np.arange(len(self.position))
        return SlotState(
            token=self.tokens[slots, self.position],  # type: ignore[arg-type]  # numpy goes in
            position=self.position.copy(),  # type: ignore[arg-type]
            generated=self.position - self._prompt_len + 1,  # type: ignore[arg-type]
            budget=self._budget.copy(),  # type: ignore[arg-type]
            active=self.active.copy(),  # type: ignore[arg-type]
            ignore_eos=self._ignore_eos.copy(),  # type: ignore[arg-type]
            rows=RowParams(**{name: value.copy() for name, value in vars(self._rows).items()}),
        )

    def absorb(self, decoded: Decoded, version: int) -> None:
        """Takes over what a dispatch with the weights of ``version`` made (arrays already on the host)."""
        emitted = np.asarray(decoded.emitted)
        step, slot = np.nonzero(np.arange(len(decoded.tokens))[:, None] < emitted)
        fed = self.position[slot] + step
        self.tokens[slot, fed + 1] = np.asarray(decoded.tokens)[step, slot]
        self._log_probs[slot, fed + 1] = np.asarray(decoded.log_probs)[step, slot]
        self._versions[slot, fed + 1] = version
        if self._routes is not None:
            self._routes[slot, fed] = np.asarray(decoded.routes)[step, slot]
        if self._support is not None:
            self._support[slot, fed + 1] = np.asarray(decoded.support)[step, slot]
        self.position += emitted
        self.active &= np.asarray(decoded.active)

    def record_prefill(self, slot: int, start: int, routes: np.ndarray, siblings: list[int]) -> None:
        """Routes int16 [n, L, K] of prompt tokens ``start .. start + n - 1``, for a slot and those that share its
        prompt."""
        if self._routes is not None:
            self._routes[[slot, *siblings], start : start + len(routes)] = routes

    def response(self, slot: int) -> np.ndarray:
        """int32 [R]; the response so far."""
        return self.tokens[slot, self._prompt_len[slot] : self.position[slot] + 1]

    def truncate(self, slot: int, length: int) -> None:
        """Ends a response after its first ``length`` tokens."""
        self.position[slot] = self._prompt_len[slot] + length - 1
        self.active[slot] = False

    def release(self, slot: int, finish_reason: FinishReason, text: str) -> Trajectory:
        """The slot's trajectory; the slot is free afterwards."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        P, end = self._prompt_len[slot], self.position[slot] + 1
        self.requests[slot], self.active[slot] = None, False
        return Trajectory(
            prompt_id=request.prompt.prompt_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt.token_ids,
            response_ids=self.tokens[slot, P:end].copy(),
            log_probs=self._log_probs[slot, P:end].copy(),
            policy_versions=self._versions[slot, P:end].copy(),
            routed_experts=None if self._routes is None else self._routes[slot, : end - 1].copy(),
            finish_reason=finish_reason,
            text=text,
            request_id=request.request_id,
            support=None if self._support is None else self._support[slot, P:end].copy(),
        )

    def clear(self) -> None:
        """Forgets everything in flight."""
        self.requests = [None] * len(self.requests)
        self.active[:] = False
