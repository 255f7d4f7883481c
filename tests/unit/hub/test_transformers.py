"""Exported folders in transformers itself; skipped where torch or transformers is missing."""

import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax import hub, model
from tests.helpers.models import LLAMA, MIXED, MOE, init, run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("cfg", [MOE, MIXED, LLAMA], ids=["moe", "mixed", "llama"])
def test_transformers_loads_what_is_saved_and_computes_the_same_logits(cfg, tmp_path):
    params = init(cfg)
    hub.save_hf(tmp_path / "out", cfg, params)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 10))
    (_, logits, _) = run(cfg, params, jnp.asarray(tokens, jnp.int32))
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = other(input_ids=torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, theirs, rtol=1e-4, atol=1e-4)
    # And the other way round: what transformers saves, in its own config layout, loads here to the same bits.
    other.save_pretrained(tmp_path / "theirs")
    again = hub.load_params(tmp_path / "theirs")
    for p in model.parameter_table(cfg):
        mine, back = params, again
        for key in p.path:
            mine, back = mine[key], back[key]
        np.testing.assert_array_equal(mine, back, err_msg=p.name)
