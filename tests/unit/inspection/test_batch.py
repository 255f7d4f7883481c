"""inspect, geometry and methods: right numbers, names of other trainers, one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sat_jax import losses
from sat_jax.cli.losses import geometry, inspect, methods
from sat_jax.inspection.batch import Settings
from sat_jax.inspection.geometry import curve

pytestmark = pytest.mark.slow

D = np.array([[0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.15, 9.0]])


def arrays() -> dict[str, np.ndarray]:
    behavior = np.full(D.shape, -1.0)
    mask = np.ones(D.shape, int)
    mask[0, -1] = 0
    return {
        "log_probs": behavior + D,
        "behavior_log_probs": behavior,
        "advantages": np.ones(D.shape),
        "loss_mask": mask,
    }


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "batch.npz"
    np.savez(path, **arrays())
    return path


def test_json_and_gradient(batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(batch, method="sat-grpo", json_=True, grad=tmp_path / "g.npz", plot=tmp_path / "p.png")
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "sat-grpo"
    assert found["tokens"] == 10
    assert found["q"] == pytest.approx(0.08)
    assert found["gate_rate"] == found["intercept_rate"] == found["clip_fraction"] == pytest.approx(0.1)
    assert found["d_bar"] == pytest.approx(D[0, :10].mean())
    assert found["c_high_min"] == pytest.approx(1 / (1 + (0.15 / 0.08) ** 2), rel=1e-5)
    assert found["c_low_min"] == 1
    assert found["sat"]["newly_intercepted_tokens"] == 1
    assert found["sat"]["window"].startswith("acts: q = 0.08")
    r = np.exp(D[0, :10])
    bound = 1 + 0.2 * found["c_high_min"]
    assert found["loss"] == pytest.approx(-np.append(r[:9], bound).mean(), rel=1e-5)
    gradient = np.load(tmp_path / "g.npz")["grad"]
    np.testing.assert_allclose(gradient[0, :9], -r[:9] / 10, rtol=1e-5)
    assert (gradient[0, 9:] == 0).all()
    assert found["sat"]["newly_intercepted_gradient_share"] == pytest.approx(r[9] / r.sum(), rel=1e-5)
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_names_of_other_trainers_compare_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = arrays()
    np.savez(
        tmp_path / "verl.npz",
        log_prob=ours["log_probs"],
        rollout_log_probs=ours["behavior_log_probs"],
        old_log_probs=ours["behavior_log_probs"],
        advantages=ours["advantages"],
        response_mask=ours["loss_mask"],
    )
    np.savez(
        tmp_path / "trl.npz",
        per_token_logps=ours["log_probs"],
        sampling_per_token_logps=ours["behavior_log_probs"],
        advantages=np.ones(1),
        completion_mask=np.ones(D.shape, int),
        tool_mask=ours["loss_mask"],
    )
    inspect(tmp_path, compare="grpo,sat-grpo,dppo", json_=True)
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["file"], r["method"]) for r in results] == [
        (file, method) for file in ("trl.npz", "verl.npz") for method in ("grpo", "sat-grpo", "dppo")
    ]
    assert len({r["loss"] for r in results if r["method"] == "sat-grpo"}) == 1
    inspect(tmp_path, compare="grpo,gspo")
    assert "note: behavior_log_probs = rollout_log_probs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"loss_mask": None}, {}, "has no array 'loss_mask'.*there are: advantages"),
        ({"loss_mask": np.full(D.shape, 0.5)}, {}, "loss_mask holds 0.5"),
        ({"log_probs": np.full(D.shape, 0.5)}, {}, r"log_probs\[0, 0\] = 0.5"),
        ({"advantages": np.full(D.shape, np.nan)}, {}, r"advantages\[0, 0\] = nan"),
        ({"advantages": np.ones(7)}, {}, "advantages has shape"),
        ({}, {"method": "grpo-tis"}, "rollout_policy_log_probs, which is missing"),
        ({}, {"settings": Settings(kl_loss_coef=0.1)}, "reference_log_probs, which is missing"),
        ({}, {"settings": Settings(alpha=1.0)}, "alpha = 1.0"),
        ({}, {"settings": Settings(eps_low=0.0)}, "eps_low = 0.0"),
        ({}, {"method": "sat-grop"}, "did you mean 'sat-grpo'"),
        ({}, {"compare": "grpo,gspo", "plot": Path("x.png")}, "one method on one batch"),
        ({}, {"plot": Path("x.nothing")}, "use .png"),
        ({}, {"grad": Path("x.csv")}, "ends in .npz"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict, options: dict, message: str) -> None:
    path = tmp_path / "batch.npz"
    np.savez(path, **{k: v for k, v in (arrays() | changes).items() if v is not None})
    with pytest.raises(ValueError, match=message):
        inspect(path, **options)


@pytest.mark.parametrize("method", ["gspo-tis", "sat-gspo", "dppo", "drpo", "decoupled-ppo"])
def test_every_method_on_a_packed_batch(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batch.npz"
    extra = {name: arrays()["log_probs"] - 0.01 for name in ("old_log_probs", "proximal_log_probs")}
    np.savez(path, segment_ids=np.array([[4] * 6 + [5] * 5]), **arrays(), **extra)
    inspect(path, method=method, json_=True)
    found = json.loads(capsys.readouterr().out)
    required = "method tokens loss d_bar q gate_rate eps_low_mean eps_high_mean c_low_min c_high_min clip_fraction"
    assert {*required.split(), "intercept_rate"} <= found.keys()
    assert found["method"] == method
    assert found["q"] > 0


def test_files_that_are_not_batches(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        inspect(tmp_path / "nothing.npz")
    with pytest.raises(ValueError, match=r"holds no \.npz"):
        inspect(tmp_path)
    (tmp_path / "text.npz").write_text("not a zip")
    with pytest.raises(ValueError, match=r"not an \.npz archive"):
        inspect(tmp_path / "text.npz")


def test_geometry(tmp_path: Path) -> None:
    geometry(method="dppo", out=tmp_path / "dppo.png", mu=0.05)
    assert (tmp_path / "dppo.png").stat().st_size > 10_000
    c = curve(losses.method("grpo"), -1.0, 0.3, 0.05)
    r = np.exp(c.log_ratio)
    np.testing.assert_allclose(c.gradient, np.where(r < 0.8, 0, -r), atol=1e-5)
    tis = curve(losses.method("grpo-tis"), 1.0, 0.3, 0.05, span=2.0)
    np.testing.assert_allclose(tis.gradient, np.minimum(np.exp(tis.log_ratio), 2), rtol=1e-5)
    for settings, message in (({"mu": 0.0}, "mu = 0.0"), ({"q": -1.0}, "q = -1.0")):
        with pytest.raises(ValueError, match=message):
            geometry(method="grpo", out=tmp_path / "x.png", **settings)


def test_methods_table(capsys: pytest.CaptureFixture[str]) -> None:
    methods(json_=True)
    found = json.loads(capsys.readouterr().out)
    assert list(found)[:13] == list(losses.TABLE_1)
    assert found["sat-gspo-r3"]["replay"] is True
    assert found["grpo-tis"]["needs"] == ["rollout_policy_log_probs"]
    methods()
    shown = capsys.readouterr().out
    assert all(name in shown for name in losses.METHODS)
    assert "icepop" in shown
