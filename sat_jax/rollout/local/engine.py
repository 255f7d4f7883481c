"""The in-process engine: continuous batching over a fixed number of slots, a few tokens per dispatch.

A prompt is prefilled up to its last token, once for all members of a group that are admitted together; decoding starts
by feeding that last token, so every sampled token, the first included, comes out of the one decode program.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax import model
from sat_jax.rollout.engine import MAX_SUPPORT, Request
from sat_jax.rollout.local.compiled import Decoded, EngineShape, programs_for
from sat_jax.rollout.local.slots import Records
from sat_jax.types import FinishReason, Trajectory

UNROLLED_LAYERS, SMALL_POLICY = 8, 1_000_000
"""Up to this depth, and from this many parameters on, layers are unrolled: about 1.15 times the tokens per second of a
9 M-parameter policy on a CPU, for a second of compilation. Policies that fit into a cache gain nothing."""

PREFILL_ROWS = 32
"""Prompts prefilled side by side."""

PrefillRoutes = tuple[jax.Array, np.ndarray, np.ndarray, np.ndarray]
"""Routes int16 [W, C, L, K] of one prefill dispatch, with slots, start and n_valid, each [W]."""


class Decoder(Protocol):
    """The part of a tokenizer that an engine needs: for the text of a response, stop strings and end-of-sequence."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class LocalEngine:
    """Samples with a JAX model in this process. Weights may change in the middle of a response, whose keys and values
    are kept as they are.

    Memory: on the device a KV cache of ``cache_bytes``, the weights (twice while new ones wait for their dispatch), and
    while decoding a working copy of one layer's keys and values; on the host a record of ``record_bytes``. None of it
    grows.

    The same request gives the same tokens whatever else is in the batch: shapes are fixed, and no row of any program
    looks at another one.

    Args:
        params: the weights; copied.
        tokenizer: for texts, stop strings and the tokens that end a response; without one, texts are empty and the
            model's configuration names those tokens.
        max_len: longest prompt plus budget. This and the sizes not named here: see ``EngineShape``.
        dtype: of weights and cache, ``float32`` or ``bfloat16``; log-probs are float32 in any case.
        decode_steps: most tokens per dispatch; weights are swapped and slots refilled between two of them.
        selection_noise: 0 in every honest run.
        options: of the forward pass; its placement is the mesh that the engine samples on, and its rules cut the copy
            of the weights: they need not be those of ``params``.
        support: record the tokens that every sampled one was drawn from, at most so many; every request then has a
            temperature above 0 and a ``top_k`` from 1 to this. 0: nothing is recorded.
        device: where the engine samples, if not on a mesh and not where ``params`` are: rollout and learner overlap
            only on devices of their own. New weights are brought over.
    """

    def __init__(
        self,
        cfg: model.ModelConfig,
        params: model.Params,
        tokenizer: Decoder | None = None,
        *,
        version: int = 0,
        n_slots: int = 64,
        max_len: int = 512,
        dtype: str = "float32",
        decode_steps: int = 8,
        prefill_rows: int = PREFILL_ROWS,
        prefill_chunks: Sequence[int] = (16, 128),
        selection_noise: float = 0.0,
        options: model.ForwardOptions | None = None,
        support: int = 0,
        device: jax.Device | None = None,
    ) -> None:
        for name, value in (("n_slots", n_slots), ("max_len", max_len), ("decode_steps", decode_steps)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if not 0 <= support <= min(MAX_SUPPORT, cfg.vocab_size):
            raise ValueError(
                f"support = {support}: must lie in 0 .. {min(MAX_SUPPORT, cfg.vocab_size)}, the smaller one of "
                f"{MAX_SUPPORT} and the vocabulary; 0 records nothing"
            )
        if device is not None and options is not None and options.placement is not None:
            raise ValueError(f"device = {device} and a mesh: the engine samples on one or the other, leave one out")
        declared = (tokenizer.eos_ids if tokenizer is not None else ()) or cfg.eos_token_id
        self.shape = EngineShape(
            cfg=cfg,
            slots=n_slots,
            max_len=max_len,
            decode_steps=decode_steps,
            prefill_rows=min(prefill_rows, n_slots),
            prefill_chunks=tuple(sorted({min(c, max_len) for c in prefill_chunks})),
            eos_ids=tuple(declared),
            selection_noise=selection_noise if cfg.moe_layers else 0.0,
            split_layers=cfg.num_hidden_layers <= UNROLLED_LAYERS and model.parameter_count(cfg) > SMALL_POLICY,
            options=options or model.ForwardOptions(),
            support=support,
        )
        self._programs = programs_for(self.shape)
        self._tokenizer, self._dtype, self._device = tokenizer, dtype, device
        placement, split = self.shape.options.placement, self.shape.split_layers
        self._cache = model.init_cache(cfg, n_slots, max_len, dtype, placement, per_layer=split)
        if device is not None:
            self._cache = jax.device_put(self._cache, device)
        self._layout = jax.tree.map(jnp.shape, params)
        self._params, self._version = self._own(params), version
        self._lock = threading.Lock()
        self._pending: tuple[model.Params, int] | None = None
        self._aborted: set[str] | None = set()  # None: all
        self._busy = False
        self._records = Records(self.shape)
        self._new_routes: list[tuple[jax.Array, np.ndarray, np.ndarray, np.ndarray, dict[int, list[int]]]] = []

    # ------------------------------------------------------------------ the protocol

    @property
    def version(self) -> int:
        """The version of the weights that the next token will be sampled with."""
        with self._lock:
            return self._version if self._pending is None else self._pending[1]

    def update_weights(self, params: model.Params, version: int) -> None:
        """See ``Engine``; parameters of another structure or shape are a ``ValueError``."""
        if jax.tree.map(jnp.shape, params) != self._layout:
            raise ValueError(
                "the new weights have another structure or other shapes than the engine's: same model only"
            )
        own = self._own(params)
        with self._lock:
            self._pending = own, version

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See ``Engine``."""
        with self._lock:
            self._aborted = None if request_ids is None or self._aborted is None else self._aborted | set(request_ids)

    def close(self) -> None:
        """Frees weights and cache; the engine cannot be used afterwards."""
        pending = None if self._pending is None else self._pending[0]
        for leaf in jax.tree.leaves((self._cache, self._params, pending)):
            if not leaf.is_deleted():
                leaf.delete()

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Trajectory]:
        """See ``Engine``. What has finished is handed out while the device is already at the next tokens."""
        if self._busy:
            raise RuntimeError("generate() is running already: one thread drives an engine")
        self._busy, source, more = True, iter(requests), True
        with self._lock:
            self._aborted = set()
        try:
            finished: list[Trajectory] = []
            while True:
                new, more = self._pull(source) if more else ([], False)
                # Behind the pull, which may have blocked until there were new weights: what is issued then is theirs.
                self._swap_weights()
                self._admit(new)
                decoded = self._launch() if self._records.active.any() else None
                yield from finished
                if decoded is None and not more:
                    return
                finished = [] if decoded is None else self._collect(decoded)
        finally:
            self._records.clear()
            self._new_routes.clear()
            self._busy = False

    # ------------------------------------------------------------------ looking at it

    @property
    def compilations(self) -> dict[str, int]:
        """How often each program has been compiled; shared by engines of the same shape."""
        return dict(self._programs.compilations)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))

    @property
    def record_bytes(self) -> int:
        """Bytes of tokens, log-probs, versions, routes and supports of the responses in flight, on the host."""
        return self._records.nbytes

    def warm_up(self) -> None:
        """Compiles everything that a run can need; nothing is compiled afterwards."""
        shape = self.shape
        nothing = np.zeros(shape.prefill_rows, np.int32)
        for width in shape.prefill_chunks:
            tokens = np.zeros((shape.prefill_rows, width), np.int32)
            self._cache, _ = self._programs.prefill(
                self._params, self._cache, tokens, nothing, nothing, nothing, nothing.astype(np.uint32)
            )
        nowhere = np.zeros(shape.slots, np.int32)
        self._cache = self._programs.copy_slots(self._cache, nowhere, nowhere, 0)
        self._cache, _ = self._programs.decode(self._params, self._cache, self._records.state())

    # ------------------------------------------------------------------ between two dispatches

    def _own(self, params: model.Params) -> model.Params:
        # A dispatch may read a numpy array later, when its owner has already overwritten it; jax arrays never change.
        params = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), params)
        copies = self._programs.own(params, self._dtype)
        return copies if self._device is None else jax.device_put(copies, self._device)

    def _swap_weights(self) -> None:
        with self._lock:
            if self._pending is None:
                return
            (self._params, self._version), self._pending = self._pending, None

    def _pull(self, source: Iterator[Request | None]) -> tuple[list[Request], bool]:
        """Requests for the free slots; False once the source has ended."""
        new: list[Request] = []
        for _ in self._records.free:
            try:
                request = next(source)
            except StopIteration:
                return new, False
            if request is None:
                break
            self._check(request)
            new.append(request)
        return new, True

    def _admit(self, new: Sequence[Request]) -> None:
        """Puts requests into free slots and their prompts into the cache."""
        leaders: dict[bytes, int] = {}
        siblings: dict[int, list[int]] = {}
        for slot, request in zip(self._records.free.tolist(), new, strict=False):
            self._records.assign(slot, request)
            leader = leaders.setdefault(request.prompt.token_ids.tobytes(), slot)
            siblings.setdefault(leader, []).extend([slot] if slot != leader else [])
        prompts = [(slot, self._records.tokens[slot, : self._records.position[slot]]) for slot in siblings]
        self._new_routes += [(*routes, siblings) for routes in self._prefill(prompts)]
        pairs = [(leader, other) for leader, others in siblings.items() for other in others]
        if pairs:
            ends = np.zeros((2, self.shape.slots), np.int32)
            ends[:, : len(pairs)] = np.transpose(pairs)
            self._cache = self._programs.copy_slots(self._cache, *ends, len(pairs))

    def _check(self, request: Request) -> None:
        n, budget, limit = len(request.prompt.token_ids), request.params.max_new_tokens, self.shape.max_len
        if n < 1:
            raise ValueError(f"request {request.request_id}: the prompt is empty; give it at least one token")
        self.shape.cfg.check_ids(request.prompt.token_ids, f"request {request.request_id}")
        if n + budget > limit:
            raise ValueError(
                f"request {request.request_id}: {n} prompt tokens and a budget of {budget} exceed the engine's "
                f"max_len = {limit}; shorten the prompt or the budget, or raise max_len"
            )
        if request.params.stop and self._tokenizer is None:
            raise ValueError(f"request {request.request_id}: stop strings need an engine with a tokenizer")
        params, most = request.params, self.shape.support
        if most and not (1 <= min(params.top_k, self.shape.cfg.vocab_size) <= most and params.temperature > 0):
            raise ValueError(
                f"request {request.request_id}: top_k = {params.top_k}, temperature = {params.temperature}: this "
                f"engine records supports and needs top_k in 1 .. {most} and a temperature above 0"
            )

    def _prefill(self, prompts: Sequence[tuple[int, np.ndarray]]) -> list[PrefillRoutes]:
        """Fills slots with the keys and values of token ids; returns the routes, still on the device."""
        routes: list[PrefillRoutes] = []
        W, narrowest = self.shape.prefill_rows, self.shape.prefill_chunks[0]
        for first in range(0, len(prompts), W):
            rows = prompts[first : first + W]
            slots, seeds = np.zeros(W, np.int32), np.zeros(W, np.uint32)
            slots[: len(rows)] = [slot for slot, _ in rows]
            seeds[: len(rows)] = [zlib.crc32(ids.tobytes()) for _, ids in rows]
            length, start = np.zeros(W, np.int32), np.zeros(W, np.int32)
            length[: len(rows)] = [len(ids) for _, ids in rows]
            for width in reversed(self.shape.prefill_chunks):
                left = length - start
                chunks = -(-left // width) if width == narrowest else left // width
                for i in range(max(chunks.tolist())):
                    n_valid = np.where(i < chunks, np.minimum(length - start, width), 0).astype(np.int32)
                    tokens = np.zeros((W, width), np.int32)
                    for row, (_, ids) in enumerate(rows):
                        tokens[row, : n_valid[row]] = ids[start[row] : start[row] + n_valid[row]]
                    self._cache, made = self._programs.prefill(
                        self._params, self._cache, tokens, start.copy(), n_valid, slots, seeds
                    )
                    if made is not None:
                        routes.append((made, slots, start.copy(), n_valid))
                    start += n_valid
        return routes

    def _launch(self) -> Decoded:
        """Starts a decode dispatch; the device works while the host goes on."""
        self._cache, decoded = self._programs.decode(self._params, self._cache, self._records.state())
        return decoded

    def _collect(self, decoded: Decoded) -> list[Trajectory]:
        """Waits for a dispatch, takes its tokens over and hands out what has ended."""
        records = self._records
        for made, slots, start, n_valid, siblings in self._new_routes:
            host = np.asarray(made)
            for row in np.flatnonzero(n_valid).tolist():
                slot = int(slots[row])
                records.record_prefill(slot, int(start[row]), host[row, : n_valid[row]], siblings[slot])
        self._new_routes.clear()
        before = records.position.copy()
        records.absorb(jax.device_get(decoded), self._version)
        with self._lock:
            aborted, self._aborted = self._aborted, set()
        cut: dict[int, tuple[FinishReason, str]] = {}
        for slot, request in enumerate(records.requests):
            if request is None:
                continue
            if request.params.stop and (text := self._stop(slot, request, int(before[slot]))) is not None:
                cut[slot] = "stop", text
            elif records.active[slot] and (aborted is None or request.request_id in aborted):
                records.active[slot] = False
                cut[slot] = "abort", self._text(records.response(slot))
        return [self._release(slot, cut.get(slot)) for slot in records.ended.tolist()]

    def _release(self, slot: int, cut: tuple[FinishReason, str] | None) -> Trajectory:
        if cut is not None:
            return self._records.release(slot, *cut)
        ids, request = self._records.response(slot), self._records.requests[slot]
        assert request is not None, f"slot {slot} is free"
        stopped = not request.params.ignore_eos and int(ids[-1]) in self.shape.eos_ids
        return self._records.release(slot, "stop" if stopped else "length", self._text(ids))

    def _stop(self, slot: int, request: Request, before: int) -> str | None:
        """The text before a stop string, if the tokens after position ``before`` complete one; truncates there."""
        ids = self._records.response(slot)
        if not any(stop in self._text(ids) for stop in request.params.stop):
            return None
        seen = len(ids) - (int(self._records.position[slot]) - before)
        for length in range(seen + 1, len(ids) + 1):
            text = self._text(ids[:length])
            found = [at for stop in request.params.stop if (at := text.find(stop)) >= 0]
            if found:
                self._records.truncate(slot, length)
                return text[: min(found)]
        return None

    def _text(self, ids: np.ndarray) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids)
