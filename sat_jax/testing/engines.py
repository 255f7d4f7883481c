"""The suite that every sampling engine passes, whatever it samples with: ``check_engine``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sat_jax.checked import INT_MAX
from sat_jax.data.records import Routes, Support
from sat_jax.rollout.engine import Engine, Request, SamplingParams
from sat_jax.testing.watched import BrokenRuleError, EngineSuite, WatchedCall, shown
from sat_jax.types import Prompt, Trajectory


def check_engine(
    make_engine: Callable[[], Engine],
    *,
    prompts: Sequence[Prompt],
    vocab_size: int,
    eos_ids: Sequence[int] | None = None,
    params: SamplingParams | None = None,
    new_weights: Callable[[], Any] | None = None,
    routes: Routes | None = None,
    support: Support | None = None,
    room: int = 64,
    reproducible: bool = True,
    timeout_s: float = 120.0,
) -> None:
    """Returns where the engine keeps the protocol of ``rollout.engine.Engine``.

    Of every trajectory, whatever is being tried:

    * ``once``: one trajectory a request, none lost, none twice.
    * ``identity``: request id, prompt id, sample index and prompt ids come back as asked, ungraded.
    * ``tokens``: integers [R] inside the vocabulary, at least one (aborted: none will do), at most the budget.
    * ``log_probs``: float32 [R], finite, at most rounding above 0.
    * ``policy_versions``: integers [R] that never decrease, from the engine's version when the request was pulled to
      its version now.
    * ``finish_reason``: ``length`` with the whole budget; ``stop`` at a stop string or an end-of-sequence token, which
      stands nowhere else; ``abort`` for whom ``abort`` named.
    * ``routed_experts``: what the learner's batch accepts for ``routes``.
    * ``support``: what it accepts for ``support``.
    * ``kept``: what was handed out stays as it was.

    Of every call:

    * ``room``: at most ``room`` requests have been pulled and have not come back.
    * ``thread``: requests are pulled in the thread that iterates.
    * ``blocked``: ``version``, ``update_weights`` and ``abort`` answer other threads while a request is being pulled.

    And one by one:

    * ``greedy``: temperature 0 gives the same tokens again, with any seed.
    * ``seeds``: one request with one seed gives the same tokens, alone or among others; seeds make a difference.
    * ``stop_strings``: a response ends with the first token that completes one; its text ends in front of it.
    * ``none``: at ``None`` the engine goes on with what it has, and asks again later.
    * ``new_weights``: the engine's version is theirs at once; tokens sampled from then on are theirs, in responses in
      flight too; tokens sampled before are not.
    * ``copied``: the caller may delete or overwrite weights that it has handed over.
    * ``abort``: who is named comes back with what it has, unknown names are ignored; without names everybody does; what
      is asked for afterwards is served.
    * ``abandoned``: an iterator left behind leaves nothing in flight.
    * ``refused``: an empty prompt, or a budget beyond any context, is a ``ValueError`` with the request's id; the
      engine serves the next call.
    * ``close``: twice is fine.

    Two engines are made, and closed once everything has passed.

    Args:
        make_engine: a new engine, with the same weights and the same version every time.
        prompts: at least two different ones, that fit the engine with ``params.max_new_tokens`` behind them.
        vocab_size: V.
        eos_ids: tokens that end a response; None: not known.
        params: how to sample; by default at temperature 1 with 16 tokens. ``max_new_tokens`` must take the engine
            several rounds, or nothing can be swapped or aborted in between.
        new_weights: makes other weights than the engine's first, anew at every call; None: ``new_weights`` and
            ``copied`` are not tried.
        routes: what recorded experts look like; None: not looked at.
        support: what recorded supports look like; ``greedy`` is not tried then. None: there must be none.
        room: most requests that the engine holds, in flight or waiting to be handed out.
        reproducible: whether ``seeds`` is tried.
        timeout_s: for each rule.

    Raises:
        AssertionError: the first rule that is broken, and what was seen.
    """
    if len({prompt.token_ids.tobytes() for prompt in prompts}) < 2:
        raise ValueError(f"prompts: {len(prompts)} given, two that differ are needed; add one")
    suite = EngineSuite(
        make_engine=make_engine,
        prompts=tuple(prompts),
        vocab_size=vocab_size,
        eos_ids=None if eos_ids is None else frozenset(eos_ids),
        params=params or SamplingParams(max_new_tokens=16),
        new_weights=new_weights,
        routes=routes,
        support=support,
        room=room,
        reproducible=reproducible,
        timeout_s=timeout_s,
    )
    engine = make_engine()
    for scenario in (
        _once,
        _room,
        _greedy,
        _seeds,
        _stop_strings,
        _none,
        _abort,
        _abandoned,
        _refused,
        _new_weights,
        _copied,
        _close,
    ):
        suite.within_time(scenario, engine)


# What follows tries one rule each and returns what is wrong, or None.


def _run(suite: EngineSuite, engine: Engine, requests: Iterable[Request]) -> dict[str, Trajectory]:
    return WatchedCall(suite, engine).run(requests)


def _with(request: Request, **params: Any) -> Request:
    return dataclasses.replace(request, params=dataclasses.replace(request.params, **params))


def _once(suite: EngineSuite, engine: Engine) -> str | None:
    _run(suite, engine, [])
    requests = suite.requests(4 * len(suite.prompts))
    requests[::3] = [_with(r, max_new_tokens=1) for r in requests[::3]]
    requests[1::3] = [_with(r, ignore_eos=True) for r in requests[1::3]]
    _run(suite, engine, requests)
    return None


def _room(suite: EngineSuite, engine: Engine) -> str | None:
    _run(suite, engine, suite.requests(2 * suite.room + 1, max_new_tokens=1))
    return None


def _greedy(suite: EngineSuite, engine: Engine) -> str | None:
    if suite.support is not None:
        return None
    for request in suite.repeatable():
        first, again = (
            _run(suite, engine, [dataclasses.replace(request, seed=seed)])[request.request_id] for seed in (1, 2)
        )
        if not np.array_equal(first.response_ids, again.response_ids):
            return f"{first.response_ids.tolist()}, and with another seed {again.response_ids.tolist()}"
    return None


def _seeds(suite: EngineSuite, engine: Engine) -> str | None:
    if not suite.reproducible:
        return None
    wanted, others = suite.requests(4, suite.prompts[:1], ignore_eos=True), suite.requests(9)[4:]
    alone = {r.request_id: _run(suite, engine, [r])[r.request_id] for r in wanted}
    for batch in ([*others[:2], *wanted, *others[2:]], [wanted[3], *others, *wanted[2::-1]]):
        among = _run(suite, engine, batch)
        for name, t in alone.items():
            if not np.array_equal(t.response_ids, among[name].response_ids):
                return f"{t.response_ids.tolist()} alone, {among[name].response_ids.tolist()} among others"
    if len({t.response_ids.tobytes() for t in alone.values()}) == 1:
        return f"{len(alone)} seeds gave one and the same response to a prompt"
    return None


def _stop_strings(suite: EngineSuite, engine: Engine) -> str | None:
    for request in suite.repeatable():
        (free,) = _run(suite, engine, [request]).values()
        stop = free.text[len(free.text) // 2 :][:2]
        if not stop or "\N{REPLACEMENT CHARACTER}" in free.text:
            continue  # an engine without texts, or one whose tokens are pieces of characters
        never = "\N{SNOWMAN}" * 9
        (cut,) = _run(suite, engine, [_with(request, stop=(never, stop))]).values()
        n, seen = len(cut.response_ids), f"stop = {stop!r} in {free.text!r}"
        if cut.finish_reason != "stop" or not np.array_equal(cut.response_ids, free.response_ids[:n]):
            return f"{seen}: not the beginning of the response without it; {shown(cut)}"
        if cut.text != free.text[: free.text.find(stop)]:
            return f"{seen}: the text does not end in front of it; {shown(cut)}"
        if n > 1:
            (before,) = _run(suite, engine, [_with(request, max_new_tokens=n - 1)]).values()
            if stop in before.text:
                return f"{seen}: it was complete before token {n}, where the response ended; {shown(cut)}"
    return None


def _none(suite: EngineSuite, engine: Engine) -> str | None:
    first, second = suite.requests(2)
    call = WatchedCall(suite, engine)

    def items() -> Iterator[Request | None]:
        yield first
        yield from call.until_done(first)
        yield second

    if second.request_id not in call.run(items()):
        return "the engine took None for the end of the requests"
    return None


def _abort(suite: EngineSuite, engine: Engine) -> str | None:
    requests = suite.requests(3, ignore_eos=True)
    for names in ([requests[1].request_id, "check:nobody"], None):
        call = WatchedCall(suite, engine)

        def items(call: WatchedCall = call, names: list[str] | None = names) -> Iterator[Request | None]:
            yield from requests
            call.abort(names)
            yield from call.until_done(*requests)
            yield dataclasses.replace(requests[0], request_id="check:late")

        done = call.run(items())
        for request in requests if names is None else requests[1:2]:
            t = done[request.request_id]
            if t.finish_reason != "abort":
                return f"abort({names}) left it alone, or max_new_tokens are one round only; {shown(t)}"
    engine.abort()
    _run(suite, engine, requests[:1])  # nothing was in flight: finish_reason tells
    return None


def _abandoned(suite: EngineSuite, engine: Engine) -> str | None:
    requests = suite.requests(6, suite.prompts[:1], ignore_eos=True)
    iterator = WatchedCall(suite, engine).iterate([_with(requests[0], max_new_tokens=1), *requests[1:]])
    next(iterator)
    iterator.close()
    try:
        _run(suite, engine, suite.requests(6, suite.prompts[1:]))  # the same names, other prompts
    except BrokenRuleError as error:
        return f"the next call suffers from it: {error}"
    return None


def _refused(suite: EngineSuite, engine: Engine) -> str | None:
    good, bad = suite.requests(2)
    empty = dataclasses.replace(bad.prompt, token_ids=np.zeros(0, np.int32))
    for what, request in (
        ("an empty prompt", dataclasses.replace(bad, prompt=empty)),
        (f"a budget of {INT_MAX} tokens", _with(bad, max_new_tokens=INT_MAX, ignore_eos=True)),
    ):
        try:
            done = _run(suite, engine, [good, request])
        except ValueError as error:
            if request.request_id not in str(error):
                return f"{what}: the error does not name the request, {request.request_id}: {error}"
        except BrokenRuleError as error:
            return f"{what} was not refused: {error}"
        else:
            return f"{what} was not refused; {shown(done[request.request_id])}"
        _run(suite, engine, [good])
    return None


def _new_weights(suite: EngineSuite, engine: Engine) -> str | None:
    if suite.new_weights is None:
        return None
    call, version, weights = WatchedCall(suite, engine), engine.version + 1, suite.new_weights()
    before = _run(suite, engine, suite.repeatable())
    long, short, late = suite.requests(3, ignore_eos=True)
    short = _with(short, max_new_tokens=1)
    seen: list[int] = []

    def items() -> Iterator[Request | None]:
        yield from (long, short)
        yield from call.until_done(short)
        call.elsewhere("update_weights", lambda: engine.update_weights(weights, version))
        call.elsewhere("version", lambda: seen.append(engine.version))
        yield late

    spans = call.run(items())[long.request_id].policy_versions.tolist()
    if seen != [version]:
        return f"engine.version is {seen[0]} behind update_weights(..., {version})"
    if spans[-1] != version:
        return (
            f"versions {spans}: the response in flight did not go on with {version}, or max_new_tokens = "
            f"{suite.params.max_new_tokens} are too few rounds"
        )
    if spans[0] == version:
        return f"versions {spans}: the first token was sampled before there was a version {version}"
    after = _run(suite, engine, suite.repeatable())
    same = (
        np.array_equal(getattr(t, array), getattr(before[name], array))
        for name, t in after.items()
        for array in ("response_ids", "log_probs")
    )
    if after and all(same):
        return "tokens and log-probs are those of the weights before"
    return None


def _copied(suite: EngineSuite, engine: Engine) -> str | None:
    if suite.new_weights is None:
        return None
    other, version = suite.make_engine(), engine.version + 1
    kept, spoiled = suite.new_weights(), suite.new_weights()
    engine.update_weights(kept, version)
    other.update_weights(spoiled, version)
    for leaf in jax.tree.leaves(spoiled):
        if isinstance(leaf, jax.Array):
            leaf.delete()
        elif isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            leaf[...] = 0
    requests = suite.repeatable()
    expected, found = (_run(suite, e, requests) for e in (engine, other))
    for name, t in found.items():
        if not np.array_equal(t.response_ids, expected[name].response_ids):
            return f"other tokens once the caller had overwritten its own weights; {shown(t)}"
    other.close()
    return None


def _close(suite: EngineSuite, engine: Engine) -> str | None:
    engine.close()
    engine.close()
    return None
