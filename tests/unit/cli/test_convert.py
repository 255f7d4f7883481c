"""``upcycle`` and ``export`` from the command line: what is written, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from sat_jax import hub, learner, load_policy, model
from sat_jax.cli.main import main
from sat_jax.config import ExperimentConfig, load_config
from sat_jax.dataclass_json import to_dict
from sat_jax.runs.checkpoint import Checkpoints
from sat_jax.training import build

LLAMA = model.ModelConfig(
    model_type="llama",
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=12,
)


def _config() -> ExperimentConfig:
    base = load_config("mix6")
    shape = model.ModelConfig(
        model_type="qwen3_moe",
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    return replace(base, policy=replace(base.policy, init=shape))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, model.Params]]:
    """A run folder with checkpoints of two steps, and what is in them."""
    folder = tmp_path_factory.mktemp("run")
    config = _config()
    (folder / "config.json").write_text(json.dumps({"config": to_dict(config), "versions": {}}))
    policy = build.build_policy(config, folder)
    spec = build.build_learner(config, policy.config)
    saved = {}
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in (5, 10):
        params = jax.tree.map(lambda x, by=step: x * (1 + by / 10), policy.params)
        checkpoints.save(learner.init_state(spec, params).replace(step=np.int32(step)), {}, [])
        saved[step] = params
    checkpoints.close()
    return folder, saved


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*args: object) -> str:
        assert main([str(a) for a in args]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, captured.err
        return captured.err

    return call


def _same(a: model.Params, b: model.Params) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_is_exported_with_its_newest_weights_and_its_tokenizer(
    run: tuple[Path, dict[int, model.Params]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, saved = run
    assert main(["export", str(folder), "--out", str(tmp_path / "hf")]) == 0
    assert "step 10" in capsys.readouterr().out
    policy = load_policy(tmp_path / "hf")
    _same(policy.params, saved[10])
    assert policy.tokenizer is not None
    assert policy.tokenizer.decode(policy.tokenizer.encode("123=")) == "123="
    # The policy was initialised here: nothing but the tokenizer knows how a response ends.
    assert policy.config.eos_token_id == policy.tokenizer.eos_ids != ()


def test_an_older_checkpoint_is_named_by_its_folder(run: tuple[Path, dict[int, model.Params]], tmp_path: Path) -> None:
    folder, saved = run
    assert main(["export", str(folder / "checkpoints" / "5"), "--out", str(tmp_path / "hf")]) == 0
    _same(load_policy(tmp_path / "hf").params, saved[5])


def test_bfloat16_on_request(run: tuple[Path, dict[int, model.Params]], tmp_path: Path) -> None:
    folder, saved = run
    assert main(["export", str(folder), "--out", str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    _same(
        load_policy(tmp_path / "hf", dtype="bfloat16").params, jax.tree.map(lambda x: x.astype("bfloat16"), saved[10])
    )


def test_a_folder_is_exported_again(tmp_path: Path) -> None:
    params = model.init_params(jax.random.key(0), LLAMA)
    dense = hub.save_hf(tmp_path / "dense", LLAMA, params)
    assert main(["export", str(dense), "--out", str(tmp_path / "again")]) == 0
    _same(load_policy(tmp_path / "again").params, params)


def test_transformers_loads_an_export_with_the_same_logits(
    run: tuple[Path, dict[int, model.Params]], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert main(["export", str(run[0]), "--out", str(tmp_path / "hf")]) == 0
    tokens = np.random.default_rng(0).integers(0, 16, (2, 9))
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = peer(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(load_policy(tmp_path / "hf").logits(tokens), expected, atol=2e-4)
    text = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert text("312=")["input_ids"] == load_policy(tmp_path / "hf").tokenizer.encode("312=")


def test_exports_that_cannot_be(
    run: tuple[Path, dict[int, model.Params]], tmp_path: Path, mistake: Callable[..., str]
) -> None:
    folder, _ = run
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "x").touch()
    assert "not empty" in mistake("export", folder, "--out", taken)
    assert "no checkpoint of step 7" in mistake("export", folder / "checkpoints" / "7", "--out", tmp_path / "hf")
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.json").write_text((folder / "config.json").read_text())
    assert "has no checkpoint yet" in mistake("export", young, "--out", tmp_path / "hf")
    assert not (young / "checkpoints").exists()
    assert "is no folder: give a run folder" in mistake("export", tmp_path / "absent", "--out", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_upcycle_from_the_command_line(
    tmp_path: Path, mistake: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    dense = hub.save_hf(tmp_path / "dense", LLAMA, model.init_params(jax.random.key(0), LLAMA))
    out = tmp_path / "moe"
    assert "--top-k 5 with --experts 4" in mistake("upcycle", dense, "--top-k", "5", "--out", out)
    assert "--out" in mistake("upcycle", dense)
    assert main(["upcycle", str(dense), "--experts", "4", "--top-k", "2", "--out", str(out)]) == 0
    assert "mixtral, 2 of 4 experts in 2 layers" in capsys.readouterr().out
    assert hub.read_config(out).num_experts == 4
    assert "not empty" in mistake("upcycle", dense, "--out", out)
    assert "'mixtral' is a mixture already" in mistake("upcycle", out, "--out", tmp_path / "twice")
