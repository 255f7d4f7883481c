"""examples/tunix_sat.py: its arithmetic always, its registration where Tunix is installed."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import losses
from tests.helpers import ROOT

pytestmark = pytest.mark.slow


def example() -> ModuleType:
    path = ROOT / "examples" / "tunix_sat.py"
    spec = importlib.util.spec_from_file_location("tunix_sat", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_example() -> SimpleNamespace:
    rng = np.random.default_rng(0)
    old = jnp.asarray(-rng.random((3, 8)) - 0.5, jnp.float32)
    return SimpleNamespace(
        prompt_ids=None,
        completion_ids=None,
        completion_mask=jnp.asarray(rng.random((3, 8)) < 0.8, jnp.int32),
        advantages=jnp.asarray([1.0, -1.0, 0.5]),
        ref_per_token_logps=old,
        old_per_token_logps=old,
        segment_ids=None,
        segment_positions=None,
    )


@pytest.mark.parametrize("method", ["sat-grpo", "sat-gspo"])
def test_the_adapter_is_the_loss(method: str) -> None:
    batch = train_example()
    log_probs = batch.old_per_token_logps + 0.1
    loss, metrics = example().sat_loss(method, log_probs, batch)
    inputs = losses.LossInputs(log_probs, batch.old_per_token_logps, batch.advantages, batch.completion_mask)
    assert loss == losses.make_loss(losses.method(method))(inputs)[0]
    assert metrics["sat/q"] > 0
    with_kl, _ = example().sat_loss(method, log_probs, batch, kl_loss_coef=0.1)
    assert with_kl > loss


def test_registration() -> None:
    pytest.importorskip("tunix.rl.common", reason="Tunix is not installed", exc_type=ImportError)
    from tunix.rl import common, function_registry

    module = example()
    module.register()
    registered = function_registry.get_policy_loss_fn("sat-gspo")
    batch = train_example()
    log_probs = batch.old_per_token_logps + 0.05
    config = SimpleNamespace(beta=0.0, epsilon=0.2, epsilon_high=0.28, temperature=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "compute_per_token_logps", lambda *_, **__: log_probs)
        from flax import nnx

        patch.setattr(nnx, "split", lambda model: (None, None))
        loss, _ = registered(None, batch, config, 0, 1)
    assert jax.numpy.isfinite(loss)
