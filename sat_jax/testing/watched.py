"""One call of an engine under watch: what it pulls, and all that it hands out."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, get_args

import numpy as np

from sat_jax.data.batching import make_batch
from sat_jax.data.records import Routes, Support
from sat_jax.rollout.engine import Engine, Request, SamplingParams
from sat_jax.types import FinishReason, Group, Prompt, Trajectory

T = TypeVar("T")

ROUNDING = 1e-4
"""How far above 0 an engine's rounding may put a log-prob, in nats."""


class BrokenRuleError(AssertionError):
    """An engine breaks a rule: its name, and what was seen."""

    def __init__(self, rule: str, seen: str) -> None:
        super().__init__(f"engine rule '{rule}': {seen}")


@dataclasses.dataclass(frozen=True)
class EngineSuite:
    """The arguments of ``check_engine``."""

    make_engine: Callable[[], Engine]
    prompts: tuple[Prompt, ...]
    vocab_size: int
    eos_ids: frozenset[int] | None
    params: SamplingParams
    new_weights: Callable[[], Any] | None
    routes: Routes | None
    support: Support | None
    room: int
    reproducible: bool
    timeout_s: float

    def within_time(self, scenario: Callable[[EngineSuite, Engine], str | None], engine: Engine) -> None:
        """Tries one rule, in a thread of its own: an engine that hangs breaks it."""
        rule = _name(scenario)
        outcome = _in_thread(rule, lambda: scenario(self, engine), self.timeout_s)
        if not outcome.done():
            raise BrokenRuleError(rule, f"no end after {self.timeout_s:g} s: the engine hangs, or timeout_s is short")
        error = outcome.exception()
        if error is not None and not isinstance(error, BrokenRuleError):
            raise BrokenRuleError(rule, f"{type(error).__name__}: {error}") from error
        if (found := outcome.result()) is not None:
            raise BrokenRuleError(rule, found)

    def requests(self, n: int, prompts: Sequence[Prompt] = (), **params: Any) -> list[Request]:
        """``n`` requests over ``prompts`` in turn, each with a seed of its own."""
        prompts, settings = prompts or self.prompts, dataclasses.replace(self.params, **params)
        return [
            Request(f"check:{i}", prompts[i % len(prompts)], i // len(prompts), settings, seed=100 + i)
            for i in range(n)
        ]

    def repeatable(self) -> list[Request]:
        """A request to each prompt whose tokens must be the same again; none where the engine promises nothing."""
        if self.support is None:
            greedy: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
            return self.requests(len(self.prompts), ignore_eos=True, **greedy)
        return self.requests(len(self.prompts), ignore_eos=True) if self.reproducible else []


class WatchedCall:
    """One ``generate``, which every trajectory's and every call's rules are held against."""

    def __init__(self, suite: EngineSuite, engine: Engine) -> None:
        self.suite, self.engine = suite, engine
        self.issued: dict[str, tuple[Request, int]] = {}
        self.done: dict[str, Trajectory] = {}
        self.aborted: set[str] = set()
        self._copies: dict[str, dict[str, np.ndarray]] = {}
        self._most_held, self._pulling = 0, {threading.get_ident()}
        self._deadline = time.monotonic() + suite.timeout_s / 2

    def run(self, items: Iterable[Request | None]) -> dict[str, Trajectory]:
        """All that the engine makes of ``items``, by request id."""
        for _ in self.iterate(items):
            pass
        if lost := self.issued.keys() - self.done.keys():
            raise BrokenRuleError("once", f"{len(lost)} of {len(self.issued)} requests were lost, {min(lost)} is one")
        for name, before in self._copies.items():
            for field, was in before.items():
                if not np.array_equal(getattr(self.done[name], field), was):
                    raise BrokenRuleError("kept", f"{field} of {name} changed after it had been handed out")
        if self._most_held > self.suite.room:
            raise BrokenRuleError("room", f"{self._most_held} requests were held at a time, room = {self.suite.room}")
        if len(self._pulling) > 1:
            raise BrokenRuleError("thread", "requests were pulled in another thread than the one that iterates")
        return self.done

    def iterate(self, items: Iterable[Request | None]) -> Generator[Trajectory]:
        """The same, one by one."""
        iterator = self.engine.generate(self._watched(items))
        try:
            for t in iterator:
                if t.request_id in self.done:
                    raise BrokenRuleError("once", f"{t.request_id} came back twice")
                for check in _OF_EVERY_TRAJECTORY:
                    if (seen := check(self, t)) is not None:
                        raise BrokenRuleError(_name(check), f"{seen}; {shown(t)}")
                self.done[t.request_id] = t
                arrays = {f.name: getattr(t, f.name) for f in dataclasses.fields(t)}
                self._copies[t.request_id] = {k: v.copy() for k, v in arrays.items() if isinstance(v, np.ndarray)}
                yield t
        finally:
            if callable(close := getattr(iterator, "close", None)):
                close()

    def until_done(self, *requests: Request) -> Iterator[None]:
        """Says that there is nothing right now, until all of ``requests`` have come back."""
        while missing := [r.request_id for r in requests if r.request_id not in self.done]:
            if time.monotonic() > self._deadline:
                raise BrokenRuleError("none", f"{missing} did not come back while the engine was given None to go on")
            yield None

    def abort(self, names: Sequence[str] | None) -> None:
        """``engine.abort``, noting who may come back aborted."""
        self.aborted |= (self.issued.keys() - self.done.keys()) if names is None else set(names)
        self.elsewhere("abort", lambda: self.engine.abort(names))

    def elsewhere(self, what: str, call: Callable[[], object]) -> None:
        """What a learner does in its own thread while the engine waits for a request."""
        outcome = _in_thread(what, call, self.suite.timeout_s / 2)
        if not outcome.done():
            raise BrokenRuleError("blocked", f"{what} waits while a request is being pulled: so would the learner")
        outcome.result()

    def _watched(self, items: Iterable[Request | None]) -> Iterator[Request | None]:
        for item in items:
            self._pulling.add(threading.get_ident())
            if item is not None:
                self.issued[item.request_id] = item, self.engine.version
                self._most_held = max(self._most_held, len(self.issued) - len(self.done))
            yield item


def shown(t: Trajectory) -> str:
    """A trajectory in a sentence."""
    return f"{t.request_id}: tokens {np.asarray(t.response_ids).tolist()}, {t.finish_reason!r}, text {t.text!r}"


def _in_thread(name: str, call: Callable[[], T], timeout_s: float) -> Future[T]:
    """What ``call`` gives or raises in a thread of its own; not ``done`` where that takes longer than ``timeout_s``."""
    outcome: Future[T] = Future()

    def body() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome.set_exception(error)

    thread = threading.Thread(target=body, name=f"check_engine {name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome


def _name(check: Callable[..., Any]) -> str:
    return check.__name__.removeprefix("_")


# The rules of every trajectory. Each returns what is wrong, or None.


def _identity(call: WatchedCall, t: Trajectory) -> str | None:
    if t.request_id not in call.issued:
        return f"nobody asked for request_id {t.request_id!r}"
    request, _ = call.issued[t.request_id]
    for name, got, asked in (
        ("prompt_id", t.prompt_id, request.prompt.prompt_id),
        ("sample_index", t.sample_index, request.sample_index),
        ("reward", t.reward, None),
    ):
        if got != asked:
            return f"{name} is {got!r}, not {asked!r}"
    if not np.array_equal(t.prompt_ids, request.prompt.token_ids):
        return f"prompt_ids are {t.prompt_ids}, not {request.prompt.token_ids}"
    return None if isinstance(t.text, str) else f"text is {type(t.text).__name__}"


def _tokens(call: WatchedCall, t: Trajectory) -> str | None:
    ids, budget = np.asarray(t.response_ids), call.issued[t.request_id][0].params.max_new_tokens
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        return f"response_ids are {ids.dtype}{list(ids.shape)}, not integers [R]"
    if not (0 if t.finish_reason == "abort" else 1) <= len(ids) <= budget:
        return f"{len(ids)} tokens of a budget of {budget}"
    outside = ids[(ids < 0) | (ids >= call.suite.vocab_size)]
    return f"token {outside[0]} lies outside the vocabulary of {call.suite.vocab_size}" if len(outside) else None


def _log_probs(call: WatchedCall, t: Trajectory) -> str | None:
    found = np.asarray(t.log_probs)
    if found.dtype != np.float32 or found.shape != (len(t.response_ids),):
        return f"log_probs are {found.dtype}{list(found.shape)}, not float32[{len(t.response_ids)}]"
    bad = found[~(np.isfinite(found) & (found <= ROUNDING))]
    return f"log-prob {bad[0]} is not finite, or above 0" if len(bad) else None


def _policy_versions(call: WatchedCall, t: Trajectory) -> str | None:
    found, pulled, now = np.asarray(t.policy_versions), call.issued[t.request_id][1], call.engine.version
    if not np.issubdtype(found.dtype, np.integer) or found.shape != (len(t.response_ids),):
        return f"policy_versions are {found.dtype}{list(found.shape)}, not integers [{len(t.response_ids)}]"
    if (np.diff(found) < 0).any():
        return f"versions decrease inside a response, {found.tolist()}"
    if len(found) and not pulled <= found[0] <= found[-1] <= now:
        return f"versions {found.tolist()}: the request was pulled at {pulled}, and the engine is at {now}"
    return None


def _finish_reason(call: WatchedCall, t: Trajectory) -> str | None:
    params, eos = call.issued[t.request_id][0].params, call.suite.eos_ids
    if t.finish_reason not in get_args(FinishReason):
        return f"not one of {', '.join(get_args(FinishReason))}"
    ends = [] if params.ignore_eos else [i for i, token in enumerate(t.response_ids.tolist()) if token in (eos or ())]
    if ends and ends[0] < len(t.response_ids) - 1:
        return f"goes on after an end-of-sequence token, its token {ends[0]}"
    if t.finish_reason == "abort":
        return None if t.request_id in call.aborted else "nobody aborted it"
    if t.finish_reason == "length":
        if ends:
            return "ended with an end-of-sequence token, which is 'stop'"
        whole = len(t.response_ids) == params.max_new_tokens
        return None if whole else f"the budget of {params.max_new_tokens} was not used up"
    reasons = bool(params.stop) or bool(ends) or (eos is None and not params.ignore_eos)
    return None if reasons else "no end-of-sequence token or stop string to stop at"


def _routed_experts(call: WatchedCall, t: Trajectory) -> str | None:
    routes = call.suite.routes
    return None if routes is None else _refused_by_the_batch(dataclasses.replace(t, support=None), routes, None)


def _support(call: WatchedCall, t: Trajectory) -> str | None:
    return _refused_by_the_batch(dataclasses.replace(t, routed_experts=None), None, call.suite.support)


def _refused_by_the_batch(t: Trajectory, routes: Routes | None, support: Support | None) -> str | None:
    n = len(t.prompt_ids) + len(t.response_ids)
    group = Group("check", Prompt("", "", t.prompt_ids, "", ""), (t,), np.zeros(1, np.float32))
    try:
        if len(t.response_ids):
            make_batch([group], widths=[n], routes=routes, support=support)
    except ValueError as error:
        return str(error)
    return None


_OF_EVERY_TRAJECTORY = (_identity, _tokens, _log_probs, _policy_versions, _finish_reason, _routed_experts, _support)
