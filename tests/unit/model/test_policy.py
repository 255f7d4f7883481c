"""Three lines for a newcomer: load, look, generate."""

import shutil

import numpy as np
import pytest

from sat_jax.policy import load_policy
from tests.helpers.models import ATOL, CHECKPOINTS


@pytest.fixture(scope="module")
def policy():
    return load_policy(CHECKPOINTS / "moe_top4_norm")


def test_looking(policy):
    g = np.load(CHECKPOINTS / "moe_top4_norm" / "golden.npz")
    for side in ("right", "left"):
        ids, mask = g[f"{side}_input_ids"], g[f"{side}_attention_mask"]
        logits, log_probs = np.asarray(policy.logits(ids, mask)), np.asarray(policy.log_probs(ids, mask))
        np.testing.assert_allclose(logits, g[f"{side}_logits"], rtol=1e-4, atol=ATOL["moe_top4_norm"])
        np.testing.assert_allclose(log_probs, g[f"{side}_logprobs"], rtol=1e-4, atol=ATOL["moe_top4_norm"])


def test_generating_greedily(policy):
    """Left-padded prompts of 9 and 5 tokens; the golden run stops at an end-of-sequence token and pads after it."""
    g = np.load(CHECKPOINTS / "moe_top4_norm" / "greedy.npz")
    prompts = [ids[mask > 0].tolist() for ids, mask in zip(g["prompt_ids"], g["prompt_mask"], strict=True)]
    out = policy.generate(prompts, max_new_tokens=32)
    for i, wanted in enumerate(g["new_ids"]):
        n = len(out.token_ids[i])
        assert out.token_ids[i] == wanted[:n].tolist()
        np.testing.assert_allclose(out.log_probs[i], g["new_logprobs"][i, :n], atol=1e-4)
        assert out.routed_experts[i].shape == (len(prompts[i]) + n, 3, 4)
        assert (out.routed_experts[i][-1] == -1).all()
        assert (out.routed_experts[i][:-1] >= 0).all()
    assert [len(ids) for ids in out.token_ids] == [1, 32]
    assert out.finish_reasons == ["stop", "length"]


def test_texts_are_encoded_and_decoded(policy):
    texts = ["the sum of", "two"]
    out = policy.generate(texts, max_new_tokens=4)
    again = policy.generate([policy.tokenizer.encode(text) for text in texts], max_new_tokens=4)
    assert out.token_ids == again.token_ids
    assert out.texts == [policy.tokenizer.decode(ids) for ids in out.token_ids]


def test_saving_and_loading_gives_the_same_bits(policy, tmp_path):
    other = load_policy(policy.save(tmp_path / "copy"))
    ids = np.arange(51).reshape(3, 17)
    np.testing.assert_array_equal(policy.logits(ids), other.logits(ids))
    assert other.tokenizer is not None
    assert other.config == policy.config


def test_wrong_use_says_what_to_do(policy, tmp_path):
    cases = [
        (
            lambda: policy.logits([[1, 2], [1, 512]]),
            "row 1, token 1: id 512 lies outside the model's vocabulary of 512",
        ),
        (lambda: policy.log_probs([[-1, 2]]), "row 0, token 0: id -1 lies outside the model's vocabulary of 512"),
        (lambda: policy.generate([[1], [5, 99999]]), "prompt 1, token 1: id 99999 lies outside the model's vocabulary"),
        (lambda: policy.logits([1, 2]), "give integers [B, T]; wrap a single row: [[1, 2, 3]]"),
        (lambda: policy.logits([[1, 2], [3]]), "pad them, and give an attention_mask"),
        (lambda: policy.generate([1, 2]), "prompt 0 = 1: give prompts as texts or as lists of ids; one prompt alone"),
        (lambda: policy.generate(np.arange(3)), "one prompt alone is wrapped: [[1, 2, 3]]"),
        (lambda: policy.generate([[1.5]]), "prompt 0 = [1.5]: give prompts as texts or as lists of ids"),
        (lambda: policy.generate([[]]), "the prompt is empty"),
        (lambda: policy.log_probs([[1, 2]], [[1]]), "attention_mask has shape [1, 1]"),
        (
            lambda: policy.logits(np.zeros((1, 4097), np.int32)),
            "rows of 4097 tokens exceed the model's context of 4096",
        ),
        (lambda: policy.generate([]), "give a list with at least one prompt"),
        (lambda: policy.generate("text"), "give a list with at least one prompt"),
        (lambda: policy.generate([[1]], max_new_tokens=4096), "the model's context is 4096"),
    ]
    for call, says in cases:
        with pytest.raises(ValueError) as error:
            call()
        assert says in str(error.value)
        assert "\n" not in str(error.value)
    folder = shutil.copytree(CHECKPOINTS / "dense_tied", tmp_path / "no-tokenizer")
    with pytest.raises(ValueError, match="no tokenizer"):
        load_policy(folder).generate(["text"])
