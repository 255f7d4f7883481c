"""Run by test_engine.py in a process with two CPU devices: learner on one, engine on the other; engine on both."""

import json
import math
from collections import Counter
from collections.abc import Iterable

import jax
import numpy as np

from sat_jax import model
from sat_jax.rollout import Request, SamplingParams
from sat_jax.rollout.local import LocalEngine
from sat_jax.types import Prompt
from tests.unit.rollout.local.test_engine import CFG, LEAN


def held(arrays: Iterable[jax.Array] | None = None) -> Counter[jax.Device]:
    """Bytes by device: of ``arrays``, or of all that there are."""
    sizes: Counter[jax.Device] = Counter()
    for array in jax.live_arrays() if arrays is None else arrays:
        for device in array.sharding.device_set:
            sizes[device] += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return sizes


def main() -> None:
    learner, rollout = jax.devices()
    old, new = (
        jax.device_put(model.init_params(jax.random.key(seed), CFG, dtype="float32"), learner) for seed in (0, 1)
    )
    prompt = Prompt("p", "", np.arange(2, 8, dtype=np.int32), "", "test")
    requests = [Request(str(i), prompt, i, SamplingParams(max_new_tokens=6), i) for i in range(3)]
    weights, texts = sum(leaf.nbytes for leaf in jax.tree.leaves(old)), []
    for device in (None, rollout):
        before, where = held(), device or learner
        engine = LocalEngine(CFG, old, device=device, **LEAN)
        assert held() - before == {where: weights + engine.cache_bytes}
        first = sorted(engine.generate(requests), key=lambda t: t.sample_index)
        engine.update_weights(new, 1)
        second = sorted(engine.generate(requests), key=lambda t: t.sample_index)
        assert held() - before == {where: weights + engine.cache_bytes}, "new weights are brought over"
        engine.close()
        texts.append([(t.response_ids.tolist(), t.log_probs.tolist()) for t in first + second])
    assert texts[0] == texts[1], "the device makes a difference"

    mesh = jax.make_mesh((1, 1, 1, 2), model.MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)
    sharded = jax.device_put(old, model.param_shardings(CFG, mesh))
    options = model.ForwardOptions(placement=model.Placement(mesh))
    before = held()
    engine = LocalEngine(CFG, sharded, options=options, **LEAN)
    cache = Counter({learner: engine.cache_bytes // 2, rollout: engine.cache_bytes // 2})
    assert held() - before == held(jax.tree.leaves(sharded)) + cache, "weights are cut, slots dealt out"
    for t in engine.generate(requests):
        ids, log_probs = texts[0][t.sample_index]
        assert t.response_ids.tolist() == ids
        np.testing.assert_allclose(t.log_probs, log_probs, atol=1e-5)
    print(json.dumps("same"))


if __name__ == "__main__":
    main()
