from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from sat_jax.data import chat
from sat_jax.data.tokenizer import Tokenizer
from tests.helpers import DATA
from tests.helpers.chatml import CHATML

GOLDEN = json.loads(((DATA / "tokenizer") / "golden.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "hi"}]


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(data | changes))


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"][:20]))
def test_ids_and_text_equal_those_of_transformers(plain_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert plain_tokenizer.encode(case["text"]) == case["ids"]
    assert plain_tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    assert plain_tokenizer.decode(case["ids"]) == case["decoded_skip_special"]


def qwen3_template() -> str:
    """Qwen3's own template, from a package that ships it: it is not ours to keep here."""
    try:
        files = importlib.metadata.files("trl") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("trl, which ships Qwen3's chat template, is not installed")
    path = next((f for f in files if f.name == "qwen3.jinja"), None)
    if path is None:
        pytest.skip("this trl ships no qwen3.jinja")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", GOLDEN["chats"], ids=range(len(GOLDEN["chats"])))
def test_chats_render_as_in_transformers(folder: Path, case: dict[str, Any]) -> None:
    (folder / "chat_template.jinja").write_text(qwen3_template())
    tokenizer = Tokenizer.from_folder(folder)
    text = tokenizer.render_chat(case["messages"], **case["kwargs"])
    assert hashlib.sha256(text.encode()).hexdigest() == case["rendered_sha256"]
    ids = tokenizer.encode(text)
    assert len(ids) == case["n_ids"]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == case["ids_sha256"]


def test_special_ids_come_from_the_folder(plain_tokenizer: Tokenizer) -> None:
    assert plain_tokenizer.eos_ids == (482, 480)
    assert plain_tokenizer.pad_id == 480
    assert plain_tokenizer.bos_id is None, (
        "a bos_token of null in tokenizer_config.json wins over generation_config.json"
    )
    assert plain_tokenizer.token(481) == "<|im_start|>"


def test_eos_ids_where_the_generation_config_says_nothing(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_folder(folder).eos_ids == (482,)
    edit(folder / "config.json", eos_token_id=480)
    assert Tokenizer.from_folder(folder).eos_ids == (480, 482)


def test_vocabulary_check_names_both_sizes(plain_tokenizer: Tokenizer) -> None:
    assert plain_tokenizer.vocab_size == 489
    plain_tokenizer.check_vocabulary(489)
    with pytest.raises(ValueError, match=r"up to 488, but the model's vocabulary has 488 rows"):
        plain_tokenizer.check_vocabulary(488)


def test_vocabulary_check_covers_eos_ids(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=600)
    with pytest.raises(ValueError, match=r"eos_token_id 600 .*vocabulary of 512"):
        Tokenizer.from_folder(folder).check_vocabulary(512)


@pytest.mark.parametrize("content", [None, "", "{", '{"model": {}}', "[]"])
def test_missing_or_malformed_tokenizer(folder: Path, content: str | None) -> None:
    if content is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json") as raised:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(raised.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_malformed_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)


def test_tokens_that_only_the_config_declares(folder: Path) -> None:
    declared = {"489": {"content": "<extra>", "special": True}}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=declared)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<extra>") == [489]
    assert tokenizer.decode([489]) == ""
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"700": {"content": "<extra>"}})
    with pytest.raises(ValueError, match=r"'<extra>' the id 700, but tokenizer.json makes it 489"):
        Tokenizer.from_folder(folder)


def bos_tokenizer(template: str | None) -> Tokenizer:
    """Adds <s> by its post-processor, as Llama's and Gemma's do."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"}, template=template)


def test_bos_is_never_doubled() -> None:
    """Fault 40: rendered text starts with BOS and the post-processor adds one."""
    tokenizer = bos_tokenizer("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    text = tokenizer.render_chat([{"role": "user", "content": "a b"}])
    assert text == "<s>a b"
    assert tokenizer.encode(text) == [0, 1, 2]
    assert tokenizer.encode(text, add_special_tokens=True) == [0, 1, 2]
    assert tokenizer.encode("a b", add_special_tokens=True) == [0, 1, 2]
    assert tokenizer.encode("a b") == [1, 2]


def test_truncation_and_padding_saved_in_the_file_do_not_apply(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("Hello world") == GOLDEN["texts"][1]["ids"]


def test_template_file_wins_over_the_config(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="from config")
    assert Tokenizer.from_folder(folder).render_chat(USER) == "from config"
    (folder / "chat_template.jinja").write_text("from file")
    assert Tokenizer.from_folder(folder).render_chat(USER) == "from file"


def test_named_templates(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_folder(folder).render_chat(USER) == "plain"
    edit(folder / "tokenizer_config.json", chat_template=named[1:])
    assert not Tokenizer.from_folder(folder).has_chat_template
    edit(folder / "tokenizer_config.json", chat_template={"default": "x"})
    with pytest.raises(ValueError, match="must be a string or a list of"):
        Tokenizer.from_folder(folder)


def test_no_template(plain_tokenizer: Tokenizer) -> None:
    assert not plain_tokenizer.has_chat_template
    with pytest.raises(ValueError, match=r"has no chat template: add chat_template\.jinja"):
        plain_tokenizer.render_chat(USER)


def test_chatml(chat_tokenizer: Tokenizer) -> None:
    assert chat_tokenizer.has_chat_template
    assert chat_tokenizer.render_chat(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.render_chat(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert chat_tokenizer.render_chat(USER, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert chat_tokenizer.encode(chat_tokenizer.render_chat(USER))[0] == 481


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'k': \"<a> & 'é'\"} | tojson }}", '{"k": "<a> & \'é\'"}'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "ahib"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_template_environment(template: str, expected: str) -> None:
    assert chat.render(template, USER) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only two roles') }}", r"roles \['user'\]: only two roles"),
        ("{% if %}", "the chat template rejects"),
        ("{{ messages.append(1) }}", "the chat template rejects"),
        ("{{ ''.__class__.__mro__ }}", "the chat template rejects"),
        ("{{ nothing.there }}", "the chat template rejects"),
    ],
)
def test_template_errors_are_the_users_to_mend(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat.render(template, USER)


def test_chatml_is_what_the_tests_say() -> None:
    assert chat.render(CHATML, [], add_generation_prompt=False) == ""
