"""Sampling: golden distributions of transformers' warpers, the draw, and what a log-prob refers to."""

import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.rollout.engine import Request, SamplingParams
from sat_jax.rollout.local.sampling import RowParams, draw, sample, sample_recorded, support_logits, top_k, uniforms
from sat_jax.types import MIN_TEMPERATURE, NO_TOKEN, Prompt
from tests.helpers import DATA

CASES = json.loads((DATA / "rollout" / "sampling_cases.json").read_text())["settings"]
GOLDEN = np.load(DATA / "rollout" / "sampling_cases.npz")


ROWS, VOCABULARY = 256, 512
_support_logits, _draw = jax.jit(support_logits), jax.jit(draw)
_sample = jax.jit(lambda logits, rows, step: sample(logits, rows, uniforms(rows.seed, step)))


def rows(n: int, **settings) -> list[SamplingParams]:
    return [SamplingParams(**settings)] * n


def padded(logits, params, step=None, seeds=None):
    """One shape for every test, so that everything is compiled once. Row i has seed i."""
    logits = np.asarray(logits, np.float32)
    n, v = logits.shape
    full = np.full((ROWS, VOCABULARY), -np.inf, np.float32)
    full[:, 0] = 0
    full[:n, :v] = logits
    steps = np.zeros(ROWS, np.int32)
    steps[:n] = 0 if step is None else step
    every = RowParams.of(
        [*params, *[SamplingParams()] * (ROWS - n)], [*(range(n) if seeds is None else seeds), *[0] * (ROWS - n)]
    )
    return jnp.asarray(full), every, jnp.asarray(steps), n


def kept_logits(logits, params):
    full, row_params, _, n = padded(logits, params)
    return np.asarray(_support_logits(full, row_params))[:n, : np.shape(logits)[1]]


def sampled(logits, params, step=None, seeds=None):
    full, row_params, steps, n = padded(logits, params, step, seeds)
    tokens, log_probs = _sample(full, row_params, steps)
    return np.asarray(tokens)[:n], np.asarray(log_probs)[:n]


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("name", sorted(CASES))
def test_distribution_matches_golden(name):
    kept = kept_logits(GOLDEN["logits"], rows(6, **CASES[name]))
    golden = GOLDEN[f"{name}/probs"]
    # The support is what has a finite logit: XLA on CPUs flushes probabilities below 1e-38 to zero, the golden ones are
    # kept.
    np.testing.assert_array_equal(np.isfinite(kept), golden > 0)
    np.testing.assert_allclose(np.exp(log_softmax(kept)), golden, atol=1e-6)


@pytest.mark.parametrize("name", sorted(CASES))
def test_log_probs_at_full_support_match_golden(name):
    kept = kept_logits(GOLDEN["logits"], rows(6, temperature=CASES[name]["temperature"]))
    golden = GOLDEN[f"{name}/logprobs_full_temperature"]
    np.testing.assert_allclose(log_softmax(kept)[:, :8], golden, atol=1e-5)


def test_settings_of_one_row_do_not_touch_another():
    names = ("s00", "s07", "s10", "s03", "s01", "s11")
    together = kept_logits(GOLDEN["logits"], [SamplingParams(**CASES[name]) for name in names])
    for i, name in enumerate(names):
        np.testing.assert_array_equal(together[i], kept_logits(GOLDEN["logits"], rows(6, **CASES[name]))[i])


def test_ties_with_the_kth_are_kept():
    kept = kept_logits([[3.0, 1.0, 1.0, 0.0]], rows(1, top_k=2))
    np.testing.assert_array_equal(np.isfinite(kept[0]), [True, True, True, False])


def test_log_prob_is_at_the_sampling_temperature():
    tokens, log_probs = sampled(np.tile([2.0, 0.0], (64, 1)), rows(64, temperature=0.5))
    np.testing.assert_allclose(log_probs, np.where(tokens == 0, -0.018150, -4.018150), atol=1e-6)


def test_log_prob_is_over_the_sampling_support():
    # p = [.6, .3, .1], top_p = .85 keeps the first two: log(.6667), log(.3333), never the third.
    tokens, log_probs = sampled(np.tile(np.log([0.6, 0.3, 0.1]), (ROWS, 1)), rows(ROWS, top_p=0.85))
    assert set(tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(log_probs, np.log([2 / 3, 1 / 3])[tokens], atol=1e-6)


def test_greedy_takes_the_argmax_and_reports_the_full_distribution():
    tokens, log_probs = sampled(GOLDEN["logits"], rows(6, temperature=0.0, top_k=3))
    np.testing.assert_array_equal(tokens, np.argmax(GOLDEN["logits"], axis=-1))
    np.testing.assert_allclose(log_probs, log_softmax(GOLDEN["logits"]).max(axis=-1), atol=1e-6)


@pytest.mark.parametrize("vocabulary", [7, 512, 513, 5000])
def test_draw_inverts_the_cdf(vocabulary):
    rng = np.random.default_rng(vocabulary)
    probs = rng.dirichlet(np.full(vocabulary, 0.3)).astype(np.float32)
    probs[rng.random(vocabulary) < 0.4] = 0
    probs[0] = probs[-1] = 0  # the ends tempt off-by-one errors
    uniform = np.append(rng.random(200), [0.0, 1 - 2**-24]).astype(np.float32)
    drawn = np.asarray(_draw(jnp.tile(probs, (len(uniform), 1)), jnp.asarray(uniform)))
    assert (probs[drawn] > 0).all()
    cdf = np.cumsum(probs.astype(np.float64)) / probs.astype(np.float64).sum()
    upper, lower = cdf[drawn], cdf[drawn] - probs[drawn] / probs.astype(np.float64).sum()
    assert (uniform <= upper + 1e-6).all()
    assert (uniform >= lower - 1e-6).all()


def test_frequencies_follow_the_distribution():
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    logits, params = np.tile(np.log(probs), (ROWS, 1)), rows(ROWS)
    tokens = np.concatenate([sampled(logits, params, np.full(ROWS, step))[0] for step in range(80)])
    expected = len(tokens) * probs
    chi_square = ((np.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 0.999 quantile with 3 degrees of freedom


def test_a_row_depends_on_its_own_seed_and_step_only():
    rng = np.random.default_rng(0)
    logits, params, step = rng.normal(size=(8, VOCABULARY)), rows(8, temperature=0.9), np.arange(8)
    tokens, log_probs = sampled(logits, params, step)
    order = rng.permutation(8)
    again, log_probs_again = sampled(logits[order], params, step[order], order)
    np.testing.assert_array_equal(again, tokens[order])
    np.testing.assert_array_equal(log_probs_again, log_probs[order])
    assert (sampled(logits, params, step + 100)[0] != tokens).any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 1e-38}, "temperature = 1e-38: must be at least 0.0001, or 0 for greedy decoding"),
        ({"temperature": MIN_TEMPERATURE / 2}, "temperature = 5e-05"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"stop": "END"}, "stop = 'END': must be a tuple"),
        ({"stop": ("",)}, "stop = .* empty string"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=rf"sampling\.{words}"):
        SamplingParams(**settings)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match=f"request.seed = {seed}: must "):
        Request("a", Prompt("p", "", np.arange(3, dtype=np.int32), "", "test"), 0, SamplingParams(), seed)


def test_truncates_says_when_the_support_must_be_replayed():
    assert SamplingParams(top_p=0.9).truncates
    assert SamplingParams(top_k=5).truncates
    assert not SamplingParams(temperature=0.7).truncates
    assert not SamplingParams(temperature=0.0, top_k=5).truncates


SIZE = 12
_recorded = jax.jit(lambda logits, rows, step: sample_recorded(logits, rows, uniforms(rows.seed, step), SIZE))


def recorded(logits, params):
    full, row_params, steps, n = padded(logits, params)
    return [np.asarray(x)[:n] for x in _recorded(full, row_params, steps)]


def test_the_lowest_temperature_works_with_extreme_logits():
    """There, sampling takes the argmax, whose log-prob is 0."""
    logits = np.random.default_rng(0).uniform(-1e4, 1e4, (64, 300)).astype(np.float32)
    settings = {"temperature": MIN_TEMPERATURE, "top_k": 5, "top_p": 0.9}
    for tokens, log_probs, *_ in (
        sampled(logits, rows(64, temperature=MIN_TEMPERATURE)),
        sampled(logits, rows(64, **settings)),
        recorded(logits, rows(64, **settings)),
    ):
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
        np.testing.assert_array_equal(log_probs, np.zeros(64))


def ids(support):
    return set(support[support != NO_TOKEN].tolist())


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_p": 0.95, "min_p": 0.05}])
@pytest.mark.parametrize("top_k", [1, 5, SIZE])
def test_what_is_recorded_is_what_the_filters_leave(settings, top_k):
    """And the log-probs are those of the tokens drawn, over exactly that."""
    logits = np.random.default_rng(top_k).normal(size=(64, 300)) * 2
    params = rows(64, temperature=0.7, top_k=top_k, **settings)
    tokens, log_probs, support = recorded(logits, params)
    kept = kept_logits(logits, params)
    assert [ids(row) for row in support] == [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in kept]
    np.testing.assert_allclose(log_probs, log_softmax(kept)[np.arange(64), tokens], atol=1e-5)


def test_everything_recorded_is_drawn_and_nothing_else():
    logits = np.tile(np.random.default_rng(1).normal(size=40), (ROWS, 1))
    tokens, log_probs, support = recorded(logits, rows(ROWS, top_k=6, top_p=0.9))
    assert len({tuple(row) for row in support}) == 1
    assert set(tokens.tolist()) == ids(support[0])
    share = np.array([np.mean(tokens == t) for t in support[0] if t != NO_TOKEN])
    exact = np.array([np.exp(log_probs[tokens == t][0]) for t in support[0] if t != NO_TOKEN])
    assert exact.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(share, exact, atol=0.1)


def test_ties_with_the_kth_go_to_the_lower_ids():
    """A bound must hold: the token that ties is neither recorded nor sampled."""
    tokens, log_probs, support = recorded(np.tile([1.0, 3.0, 1.0, 1.0, 0.0], (ROWS, 1)), rows(ROWS, top_k=2))
    assert {tuple(row[:3]) for row in support} == {(1, 0, NO_TOKEN)}
    assert set(tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(log_probs, log_softmax([[1.0, 3.0]])[0][tokens], atol=1e-6)


def test_ties_at_the_edge_of_the_nucleus_stay():
    """As without a record: the second and the third are equally likely, and with the second there is mass enough."""
    _, _, support = recorded(np.log([[0.5, 0.2, 0.2, 0.1]]), rows(1, top_k=4, top_p=0.6))
    assert ids(support[0]) == {0, 1, 2}
    kept = kept_logits(np.log([[0.5, 0.2, 0.2, 0.1]]), rows(1, top_k=4, top_p=0.6))
    np.testing.assert_array_equal(np.isfinite(kept[0]), [True, True, True, False])


def survivors(weights, top_k, top_p, min_p):
    """Exactly: the ``top_k`` largest of whole numbers, of those the fewest with the mass ``top_p``, of those the ones
    with at least ``min_p`` times the largest; ties with the last one stay."""
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[:top_k]
    total, front, least = sum(weights[i] for i in order), 0, weights[order[0]]
    for i in order:
        if Fraction(front, total) < top_p and Fraction(weights[i], weights[order[0]]) >= min_p:
            least = weights[i]
        front += weights[i]
    return {i for i in order if weights[i] >= least}


def test_top_p_is_the_smallest_set_with_that_mass():
    logits, params = np.log([[0.3, 0.15, 0.05, 0.5]]), rows(1, top_k=4, top_p=0.8)
    assert ids(recorded(logits, params)[2][0]) == {0, 3}
    assert np.flatnonzero(np.isfinite(kept_logits(logits, params)[0])).tolist() == [0, 3]


@pytest.mark.parametrize("seed", range(4))
def test_both_paths_keep_the_same_tokens(seed):
    """Random distributions with many ties; the filters' values lie on exact boundaries or anywhere between."""
    rng = np.random.default_rng(seed)
    logits, params, expected = np.full((ROWS, SIZE), -np.inf), [], []
    for i in range(ROWS):
        n = int(rng.integers(2, SIZE + 1))
        weights = rng.integers(1, rng.choice([3, 10, 1000]), n).tolist()
        ordered = sorted(weights, reverse=True)
        top_k = int(rng.choice([k for k in range(1, n + 1) if k == n or ordered[k - 1] > ordered[k]]))
        boundary = Fraction(sum(ordered[: rng.integers(1, top_k + 1)]), sum(ordered[:top_k]))
        top_p = boundary if rng.random() < 0.5 else Fraction(int(rng.integers(1, 997)), 997)
        share = Fraction(ordered[rng.integers(n)], ordered[0])
        min_p = rng.choice([Fraction(0), share, Fraction(int(rng.integers(997)), 997)])
        temperature = float(rng.choice([1.0, 0.7]))
        logits[i, :n] = temperature * np.log(weights)
        settings = {"top_k": top_k, "top_p": float(top_p), "min_p": float(min_p)}
        params.append(SamplingParams(temperature=temperature, **settings))
        expected.append(survivors(weights, top_k, top_p, min_p))
    plain = [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in kept_logits(logits, params)]
    tokens, _, support = recorded(logits, params)
    assert plain == expected
    assert [ids(row) for row in support] == expected
    assert all(token in kept for token, kept in zip(tokens.tolist(), expected, strict=True))


@pytest.mark.parametrize(("vocabulary", "k"), [(5000, 7), (4099, 64), (300, 300), (20, 1)])
def test_top_k_by_blocks_is_top_k(vocabulary, k):
    """Ties included: a few distinct values, and rows that are -inf nearly everywhere."""
    rng = np.random.default_rng(k)
    x = rng.integers(-3, 3, (6, vocabulary)).astype(np.float32)
    x[3:] = rng.normal(size=(3, vocabulary))
    x[2, : vocabulary - 1] = -np.inf
    found, wanted = jax.jit(top_k, static_argnums=1)(x, k), jax.lax.top_k(x, k)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
