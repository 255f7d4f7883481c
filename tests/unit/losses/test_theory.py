"""Proposition 4.1 on grids and by hypothesis; Section 3 and Appendix D by enumeration of small policies."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.inspection.geometry import token_at
from sat_jax.losses import LossConfig, Ppo, Sat, Unclipped
from sat_jax.losses.rules.sat import SatSummary
from sat_jax.losses.tokens import token_terms

PPO = LossConfig(rules=(Ppo(),), eps_low=0.2, eps_high=0.28)
SAT = LossConfig(rules=(Ppo(), Sat()), eps_low=0.2, eps_high=0.28)


def elementwise(config: LossConfig):
    """``(d, A, q) -> S, dS/dr, lower end, upper end`` for flat arrays."""

    def one(d: jax.Array, advantage: jax.Array, q: jax.Array):
        def objective(d: jax.Array):
            token = token_at(d[None], advantage[None], jnp.zeros((1,)))
            terms = token_terms(config, token, {"sat": SatSummary(q, q)})
            ends = jnp.broadcast_to(1 - terms.radii.low, (1,))[0], jnp.broadcast_to(1 + terms.radii.high, (1,))[0]
            return -terms.loss[0], ends

        (value, (low, high)), slope = jax.value_and_grad(objective, has_aux=True)(d)
        return value, slope / jnp.exp(d), low, high

    return jax.jit(jax.vmap(one))


ppo, sat = elementwise(PPO), elementwise(SAT)


def check_proposition(d: np.ndarray, advantage: np.ndarray, q: np.ndarray) -> None:
    d, advantage, q = (jnp.asarray(x, jnp.float32) for x in (d, advantage, q))
    value, slope, low, high = map(np.asarray, ppo(d, advantage, q))
    value2, slope2, low2, high2 = map(np.asarray, sat(d, advantage, q))
    d, advantage, q = map(np.asarray, (d, advantage, q))
    r = np.exp(d)
    gate = (q > 0) & (np.abs(d) > q)
    # Containment: the same interval without the gate, one endpoint strictly inside with it.
    assert ((low2 >= low) & (high2 <= high)).all()
    assert ((low2 == low) & (high2 == high))[~gate].all()
    visible = gate & (np.abs(d) > q * 1.01)  # c = 1/2 at |d| = q already; skip nothing but exact rounding at the gate
    moved_low, moved_high = low2 > low, high2 < high
    assert (moved_low ^ moved_high)[visible].all()
    assert (moved_high == (d > 0))[visible].all()
    # Pessimism.
    assert (value2 <= value + 1e-6 * np.abs(advantage)).all()
    # Exact locus of change: where SAT's gradient is 0 and PPO's is A.
    np.testing.assert_allclose(
        slope[(advantage > 0) & (r < high * 0.999)], advantage[(advantage > 0) & (r < high * 0.999)], rtol=1e-5
    )
    changed = slope2 != slope
    locus = ((advantage > 0) & (r > high2) & (r < high)) | ((advantage < 0) & (r > low) & (r < low2))
    near_boundary = np.minimum.reduce([np.abs(r - end) for end in (low, high, low2, high2)]) < 1e-5
    np.testing.assert_array_equal(changed[~near_boundary], (locus & (advantage != 0))[~near_boundary])
    assert (slope2[changed] == 0).all()
    np.testing.assert_allclose(slope[changed], advantage[changed], rtol=1e-5)
    # Pull-back branches never change.
    pull_back = advantage * (r - 1) < 0
    assert (slope2 == slope)[pull_back].all()
    assert (value2 == value)[pull_back].all()


def test_proposition_4_1_on_a_dense_grid() -> None:
    d, advantage, q = np.meshgrid(
        np.linspace(-0.6, 0.6, 241), (-2.0, -0.5, 0.0, 1.0, 3.0), (0.0, 1e-7, 0.01, 0.05, 0.2, 0.5)
    )
    check_proposition(d.ravel(), advantage.ravel(), q.ravel())


FLOATS = st.floats(-3, 3, width=32)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(FLOATS, FLOATS, st.floats(0, 1, width=32)), min_size=16, max_size=16))
def test_proposition_4_1_by_hypothesis(points: list) -> None:
    d, advantage, q = np.array(points, np.float32).T
    check_proposition(d, np.where(np.abs(advantage) < 1e-6, 0, advantage), np.where(q < 1e-6, 0, q))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-2, 2, width=32), min_size=20, max_size=20), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_gate_share_and_scale(d: list, scale: float) -> None:
    from sat_jax.losses.quantile import order_statistic, rank_from_alpha

    x = jnp.abs(jnp.asarray(d, jnp.float32))
    rank = rank_from_alpha(jnp.uint32(20), 0.9)
    q = order_statistic(x, jnp.ones(20, bool), rank)
    assert int(jnp.sum(x > q)) <= 2  # at most a 1 - alpha share
    scaled = order_statistic(x * scale, jnp.ones(20, bool), rank)
    assert scaled == q * scale or q < 1e-30


# --- enumeration ----------------------------------------------------------------------------------------------------


class Policies:
    """Two random autoregressive policies over every response of length T, in float64."""

    def __init__(self, seed: int, vocabulary: int, horizon: int, distance: float) -> None:
        rng = np.random.default_rng(seed)
        self.V, self.T = vocabulary, horizon
        self.mu, self.pi = {}, {}
        for t in range(horizon):
            for prefix in itertools.product(range(vocabulary), repeat=t):
                logits = rng.normal(size=vocabulary)
                other = logits + distance * rng.normal(size=vocabulary)
                self.mu[prefix] = np.exp(logits) / np.exp(logits).sum()
                self.pi[prefix] = np.exp(other) / np.exp(other).sum()
        self.responses = list(itertools.product(range(vocabulary), repeat=horizon))
        self.reward = {y: rng.random() for y in self.responses}

    def steps(self, y: tuple) -> list[tuple[np.ndarray, np.ndarray, int]]:
        return [(self.mu[y[:t]], self.pi[y[:t]], y[t]) for t in range(self.T)]

    def probability(self, y: tuple, which: int) -> float:
        return float(np.prod([step[which][step[2]] for step in self.steps(y)]))

    def expectation(self, f, which: int = 0) -> float:
        """Sum over all responses of p(y) f(y)."""
        return sum(self.probability(y, which) * f(y) for y in self.responses)

    def ratios(self, y: tuple) -> np.ndarray:
        return np.array([pi[a] / mu[a] for mu, pi, a in self.steps(y)])

    def tv(self, y: tuple) -> np.ndarray:
        return np.array([0.5 * np.abs(pi - mu).sum() for mu, pi, _ in self.steps(y)])


CASES = [
    Policies(seed, V, T, distance)
    for seed, (V, T, distance) in enumerate(
        [(2, 4, 0.3), (3, 3, 0.5), (4, 4, 0.1), (4, 2, 2.0), (3, 4, 1.0), (2, 1, 1.0)]
    )
]


@pytest.mark.parametrize("policies", CASES, ids=lambda p: f"V{p.V}T{p.T}")
def test_lemma_3_1_total_variation_from_samples(policies: Policies) -> None:
    for prefix, mu in policies.mu.items():
        pi = policies.pi[prefix]
        tv = 0.5 * np.abs(pi - mu).sum()
        assert 0.5 * (mu * np.abs(pi / mu - 1)).sum() == pytest.approx(tv, rel=1e-12)
        # Proposition 3.2: an all-action ratio bound eps gives TV <= eps / 2.
        assert tv <= np.abs(pi / mu - 1).max() / 2 + 1e-15


@pytest.mark.parametrize("policies", CASES, ids=lambda p: f"V{p.V}T{p.T}")
def test_improvement_identity_and_bounds(policies: Policies) -> None:
    p, T = policies, policies.T
    gain = p.expectation(p.reward.get, 1) - p.expectation(p.reward.get, 0)
    surrogate = p.expectation(lambda y: p.reward[y] * (p.ratios(y) - 1).sum())

    def remainder(y: tuple) -> float:
        # prod r - 1 - sum (r - 1) telescopes: sum_t (r_t - 1) (1 - prod_{s > t} r_s), up to sign (29)-(31).
        r = p.ratios(y)
        return p.reward[y] * sum((r[t] - 1) * (1 - np.prod(r[t + 1 :])) for t in range(T))

    delta = p.expectation(remainder)
    assert gain == pytest.approx(surrogate - delta, abs=1e-12)
    xi = max(p.reward.values())
    tv_max = max(p.tv(y).max() for y in p.responses)
    assert gain >= surrogate - 2 * xi * T * (T - 1) * tv_max**2 - 1e-12  # (33)
    assert gain >= surrogate - 4 * xi * p.expectation(lambda y: p.tv(y).sum()) - 1e-12  # (34)


@pytest.mark.parametrize("policies", CASES[:2], ids=lambda p: f"V{p.V}T{p.T}")
def test_the_loss_is_the_surrogate_on_the_enumeration(policies: Policies) -> None:
    """The code's own unclipped loss, weighted by mu(y), is minus L' up to its constant."""
    from sat_jax import losses

    with jax.enable_x64(True):
        p = policies
        log_mu = np.array([[np.log(mu[a]) for mu, _, a in p.steps(y)] for y in p.responses])
        log_pi = np.array([[np.log(pi[a]) for _, pi, a in p.steps(y)] for y in p.responses])
        weight = np.array([p.probability(y, 0) * p.reward[y] for y in p.responses])
        config = LossConfig(rules=(Unclipped(),), loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=1.0)
        loss, _ = losses.make_loss(config)(
            losses.LossInputs(
                jnp.asarray(log_pi), jnp.asarray(log_mu), jnp.asarray(weight), jnp.ones(log_mu.shape, bool)
            )
        )
        surrogate = p.expectation(lambda y: p.reward[y] * (p.ratios(y) - 1).sum())
        constant = p.T * p.expectation(p.reward.get)
        assert -float(loss) * len(p.responses) == pytest.approx(surrogate + constant, rel=1e-12)
