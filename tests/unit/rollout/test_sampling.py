"""Sampling: golden distributions of transformers' warpers, the draw, and what a log-prob refers to."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.rollout.engine import SamplingParams
from sat_jax.rollout.sampling import RowParams, draw, sample, support_logits

DATA = Path(__file__).parents[2] / "data" / "rollout"
CASES = json.loads((DATA / "sampling_cases.json").read_text())["settings"]
GOLDEN = np.load(DATA / "sampling_cases.npz")


def rows(n: int, **settings) -> RowParams:
    return RowParams.of([SamplingParams(**settings, seed=i) for i in range(n)])


@pytest.mark.parametrize("name", sorted(CASES))
def test_distribution_matches_golden(name):
    logits = jnp.asarray(GOLDEN["logits"])
    kept = support_logits(logits, rows(len(logits), **CASES[name]))
    probs = np.asarray(jax.nn.softmax(kept, axis=-1))
    golden = GOLDEN[f"{name}/probs"]
    # The support is what has a finite logit; XLA on CPUs flushes probabilities below 1e-38 to zero, the golden ones are
    # kept.
    np.testing.assert_array_equal(np.isfinite(kept), golden > 0)
    np.testing.assert_allclose(probs, golden, atol=1e-6)


def test_log_probs_at_full_support_match_golden():
    for name, case in CASES.items():
        logits = jnp.asarray(GOLDEN["logits"])
        full = rows(len(logits), temperature=case["temperature"])
        log_probs = jax.nn.log_softmax(support_logits(logits, full), axis=-1)[:, :8]
        np.testing.assert_allclose(log_probs, GOLDEN[f"{name}/logprobs_full_temperature"], atol=1e-5)


def test_settings_of_one_row_do_not_touch_another():
    logits = jnp.asarray(GOLDEN["logits"])
    mixed = RowParams.of([SamplingParams(**CASES[name]) for name in ("s00", "s07", "s10", "s03", "s01", "s11")])
    together = np.asarray(support_logits(logits, mixed))
    for i, name in enumerate(("s00", "s07", "s10", "s03", "s01", "s11")):
        alone = np.asarray(support_logits(logits, rows(6, **CASES[name])))
        np.testing.assert_array_equal(together[i], alone[i])


def test_ties_with_the_kth_are_kept():
    kept = support_logits(jnp.array([[3.0, 1.0, 1.0, 0.0]]), rows(1, top_k=2))
    np.testing.assert_array_equal(np.isfinite(kept[0]), [True, True, True, False])


def test_log_prob_is_at_the_sampling_temperature():
    logits = jnp.tile(jnp.array([[2.0, 0.0]]), (64, 1))
    tokens, log_probs = sample(logits, rows(64, temperature=0.5), jnp.zeros(64, jnp.int32))
    expected = np.where(np.asarray(tokens) == 0, -0.018150, -4.018150)
    np.testing.assert_allclose(log_probs, expected, atol=1e-6)


def test_log_prob_is_over_the_sampling_support():
    # p = [.6, .3, .1], top_p = .9 keeps the first two: log(.6667), log(.3333), never the third.
    logits = jnp.tile(jnp.log(jnp.array([[0.6, 0.3, 0.1]])), (256, 1))
    tokens, log_probs = sample(logits, rows(256, top_p=0.85), jnp.zeros(256, jnp.int32))
    assert set(np.asarray(tokens).tolist()) == {0, 1}
    np.testing.assert_allclose(log_probs, np.log([2 / 3, 1 / 3])[np.asarray(tokens)], atol=1e-6)


def test_greedy_takes_the_argmax_and_reports_the_full_distribution():
    logits = jnp.asarray(GOLDEN["logits"])
    tokens, log_probs = sample(logits, rows(6, temperature=0.0, top_k=3), jnp.zeros(6, jnp.int32))
    np.testing.assert_array_equal(tokens, np.argmax(GOLDEN["logits"], axis=-1))
    expected = np.max(np.asarray(jax.nn.log_softmax(logits, axis=-1)), axis=-1)
    np.testing.assert_allclose(log_probs, expected, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [7, 512, 513, 5000])
def test_draw_inverts_the_cdf(vocabulary):
    rng = np.random.default_rng(vocabulary)
    probs = rng.dirichlet(np.full(vocabulary, 0.3)).astype(np.float32)
    probs[rng.random(vocabulary) < 0.4] = 0
    probs[0] = probs[-1] = 0  # the ends tempt off-by-one errors
    uniform = np.append(rng.random(200), [0.0, 1 - 2**-24]).astype(np.float32)
    drawn = np.asarray(draw(jnp.tile(jnp.log(probs), (len(uniform), 1)), jnp.asarray(uniform)))
    assert (probs[drawn] > 0).all()
    cdf = np.cumsum(probs.astype(np.float64)) / probs.astype(np.float64).sum()
    upper, lower = cdf[drawn], cdf[drawn] - probs[drawn] / probs.astype(np.float64).sum()
    assert (uniform <= upper + 1e-6).all()
    assert (uniform >= lower - 1e-6).all()


def test_frequencies_follow_the_distribution():
    n, probs = 20_000, np.array([0.5, 0.25, 0.125, 0.125])
    logits = jnp.tile(jnp.log(jnp.asarray(probs, jnp.float32)), (n, 1))
    tokens, _ = sample(logits, rows(n), jnp.zeros(n, jnp.int32))
    observed = np.bincount(np.asarray(tokens), minlength=4)
    chi_square = ((observed - n * probs) ** 2 / (n * probs)).sum()
    assert chi_square < 16.3  # 0.999 quantile with 3 degrees of freedom


def test_a_row_depends_on_its_own_seed_and_step_only():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(8, 600)), jnp.float32)
    params, step = rows(8, temperature=0.9), jnp.arange(8)
    tokens, log_probs = sample(logits, params, step)
    order = rng.permutation(8)
    shuffled = jax.tree.map(lambda x: x[order], params)
    again, log_probs_again = sample(logits[order], shuffled, step[order])
    np.testing.assert_array_equal(again, np.asarray(tokens)[order])
    np.testing.assert_array_equal(log_probs_again, np.asarray(log_probs)[order])
    other_step, _ = sample(logits, params, step + 100)
    assert (np.asarray(other_step) != np.asarray(tokens)).any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"stop": "END"}, "stop = 'END'"),
        ({"stop": ("",)}, "non-empty"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**settings)


def test_truncates_says_when_the_support_must_be_replayed():
    assert SamplingParams(top_p=0.9).truncates
    assert SamplingParams(top_k=5).truncates
    assert not SamplingParams(temperature=0.7).truncates
    assert not SamplingParams(temperature=0.0, top_k=5).truncates
