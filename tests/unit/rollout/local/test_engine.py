"""The in-process engine against whole-sequence forward passes of the same weights."""

import dataclasses
import gc
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import hub, model
from sat_jax.data.records import Routes, check_routes
from sat_jax.rollout import Request, SamplingParams
from sat_jax.rollout.local import LocalEngine
from sat_jax.rollout.local.compiled import programs_for
from sat_jax.types import Prompt
from tests.helpers import DATA
from tests.helpers.devices import report_of

CFG = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    eos_token_id=(1,),
    initializer_range=0.3,
)
DENSE = dataclasses.replace(CFG, model_type="qwen3", num_experts=0, intermediate_size=48)
SHAPE = {"n_slots": 4, "max_len": 32, "decode_steps": 4, "prefill_rows": 2, "prefill_chunks": (4, 8)}
LEAN = SHAPE | {"prefill_chunks": (8,)}  # one program less to compile
EVERY = SamplingParams(max_new_tokens=9, ignore_eos=True)


class Letters:
    """A tokenizer whose token ``i`` is the letter ``i``."""

    eos_ids = (1,)

    def decode(self, ids):
        return "".join(chr(65 + int(i)) for i in ids if i != 1)


@pytest.fixture(scope="module")
def params():
    return model.init_params(jax.random.key(0), CFG, dtype="float32")


@pytest.fixture(scope="module")
def other_params():
    return model.init_params(jax.random.key(1), CFG, dtype="float32")


@pytest.fixture
def engine(params):
    return LocalEngine(CFG, params, Letters(), version=3, **SHAPE)


def request(name, length=6, params=EVERY, seed=0, prompt_seed=None) -> Request:
    rng = np.random.default_rng([length, zlib.crc32(name.encode()) if prompt_seed is None else prompt_seed])
    ids = rng.integers(2, CFG.vocab_size, length).astype(np.int32)
    return Request(name, Prompt(name, "", ids, "", "test"), 0, params, seed)


def by_name(trajectories):
    return {t.request_id: t for t in trajectories}


@partial(jax.jit, static_argnums=0)
def _score(cfg, params, tokens, length, routes, temperature):
    segments = (jnp.arange(tokens.shape[1]) < length).astype(jnp.int32)[None]
    out = model.forward(params, cfg, tokens, segments, routed_experts=routes)
    scored = model.token_log_probs(params, cfg, out.hidden, tokens, temperature, with_entropy=False)
    return scored.log_probs[0], None if out.router is None else out.router.indices[0]


def score(params, trajectory, *, cfg=CFG, replay=False, temperature=1.0):
    """The learner's view: log-probs [R] of the response, and the experts of every token fed [P + R - 1, L, K]."""
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    tokens = np.zeros((1, SHAPE["max_len"]), np.int32)
    tokens[0, : len(ids)] = ids
    routes = None
    if replay:
        routes = np.full((1, SHAPE["max_len"], 2, 2), -1, np.int32)
        (routes[0, : len(ids) - 1],) = check_routes([trajectory], Routes(2, 2, 8))
    log_probs, indices = _score(cfg, params, tokens, len(ids), routes, temperature)
    P = len(trajectory.prompt_ids)
    return np.asarray(log_probs)[P : len(ids)], None if indices is None else np.asarray(indices)[: len(ids) - 1]


def assert_same(one, other):
    np.testing.assert_array_equal(one.response_ids, other.response_ids)
    np.testing.assert_array_equal(one.log_probs, other.log_probs)
    np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_routes_are_those_of_a_full_forward(engine, params, temperature):
    settings = dataclasses.replace(EVERY, temperature=temperature)
    # 1: nothing to prefill; 5: one narrow chunk; 9, 20: wide ones and a rest.
    requests = [request(f"p{n}", n, settings, seed=n) for n in (1, 2, 5, 6, 9, 20)]
    trajectories = by_name(engine.generate(requests))
    assert len(trajectories) == 6
    for wanted in requests:
        t = trajectories[wanted.request_id]
        assert (t.prompt_id, t.finish_reason, len(t.response_ids)) == (wanted.prompt.prompt_id, "length", 9)
        np.testing.assert_array_equal(t.policy_versions, [3] * 9)
        log_probs, routes = score(params, t, temperature=temperature)
        np.testing.assert_allclose(t.log_probs, log_probs, atol=1e-5)
        np.testing.assert_array_equal(t.routed_experts, routes)


def test_dense_policies_report_no_routes():
    params = model.init_params(jax.random.key(0), DENSE, dtype="float32")
    (t,) = LocalEngine(DENSE, params, **LEAN).generate([request("a")])
    assert t.routed_experts is None
    np.testing.assert_allclose(t.log_probs, score(params, t, cfg=DENSE)[0], atol=1e-5)


def test_a_request_gives_the_same_tokens_whatever_else_is_in_the_batch(engine):
    wanted = [request("same", seed=i, prompt_seed=1) for i in range(3)]
    wanted = [dataclasses.replace(r, request_id=f"same{i}", sample_index=i) for i, r in enumerate(wanted)]
    alone = {}
    for r in wanted:
        alone |= by_name(engine.generate([r]))
    others = [
        request(f"o{i}", 1 + 3 * i, dataclasses.replace(EVERY, top_k=i, temperature=0.5 + i / 4), i) for i in range(6)
    ]
    mixed = by_name(engine.generate([others[0], *wanted, *others[1:]]))
    spread = by_name(engine.generate([wanted[2], *others[:4], wanted[1], others[5], wanted[0]]))
    for r in wanted:
        assert_same(mixed[r.request_id], alone[r.request_id])
        assert_same(spread[r.request_id], alone[r.request_id])
    assert len({t.response_ids.tobytes() for t in alone.values()}) == 3, "seeds make no difference"


def test_nothing_is_compiled_after_warm_up(params):
    engine = LocalEngine(CFG, params, **(SHAPE | {"max_len": 31}))  # programs are shared by engines of one shape
    engine.warm_up()
    before = engine.compilations
    assert before == {"prefill": 2, "copy": 1, "decode": 1}
    settings = [
        dataclasses.replace(EVERY, top_p=0.9),
        dataclasses.replace(EVERY, temperature=0.0, max_new_tokens=1),
        EVERY,
    ]
    requests = [request(f"r{i}", 1 + i, settings[i % 3], i) for i in range(20)]
    assert len(list(engine.generate(requests))) == 20
    assert engine.compilations == before


def test_a_finished_row_is_replaced_while_others_go_on(engine):
    """Four slots, one long response, many short ones: the long one does not hold the short ones up."""
    settings = dataclasses.replace(EVERY, max_new_tokens=24)
    requests = [request("long", 4, settings)] + [
        request(f"s{i}", 4, dataclasses.replace(EVERY, max_new_tokens=2)) for i in range(9)
    ]
    order = [t.request_id for t in engine.generate(requests)]
    assert order[-1] == "long"
    assert len(order) == 10


def test_budget_end_of_sequence_and_ignoring_it(engine):
    stops = [request(f"r{i}", 4, dataclasses.replace(EVERY, max_new_tokens=20, ignore_eos=False), i) for i in range(24)]
    trajectories = list(engine.generate(stops))
    assert {t.finish_reason for t in trajectories} == {"stop", "length"}
    for t in trajectories:
        ended = t.finish_reason == "stop"
        assert (t.response_ids[-1] == 1) == ended
        assert 1 not in t.response_ids[:-1]
        assert ended or len(t.response_ids) == 20
        assert len(t.text) == len(t.response_ids) - ended
        assert t.routed_experts.shape == (4 + len(t.response_ids) - 1, 2, 2)
    ignoring = [dataclasses.replace(r, params=dataclasses.replace(r.params, ignore_eos=True)) for r in stops]
    longer = by_name(engine.generate(ignoring))
    assert all(len(t.response_ids) == 20 for t in longer.values())
    for t in trajectories:
        np.testing.assert_array_equal(longer[t.request_id].response_ids[: len(t.response_ids)], t.response_ids)


def test_stop_strings_end_with_the_token_that_completes_them(engine):
    (free,) = engine.generate([request("a", 5, dataclasses.replace(EVERY, max_new_tokens=20))])
    stop = free.text[5:8]  # spans two dispatches of four tokens
    assert free.text.find(stop) == 5
    (cut,) = engine.generate([request("a", 5, dataclasses.replace(EVERY, max_new_tokens=20, stop=("never", stop)))])
    np.testing.assert_array_equal(cut.response_ids, free.response_ids[:8])
    np.testing.assert_array_equal(cut.log_probs, free.log_probs[:8])
    np.testing.assert_array_equal(cut.routed_experts, free.routed_experts[: 5 + 8 - 1])
    assert cut.text == free.text[:5]
    assert cut.finish_reason == "stop"


def test_truncated_sampling_reports_the_log_prob_over_its_support(engine, params):
    (t,) = engine.generate([request("a", 5, dataclasses.replace(EVERY, top_k=1))])
    np.testing.assert_allclose(t.log_probs, 0.0, atol=1e-6)
    (t,) = engine.generate([request("a", 5, dataclasses.replace(EVERY, top_k=4), seed=3)])
    assert (t.log_probs >= score(params, t)[0]).all()


def swap_after(engine, params, version, requests, dispatches):
    """A source that hands out ``requests``, and new weights once ``dispatches`` have been made since."""
    yield from requests
    for _ in range(dispatches):
        yield None
    engine.update_weights(params, version)
    yield None


@jax.jit
def _feed(params, cache, token, position):
    out = model.extend(params, CFG, cache, token[None, None], position[None], jnp.ones(1, jnp.int32))
    return out.cache, jax.nn.log_softmax(model.logits(params, CFG, out.hidden[0, 0]))


def cached_reference(stages, trajectory):
    """Log-probs of a response whose tokens are fed one by one to a cache, with the weights of each token's version."""

    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    P, cache, log_probs = len(trajectory.prompt_ids), model.init_cache(CFG, 1, SHAPE["max_len"], "float32"), []
    for position, token in enumerate(ids[:-1]):
        version = int(trajectory.policy_versions[max(0, position + 1 - P)])
        cache, distribution = _feed(stages[version], cache, jnp.int32(token), jnp.int32(position))
        log_probs.append(float(distribution[ids[position + 1]]))
    return np.array(log_probs[P - 1 :], np.float32)


def test_weights_are_swapped_between_two_dispatches_of_a_response(params, other_params):
    """What was decoded before keeps its keys and values."""
    engine = LocalEngine(CFG, params, version=3, **SHAPE)
    requests = [request(f"r{n}", n, dataclasses.replace(EVERY, max_new_tokens=10), n) for n in (3, 11)]
    trajectories = list(engine.generate(swap_after(engine, other_params, 4, requests, 1)))
    assert engine.version == 4
    for t in trajectories:
        np.testing.assert_array_equal(t.policy_versions, [3] * 4 + [4] * 6)
        np.testing.assert_allclose(t.log_probs[:4], score(params, t)[0][:4], atol=1e-5)
        mixed, anew = cached_reference({3: params, 4: other_params}, t)[4:], score(other_params, t)[0][4:]
        kept, recomputed = (np.abs(t.log_probs[4:] - reference).max() for reference in (mixed, anew))
        assert kept < 1e-5 < 1e-2 < recomputed


def test_numpy_weights_are_copied_before_the_update_returns(engine, params):
    """jax reads an aligned numpy argument in place, once the program starts: here when a slow leaf is there."""

    def aligned(x):
        memory = np.empty(x.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy

    slow = jax.jit(lambda x, zeros: x + jax.lax.fori_loop(0, 60, lambda _, y: y @ y, zeros)[0, 0])
    weights = jax.tree.map(aligned, params) | {"embed": slow(params["embed"], jnp.zeros((600, 600)))}
    engine.update_weights(weights, 9)
    jax.tree.map(lambda x: x.fill(7) if isinstance(x, np.ndarray) else None, weights)
    (t,) = engine.generate([request("a")])
    np.testing.assert_array_equal(t.policy_versions, [9] * 9)
    np.testing.assert_allclose(t.log_probs, score(params, t)[0], atol=1e-5)


def test_weights_of_another_model_are_refused_and_change_nothing(engine, params):
    wrong = jax.tree.map(lambda x: x[..., :1], params)
    with pytest.raises(ValueError, match="same model only"):
        engine.update_weights(wrong, 9)
    assert engine.version == 3
    (t,) = engine.generate([request("a")])
    np.testing.assert_allclose(t.log_probs, score(params, t)[0], atol=1e-5)


@pytest.mark.slow
def test_selection_noise_is_undone_by_replay_and_only_by_replay(params):
    engine = LocalEngine(CFG, params, selection_noise=0.5, **LEAN)
    requests = [request(f"r{n}", n, seed=n) for n in (1, 5, 9)]
    trajectories = list(engine.generate(requests))
    flipped = 0
    for t in trajectories:
        replayed, _ = score(params, t, replay=True)
        native, routes = score(params, t)
        np.testing.assert_allclose(t.log_probs, replayed, atol=1e-5)
        flipped += (np.sort(t.routed_experts, -1) != np.sort(routes, -1)).any()
        assert np.abs(t.log_probs - native).max() > 1e-3
    assert flipped == 3
    again = by_name(engine.generate(requests[::-1]))
    for t in trajectories:
        assert_same(t, again[t.request_id])


@pytest.mark.slow
def test_bfloat16_engine_reports_float32_log_probs_of_its_own_distribution(params):
    engine = LocalEngine(CFG, params, dtype="bfloat16", **LEAN)
    (t,) = engine.generate([request("a")])
    assert t.log_probs.dtype == np.float32
    difference = np.abs(t.log_probs - score(params, t)[0])
    assert 1e-5 < difference.max() < 0.5
    assert engine.cache_bytes * 2 == LocalEngine(CFG, params, **SHAPE).cache_bytes


def held() -> int:
    """Bytes of all arrays that there are."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_the_stated_memory_is_what_is_held(params):
    before = held()
    engine = LocalEngine(CFG, params, **SHAPE)
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    assert held() - before == engine.cache_bytes + weights
    assert engine.cache_bytes == 2 * 2 * 4 * 32 * 16 * 4  # k and v, layers, slots, positions, head width, bytes
    assert engine.record_bytes == 4 * 32 * (3 * 4 + 2 * 2 * 2)
    engine.update_weights(params, 1)
    assert held() - before == engine.cache_bytes + 2 * weights, "the new ones wait for their dispatch"
    engine.close()
    assert held() == before


def test_sharing_a_prompt_needs_no_second_cache(engine):
    cache, pairs = model.init_cache(CFG, SHAPE["n_slots"], SHAPE["max_len"], "float32"), np.zeros(4, np.int32)
    compiled = programs_for(engine.shape).copy_slots.lower(cache, pairs, pairs, 0).compile()
    usage = compiled.memory_analysis()
    assert usage.alias_size_in_bytes == engine.cache_bytes, "the cache is updated in place"
    assert usage.temp_size_in_bytes <= engine.cache_bytes / 4 + 1024, "one slot at a time"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (request("long", 30), "30 prompt tokens and a budget of 9 exceed the engine's max_len = 32"),
        (request("none", 0), "the prompt is empty"),
        (
            Request("other", Prompt("other", "", np.array([2, 3, 40], np.int32), "", "test"), 0, EVERY, 0),
            "token 2: id 40 lies outside the model's vocabulary of 40",
        ),
    ],
)
def test_requests_that_do_not_fit_are_refused_by_name(engine, wanted, words):
    with pytest.raises(ValueError, match=f"request {wanted.request_id}[:,] {words}"):
        list(engine.generate([wanted]))
    assert len(list(engine.generate([request("a")]))) == 1, "the engine is usable afterwards"


def test_stop_strings_need_a_tokenizer(params):
    engine = LocalEngine(CFG, params, **SHAPE)
    with pytest.raises(ValueError, match="need an engine with a tokenizer"):
        list(engine.generate([request("a", 4, dataclasses.replace(EVERY, stop=("x",)))]))


def test_one_generate_at_a_time(engine):
    running = engine.generate([request(f"r{i}") for i in range(8)])
    next(running)
    with pytest.raises(RuntimeError, match="running already"):
        next(engine.generate([request("b")]))
    running.close()


@pytest.mark.parametrize("settings", [{"n_slots": 0}, {"max_len": 0}, {"decode_steps": 0}, {"max_len": 10**6}])
def test_impossible_sizes_are_refused(params, settings):
    with pytest.raises(ValueError, match=rf"{next(iter(settings))} = {next(iter(settings.values()))}"):
        LocalEngine(CFG, params, **(SHAPE | settings))


@pytest.mark.parametrize(("name", "split"), [("moe_top4_norm", True), ("dense_tied", False)])
def test_greedy_decoding_matches_the_golden_checkpoints(name, split, monkeypatch):
    """transformers' generate: tokens exactly, log-probs at temperature 1."""
    monkeypatch.setattr("sat_jax.rollout.local.engine.SMALL_POLICY", 0 if split else 10**9)
    folder = DATA / "model" / name
    cfg = hub.read_config(folder)
    golden = np.load(folder / "greedy.npz")
    engine = LocalEngine(
        cfg,
        hub.load_params(folder, cfg, dtype="float32"),
        n_slots=4,
        max_len=golden["prompt_ids"].shape[1] + golden["new_ids"].shape[1],
        prefill_rows=4,
        prefill_chunks=(16,),
    )
    greedy = SamplingParams(temperature=0.0, max_new_tokens=golden["new_ids"].shape[1])
    prompts = [
        Prompt(str(i), "", ids[mask > 0].astype(np.int32), "", "test")
        for i, (ids, mask) in enumerate(zip(golden["prompt_ids"], golden["prompt_mask"], strict=True))
    ]
    trajectories = by_name(engine.generate(Request(p.prompt_id, p, 0, greedy, 0) for p in prompts))
    for i in range(len(prompts)):
        t = trajectories[str(i)]
        n = len(t.response_ids)  # where a response ended, generate went on with padding
        assert n == golden["new_ids"].shape[1] or t.response_ids[-1] in cfg.eos_token_id
        np.testing.assert_array_equal(t.response_ids, golden["new_ids"][i, :n])
        np.testing.assert_allclose(t.log_probs, golden["new_logprobs"][i, :n], atol=2e-4)


@pytest.mark.slow
def test_layers_of_a_large_policy_are_unrolled_and_compute_the_same():
    large = dataclasses.replace(CFG, hidden_size=128, moe_intermediate_size=192, initializer_range=0.1)
    params = model.init_params(jax.random.key(0), large, dtype="float32")
    cache = model.init_cache(large, 1, 1, "float32", per_layer=True)
    arrays = len(jax.tree.leaves((model.split_layers(params, large), cache)))
    assert arrays > len(jax.tree.leaves((params, model.init_cache(large, 1, 1, "float32"))))
    gc.collect()
    before = len(jax.live_arrays())
    engine = LocalEngine(large, params, **LEAN)
    assert len(jax.live_arrays()) - before == arrays, "layer by layer"
    for t in engine.generate([request(f"r{n}", n, seed=n) for n in (2, 7)]):
        log_probs, routes = score(params, t, cfg=large)
        np.testing.assert_allclose(t.log_probs, log_probs, atol=1e-4)
        np.testing.assert_array_equal(t.routed_experts, routes)


@pytest.mark.slow
def test_the_engine_samples_on_a_device_of_its_own_or_on_a_mesh():
    assert report_of("tests.unit.rollout.local.two_devices_main", devices=2) == "same"
