"""Router, replay and the three implementations of the expert MLP, against loops over tokens and every expert on all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import model
from sat_jax.model import experts as experts_of
from sat_jax.model import moe

pytestmark = pytest.mark.slow

CFG = model.ModelConfig(
    model_type="qwen3_moe",
    vocab_size=8,
    hidden_size=12,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=4,
    moe_intermediate_size=6,
    num_experts=5,
    num_experts_per_tok=2,
)
IMPLEMENTATIONS = ("slots", "blocked", "ragged")
B, T, D, E, K = 3, 7, CFG.hidden_size, CFG.num_experts, CFG.num_experts_per_tok


def layer(seed=0, skew=0.0):
    rng = np.random.default_rng(seed)
    p = {
        "router": rng.normal(size=(D, E)).astype(np.float32),
        "gate": rng.normal(size=(E, D, 6)).astype(np.float32),
        "up": rng.normal(size=(E, D, 6)).astype(np.float32),
        "down": rng.normal(size=(E, 6, D)).astype(np.float32),
    }
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    p["router"][:, 3] += skew * x.reshape(-1, D).mean(0)
    return p, x


def by_hand(p, x, indices, weights):
    y = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        for k, e in enumerate(indices[b, t]):
            a, u = x[b, t] @ p["gate"][e], x[b, t] @ p["up"][e]
            y[b, t] += weights[b, t, k] * ((a / (1 + np.exp(-a)) * u) @ p["down"][e])
    return y


def apply(p, x, valid, recorded=None, implementation="slots", cfg=CFG):
    p, x, valid = jax.tree.map(jnp.asarray, (p, x, valid))
    return moe.moe_mlp(p, cfg, x, valid, recorded, implementation, None)


VALID = np.arange(B * T).reshape(B, T) % 5 != 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "all-on-two-experts"])
def test_output_is_the_weighted_sum_of_the_chosen_experts(implementation, crowded):
    p, x = layer()
    if crowded:  # every token to experts 3 and 1: nothing may be dropped
        p["router"][:] = 0
        recorded = jnp.broadcast_to(jnp.array([3, 1]), (B, T, K))
    else:
        recorded = None
    y, router = jax.jit(apply, static_argnames="implementation")(p, x, VALID, recorded, implementation=implementation)
    logits = x @ p["router"]
    indices = np.asarray(router.indices)
    chosen = np.take_along_axis(logits, indices, -1)
    weights = np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True)
    if not crowded:
        np.testing.assert_array_equal(indices, np.argsort(-logits, -1)[..., :K])
    np.testing.assert_allclose(np.asarray(y)[VALID], by_hand(p, x, indices, weights)[VALID], rtol=2e-5, atol=2e-5)
    assert not np.asarray(y)[~VALID].any()


def every_expert(x, indices, weights, experts):
    """``[N, D]``: every expert on every token, weighted; padding's index is E."""
    gate, up, down = experts
    combine = jnp.sum(jnp.where(indices[..., None] == jnp.arange(len(gate)), weights[..., None], 0), axis=1)
    hidden = jax.nn.silu(jnp.einsum("nd,edf->enf", x, gate)) * jnp.einsum("nd,edf->enf", x, up)
    return jnp.einsum("enf,efd,ne->nd", hidden, down, combine)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 11, 64, 700])  # blocks of 1, 2, 8 and 64 rows
def test_values_and_gradients_are_those_of_every_expert(implementation, tokens):
    """Whatever the load: even, random with padding, or all of it on two experts."""
    p, _ = layer(tokens)
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(1, tokens, D)), jnp.float32)
    weights = jnp.asarray(rng.random((1, tokens, K)), jnp.float32)
    experts = tuple(jnp.asarray(p[name]) for name in ("gate", "up", "down"))
    target = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    even = (np.arange(tokens)[:, None] + np.arange(K)) % E
    some = np.where(rng.random((tokens, 1)) < 0.3, E, rng.permuted(np.tile(np.arange(E), (tokens, 1)), axis=1)[:, :K])
    crowded = np.broadcast_to([3, 1], (tokens, K))

    def grouped(x, weights, experts, indices):
        return jnp.sum(experts_of.apply_experts(x, indices[None], weights, experts, implementation, None) * target)

    def plain(x, weights, experts, indices):
        return jnp.sum(every_expert(x[0], indices, weights[0], experts) * target)

    for indices in (even, some, crowded):
        weighted = jnp.where(indices == E, 0, weights)
        found, expected = (
            jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, weighted, experts, jnp.asarray(indices, jnp.int32))
            for f in (grouped, plain)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-4), found, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_changes_nobody_and_is_not_counted(implementation):
    p, x = layer(3)
    program = jax.jit(apply, static_argnames="implementation")
    y, router = program(p, x, VALID, implementation=implementation)
    other = np.where(VALID[..., None], x, 1e3).astype(np.float32)
    z, again = program(p, other, VALID, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(y)[VALID], np.asarray(z)[VALID])
    for field in ("load", "probability", "log_z_squared", "tokens"):
        np.testing.assert_array_equal(getattr(router, field), getattr(again, field))
    assert router.load.sum() == VALID.sum() * K
    assert router.tokens == VALID.sum()


# ---------------------------------------------------------------- routing replay


def test_replayed_weights_are_a_softmax_over_the_recorded_set():
    """The recorded experts 1 and 2 although 0 is the largest, and gradients to 1 and 2 alone."""
    logits = jnp.array([2.0, 1.0, 0.0, -1.0])
    recorded = jnp.array([1, 2])
    indices, weights, has_record, agrees = moe.route(logits, 2, True, recorded)
    np.testing.assert_array_equal(indices, [1, 2])
    np.testing.assert_allclose(weights, [0.731059, 0.268941], atol=1e-6)
    assert bool(has_record)
    assert not bool(agrees)
    grads = jax.jit(jax.jacobian(lambda z: moe.route(z, 2, True, recorded)[1]))(logits)
    assert np.abs(grads[:, 1:3]).min() > 0.1
    assert not np.asarray(grads)[:, [0, 3]].any()


def test_replay_without_renormalisation_gathers_the_full_softmax():
    logits = jnp.array([2.0, 1.0, 0.0, -1.0])
    _, weights, *_ = moe.route(logits, 2, False, jnp.array([1, 2]))
    np.testing.assert_allclose(weights, [0.236883, 0.087144], atol=1e-6)
    grads = jax.jit(jax.jacobian(lambda z: moe.route(z, 2, False, jnp.array([1, 2]))[1]))(logits)
    assert np.abs(grads).min() > 1e-3  # every expert is in the denominator


def test_a_tie_does_not_overrule_the_record():
    logits = jnp.array([1.0, 1.0, 1.0, 0.0])
    indices, weights, *_ = moe.route(logits, 2, True, jnp.array([1, 2]))
    np.testing.assert_array_equal(indices, [1, 2])
    np.testing.assert_allclose(weights, [0.5, 0.5])


def test_rows_without_a_record_route_natively_and_sets_are_compared_without_order():
    logits = jnp.array([[3.0, 2.0, 1.0, 0.0]] * 3)
    recorded = jnp.array([[-1, -1], [1, 0], [0, 3]])
    indices, _, has_record, agrees = moe.route(logits, 2, True, recorded)
    np.testing.assert_array_equal(indices, [[0, 1], [1, 0], [0, 3]])
    np.testing.assert_array_equal(has_record, [False, True, True])
    np.testing.assert_array_equal(agrees, [False, True, False])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_reach_the_router_through_the_recorded_set(implementation):
    p, x = layer(4)
    recorded = jnp.broadcast_to(jnp.array([4, 0]), (B, T, K))

    def loss(router):
        return jnp.sum(jnp.sin(apply(p | {"router": router}, x, VALID, recorded, implementation)[0]))

    grad = np.asarray(jax.jit(jax.grad(loss))(p["router"]))
    assert np.abs(grad[:, [0, 4]]).min() > 0
    assert not grad[:, [1, 2, 3]].any()


# ---------------------------------------------------------------- auxiliary losses


def statistics(p, x, valid=VALID):
    _, router = jax.jit(apply)(p, x, valid)
    stacked = jax.tree.map(lambda leaf: leaf[None], router)
    return dataclasses.replace(stacked, tokens=router.tokens)


def test_balancing_loss_is_k_at_balance_and_its_gradient_pushes_down_the_crowded():
    p, x = layer(5)
    measured = statistics(p, x)
    balanced = dataclasses.replace(
        measured, load=jnp.full((1, E), 10.0), probability=jnp.full((1, E), 5.0), tokens=jnp.float32(25)
    )
    np.testing.assert_allclose(model.load_balancing_loss(balanced), K, rtol=1e-6)
    p["router"][:, 1] = 0
    everyone = jnp.broadcast_to(jnp.array([1, 0]), (B, T, K))

    def loss(bias):
        shifted = x @ p["router"] + bias
        weights = jax.nn.softmax(shifted)
        crowded = dataclasses.replace(
            measured,
            load=jnp.sum(everyone[..., None] == jnp.arange(E), (0, 1, 2), dtype=jnp.float32)[None],
            probability=weights.sum((0, 1))[None],
        )
        return model.load_balancing_loss(crowded)

    grad = jax.jit(jax.grad(loss))(jnp.zeros(E))
    assert grad[1] > 0
    assert (grad[2:] < 0).all()


def test_auxiliary_losses_of_micro_batches_add_up():
    p, x = layer(6)
    whole = statistics(p, x)
    parts = [statistics(p, x[i : i + 1], VALID[i : i + 1]) for i in range(B)]
    balance = sum(model.load_balancing_loss(part, load=whole.load, tokens=whole.tokens) for part in parts)
    np.testing.assert_allclose(balance, model.load_balancing_loss(whole), rtol=1e-6)
    z = sum(model.router_z_loss(part, tokens=whole.tokens) for part in parts)
    np.testing.assert_allclose(z, model.router_z_loss(whole), rtol=1e-6)
    log_z = np.log(np.exp(x @ p["router"]).sum(-1))[VALID]
    np.testing.assert_allclose(model.router_z_loss(whole), np.mean(log_z**2), rtol=1e-5)


def test_the_choice_of_implementation():
    assert experts_of.choose_implementation(4096, 128, 8, "tpu") == "ragged"
    assert experts_of.choose_implementation(16, 16, 4, "cpu") == "slots"  # a decode step: the weights are read anyway
    assert experts_of.choose_implementation(1, 128, 8, "cpu") == "blocked"  # few experts are touched: read only those
    assert experts_of.choose_implementation(2048, 16, 4, "cpu") == "blocked"


@pytest.mark.parametrize("crowded", [False, True])
def test_slots_hold_any_load_and_a_token_does_not_notice(crowded, monkeypatch):
    """32 tokens and room for 16 with each of 8 experts: a crowd that wants one expert gets the full room instead."""
    monkeypatch.setattr(experts_of, "SMALL_PROJECTION", 0)
    N, experts, D, F = 32, 8, 16, 12
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    weights = jnp.asarray(rng.random((N, 2)), jnp.float32)
    mlp = tuple(jnp.asarray(rng.normal(size=(experts, *shape)), jnp.float32) for shape in ((D, F), (D, F), (F, D)))
    even = np.stack([np.arange(N) % experts, (np.arange(N) + 1) % experts], axis=1)
    indices = even.copy()
    if crowded:
        indices[1:] = [3, 5]
    indices[7] = experts  # padding

    @jax.jit
    def program(x, indices, weights, mlp):
        return experts_of.apply_experts(x[None], indices[None], weights[None], mlp, "slots", None)[0]

    found = program(x, jnp.asarray(indices), weights.at[7].set(0), mlp)
    expected = every_expert(x, jnp.asarray(indices), weights.at[7].set(0), mlp)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    assert not np.asarray(found)[7].any()
    np.testing.assert_array_equal(found[0], program(x, jnp.asarray(even), weights, mlp)[0])
