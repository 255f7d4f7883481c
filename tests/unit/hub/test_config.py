import dataclasses
import json
import shutil

import pytest

from sat_jax import hub
from sat_jax.model.config import LayerRun
from tests.helpers.models import CHECKPOINTS, GOLDEN, LLAMA, MIXED, MOE


def raw(name="moe_top4_norm", file="config.json"):
    return json.loads((CHECKPOINTS / name / file).read_text())


@pytest.mark.parametrize("name", ["moe_top4_norm", "moe_mixed_dense", "dense_tied"])
def test_both_layouts_describe_the_same_model(name):
    assert hub.config_from_hf(raw(name)) == hub.config_from_hf(raw(name, "config.transformers5.json"))


@pytest.mark.parametrize("name", GOLDEN)
def test_written_configuration_reads_back(name):
    cfg = hub.read_config(CHECKPOINTS / name)
    assert hub.config_from_hf(hub.config_to_hf(cfg, "float32")) == cfg


@pytest.mark.parametrize("cfg", [MOE, MIXED, LLAMA], ids=["moe", "mixed", "llama"])
def test_own_configurations_round_trip(cfg):
    assert hub.config_from_hf(hub.config_to_hf(cfg, "bfloat16")) == cfg


def test_end_of_sequence_ids_of_both_files():
    assert hub.read_config(CHECKPOINTS / "moe_top4_norm").eos_token_id == (482, 480)


def test_llama_fills_what_old_configurations_leave_out():
    raw = hub.config_to_hf(LLAMA, "float32")
    del raw["head_dim"], raw["num_key_value_heads"]
    cfg = hub.config_from_hf(raw)
    assert (cfg.head_dim, cfg.num_key_value_heads, cfg.qk_norm) == (8, 4, False)


def test_runs_group_equal_layers():
    assert MIXED.moe_layers == (1,)
    assert MIXED.runs == (
        LayerRun("layers_0", first=0, length=1, moe=False, first_moe=0),
        LayerRun("layers_1", first=1, length=1, moe=True, first_moe=0),
        LayerRun("layers_2", first=2, length=2, moe=False, first_moe=1),
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "'Qwen3VLForConditionalGeneration' is not supported"),
        ({"architectures": None, "model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
        ({"model_type": "qwen3"}, "contradicts model_type 'qwen3'"),
        ({"attn_logit_softcapping": 30.0}, "key 'attn_logit_softcapping' = 30.0 is unknown and may change the maths"),
        ({"num_expert": 8}, "did you mean 'num_experts'?"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling = "),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "only rope_type 'default'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta = 10000.0, but rope_parameters.rope_theta = 500000.0: remove the one",
        ),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": "1e4"}}, "rope_theta = '1e4': must be a number"),
        ({"rope_parameters": [1e4]}, "rope_parameters = [10000.0]"),
        ({"num_local_experts": 4}, "num_experts = 8, but num_local_experts = 4"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window = 4096 is in use"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only 'full_attention' is implemented"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not implemented"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"hidden_size": "64"}, "config.json: hidden_size = '64': must be a whole number, not str"),
        ({"num_hidden_layers": 2.5}, "config.json: num_hidden_layers = 2.5: must be a whole number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06: must be at least 0 and finite; the default is 1e-06"),
        ({"vocab_size": 0}, "config.json: vocab_size = 0: must be at least 1"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers = (-1,): must be at least 0"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id = ('</s>',): must be a whole number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be bool, not int"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads = 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 with num_experts = 8"),
        ({"head_dim": 31}, "head_dim = 31 is odd"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
    ],
)
def test_what_is_not_implemented_is_refused(change, says):
    with pytest.raises(ValueError) as error:
        hub.config_from_hf(raw() | change)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_order_of_keys_decides_nothing():
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4}
    for order in (both, dict(reversed(both.items()))):
        plain = {key: value for key, value in raw().items() if key != "rope_theta"}
        with pytest.raises(ValueError, match=r"rope_theta = .*rope_theta = .*remove the one"):
            hub.config_from_hf(plain | order)
        agreed = {**order, "rope_theta": 500_000}
        assert hub.config_from_hf(plain | agreed).rope_theta == 5e5


def test_minus_one_is_no_token():
    cfg = hub.config_from_hf(raw() | {"pad_token_id": -1, "bos_token_id": -1, "eos_token_id": -1})
    assert (cfg.pad_token_id, cfg.bos_token_id, cfg.eos_token_id) == (None, None, ())


def test_a_description_cannot_be_impossible_however_it_is_made():
    with pytest.raises(ValueError, match=r"policy\.init\.num_experts_per_tok = 9 with num_experts = 8"):
        dataclasses.replace(MOE, num_experts_per_tok=9)
    with pytest.raises(ValueError, match=r"policy\.init\.rope_theta = nan: must be above 0 and finite; the default is"):
        dataclasses.replace(MOE, rope_theta=float("nan"))
    assert hash(dataclasses.replace(MOE, rope_theta=10_000)) == hash(MOE)


def test_how_transformers_balances_a_router_is_read_and_ignored():
    """Balancing is the learner's own setting here; what is written leaves transformers its default."""
    assert hub.config_from_hf(raw() | {"router_aux_loss_coef": 0.5}) == hub.config_from_hf(raw())
    assert "router_aux_loss_coef" not in hub.config_to_hf(MOE, "float32")


def test_null_keys_are_absent_keys():
    assert hub.config_from_hf(raw() | {"attn_logit_softcapping": None}) == hub.config_from_hf(raw())


def test_missing_and_half_written_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        hub.read_config(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        hub.read_config(tmp_path)
    shutil.copy(CHECKPOINTS / "moe_top4_norm" / "config.json", tmp_path)
    half = (tmp_path / "config.json").read_text()[:100]
    (tmp_path / "config.json").write_text(half)
    with pytest.raises(ValueError, match="is not valid JSON"):
        hub.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list, not an object"):
        hub.read_config(tmp_path)
