"""What each named method is made of, and that SAT switched off leaves nothing behind."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import losses
from sat_jax.losses import (
    Cispo,
    Decoupled,
    Dppo,
    Drpo,
    DualClip,
    Icepop,
    Kpop,
    LossConfig,
    LossInputs,
    Ppo,
    Rule,
    Sat,
    Seqclip,
    Spo,
    Tis,
    TisReinforce,
    Unclipped,
)

# method: (rules, unit, what the ratio divides by)
MADE_OF = {
    "grpo": ((Ppo(),), "token", "rollout"),
    "gspo": ((Ppo(),), "sequence", "rollout"),
    "grpo-tis": ((Ppo(), Tis()), "token", "rollout_policy"),
    "gspo-tis": ((Ppo(), Tis()), "sequence", "rollout_policy"),
    "dppo": ((Ppo(), Dppo()), "token", "rollout"),
    "sat-grpo": ((Ppo(), Sat()), "token", "rollout"),
    "sat-gspo": ((Ppo(), Sat()), "sequence", "rollout"),
}
EXAMPLE = LossInputs(
    log_probs=jnp.log(jnp.asarray([[0.5, 0.3, 0.2, 0.9]])),
    behavior_log_probs=jnp.log(jnp.asarray([[0.4, 0.4, 0.1, 0.9]])),
    advantages=jnp.asarray([[1.0, 1.0, 1.0, 1.0]]),
    loss_mask=jnp.ones((1, 4), bool),
    rollout_policy_log_probs=jnp.log(jnp.asarray([[0.45, 0.35, 0.3, 0.9]])),
)


@pytest.mark.parametrize("name", losses.TABLE_1)
def test_table_1(name: str) -> None:
    base = name.removesuffix("-r3")
    config, replay = losses.split_method(name)
    assert (config.rules, config.unit, config.denominator) == MADE_OF[base]
    assert config == losses.method(base)
    assert config.name == config.label == base
    assert replay == (base != name)
    assert (config.eps_low, config.eps_high) == (0.2, 0.2)
    assert config.loss_agg_mode == "seq-mean-token-mean"
    assert config.kl_loss_coef == config.entropy_coef == 0


def test_the_settings_of_table_1_are_the_papers() -> None:
    assert Sat() == Sat(alpha=0.9, exponent=2.0, scope="batch", shards=1, q_floor=0.0, q_cap=None)
    assert Tis() == Tis(cap=2.0, floor=0.0, level="token")
    assert Dppo() == Dppo(delta=1e-3)


def test_a_method_of_training_is_no_loss() -> None:
    with pytest.raises(ValueError, match="its loss is 'sat-gspo'"):
        losses.method("sat-gspo-r3")
    with pytest.raises(ValueError, match="did you mean 'sat-gspo'"):
        losses.method("sat-gsp")


def test_thirteen_methods() -> None:
    assert len(losses.TABLE_1) == len(set(losses.TABLE_1)) == 13
    assert {name.removesuffix("-r3") for name in losses.TABLE_1} == set(MADE_OF)


def loss(name: str) -> float:
    return float(losses.make_loss(losses.method(name))(EXAMPLE)[0])


def test_hand_computed_losses() -> None:
    ratios = np.array([1.25, 0.75, 2.0, 1.0])
    clipped = np.minimum(ratios, 1.2)  # A = 1: only the upper boundary matters
    assert loss("grpo") == pytest.approx(-clipped.mean(), rel=1e-6)
    rho = ratios.prod() ** 0.25
    assert loss("gspo") == pytest.approx(-min(rho, 1.2), rel=1e-6)
    weights = np.minimum(np.array([0.45 / 0.4, 0.35 / 0.4, 3.0, 1.0]), 2)
    own = np.minimum(np.array([0.5 / 0.45, 0.3 / 0.35, 0.2 / 0.3, 1.0]), 1.2)
    assert loss("grpo-tis") == pytest.approx(-(weights * own).mean(), rel=1e-6)
    rho_own = np.array([0.5 / 0.45, 0.3 / 0.35, 0.2 / 0.3, 1.0]).prod() ** 0.25
    assert loss("gspo-tis") == pytest.approx(-(weights * min(rho_own, 1.2)).mean(), rel=1e-6)
    keep = np.array([0, 1, 0, 1])  # |pi - mu| = .1, .1, .1, 0; the second pulls back
    assert loss("dppo") == pytest.approx(-(keep * clipped).mean(), rel=1e-6)
    # alpha = .9 of 4 tokens: q is the largest |d|, nothing is gated.
    assert loss("sat-grpo") == loss("grpo")
    q = np.log(4 / 3)  # alpha = .7: ceil(2.8) = 3rd smallest of 0, .223, .288, .693
    sharper = losses.method("sat-grpo").with_rules(Sat(alpha=0.7))
    radius = 0.2 / (1 + (np.log(2) / q) ** 2)
    want = -np.array([1.2, 0.75, 1 + radius, 1.0]).mean()
    assert float(losses.make_loss(sharper)(EXAMPLE)[0]) == pytest.approx(want, rel=1e-6)


def test_beyond_table_1() -> None:
    r, mu, pi = np.array([1.25, 0.75, 2.0, 1.0]), np.array([0.4, 0.4, 0.1, 0.9]), np.array([0.5, 0.3, 0.2, 0.9])
    own = np.array([0.5 / 0.45, 0.3 / 0.35, 0.2 / 0.3, 1.0])
    k = np.array([0.45 / 0.4, 0.35 / 0.4, 3.0, 1.0])
    assert loss("spo") == pytest.approx(-(r - (r - 1) ** 2 / 0.4).mean(), rel=1e-5)
    assert loss("drpo") == pytest.approx(-(r - mu * (r - 1) ** 2 / 2e-3).mean(), rel=1e-5)
    assert loss("cispo") == pytest.approx(-(np.clip(r, 0.8, 1.2) * np.log(pi)).mean(), rel=1e-5)
    assert loss("tis-reinforce") == pytest.approx(-(np.minimum(r, 2) * np.log(pi)).mean(), rel=1e-5)
    assert loss("icepop") == pytest.approx(-(k * np.minimum(own, 1.2)).mean(), rel=1e-5)
    assert loss("seqclip") == 0  # rho = 1.17 leaves the band
    assert loss("kpop") == pytest.approx(-np.minimum(r, 1.2).mean(), rel=1e-5)


@pytest.mark.parametrize("base", ["grpo", "gspo", "grpo-tis", "dppo", "cispo", "kpop"])
def test_sat_off_is_the_same_program(base: str) -> None:
    config = losses.method(base)
    with_sat = config.with_rules(Sat())
    off = dataclasses.replace(with_sat.without(Sat), name="switched off")

    def program(config: LossConfig) -> str:
        loss_fn = losses.make_loss(config)
        return str(
            jax.make_jaxpr(jax.value_and_grad(lambda lp: loss_fn(EXAMPLE.replace(log_probs=lp)), has_aux=True))(
                EXAMPLE.log_probs
            )
        )

    assert program(off) == program(config)
    assert program(with_sat) != program(config)


def test_unknown_names_are_answered() -> None:
    for name, hint in (
        ("sat-grop", "sat-grpo"),
        ("gspo-tis-r4", "gspo-tis"),
    ):
        with pytest.raises(ValueError, match=f"'{hint}"):
            losses.method(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps_low": 0.0}, "eps_low = 0.0"),
        ({"eps_high": -0.1}, "eps_high = -0.1"),
        ({"eps_high": float("nan")}, "eps_high = nan"),
        ({"rules": (Ppo(), Cispo())}, "2 surrogates"),
        ({"rules": (Sat(),)}, "0 surrogates"),
        ({"rules": ()}, "0 surrogates"),
        ({"rules": (Ppo(), Ppo())}, "repeats"),
        ({"rules": ("ppo",)}, "holds 'ppo'"),
        ({"rules": (Ppo,)}, r"make a rule of it, Ppo\(\)"),
        ({"rules": [Ppo()]}, "must be a tuple"),
        ({"rules": (Ppo(), Tis(), Icepop())}, "tis and icepop"),
        ({"rules": (Unclipped(), Spo(), Drpo())}, "spo and drpo"),
        ({"rules": (TisReinforce(), Sat())}, "no interval"),
        ({"rules": (Ppo(), Decoupled())}, "use 'proximal'"),
        ({"loss_agg_mode": "token_mean"}, "did you mean 'token-mean'"),
        ({"unit": "tokens"}, "did you mean 'token'"),
        ({"kl_loss_coef": -1.0}, "kl_loss_coef = -1.0"),
        ({"kl_loss_type": "k4"}, "kl_loss_type = 'k4'"),
        ({"loss_scale_factor": 0.0}, "loss_scale_factor = 0.0"),
        ({"kl_unbiased": True, "kl_loss_type": "k1+"}, "only k1 and k3 are made exact"),
        ({"kl_unbiased": True, "kl_loss_type": "k2"}, "only k1 and k3 are made exact"),
        ({"kl_unbiased": True, "kl_loss_type": "k3+"}, "only k1 and k3 are made exact"),
    ],
)
def test_bad_configurations(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**change)


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (Sat, {"alpha": 1.0}, "alpha = 1.0"),
        (Sat, {"alpha": 0}, "alpha = 0"),
        (Sat, {"exponent": 0.0}, "exponent = 0.0"),
        (Sat, {"q_floor": -1.0}, "q_floor"),
        (Sat, {"q_floor": 0.2, "q_cap": 0.1}, "q_cap = 0.1"),
        (Sat, {"scope": "mesh"}, "scope = 'mesh'"),
        (Sat, {"shards": 4}, "shards = 4"),
        (Dppo, {"delta": 0.0}, "delta"),
        (Drpo, {"delta": -1.0}, "delta"),
        (Kpop, {"phi": 0.0}, "phi"),
        (Tis, {"cap": 0.0}, "cap"),
        (Tis, {"level": "sequence"}, "level"),
        (Icepop, {"lower": 2.0}, r"must lie in \[0, 1\)"),
        (Seqclip, {"upper": 0.9}, "must be above 1"),
        (DualClip, {"bound": 1.0}, "bound"),
        (TisReinforce, {"cap": 0.0}, "cap"),
        (Decoupled, {"cap": 0.0}, "cap"),
    ],
)
def test_bad_rule_settings(rule: type[Rule], settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.ones((1, 3))}, "loss_mask has shape"),
        ({"advantages": np.ones((4,))}, "advantages has shape"),
        ({"log_probs": np.zeros(4)}, "log_probs has shape"),
        ({"log_probs": np.zeros((1, 4), int)}, "must be floating"),
        ({"segment_ids": np.ones((1, 4))}, "must be an integer"),
    ],
)
def test_bad_shapes_at_trace_time(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(losses.make_loss(losses.method("grpo")), EXAMPLE.replace(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.array([[0, 1, 2, 1]])}, "loss_mask holds 2"),
        ({"loss_mask": np.array([[0, 1, np.nan, 1]])}, "loss_mask holds nan"),
        ({"log_probs": np.array([[0, 0.5, 0, 0]])}, r"log_probs\[0, 1\] = 0.5"),
        ({"behavior_log_probs": np.array([[0, 0, 0, np.nan]])}, r"behavior_log_probs\[0, 3\] = nan"),
        ({"advantages": np.array([[0, np.nan, 0, 0]])}, r"advantages\[0, 1\] = nan"),
    ],
)
def test_bad_values(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        losses.check_values(EXAMPLE.replace(**change))
    everywhere_masked = EXAMPLE.replace(**({"loss_mask": np.zeros((1, 4), bool)} | change))
    if "loss_mask" not in change:
        losses.check_values(everywhere_masked)
