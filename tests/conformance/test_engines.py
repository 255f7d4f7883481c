"""Our engines pass ``check_engine``; and for every rule there are engines that break it, and are caught by its name."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import model
from sat_jax.data.records import Routes, Support
from sat_jax.rollout.engine import SamplingParams
from sat_jax.rollout.local import LocalEngine
from sat_jax.testing import FakeEngine, check_engine
from sat_jax.types import Prompt

PROMPTS = [Prompt(f"p{n}", "", np.arange(2, 2 + n, dtype=np.int32), "", "test") for n in (3, 9)]

CFG = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
    eos_token_id=(1,),
    initializer_range=0.5,
)
DENSE = dataclasses.replace(CFG, model_type="qwen3", num_experts=0, intermediate_size=24)
SHAPE = {"n_slots": 4, "max_len": 32, "decode_steps": 3, "prefill_rows": 2, "prefill_chunks": (8,), "version": 3}


class Letters:
    eos_ids = (1,)

    def decode(self, ids):
        return "".join(chr(65 + int(i)) for i in ids if i != 1)


@functools.cache
def params(cfg, seed=0):
    return model.init_params(jax.random.key(seed), cfg, dtype="float32")


def new_params(kind, cfg=CFG):
    return jax.tree.map(kind, params(cfg, 1))


def check_local(cfg=CFG, tokenizer=None, kind=jnp.copy, engine=(), **arguments):
    check_engine(
        lambda: LocalEngine(cfg, params(cfg), tokenizer, **SHAPE, **dict(engine)),
        prompts=PROMPTS,
        vocab_size=40,
        eos_ids=(1,),
        new_weights=lambda: new_params(kind, cfg),
        room=2 * SHAPE["n_slots"],
        **arguments,
    )


def test_the_local_engine():
    check_local(tokenizer=Letters(), routes=Routes(1, 2, 4))


def test_the_local_engine_with_numpy_weights():
    check_local(kind=np.array, routes=Routes(1, 2, 4))


def test_the_local_engine_that_records_supports():
    sampling = SamplingParams(temperature=0.8, top_k=6, top_p=0.9, max_new_tokens=16)
    check_local(DENSE, params=sampling, support=Support(6, 40), engine={"support": 6})


FAKE = {"prompts": PROMPTS, "vocab_size": 32, "eos_ids": (1,), "room": 4, "timeout_s": 10.0}
FAKE |= {"routes": Routes(2, 2, 8), "new_weights": lambda: {"w": np.ones(3)}}


def fake(**settings):
    return FakeEngine(**({"slots": 4, "routes": (2, 2, 8)} | settings))


def test_the_engine_without_a_model():
    check_engine(fake, **FAKE)
    check_engine(lambda: fake(support=3), **FAKE, support=Support(3, 32))
    check_engine(FakeEngine, prompts=PROMPTS, vocab_size=32)


def test_prompts_must_differ():
    with pytest.raises(ValueError, match="two that differ are needed"):
        check_engine(fake, **(FAKE | {"prompts": PROMPTS[:1] * 2}))


# ---------------------------------------------------------------------- engines that break a rule


class Broken:
    """A ``FakeEngine`` behind the protocol, in pieces that others spoil."""

    def __init__(self, **settings):
        self.inner = fake(**settings)

    @property
    def version(self):
        return self.inner.version

    def generate(self, requests):
        for t in self.inner.generate(map(self.asked, requests)):
            yield from self.answered(t)

    def asked(self, request):
        return request if request is None else self.changed_request(request)

    def changed_request(self, request):
        return request

    def answered(self, t):
        yield t

    def update_weights(self, params, version):
        self.inner.update_weights(params, version)

    def abort(self, request_ids=None):
        self.inner.abort(request_ids)

    def close(self):
        self.inner.close()


def answering(settings=(), **fields):
    """Trajectories with other fields, each made from the right trajectory."""

    class Answering(Broken):
        def answered(self, t):
            yield dataclasses.replace(t, **{name: make(t) for name, make in fields.items()})

    return lambda: Answering(**dict(settings))


def asking(**fields):
    """Requests with other sampling parameters, or another seed, each made from the right request."""

    class Asking(Broken):
        def changed_request(self, request):
            new = {name: make(request) for name, make in fields.items()}
            seed = new.pop("seed", request.seed)
            return dataclasses.replace(request, params=dataclasses.replace(request.params, **new), seed=seed)

    return Asking


def entry(array, value, dtype=None):
    """A copy with another first entry."""
    copy = np.array(array, dtype)
    copy[:1] = value
    return copy


class Losing(Broken):
    def answered(self, t):
        return iter([t] * (t.request_id != "check:1"))


class Doubling(Broken):
    def answered(self, t):
        return iter([t, t])


class Overwriting(Broken):
    """One buffer for all tokens."""

    last = None

    def answered(self, t):
        if self.last is not None:
            self.last.response_ids[:1] += 1
        self.last = t
        yield t


class OldWeights(Broken):
    """Has taken its weights before it pulls: what is issued behind an update starts with older ones."""

    def generate(self, requests):
        source, before = iter(requests), {}

        def pulled():
            while True:
                version = self.version
                try:
                    request = next(source)
                except StopIteration:
                    return
                if request is not None:
                    before[request.request_id] = version
                yield request

        for t in self.inner.generate(pulled()):
            yield dataclasses.replace(t, policy_versions=entry(t.policy_versions, before[t.request_id]))


class Elsewhere(Broken):
    def generate(self, requests):
        source = iter(requests)
        with ThreadPoolExecutor(1) as pool:
            yield from self.inner.generate(iter(lambda: pool.submit(next, source, self).result(), self))


class Locked(Broken):
    """One lock around everything."""

    guards = "update_weights"

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def generate(self, requests):
        source = iter(requests)

        def pull():
            with self.lock:
                return next(source, self)

        yield from self.inner.generate(iter(pull, self))

    def update_weights(self, params, version):
        with self.lock:
            super().update_weights(params, version)


class LockedAbort(Locked):
    def abort(self, request_ids=None):
        with self.lock:
            super().abort(request_ids)


class SeedByArrival(Broken):
    def generate(self, requests):
        count = itertools.count()
        yield from self.inner.generate(
            r if r is None else dataclasses.replace(r, seed=10 * next(count) + r.seed % 10) for r in requests
        )


class StopsLate(Broken):
    """Looks for stop strings in whole responses, and cuts a token behind the one that completes them."""

    def __init__(self):
        super().__init__()
        self.stops = {}

    def changed_request(self, request):
        self.stops[request.request_id] = request.params.stop
        return dataclasses.replace(request, params=dataclasses.replace(request.params, stop=()))

    def answered(self, t):
        for stop in self.stops[t.request_id]:
            if stop in t.text:
                texts = [" ".join(map(str, t.response_ids[:n])) for n in range(len(t.response_ids))]
                n = 1 + next(n for n, text in enumerate(texts) if stop in text)
                arrays = {name: getattr(t, name)[:n] for name in ("response_ids", "log_probs", "policy_versions")}
                routes, text = t.routed_experts[: len(t.prompt_ids) + n - 1], t.text[: t.text.find(stop)]
                t = dataclasses.replace(t, **arrays, routed_experts=routes, text=text, finish_reason="stop")
        yield t


class EndsAtNone(Broken):
    def generate(self, requests):
        return self.inner.generate(itertools.takewhile(lambda r: r is not None, requests))


class WaitsAtNone(Broken):
    def generate(self, requests):
        return self.inner.generate(r for r in requests if r is not None)


class SwapsLater(Broken):
    """Weights wait for the next call."""

    waiting = None

    def update_weights(self, params, version):
        self.waiting = params, version

    def generate(self, requests):
        if self.waiting is not None:
            self.inner.update_weights(*self.waiting)
        yield from self.inner.generate(requests)


class ByReference(Broken):
    """Tokens depend on weights that are the caller's own arrays."""

    own = None

    def update_weights(self, params, version):
        self.own = params
        self.inner.update_weights({}, version)

    def answered(self, t):
        shift = 0 if self.own is None else int(self.own["w"][0])
        ids = np.where(t.response_ids == 1, 1, 2 + (t.response_ids - 2 + shift) % 30)
        yield dataclasses.replace(t, response_ids=ids.astype(np.int32))


class Deaf(Broken):
    def abort(self, request_ids=None):
        pass


class AbortsAll(Broken):
    def abort(self, request_ids=None):
        self.inner.abort()


class AbortsKnownOnly(Broken):
    def abort(self, request_ids=None):
        if "check:nobody" in (request_ids or ()):
            raise KeyError("check:nobody")
        self.inner.abort(request_ids)


class GoesOnAlone(Broken):
    """What an abandoned call had pulled is made in the next one."""

    left: tuple = ()

    def generate(self, requests):
        left, open_ = self.left, {}
        self.left = ()

        def pulled() -> Iterator:
            for request in itertools.chain(left, requests):
                if request is not None:
                    open_[request.request_id] = request
                yield request

        try:
            for t in self.inner.generate(pulled()):
                del open_[t.request_id]
                yield t
        except GeneratorExit:
            self.left = tuple(open_.values())


class BusyForEver(Broken):
    busy = False

    def generate(self, requests):
        if self.busy:
            raise RuntimeError("generate() is running already")
        self.busy = True
        yield from self.inner.generate(requests)
        self.busy = False


class Obliging(Broken):
    """Makes room for everything, if only for a beginning."""

    def changed_request(self, request):
        prompt = request.prompt
        if not len(prompt.token_ids):
            prompt = dataclasses.replace(prompt, token_ids=np.array([1], np.int32))
        budget = min(request.params.max_new_tokens, 100)
        params = dataclasses.replace(request.params, max_new_tokens=budget)
        return dataclasses.replace(request, prompt=prompt, params=params)


class Refusing(Broken):
    error: Exception = ValueError("the prompt does not fit")

    def generate(self, requests):
        try:
            yield from self.inner.generate(requests)
        except ValueError:
            raise self.error from None


class RefusingByIndex(Refusing):
    error = IndexError("check:1: slot -1")


class ClosesOnce(Broken):
    def close(self):
        if self.inner.closed:
            raise RuntimeError("closed already")
        self.inner.close()


SPREAD = {"vocab_size": 10**6}
SUPPORTED = {"support": Support(3, 32)}

BROKEN = [
    # rule, engine, what else check_engine is told
    ("once", Losing, {}),
    ("once", Doubling, {}),
    ("once", lambda: fake(lose=lambda request: request.sample_index == 1), {}),
    ("identity", answering(request_id=lambda t: t.request_id + "x"), {}),
    ("identity", answering(prompt_id=lambda t: ""), {}),
    ("identity", answering(sample_index=lambda t: 77), {}),
    ("identity", answering(prompt_ids=lambda t: t.prompt_ids[::-1]), {}),
    ("identity", answering(reward=lambda t: 1.0), {}),
    ("identity", answering(text=lambda t: t.text.encode()), {}),
    ("tokens", answering(response_ids=lambda t: entry(t.response_ids, 32)), {}),
    ("tokens", answering(response_ids=lambda t: entry(t.response_ids, -1)), {}),
    ("tokens", answering(response_ids=lambda t: t.response_ids.astype(float)), {}),
    ("tokens", answering(response_ids=lambda t: t.response_ids[None]), {}),
    ("tokens", answering(response_ids=lambda t: t.response_ids[:0]), {}),
    ("tokens", asking(max_new_tokens=lambda r: 100, ignore_eos=lambda r: True), {}),
    ("log_probs", answering(log_probs=lambda t: t.log_probs.astype(np.float64)), {}),
    ("log_probs", answering(log_probs=lambda t: t.log_probs[1:]), {}),
    ("log_probs", answering(log_probs=lambda t: entry(t.log_probs, np.nan)), {}),
    ("log_probs", answering(log_probs=lambda t: entry(t.log_probs, -np.inf)), {}),
    ("log_probs", answering(log_probs=lambda t: -t.log_probs), {}),
    ("policy_versions", answering(policy_versions=lambda t: t.policy_versions[1:]), {}),
    ("policy_versions", answering(policy_versions=lambda t: t.policy_versions.astype(float)), {}),
    ("policy_versions", answering(policy_versions=lambda t: t.policy_versions - 1), {}),
    ("policy_versions", answering(policy_versions=lambda t: t.policy_versions + 1), {}),
    ("policy_versions", answering(policy_versions=lambda t: entry(t.policy_versions, 9)), {}),
    ("policy_versions", OldWeights, {}),
    ("finish_reason", answering(finish_reason=lambda t: "eos"), {}),
    ("finish_reason", answering(finish_reason=lambda t: "stop"), {}),
    ("finish_reason", answering(finish_reason=lambda t: "length"), {}),
    ("finish_reason", answering(finish_reason=lambda t: "abort"), {}),
    ("finish_reason", asking(ignore_eos=lambda r: True), {}),
    ("finish_reason", asking(ignore_eos=lambda r: False), {}),
    ("finish_reason", asking(ignore_eos=lambda r: False), {"eos_ids": None}),
    ("finish_reason", asking(max_new_tokens=lambda r: max(1, r.params.max_new_tokens - 1)), {}),
    ("finish_reason", AbortsAll, {}),
    ("routed_experts", answering(routed_experts=lambda t: None), {}),
    ("routed_experts", answering(routed_experts=lambda t: t.routed_experts[1:]), {}),
    ("routed_experts", answering(routed_experts=lambda t: t.routed_experts + 1), {}),
    ("routed_experts", answering(routed_experts=lambda t: t.routed_experts[..., :1].repeat(2, -1)), {}),
    ("support", fake, SUPPORTED),
    ("support", lambda: fake(support=3), {}),
    ("support", answering({"support": 3}, support=lambda t: t.support[1:]), SUPPORTED),
    ("support", answering({"support": 3}, support=lambda t: entry(t.support, 5)), SUPPORTED),
    ("support", answering({"support": 4}, support=lambda t: t.support), SUPPORTED),
    ("kept", Overwriting, {}),
    ("room", lambda: fake(slots=9), {}),
    ("thread", Elsewhere, {}),
    ("blocked", Locked, {"timeout_s": 1.0}),
    ("blocked", LockedAbort, {"timeout_s": 1.0}),
    ("greedy", asking(temperature=lambda r: 1.0), {}),
    ("seeds", asking(seed=lambda r: 0), {}),
    ("seeds", SeedByArrival, {}),
    ("stop_strings", asking(stop=lambda r: ()), {}),
    ("stop_strings", answering(text=lambda t: " ".join(map(str, t.response_ids))), {}),
    ("stop_strings", StopsLate, {}),
    ("none", EndsAtNone, {}),
    ("none", WaitsAtNone, {"timeout_s": 1.0}),
    ("new_weights", SwapsLater, {}),
    ("new_weights", answering(policy_versions=lambda t: t.policy_versions * 0 + t.policy_versions.min(initial=9)), {}),
    ("new_weights", answering(policy_versions=lambda t: t.policy_versions * 0 + t.policy_versions.max(initial=0)), {}),
    (
        "new_weights",
        answering(SPREAD, response_ids=lambda t: np.full_like(t.response_ids, 5)),
        SPREAD | {"reproducible": False},
    ),
    ("copied", ByReference, {}),
    ("copied", ByReference, {"new_weights": lambda: {"w": jnp.ones(3)}}),
    ("abort", Deaf, {}),
    ("abort", AbortsKnownOnly, {}),
    ("abandoned", GoesOnAlone, {}),
    ("abandoned", BusyForEver, {}),
    ("refused", Obliging, {}),
    ("refused", Refusing, {}),
    ("refused", RefusingByIndex, {}),
    ("close", ClosesOnce, {}),
]


@pytest.mark.parametrize(("rule", "engine", "told"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_a_broken_engine_is_caught(rule, engine, told):
    with pytest.raises(AssertionError, match=f"^engine rule '{rule}': .*"):
        check_engine(engine, **(FAKE | told))


def test_every_rule_can_be_broken():
    listed = re.findall(r"^ *\* ``(\w+)``: ", check_engine.__doc__, re.MULTILINE)
    assert sorted({rule for rule, _, _ in BROKEN}) == sorted(listed)


def test_an_engine_that_hangs_is_not_waited_for():
    over = threading.Event()
    try:
        with pytest.raises(AssertionError, match=r"engine rule 'once': no end after 0.2 s"):
            check_engine(lambda: fake(on_round=lambda _: over.wait()), **(FAKE | {"timeout_s": 0.2}))
    finally:
        over.set()


def test_what_an_engine_raises_is_named_with_its_cause():
    def breaking(_):
        raise ZeroDivisionError("in the engine")

    with pytest.raises(AssertionError, match=r"rule 'once': ZeroDivisionError: in the engine") as caught:
        check_engine(lambda: fake(on_round=breaking), **FAKE)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
