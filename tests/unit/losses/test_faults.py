"""Faults that software of this kind has really had: the reports' inputs and the right outputs."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import losses
from sat_jax.config import ExperimentConfig
from sat_jax.losses import Dppo, Icepop, Kpop, LossConfig, LossInputs, Seqclip, Tis, Unclipped
from sat_jax.losses.kl import kl_estimate
from sat_jax.losses.masked import masked_mean
from sat_jax.losses.rules.kpop import bernoulli_kl
from sat_jax.model.head import token_log_probs
from sat_jax.training.evaluation import pass_at_k

pytestmark = pytest.mark.slow

# On-policy REINFORCE with advantage -x has per-token loss x: it hands any numbers to the aggregation.
MODES = {
    "token-mean": LossConfig(rules=(Unclipped(),), loss_agg_mode="token-mean"),
    "seq-mean-token-mean": LossConfig(rules=(Unclipped(),)),
    "seq-mean-token-sum": LossConfig(
        rules=(Unclipped(),), loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=1.0
    ),
    "seq-mean-token-sum-norm-8": LossConfig(
        rules=(Unclipped(),), loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=8.0
    ),
}


def batch(d: list, mask: list, advantages: list | float = 1.0, mu: float = -1.0) -> LossInputs:
    log_ratio = jnp.asarray(d, jnp.float32)
    behavior = jnp.full(log_ratio.shape, mu, jnp.float32)
    return LossInputs(
        log_probs=behavior + log_ratio,
        behavior_log_probs=behavior,
        advantages=jnp.broadcast_to(jnp.asarray(advantages, jnp.float32), log_ratio.shape),
        loss_mask=jnp.asarray(mask, bool),
    )


def value_and_grad(config: LossConfig, inputs: LossInputs) -> tuple[float, np.ndarray]:
    loss_fn = losses.make_loss(config)
    value, gradient = jax.value_and_grad(lambda lp: loss_fn(inputs.replace(log_probs=lp))[0])(inputs.log_probs)
    return float(value), np.asarray(gradient)


def aggregate(mode: str, values: list, mask: list) -> tuple[float, np.ndarray]:
    """The loss of per-token losses ``values``, and its gradient with respect to them."""
    loss_fn = losses.make_loss(MODES[mode])
    zeros = jnp.zeros(np.shape(values))

    def loss(x: jax.Array) -> jax.Array:
        # With A = -1 and r = 1 the token's loss is r; scaling r through log_probs = log(x) hands in x itself.
        return loss_fn(LossInputs(x, zeros, -jnp.ones_like(zeros), jnp.asarray(mask, bool)))[0]

    log_values = jnp.log(jnp.abs(jnp.asarray(values, jnp.float32)))
    value, gradient = jax.value_and_grad(loss)(log_values)
    return float(value), np.asarray(gradient) / np.asarray(values, np.float32)


# --- A. loss, mask, aggregation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "want"), [("token-mean", 2.0), ("seq-mean-token-mean", 2.0), ("seq-mean-token-sum", 4.0)]
)
def test_a1_nan_under_the_mask(mode: str, want: float) -> None:
    value, gradient = aggregate(mode, [[1.0, math.nan, 3.0]], [[1, 0, 1]])
    assert value == pytest.approx(want, rel=1e-6)
    assert gradient[0, [0, 2]] == pytest.approx([want / 4, want / 4], rel=1e-6)
    inputs = batch([[0.1, math.nan, 0.2]], [[1, 0, 1]], [[1.0, math.nan, 1.0]])
    for name in ("log_probs", "behavior_log_probs", "advantages"):
        assert bool(jnp.isnan(getattr(inputs, name)[0, 1])) == (name != "behavior_log_probs")
    _, gradient = value_and_grad(MODES[mode], inputs)
    assert np.isfinite(gradient).all()
    assert gradient[0, 1] == 0


def test_a2_masked_tokens_stay_out_of_the_numerator() -> None:
    value, gradient = aggregate("token-mean", [[2.0, 50.0], [4.0, 7.0]], [[1, 0], [1, 0]])
    assert value == pytest.approx(3.0, rel=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, 0], [0.5, 0]], rtol=1e-6)
    assert value == aggregate("token-mean", [[2.0, 1e9], [4.0, 1e-9]], [[1, 0], [1, 0]])[0]


@pytest.mark.parametrize("mode", MODES)
def test_a3_nothing_to_train_on(mode: str) -> None:
    inputs = batch([[0.3, -0.2], [0.1, 0.0]], [[0, 0], [0, 0]])
    loss, metrics = losses.make_loss(MODES[mode])(inputs)
    value, gradient = value_and_grad(MODES[mode], inputs)
    assert loss == value == 0
    assert (gradient == 0).all()
    assert metrics["train/tokens"] == 0
    assert all(np.isfinite(x) for x in metrics.values())


def test_a3_an_empty_row_does_not_count() -> None:
    assert aggregate("token-mean", [[9.0, 9.0], [2.0, 4.0]], [[0, 0], [1, 1]])[0] == pytest.approx(3.0, rel=1e-6)
    assert aggregate("seq-mean-token-mean", [[9.0, 9.0], [2.0, 4.0]], [[0, 0], [1, 1]])[0] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", 2.0),
        ("seq-mean-token-mean", 3.5),
        ("seq-mean-token-sum", 5.0),
        ("seq-mean-token-sum-norm-8", 0.625),
    ],
)
def test_a5_the_split_does_not_matter(mode: str, want: float) -> None:
    loss_fn = losses.make_loss(MODES[mode])
    log_x = jnp.log(jnp.asarray([[1.0] * 4, [6.0, 1, 1, 1]]))
    mask = jnp.asarray([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
    whole = LossInputs(log_x, jnp.zeros((2, 4)), -jnp.ones((2, 4)), mask)
    summary = loss_fn.summarize(whole)
    parts = [loss_fn.rows(jax.tree.map(lambda x, i=i: x[i : i + 1], whole), summary) for i in range(2)]
    split = sum(float(part.loss.sum()) for part in parts)
    packed = LossInputs(
        log_x.reshape(1, 8),
        jnp.zeros((1, 8)),
        -jnp.ones((1, 8)),
        mask.reshape(1, 8),
        segment_ids=jnp.asarray([[1] * 4 + [2] * 4]),
    )
    assert float(loss_fn(whole)[0]) == pytest.approx(want, rel=1e-6)
    assert split == pytest.approx(want, rel=1e-6)
    assert float(loss_fn(packed)[0]) == pytest.approx(want, rel=1e-6)


def test_a7_sequence_ratio_counts_active_tokens_only() -> None:
    gspo = losses.method("gspo")
    inputs = batch([[0.2, -0.1, 9.0]], [[1, 1, 0]])
    _, metrics = losses.make_loss(gspo)(inputs)
    assert float(metrics["train/ratio_max"]) == pytest.approx(1.051271, rel=1e-6)
    value, gradient = value_and_grad(gspo, inputs)
    assert -value == pytest.approx(1.051271, rel=1e-6)
    assert gradient[0, 2] == 0
    prompt = batch([[5.0, -7.0, 0.2, -0.1, 9.0]], [[0, 0, 1, 1, 0]])
    assert value_and_grad(gspo, prompt)[0] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gspo", "sat-grpo", "sat-gspo", "dppo", "spo", "drpo", "cispo"])
def test_a8_no_overflow(name: str) -> None:
    extremes = [(d, a) for d in (200.0, -200.0, 88.8, math.inf, -math.inf) for a in (1.0, -1.0, 0.0)]
    d, advantage = (
        jnp.asarray(x, jnp.float32)[:, None, None] * jnp.ones((1, 1, 2)) for x in zip(*extremes, strict=True)
    )
    loss_fn = losses.make_loss(losses.method(name))

    def loss(d: jax.Array, advantage: jax.Array) -> jax.Array:
        return loss_fn(LossInputs(d, jnp.zeros((1, 2)), advantage, jnp.ones((1, 2), bool)))[0]

    value, gradient = jax.vmap(jax.value_and_grad(loss))(d, advantage)
    assert np.isfinite(gradient).all()
    if name == "cispo":  # its value is A log pi, infinite where log pi is
        value = jnp.where(jnp.isinf(d[:, 0, 0]), 0, value)
    assert np.isfinite(value).all()


def test_a8_values() -> None:
    inputs = batch([[200.0, 200.0]], [[1, 1]], 1.0)
    value, gradient = value_and_grad(losses.method("gspo"), inputs)
    assert -value == pytest.approx(1.2)
    assert (gradient == 0).all()


def test_a9_k3_is_capped() -> None:
    value, gradient = jax.value_and_grad(lambda lp: kl_estimate(lp, jnp.float32(0), "k3"))(jnp.float32(-99))
    assert (value, gradient) == (10, 0)
    for kind in ("k1", "k2", "k3", "low_var_kl", "k1+", "k3+", "abs"):
        value, gradient = jax.value_and_grad(lambda lp, kind=kind: kl_estimate(lp, jnp.float32(0), kind))(
            jnp.float32(-math.inf)
        )
        assert np.isfinite(value), kind
        assert gradient == 0, kind
    half = jnp.float32(0.5)
    assert kl_estimate(-half, jnp.float32(0), "k1") == -0.5
    assert kl_estimate(-half, jnp.float32(0), "k2") == 0.125
    assert float(kl_estimate(-half, jnp.float32(0), "k3")) == pytest.approx(0.148721, abs=1e-6)
    assert float(kl_estimate(half, jnp.float32(0), "k3")) == pytest.approx(0.106531, abs=1e-6)


def test_a11_mean_and_product_have_names() -> None:
    inputs = batch([[-0.002] * 1000], [[1] * 1000])
    wide = losses.method("seqclip").with_rules(Seqclip(0.99, 1.01))
    assert losses.make_loss(wide)(inputs)[1]["train/keep_fraction"] == 1  # geometric mean .998002
    assert float(losses.make_loss(wide)(inputs)[1]["train/ratio_max"]) == pytest.approx(0.998002, abs=1e-6)
    config = losses.method("icepop").with_rules(Icepop(0.5, 2.0, level="sequence_product"))
    inputs = inputs.replace(rollout_policy_log_probs=inputs.log_probs)
    assert losses.make_loss(config)(inputs)[1]["train/weight_mean"] == 0  # product .135335
    tis = losses.method("grpo-tis").with_rules(Tis(level="sequence_product"))
    weight = losses.make_loss(tis)(inputs)[1]["train/weight_mean"]
    assert float(weight) == pytest.approx(0.135335, rel=1e-4)


# --- B. log-probs, precision, alignment -----------------------------------------------------------------------------


def head(logits: list, tokens: list, temperature: float = 1.0) -> np.ndarray:
    """Log-probs from the model's head with the given next-token logits [T, V]."""
    hidden = jnp.asarray([logits], jnp.float32)
    identity = {"head": jnp.eye(hidden.shape[-1])}
    cfg = SimpleNamespace(tie_word_embeddings=False)
    return np.asarray(token_log_probs(identity, cfg, hidden, jnp.asarray([tokens]), temperature).log_probs[0])


def test_b13_temperature_divides_logits() -> None:
    got = head([[2.0, 0.0], [0.0, 0.0]], [1, 0], temperature=0.5)
    assert got[1] == pytest.approx(-0.018150, abs=1e-6)
    assert math.exp(got[1] - -0.018150) == pytest.approx(1.0, abs=1e-5)


def test_b14_truncated_support_is_refused_for_training() -> None:
    config = ExperimentConfig()
    with pytest.raises(ValueError, match=r"top_p = 0\.9"):
        dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, top_p=0.9))


def test_b15_shift_by_one_once() -> None:
    # P = 2, R = 2; next-token log-probs at positions 0, 1, 2 are -.3, -1, -2 for the tokens that follow.
    def two_way(log_prob: float) -> list[float]:
        return [log_prob, math.log1p(-math.exp(log_prob))]

    got = head([two_way(-0.3), two_way(-1.0), two_way(-2.0), [0.0, 0.0]], [1, 0, 0, 0])
    np.testing.assert_allclose(got, [0, -0.3, -1, -2], atol=1e-6)
    mask = np.array([[0, 0, 1, 1]], bool)
    rollout = np.array([[0, 0, -1, -2]], np.float32)
    inputs = LossInputs(jnp.asarray(got[None]), jnp.asarray(rollout), jnp.ones((1, 4)), jnp.asarray(mask))
    _, metrics = losses.make_loss(losses.method("grpo"))(inputs)
    assert float(metrics["train/d_bar"]) < 1e-6
    assert float(metrics["train/ratio_max"]) == pytest.approx(1, abs=1e-6)


def test_b17_one_log_prob_too_many_names_the_sample() -> None:
    from sat_jax.data.batching import make_batch
    from sat_jax.types import Group, Prompt, Trajectory

    trajectory = Trajectory(
        prompt_id="p7",
        sample_index=3,
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([5, 9], np.int32),
        log_probs=np.array([-1, -2, -3], np.float32),
        policy_versions=np.zeros(2, np.int32),
        routed_experts=None,
        finish_reason="stop",
    )
    group = Group("g", Prompt("p7", "", np.array([1, 2], np.int32), "", ""), (trajectory,), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="p7"):
        make_batch([group], widths=[8])
    inputs = batch([[0.0, 0.0, 0.0]], [[1, 1, 1]]).replace(loss_mask=jnp.ones((1, 2), bool))
    with pytest.raises(ValueError, match="loss_mask has shape"):
        losses.make_loss(losses.method("grpo"))(inputs)


# --- C. advantages and groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.1, 0.3, 0.35, 0.0, -2.0, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 1000])
@pytest.mark.parametrize("xp", [np, jnp])
def test_c18_a_group_without_spread_has_no_advantage(value: float, size: int, xp) -> None:
    rewards = xp.full((2, size), value, xp.float32)
    assert losses.zero_variance(rewards).all()
    for kind in ("group_std_unbiased", "group_std_biased", "group_mean", "leave_one_out"):
        assert (losses.group_advantages(rewards, kind=kind, eps=1e-8) == 0).all()


def test_c18_float64_and_anchor() -> None:
    assert (losses.group_advantages(np.array([[0.1, 0.1, 0.1]])) == 0).all()
    rewards = np.array([[1.0, 0, 0, 1]])
    np.testing.assert_allclose(losses.group_advantages(rewards)[0], [0.866, -0.866, -0.866, 0.866], atol=1e-3)
    biased = losses.group_advantages(rewards, kind="group_std_biased")
    np.testing.assert_allclose(biased[0], [1, -1, -1, 1], atol=1e-5)
    assert not losses.zero_variance(rewards).any()


def test_c20_failed_siblings() -> None:
    rewards = np.array([[1.0, 0.0, np.nan]])
    failed = np.array([[False, False, True]])
    excluded = losses.group_advantages(rewards, kind="group_mean", failed=failed)
    np.testing.assert_allclose(excluded, [[0.5, -0.5, 0]], atol=1e-6)
    zero = losses.group_advantages(rewards, kind="group_mean", failed=failed, failures="zero")
    np.testing.assert_allclose(zero, [[2 / 3, -1 / 3, 0]], atol=1e-6)
    inputs = batch([[0.1], [0.1], [np.nan]], [[1], [1], [0]], excluded.reshape(3, 1))
    _, gradient = value_and_grad(losses.method("grpo"), inputs)
    assert gradient[2, 0] == 0


# --- H. anchors -----------------------------------------------------------------------------------------------------


def test_h_sat_quantile() -> None:
    d = [[0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.50, 9.0, 9.0]]
    inputs = batch(d, [[1] * 10 + [0] * 2], mu=0.0)
    loss_fn = losses.make_loss(losses.method("sat-grpo"))
    _, metrics = loss_fn(inputs)
    assert float(metrics["sat/q"]) == np.float32(0.08)
    assert float(metrics["sat/gate_rate"]) == pytest.approx(0.1)
    assert float(metrics["sat/c_high_min"]) == pytest.approx(0.024961, abs=1e-6)
    assert float(metrics["sat/c_low_min"]) == 1
    assert 0.2 * float(metrics["sat/c_high_min"]) == pytest.approx(0.0049922, abs=1e-7)
    assert float(metrics["sat/eps_high_mean"]) == pytest.approx((9 * 0.2 + 0.0049922) / 10, abs=1e-6)


def test_h_kpop() -> None:
    def both(pi: float, mu: float) -> tuple[float, float]:
        pi, mu = jnp.float32(pi), jnp.float32(mu)
        return float(bernoulli_kl(pi, mu)), float(bernoulli_kl(mu, pi))

    assert both(0.5, 0.4) == pytest.approx((0.020411, 0.020136), abs=1e-5)
    assert both(0.9, 0.5) == pytest.approx((0.368064, 0.510826), abs=1e-5)
    for pi, mu, kept in ((0.5, 0.4, 1), (0.9, 0.5, 0), (1.0, 0.5, 0), (1.0, 1.0, 1)):
        log_ratio = math.log(pi / mu)
        inputs = batch([[log_ratio]], [[1]], mu=math.log(mu))
        _, metrics = losses.make_loss(losses.method("kpop"))(inputs)
        assert metrics["train/keep_fraction"] == kept, (pi, mu)
        _, gradient = value_and_grad(losses.method("kpop").with_rules(Kpop(0.1)), inputs)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("delta", "kept"), [(0.2, (1, 1)), (1e-3, (0, 0))])
def test_h_dppo(delta: float, kept: tuple[int, int]) -> None:
    config = losses.method("dppo").with_rules(Dppo(delta))
    for (mu, pi), keep in zip(((0.9, 0.945), (0.01, 0.03)), kept, strict=True):
        inputs = batch([[math.log(pi / mu)]], [[1]], mu=math.log(mu))
        assert losses.make_loss(config)(inputs)[1]["train/keep_fraction"] == keep
        inward = inputs.replace(advantages=-inputs.advantages)
        assert losses.make_loss(config)(inward)[1]["train/keep_fraction"] == 1


def test_h_pass_at_k() -> None:
    assert pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)
    assert pass_at_k(8, 2, 1) == pytest.approx(0.25)


def test_masked_mean_of_nothing() -> None:
    assert masked_mean(jnp.asarray([jnp.nan, 2.0]), jnp.asarray([False, True])) == 2
    assert masked_mean(jnp.asarray([jnp.nan]), jnp.asarray([False])) == 0
