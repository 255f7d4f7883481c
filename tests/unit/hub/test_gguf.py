"""GGUF files in: a tiny Llama is written the way llama.cpp's converter writes one, and comes back as it was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from sat_jax import hub, load_policy, model
from sat_jax.cli.main import main
from sat_jax.hub.gguf import import_gguf
from tests.helpers.models import LLAMA, init, run

gguf = pytest.importorskip("gguf")

WORDS = ["<|end|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "an", "Ġan"]
MERGES = ["Ġ a", "a n", "Ġa n"]
# Q8_0 packs 32 values, and every matrix has at least that many inputs.
CFG = dataclasses.replace(
    LLAMA,
    vocab_size=len(WORDS),
    intermediate_size=32,
    attention_bias=False,
    mlp_bias=False,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=(2, 0),
    pad_token_id=2,
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def metadata() -> dict[str, Any]:
    return {
        "llama.block_count": np.uint32(2),
        "llama.context_length": np.uint32(64),
        "llama.embedding_length": np.uint32(32),
        "llama.feed_forward_length": np.uint32(32),
        "llama.attention.head_count": np.uint32(4),
        "llama.attention.head_count_kv": np.uint32(2),
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.rope.freq_base": np.float32(100_000.0),
        "llama.rope.dimension_count": np.uint32(8),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(WORDS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
        "tokenizer.ggml.eot_token_id": np.uint32(0),
        "tokenizer.ggml.padding_token_id": np.uint32(2),
        "tokenizer.chat_template": TEMPLATE,
    }


def gguf_tensors(params: model.Params) -> dict[str, np.ndarray]:
    """GGUF's names, ``[out, in]``; a Q or K head's rows go from (half, i) to (i, half), neighbours being rotated."""
    tensors = {
        "token_embd.weight": np.asarray(params["embed"]),
        "output_norm.weight": np.asarray(params["final_norm"]),
    }
    layers = params["layers_0"]
    for name, stack in {**layers["attention"], **layers["mlp"], **layers}.items():
        if name not in NAMES:
            continue
        for i, value in enumerate(np.asarray(stack)):
            if name in "qkv":
                value = value.reshape(32, -1).T
            elif name in ("out", "gate", "up", "down"):
                value = value.reshape(-1, value.shape[-1]).T
            if name in "qk":
                value = value.reshape(-1, 2, 4, 32).swapaxes(1, 2).reshape(value.shape)
            tensors[f"blk.{i}.{NAMES[name]}.weight"] = np.ascontiguousarray(value)
    return tensors


def write(
    path: Path, tensors: dict[str, np.ndarray], fields: dict[str, Any], kind: str = "llama", quantise: bool = False
) -> Path:
    writer = gguf.GGUFWriter(path, kind)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, np.uint32):
            writer.add_uint32(key, int(value))
        else:
            writer.add_float32(key, float(value))
    for name, value in tensors.items():
        if quantise and value.ndim == 2:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def params() -> model.Params:
    return init(CFG)


def test_weights_and_configuration_come_back_to_the_bit(params: model.Params, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", gguf_tensors(params), metadata())
    assert main(["import-gguf", str(file), "--out", str(tmp_path / "hf")]) == 0
    cfg = hub.read_config(tmp_path / "hf")
    assert dataclasses.replace(cfg, initializer_range=CFG.initializer_range) == CFG
    jax.tree.map(np.testing.assert_array_equal, hub.load_params(tmp_path / "hf"), params)


def test_an_untied_head_is_read(params: model.Params, tmp_path: Path) -> None:
    head = np.random.default_rng(1).standard_normal(params["embed"].shape, np.float32)
    file = write(tmp_path / "tiny.gguf", gguf_tensors(params) | {"output.weight": head}, metadata())
    cfg = import_gguf(file, tmp_path / "hf")
    assert not cfg.tie_word_embeddings
    np.testing.assert_array_equal(hub.load_params(tmp_path / "hf")["head"], head)


def test_quantised_tensors_become_what_they_stand_for(params: model.Params, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", gguf_tensors(params), metadata(), quantise=True)
    cfg = import_gguf(file, tmp_path / "hf")
    loaded = hub.load_params(tmp_path / "hf")
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=float(np.abs(b).max()) / 127)
    assert np.abs(np.asarray(loaded["embed"]) - np.asarray(params["embed"])).max() > 0
    tokens = np.arange(12, dtype=np.int32).reshape(1, -1)
    np.testing.assert_allclose(run(cfg, loaded, tokens)[1], run(cfg, params, tokens)[1], atol=1.0)


def test_bfloat16_on_request(params: model.Params, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", gguf_tensors(params), metadata())
    import_gguf(file, tmp_path / "hf", dtype="bfloat16")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    jax.tree.map(np.testing.assert_array_equal, hub.load_params(tmp_path / "hf", dtype="bfloat16"), rounded)


def test_tokenizer_template_and_special_tokens(params: model.Params, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", gguf_tensors(params), metadata())
    import_gguf(file, tmp_path / "hf")
    tokenizer = load_policy(tmp_path / "hf").tokenizer
    assert tokenizer is not None
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2, 0), 2)
    # Merged within words, digits always one by one, special tokens whole.
    spelled = [tokenizer.token(i) for i in tokenizer.encode("an 2026 an<|im_end|>é")]
    assert spelled == ["an", "Ġ", "2", "0", "2", "6", "Ġan", "<|im_end|>", "Ã", "©"]
    for text in ("  two  spaces\n\ttab ", "naïve – 日本語 🙂", "x²½ Ⅳ 1,234.5"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, *tokenizer.encode("an"), 2]) == "an"
    assert tokenizer.render_chat([{"role": "user", "content": "an"}]) == "<|im_start|>user an<|im_end|>"


def test_without_the_digit_rule_digits_merge(params: model.Params, tmp_path: Path) -> None:
    fields = metadata() | {"tokenizer.ggml.pre": "gpt-2"}
    fields["tokenizer.ggml.tokens"] = [*WORDS[:-1], "20"]
    fields["tokenizer.ggml.merges"] = ["2 0"]
    import_gguf(write(tmp_path / "tiny.gguf", gguf_tensors(params), fields), tmp_path / "hf")
    tokenizer = load_policy(tmp_path / "hf").tokenizer
    assert tokenizer is not None
    assert [tokenizer.token(i) for i in tokenizer.encode("2026")] == ["20", "2", "6"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not implemented"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not implemented"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' is not implemented"),
        ({"llama.expert_count": np.uint32(8)}, "llama.expert_count = 8 is not implemented"),
        ({"llama.rope.dimension_count": np.uint32(4)}, "rotary embedding of 4 out of 8"),
        ({"llama.block_count": np.uint32(3)}, "missing blk.2.attn_k.weight"),
        ({"llama.block_count": np.uint32(1)}, "left over blk.1.attn_k.weight"),
        ({"llama.feed_forward_length": np.uint32(48)}, r"ffn_\w+.weight has shape \[32, 32\], expected \["),
    ],
)
def test_what_is_not_implemented_is_named(
    params: model.Params, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "tiny.gguf", gguf_tensors(params), metadata() | changes)
    with pytest.raises(ValueError, match=message):
        import_gguf(file, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_files_that_are_no_gguf(params: model.Params, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "other.gguf", {}, {}, kind="gemma")
    text, empty = tmp_path / "text.gguf", tmp_path / "empty.gguf"
    text.write_text("not a model " * 20)
    empty.touch()
    whole = write(tmp_path / "whole.gguf", gguf_tensors(params), metadata()).read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    incomplete = {key: value for key, value in metadata().items() if key != "llama.context_length"}
    write(tmp_path / "incomplete.gguf", gguf_tensors(params), incomplete)
    for name, message in (
        ("other", "architecture 'gemma' is not implemented"),
        ("text", "is no readable GGUF file"),
        ("empty", "is no readable GGUF file"),
        ("half", "is no readable GGUF file"),
        ("incomplete", "lacks llama.context_length"),
        ("absent", "does not exist"),
    ):
        assert main(["import-gguf", str(tmp_path / f"{name}.gguf"), "--out", str(tmp_path / "hf")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
