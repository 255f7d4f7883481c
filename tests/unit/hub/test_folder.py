"""Folders in and out: bit-identical round trips, both expert layouts, and what damaged folders say."""

import dataclasses
import functools
import json
import math
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sat_jax import hub, model
from sat_jax.hub import folder as hub_folder
from sat_jax.hub.tensors import Checkpoint
from tests.helpers.models import CHECKPOINTS, GOLDEN, LLAMA, MIXED, init, load


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


@pytest.fixture
def folder(tmp_path):
    """A writable copy of the golden mixture model."""
    return shutil.copytree(CHECKPOINTS / "moe_top4_norm", tmp_path / "model")


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", GOLDEN)
def test_saving_writes_the_very_tensors_that_were_read(name, tmp_path):
    cfg, params = load(name)
    hub.save_hf(tmp_path / "out", cfg, params, source=CHECKPOINTS / name)
    original, written = (
        load_file(CHECKPOINTS / name / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert set(original) == set(written)
    for key, value in original.items():
        np.testing.assert_array_equal(value, written[key], err_msg=key)
    assert hub.read_config(tmp_path / "out") == cfg
    same(hub.load_params(tmp_path / "out"), params)


@pytest.mark.parametrize("cfg", [MIXED, LLAMA], ids=["mixed", "llama-with-biases"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_and_index(cfg, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_folder, "SHARD_BYTES", 8_000)
    params = jax.tree.map(lambda x: x.astype(dtype), init(cfg))
    hub.save_hf(tmp_path / "out", cfg, params)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    same(hub.load_params(tmp_path / "out", dtype=dtype), params)
    same(hub.load_params(tmp_path / "out"), jax.tree.map(lambda x: x.astype(jnp.float32), params))


def test_fused_experts_of_transformers_5(folder):
    """gate_up_proj [E, 2F, D] and down_proj [E, D, F] without ``.weight``, beside the transformers 5 config."""
    cfg, params = load("moe_top4_norm")

    def fuse(tensors):
        for layer in range(3):
            base = f"model.layers.{layer}.mlp.experts"

            def pop(name, base=base):
                return np.stack([tensors.pop(f"{base}.{e}.{name}.weight") for e in range(8)])

            tensors[f"{base}.gate_up_proj"] = np.concatenate([pop("gate_proj"), pop("up_proj")], axis=1)
            tensors[f"{base}.down_proj"] = pop("down_proj")

    rewrite(folder, fuse)
    shutil.copy(CHECKPOINTS / "moe_top4_norm" / "config.transformers5.json", folder / "config.json")
    assert hub.read_config(folder) == cfg
    same(hub.load_params(folder), params)


def test_side_files_travel_and_weights_do_not(folder, tmp_path):
    cfg, params = load("moe_top4_norm")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "notes.bin").write_text("x")
    hub.save_hf(tmp_path / "out", cfg, params, source=folder)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        *("config.json", "config.transformers5.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_nothing_is_overwritten_and_nothing_half_written_is_left(tmp_path):
    cfg, params = load("dense_tied")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("precious")
    with pytest.raises(FileExistsError, match="not empty"):
        hub.save_hf(tmp_path / "taken", cfg, params)
    with pytest.raises(ValueError, match=r"final_norm has shape \(3,\), expected \(64,\)"):
        hub.save_hf(tmp_path / "new", cfg, params | {"final_norm": jnp.ones(3)})
    with pytest.raises(ValueError, match="do not fit the configuration: surplus missing or left over"):
        hub.save_hf(tmp_path / "new", cfg, params | {"surplus": jnp.ones(3)})
    with pytest.raises(FileNotFoundError):
        hub.save_hf(tmp_path / "new", cfg, params, source=tmp_path / "absent")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("size", [100_000, 3_000])  # two of three layers of q, some experts; parts of each tensor
def test_what_is_larger_than_the_staging_buffer_comes_in_pieces(size, monkeypatch):
    monkeypatch.setattr(hub_folder, "STAGING_BYTES", size)
    same(hub.load_params(CHECKPOINTS / "moe_top4_norm"), load("moe_top4_norm")[1])


def test_host_memory_does_not_grow_with_the_model_or_its_tensors(tmp_path, monkeypatch):
    """numpy's and safetensors' memory is traced, the device's is not."""
    staging = 2**18
    cfg = dataclasses.replace(MIXED, vocab_size=2**14, hidden_size=128, moe_intermediate_size=256)
    hub.save_hf(tmp_path / "model", cfg, init(cfg))
    monkeypatch.setattr(hub_folder, "STAGING_BYTES", staging)
    largest = max(math.prod(p.shape) * 4 for p in model.parameter_table(cfg))
    tracemalloc.start()
    try:
        params = jax.block_until_ready(hub.load_params(tmp_path / "model", cfg))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    same(params, init(cfg))
    assert peak < 8 * staging < largest / 2 < sum(x.nbytes for x in jax.tree.leaves(params)) / 4


@pytest.mark.parametrize("name", ["layers_0.attention.q_bias", "layers_0.attention.q", "layers_0.attention.out"])
def test_any_part_of_a_parameter_can_be_read(name, tmp_path):
    """Also one that cuts inside an axis which the hub has flattened away."""
    params = init(LLAMA)
    hub.save_hf(tmp_path / "model", LLAMA, params)
    row = next(p for p in model.parameter_table(LLAMA) if p.name == name)
    part = tuple((n // 4, n // 2) for n in row.shape[1:])
    found = Checkpoint(tmp_path / "model").part(row, (1,), part)
    whole = np.asarray(functools.reduce(lambda tree, key: tree[key], row.path, params))
    np.testing.assert_array_equal(found, whole[(1, *(slice(*span) for span in part))])


def test_missing_and_left_over_tensors_are_listed(folder):
    def change(tensors):
        del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.1.mlp.shared_expert.up_proj.weight"] = np.zeros((4, 4), np.float32)

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        hub.load_params(folder)
    assert "missing model.layers.1.mlp.experts.5.up_proj.weight;" in str(error.value)
    assert "left over model.layers.1.mlp.shared_expert.up_proj.weight:" in str(error.value)


@pytest.mark.parametrize("stale_first", [True, False])
def test_the_index_decides_between_two_copies_of_a_tensor(folder, stale_first):
    """Whatever the order of the files: an interrupted re-export leaves superseded tensors in other shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stale = {name: tensors[name] + 1 for name in ("model.norm.weight", "lm_head.weight")}
    first, second = ("model-1.safetensors", "model-2.safetensors")[:: 1 if stale_first else -1]
    kept = {name: tensors.pop(name) for name in list(tensors)[::2] if name not in stale}
    save_file(kept | stale, folder / first)
    save_file(tensors, folder / second)
    weight_map = dict.fromkeys(kept, first) | dict.fromkeys(tensors, second)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same(hub.load_params(folder), load("moe_top4_norm")[1])


def test_a_tensor_that_only_a_shard_knows_is_left_over(folder):
    names = list(load_file(folder / "model.safetensors"))
    rewrite(folder, lambda tensors: tensors.update({"model.extra": np.zeros(1, np.float32)}))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"left over model\.extra"):
        hub.load_params(folder)


def test_wrong_shape_dtype_and_values(folder):
    name = "model.layers.2.self_attn.k_proj.weight"

    def replace(value):
        rewrite(folder, lambda tensors: tensors.update({name: value}))
        with pytest.raises(ValueError) as error:
            hub.load_params(folder)
        return str(error.value)

    assert f"{name} has shape (32, 64), expected (64, 64)" in replace(np.zeros((32, 64), np.float32))
    assert f"{name} is stored as I8, expected one of" in replace(np.zeros((64, 64), np.int8))
    bad = np.zeros((64, 64), np.float32)
    bad[3, 4] = np.nan
    assert f"{name} in {folder / 'model.safetensors'} holds NaN or infinity" in replace(bad)


def test_truncated_and_missing_shards(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        hub.load_params(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        hub.load_params(folder)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002\.safetensors is missing"):
        hub.load_params(folder)
    save_file({"other": np.zeros(1, np.float32)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"promises 'lm_head\.weight' in model-00001"):
        hub.load_params(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_')
    with pytest.raises(ValueError, match="is not valid JSON"):
        hub.load_params(folder)


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    folder = shutil.copytree(CHECKPOINTS / "dense_tied", tmp_path / "model")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    same(hub.load_params(folder), load("dense_tied")[1])
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match="differs from the embedding"):
        hub.load_params(folder)


def test_initial_weights_depend_on_key_and_name_alone():
    a, b = model.init_params(jax.random.key(0), MIXED), model.init_params(jax.random.key(0), LLAMA)
    np.testing.assert_array_equal(a["embed"], b["embed"])
    other = model.init_params(jax.random.key(1), MIXED)
    assert np.abs(a["embed"] - other["embed"]).max() > 0.1
    std = np.std(a["layers_1"]["mlp"]["gate"])
    np.testing.assert_allclose(std, MIXED.initializer_range, rtol=0.05)
    assert (np.asarray(b["layers_0"]["attention"]["q_bias"]) == 0).all()
    assert (np.asarray(a["final_norm"]) == 1).all()
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), a)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), model.abstract_params(MIXED))
    assert model.parameter_count(MIXED) == sum(x.size for x in jax.tree.leaves(a))
