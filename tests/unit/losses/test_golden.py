"""Every variant of TRL, verl and slime for which there is a rule here; docs/rules.md explains each convention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import losses
from sat_jax.losses import Cispo, DualClip, Icepop, LossConfig, LossInputs, Opsm, Ppo, Rule, Tis
from tests.helpers import golden_losses as golden
from tests.helpers.golden_losses import Case

VARIANTS = golden.description()["variants"]
NOT_OURS = {
    "verl/vanilla_tis_token_bn": "weights divided by their batch mean",
    "verl/vanilla_rs_token_k1": "rejection that changes the denominators",
    "verl/vanilla_rs_seq_mean_k1": "rejection that changes the denominators",
    "verl/vanilla_rs_seq_sum_k1": "rejection that changes the denominators",
    "verl/vanilla_tis_rs": "rejection that changes the denominators",
    "verl/gpg": "no ratio at all",
}


@dataclasses.dataclass(frozen=True)
class Twin:
    """Our side of a variant: a configuration, and what the other library counts differently."""

    config: LossConfig
    factor: Callable[[Case], float] = lambda case: 1.0
    sequences: Callable[[Case], float] | None = None
    tokens: Callable[[Case], float] | None = None
    arrays: dict[str, str] = dataclasses.field(default_factory=dict)
    rtol: float = 1e-9


def all_rows(case: Case) -> float:
    return float(case.rows)


def trl(p: dict[str, Any]) -> Twin:
    rules: list[Rule] = [Ppo()]
    settings, extra = {}, {}
    kind = p["loss_type"]
    low, high = p.get("eps", [0.2, 0.2])
    if kind == "cispo":  # epsilon_high is the bound itself and there is no lower bound
        rules, low, high = [Cispo()], 1.0, high - 1
    if "delta" in p:
        rules = [DualClip(p["delta"])]
    if "opsm" in p:
        rules.append(Opsm(p["opsm"]))
    if "vllm" in p:
        level, form = p["vllm"].split("_")
        level = {"token": "token", "sequence": "sequence_product"}[level]
        if form == "truncate":
            rules.append(Tis(cap=p["cmax"], floor=p.get("cmin", 0.0), level=level))
        else:
            rules.append(Icepop(lower=p["cmin"], upper=p["cmax"], level=level))
    if kind in ("bnpo", "dapo", "cispo"):
        settings["loss_agg_mode"] = "token-mean"
        if "num_items" in p:
            extra["tokens"] = lambda case: p["num_items"]
    else:
        extra["sequences"] = all_rows
        if kind in ("dr_grpo", "luspo"):
            settings["loss_agg_mode"] = "seq-mean-token-sum-norm"
            settings["loss_scale_factor"] = float(p.get("max_completion_length", 1))
        if "accum" in p:
            extra["factor"] = lambda case: 1 / p["accum"]
    unit = "sequence" if p.get("level") == "sequence" else "token"
    kl = {"kl_loss_coef": p.get("beta", 0.0), "kl_loss_type": "k3", "kl_unbiased": p.get("biaskl", False)}
    config = LossConfig(
        rules=tuple(rules), unit=unit, denominator="rollout_policy", eps_low=low, eps_high=high, **kl, **settings
    )
    return Twin(config, **extra)


def verl(p: dict[str, Any]) -> Twin:
    settings: dict[str, Any] = {"eps_low": p["lo"], "eps_high": p["hi"]}
    extra: dict[str, Any] = {}
    rules: list[Rule] = [{"vanilla": DualClip(p.get("cc", 3.0)), "gspo": Ppo(), "cispo": Cispo()}[p["fn_name"]]]
    if p["fn_name"] == "gspo":
        settings["unit"] = "sequence_token"
    if p.get("token_adv"):
        extra["arrays"] = {"advantages": "token_advantages"}
    if "is_thr" in p:
        level = {"token": "token", "sequence": "sequence_product"}[p["is_level"]]
        if isinstance(p["is_thr"], str):
            lower, upper = map(float, p["is_thr"].split("_"))
            rules.append(Icepop(lower=lower, upper=upper, level=level))
        else:
            rules.append(Tis(cap=p["is_thr"], level=level))
    agg = p["agg"]
    info = p.get("info", {})
    if agg == "token-sum":
        settings["loss_agg_mode"] = "token-mean"
        extra["tokens"] = lambda case: 1.0
    elif agg.startswith("seq-mean-token-sum"):
        settings["loss_agg_mode"] = "seq-mean-token-sum-norm"
        settings["loss_scale_factor"] = float(info.get("loss_scale_factor", 1.0))
        if agg.endswith("norm") and not info:
            extra["factor"] = lambda case: 1 / case.width  # the default scale is the padded length
    else:
        settings["loss_agg_mode"] = agg
    if agg == "seq-mean-token-mean":
        extra["rtol"] = 3e-8  # verl divides by n + 1e-8
    if "dp_size" in info:
        extra["factor"] = lambda case: info["dp_size"]
        extra["tokens"] = lambda case: info["batch_num_tokens"]
        extra["sequences"] = lambda case: info["global_batch_size"]
    return Twin(LossConfig(rules=tuple(rules), denominator="rollout_policy", **settings), **extra)


def verl_kl(p: dict[str, Any]) -> Twin:
    config = LossConfig(kl_loss_coef=1.0, kl_loss_type=p["kl_penalty"], loss_agg_mode=p["agg"])
    return Twin(config, arrays={"advantages": "zero"})


def slime(p: dict[str, Any]) -> Twin:
    rules: list[Rule] = [Cispo() if p["est"] == "cispo" else Ppo()]
    settings: dict[str, Any] = {"eps_low": p.get("lo", 0.2), "eps_high": p.get("hi", 0.28)}
    extra: dict[str, Any] = {"sequences": all_rows}
    if p["est"] == "gspo":
        settings["unit"] = "sequence"
    if "c_" in p:
        rules = [DualClip(p["c_"])]
    if "tis" in p and "tis_fn" in p:
        rules.append(Icepop(lower=p["tis"][0], upper=p["tis"][1]))
    elif "tis" in p:
        rules.append(Tis(floor=p["tis"][0], cap=p["tis"][1]))
    if "opsm" in p:  # the drift is measured with the step-start log-probs against the rollout's
        rules.append(Opsm(p["opsm"]))
        extra["arrays"] = {"behavior_log_probs": "old_logps"}
    if "kl" in p:
        settings |= {"kl_loss_coef": 0.04, "kl_loss_type": p["kl"], "kl_unbiased": p.get("ub", False)}
        extra["rtol"] = 2e-7  # slime's KL is float32
    if p.get("per_token"):
        settings["loss_agg_mode"] = "token-mean"
        extra["tokens"] = lambda case: 1.0  # it returns the sum and leaves the division to its caller
    return Twin(LossConfig(rules=tuple(rules), denominator="rollout_policy", **settings), **extra)


TRANSLATE = {"trl": trl, "verl": verl, "verl_kl": verl_kl, "slime": slime}
NAMES = [f"{lib}/{name}" for lib in TRANSLATE for name in VARIANTS[lib] if f"{lib}/{name}" not in NOT_OURS]


def run(twin: Twin, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Losses [20] and gradients [20, 6, 12]."""
    loss_fn = losses.make_loss(twin.config)

    def array(name: str, key: str) -> jax.Array:
        key = twin.arrays.get(name, key)
        return jnp.asarray(np.zeros((20, 6)) if key == "zero" else golden.stacked(key), dtype)

    inputs = LossInputs(
        log_probs=array("log_probs", "logps"),
        behavior_log_probs=array("behavior_log_probs", "rollout_logps"),
        advantages=array("advantages", "advantages"),
        loss_mask=jnp.asarray(golden.stacked("mask"), bool),
        reference_log_probs=array("reference_log_probs", "ref_logps"),
        rollout_policy_log_probs=array("rollout_policy_log_probs", "old_logps"),
    )

    def count(override: Callable[[Case], float] | None) -> jax.Array:
        return jnp.asarray([np.nan if override is None else override(case) for case in golden.cases()], dtype)

    def loss(log_probs: jax.Array, batch: LossInputs, tokens: jax.Array, n: jax.Array) -> jax.Array:
        batch = batch.replace(log_probs=log_probs)
        summary = loss_fn.summarize(batch)
        summary = summary.replace(
            tokens=jnp.where(jnp.isnan(tokens), summary.tokens, tokens),
            sequences=jnp.where(jnp.isnan(n), summary.sequences, n),
        )
        return loss_fn.rows(batch, summary).loss.sum()

    value, gradient = jax.vmap(jax.value_and_grad(loss))(
        inputs.log_probs, inputs, count(twin.tokens), count(twin.sequences)
    )
    factor = np.array([twin.factor(case) for case in golden.cases()])
    return np.asarray(value, np.float64) * factor, np.asarray(gradient, np.float64) * factor[:, None, None]


@pytest.mark.parametrize("name", NAMES)
def test_variant(name: str) -> None:
    library, variant = name.split("/")
    twin = TRANSLATE[library](VARIANTS[library][variant])
    with jax.enable_x64(True):
        values, gradients = run(twin, np.float64)
    values32, gradients32 = run(twin, np.float32)
    compared = 0
    for i, case in enumerate(golden.cases()):
        loss = golden.expected(name, case, "loss")
        if loss is None or not np.isfinite(loss):
            continue
        compared += 1
        gradient = np.zeros((golden.B, golden.T))
        gradient[: case.rows, : case.width] = golden.expected(name, case, "grad")
        np.testing.assert_allclose(values[i], loss, rtol=twin.rtol, atol=twin.rtol, err_msg=case.name)
        np.testing.assert_allclose(gradients[i], gradient, rtol=twin.rtol, atol=twin.rtol, err_msg=case.name)
        assert abs(values32[i] - loss) <= 1e-6 * max(10, abs(loss)), case.name
        np.testing.assert_allclose(gradients32[i], gradient, rtol=0, atol=2e-6, err_msg=case.name)
    assert compared >= 18


def test_what_is_left_out_is_named() -> None:
    everything = {f"{lib}/{name}" for lib in TRANSLATE for name in VARIANTS[lib]}
    assert set(NAMES) | set(NOT_OURS) == everything


@pytest.mark.parametrize(
    ("name", "kind", "eps"),
    [
        ("trl_advantages/group", "group_std_unbiased", 1e-4),
        ("trl_advantages/none", "group_mean", 0.0),
        ("verl_advantages/grpo", "group_std_unbiased", 1e-6),
        ("verl_advantages/grpo_nostd", "group_mean", 0.0),
        ("verl_advantages/rloo", "leave_one_out", 0.0),
    ],
)
def test_advantages(name: str, kind: losses.AdvantageKind, eps: float) -> None:
    compared = 0
    for case in golden.cases():
        want = golden.arrays().get(f"{name}/{case.name}")
        if want is None or case.group_size == 1:  # verl gives a lone response its own reward; here it gets 0
            continue
        got = losses.group_advantages(case["rewards"], case["group_ids"], kind=kind, eps=eps)
        if want.ndim == 2:
            got = got[:, None] * case["mask"]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9, err_msg=case.name)
        compared += 1
    assert compared == 18


def test_verl_counts_the_same_clipped_tokens() -> None:
    loss_fn = losses.make_loss(LossConfig(eps_high=0.28, denominator="rollout_policy"))
    inputs = LossInputs(
        log_probs=jnp.asarray(golden.stacked("logps"), jnp.float32),
        behavior_log_probs=jnp.asarray(golden.stacked("rollout_logps"), jnp.float32),
        rollout_policy_log_probs=jnp.asarray(golden.stacked("old_logps"), jnp.float32),
        advantages=jnp.asarray(golden.stacked("advantages"), jnp.float32),
        loss_mask=jnp.asarray(golden.stacked("mask"), bool),
    )
    _, metrics = jax.jit(jax.vmap(loss_fn))(inputs)
    want = [golden.expected("verl/vanilla_token-mean", case, "clipfrac") for case in golden.cases()]
    np.testing.assert_allclose(metrics["train/clip_fraction"], want, rtol=1e-6)
