"""Dense folders as mixtures: the same function, in forward passes, replay and generation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from sat_jax import hub, load_policy, model
from sat_jax.hub.upcycle import upcycle, upcycled_config
from tests.helpers.models import CHECKPOINTS, LLAMA, MOE, PLAIN_LLAMA, agreement, init, run

pytestmark = pytest.mark.slow

QWEN = dataclasses.replace(
    LLAMA, model_type="qwen3", mlp_bias=False, tie_word_embeddings=False, eos_token_id=(3,), pad_token_id=0
)
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12)).astype(np.int32)


@pytest.fixture(params=[PLAIN_LLAMA, QWEN], ids=["llama", "qwen3-with-biases"])
def dense(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return hub.save_hf(tmp_path / "dense", request.param, init(request.param))


def test_the_mixture_computes_what_the_dense_model_computes(dense: Path, tmp_path: Path) -> None:
    cfg = upcycle(dense, tmp_path / "moe", experts=4, top_k=2)
    assert hub.read_config(tmp_path / "moe") == cfg
    assert len(cfg.moe_layers) == cfg.num_hidden_layers
    params = hub.load_params(tmp_path / "moe")
    expected = run(hub.read_config(dense), hub.load_params(dense), TOKENS)[1]
    out, logits, _ = run(cfg, params, TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    # Whichever experts are replayed, the function is the same one; the router does choose among them.
    assert len(np.unique(out.router.indices)) == 4
    replayed = np.random.default_rng(1).permuted(np.broadcast_to(np.arange(4), (2, 12, 2, 4)), axis=-1)[..., :2]
    replay, logits, _ = run(cfg, params, TOKENS, routed_experts=replayed.astype(np.int32))
    np.testing.assert_array_equal(replay.router.indices, replayed)
    assert agreement(replay.router) < 1
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_generation_is_the_dense_models(tmp_path: Path) -> None:
    dense = hub.save_hf(tmp_path / "dense", PLAIN_LLAMA, init(PLAIN_LLAMA))
    upcycle(dense, tmp_path / "moe", experts=3, top_k=2)
    prompts = [[5, 6, 7], [8]]
    a = load_policy(dense).generate(prompts, max_new_tokens=6, ignore_eos=True)
    b = load_policy(tmp_path / "moe").generate(prompts, max_new_tokens=6, ignore_eos=True)
    assert a.token_ids == b.token_ids
    np.testing.assert_allclose(np.stack(a.log_probs), np.stack(b.log_probs), atol=1e-5)
    assert a.routed_experts is None
    assert b.routed_experts is not None
    assert b.routed_experts[0].shape == (9, 2, 2)


def test_experts_part_ways_in_training(tmp_path: Path) -> None:
    dense = hub.save_hf(tmp_path / "dense", PLAIN_LLAMA, init(PLAIN_LLAMA))
    cfg = upcycle(dense, tmp_path / "moe", experts=4, top_k=2)

    def loss(params: model.Params) -> jax.Array:
        return -run(cfg, params, TOKENS)[2].log_probs.mean()

    grads = jax.grad(loss)(hub.load_params(tmp_path / "moe"))["layers_0"]["mlp"]
    gate = np.asarray(grads["gate"])
    assert all(np.abs(gate[:, i] - gate[:, j]).max() > 1e-5 for i in range(4) for j in range(i))
    # Equal experts: no choice of weights changes the output, so the router has nothing to learn yet.
    np.testing.assert_allclose(grads["router"], 0, atol=1e-6)


def test_what_is_written(tmp_path: Path) -> None:
    """A Mixtral in the hub's names: every expert the dense MLP, the rest untouched, the router small and seeded."""
    bf16 = jax.tree.map(lambda x: x.astype("bfloat16"), init(PLAIN_LLAMA))
    dense = hub.save_hf(tmp_path / "dense", PLAIN_LLAMA, bf16)
    (dense / "tokenizer.json").write_text("{}")
    upcycle(dense, tmp_path / "moe", experts=2, top_k=1, router_std=0.5)
    raw = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert raw["architectures"] == ["MixtralForCausalLM"]
    assert (raw["num_local_experts"], raw["num_experts_per_tok"], raw["intermediate_size"]) == (2, 1, 24)
    assert not {"num_experts", "attention_bias", "mlp_bias", "norm_topk_prob"} & raw.keys()
    assert raw["torch_dtype"] == "bfloat16"
    assert (tmp_path / "moe" / "tokenizer.json").read_text() == "{}"
    before, after = load_file(dense / "model.safetensors"), load_file(tmp_path / "moe" / "model.safetensors")
    for name, value in before.items():
        for theirs, ours in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            if theirs in name:
                layer = name.split(".mlp.")[0]
                for e in range(2):
                    expert = after.pop(f"{layer}.block_sparse_moe.experts.{e}.{ours}.weight")
                    np.testing.assert_array_equal(expert, value)
                break
        else:
            np.testing.assert_array_equal(after.pop(name), value)
    assert set(after) == {f"model.layers.{i}.block_sparse_moe.gate.weight" for i in range(2)}
    routers = [np.asarray(r, np.float32) for r in after.values()]
    assert 0.3 < np.std(routers) < 0.7
    assert np.abs(routers[0] - routers[1]).max() > 0.1
    upcycle(dense, tmp_path / "again", experts=2, top_k=1, router_std=0.5)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "moe" / "model.safetensors"
    ).read_bytes()


def test_an_upcycled_folder_saves_and_loads_bit_by_bit(tmp_path: Path) -> None:
    dense = hub.save_hf(tmp_path / "dense", PLAIN_LLAMA, init(PLAIN_LLAMA))
    cfg = upcycle(dense, tmp_path / "moe", experts=4, top_k=2)
    policy = load_policy(tmp_path / "moe")
    policy.save(tmp_path / "again")
    assert load_policy(tmp_path / "again").config == cfg
    jax.tree.map(np.testing.assert_array_equal, load_policy(tmp_path / "again").params, policy.params)


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_out_of_range(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"--top-k {top_k} with --experts 4"):
        upcycled_config(QWEN, 4, top_k)


def test_what_cannot_be_upcycled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'qwen3_moe' is a mixture already"):
        upcycled_config(MOE, 4, 2)
    with pytest.raises(ValueError, match="biases"):
        upcycled_config(LLAMA, 4, 2)
    with pytest.raises(ValueError, match="router_std = 0"):
        upcycle(CHECKPOINTS / "dense_tied", tmp_path / "out", 4, 2, router_std=0)
    with pytest.raises(ValueError, match="seed = -1"):
        upcycle(CHECKPOINTS / "dense_tied", tmp_path / "out", 4, 2, seed=-1)
    with pytest.raises(FileNotFoundError, match="absent"):
        upcycle(tmp_path / "absent", tmp_path / "out", 4, 2)
    assert not (tmp_path / "out").exists()


def mixtral(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **changes,
    }


def test_a_mixtrals_config_is_understood_and_written_back() -> None:
    cfg = hub.config_from_hf(mixtral())
    assert (cfg.num_experts, cfg.moe_intermediate_size, cfg.head_dim, cfg.norm_topk_prob) == (8, 16, 8, True)
    assert (cfg.rope_theta, cfg.rms_norm_eps, cfg.max_position_embeddings) == (1e6, 1e-5, 131072)
    assert not cfg.qk_norm
    assert hub.config_from_hf(hub.config_to_hf(cfg, "float32")) == cfg


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window = 4096 is in use"),
        ({"attention_bias": True}, "dense layers, biases"),
        ({"num_local_experts": None}, "lacks num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 with num_experts = 8"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not implemented"),
    ],
)
def test_a_mixtral_that_is_not_implemented(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hub.config_from_hf(mixtral(**changes))


def test_transformers_loads_the_mixture_with_the_same_logits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    dense = hub.save_hf(tmp_path / "dense", PLAIN_LLAMA, init(PLAIN_LLAMA))
    cfg = upcycle(dense, tmp_path / "moe", experts=4, top_k=2)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = peer(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(run(cfg, hub.load_params(tmp_path / "moe"), TOKENS)[1], expected, atol=1e-4)
