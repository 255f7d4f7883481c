"""Run by test_local.py in a process with two CPU devices: learner on one, engine on the other; engine on both."""

import jax
import numpy as np

from sat_jax import model
from sat_jax.rollout import Request, SamplingParams
from sat_jax.rollout.local import LocalEngine
from sat_jax.types import Prompt
from tests.unit.rollout.local.test_engine import CFG, LEAN


def main() -> None:
    learner, rollout = jax.devices()
    old, new = (
        jax.device_put(model.init_params(jax.random.key(seed), CFG, dtype="float32"), learner) for seed in (0, 1)
    )
    prompt = Prompt("p", "", np.arange(2, 8, dtype=np.int32), "", "test")
    requests = [Request(str(i), prompt, i, SamplingParams(max_new_tokens=6, seed=i)) for i in range(3)]
    texts = []
    for device in (None, rollout):
        engine = LocalEngine(CFG, old, device=device, **LEAN)
        first = sorted(engine.generate(requests), key=lambda t: t.sample_index)
        engine.update_weights(new, 1)
        second = sorted(engine.generate(requests), key=lambda t: t.sample_index)
        assert set(engine.device_bytes) == {device or learner}
        alone = sum(engine.device_bytes.values())
        texts.append([(t.response_ids.tolist(), t.log_probs.tolist()) for t in first + second])
    assert texts[0] == texts[1], "the device makes a difference"

    mesh = jax.make_mesh((1, 1, 1, 2), model.MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)
    sharded = jax.device_put(old, model.param_shardings(CFG, mesh))
    options = model.ForwardOptions(placement=model.Placement(mesh))
    engine = LocalEngine(CFG, sharded, options=options, **LEAN)
    for t in engine.generate(requests):
        ids, log_probs = texts[0][t.sample_index]
        assert t.response_ids.tolist() == ids
        np.testing.assert_allclose(t.log_probs, log_probs, atol=1e-5)
    assert set(engine.device_bytes) == {learner, rollout}
    assert max(engine.device_bytes.values()) < 0.7 * alone, "nothing is cut"
    print("same")


if __name__ == "__main__":
    main()
