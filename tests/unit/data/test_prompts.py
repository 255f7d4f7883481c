from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sat_jax.data.prompts import PromptOptions, load_prompts
from sat_jax.data.tokenizer import Tokenizer

Write = Callable[[str, str], str]


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def dapo(question: str, answer: str, index: str = "a1") -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def test_gsm8k_with_a_chat_template(chat_tokenizer: Tokenizer, write: Write) -> None:
    solution = "She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nThat is 9 * 200 = 1,800.\n#### 1,800"
    path = write("gsm8k.jsonl", lines({"question": "How much?", "answer": solution}))
    prompts = load_prompts(path, chat_tokenizer)
    assert len(prompts) == 1
    p = prompts[0]
    assert p.text == "<|im_start|>user\nHow much?<|im_end|>\n<|im_start|>assistant\n"
    assert p.token_ids.tolist() == chat_tokenizer.encode(p.text)
    assert p.token_ids.dtype == np.int32
    assert (p.answer, p.source) == ("1800", "gsm8k")
    assert p.metadata == {"solution": solution}
    assert prompts.report.schema == "plain (question, answer)"


@pytest.mark.parametrize(
    ("row", "answer", "source", "metadata"),
    [
        (dapo("1+1", "2"), "2", "math_dapo", {"ability": "MATH", "extra_info": {"index": "a1"}}),
        ({"prompt": "1+1", "label": "2", "metadata": {"k": 1}}, "2", "x", {"metadata": {"k": 1}}),
        ({"prompt": [{"role": "user", "content": "1+1"}], "label": 2}, "2", "x", {}),
        ({"question": "1+1", "answer": "2"}, "2", "x", {}),
        ({"problem": "1+1", "solution": "...", "answer": "\\frac{4}{2}"}, "\\frac{4}{2}", "x", {"solution": "..."}),
        ({"question": "1+1", "answer": 2.5}, "2.5", "x", {}),
    ],
)
def test_schemas_are_recognised(
    chat_tokenizer: Tokenizer, write: Write, row: dict[str, Any], answer: str, source: str, metadata: dict[str, Any]
) -> None:
    (p,) = load_prompts(write("x.jsonl", lines(row)), chat_tokenizer)
    assert p.text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert (p.answer, p.source, dict(p.metadata)) == (answer, source, metadata)


def test_columns_can_be_named(plain_tokenizer: Tokenizer, write: Write) -> None:
    row = {"task": {"text": "1+1"}, "gold": "2", "uid": 17, "set": "algebra", "question": "no", "answer": "no"}
    options = PromptOptions(prompt_key="task.text", answer_key="gold", id_key="uid", source_key="set")
    prompts = load_prompts(write("x.jsonl", lines(row)), plain_tokenizer, options)
    p = prompts[0]
    assert (p.text, p.answer, p.prompt_id, p.source) == ("1+1", "2", "17", "algebra")
    assert prompts.report.schema == "named (task.text, gold)"
    path = write("y.jsonl", lines(row, row))
    with pytest.raises(ValueError, match=r"y\.jsonl line 2: id '17' was already used by .*y\.jsonl line 1"):
        load_prompts(path, plain_tokenizer, options)
    with pytest.raises(ValueError, match=r"line 1 has the keys .*: name the columns"):
        load_prompts(path, plain_tokenizer, PromptOptions(prompt_key="tusk"))


def test_rendering_options(chat_tokenizer: Tokenizer, write: Write) -> None:
    path = write("x.jsonl", lines({"question": "1+1", "answer": "2"}))
    options = PromptOptions(system_prompt="Be brief.", suffix=" Box it.", enable_thinking=False)
    (p,) = load_prompts(path, chat_tokenizer, options)
    assert p.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1 Box it.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    (p,) = load_prompts(path, chat_tokenizer, PromptOptions(chat="never", system_prompt="Be brief."))
    assert p.text == "Be brief.\n\n1+1"
    own = {"prompt": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+1"}], "label": "2"}
    (p,) = load_prompts(write("y.jsonl", lines(own)), chat_tokenizer, options)
    assert "Mine." in p.text
    assert "Be brief." not in p.text


def test_without_a_template_prompts_are_plain(plain_tokenizer: Tokenizer, write: Write) -> None:
    path = write("x.jsonl", lines({"question": "1+1", "answer": "2"}))
    (p,) = load_prompts(path, plain_tokenizer)
    assert p.text == "1+1"
    with pytest.raises(ValueError, match=r"x\.jsonl line 1: .* has no chat template"):
        load_prompts(path, plain_tokenizer, PromptOptions(chat="always"))


def test_prompt_ids_are_stable(chat_tokenizer: Tokenizer, plain_tokenizer: Tokenizer, write: Write) -> None:
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(5)]
    ids = [p.prompt_id for p in load_prompts(write("a.jsonl", lines(*rows)), plain_tokenizer)]
    reordered = load_prompts(write("b.jsonl", lines(*rows[::-1])), chat_tokenizer, PromptOptions(system_prompt="S"))
    assert [p.prompt_id for p in reordered] == ids[::-1]
    assert len(set(ids)) == 5
    assert ids[0] == "4bf614408a85a654", "ids are written into ledgers: they may never change"


def test_duplicates_are_counted_and_dropped_on_request(chat_tokenizer: Tokenizer, write: Write) -> None:
    """Fault 42: DAPO-Math-17k repeats every row a hundred times."""
    rows = [dapo(q, a, index=str(i)) for i, (q, a) in enumerate([("1+1", "2"), ("2+2", "4")] * 3)]
    path = write("x.jsonl", lines(*rows))
    kept = load_prompts(path, chat_tokenizer)
    assert (kept.report.n_unique, kept.report.n_duplicates, len(kept)) == (2, 4, 6)
    assert len({p.prompt_id for p in kept}) == 6
    dropped = load_prompts(path, chat_tokenizer, PromptOptions(drop_duplicates=True))
    assert (dropped.report.n_unique, dropped.report.n_duplicates, len(dropped)) == (2, 4, 2)
    assert [p.prompt_id for p in dropped] == [p.prompt_id for p in kept][:2]


def test_one_problem_with_two_answers_is_reported(plain_tokenizer: Tokenizer, write: Write) -> None:
    rows = [{"question": "1+1", "answer": a} for a in ("2", "3", "2")]
    report = load_prompts(write("x.jsonl", lines(*rows)), plain_tokenizer).report
    assert (report.n_duplicates, report.n_conflicting) == (1, 1)


def test_prompts_that_are_too_long(plain_tokenizer: Tokenizer, write: Write) -> None:
    path = write("x.jsonl", lines({"question": "12", "answer": "2"}, {"question": "1234567890", "answer": "2"}))
    with pytest.raises(
        ValueError, match=r"line 2: prompt \w+ has 10 tokens, max_prompt_len is 9: raise it, or set over"
    ):
        load_prompts(path, plain_tokenizer, PromptOptions(max_prompt_len=9))
    prompts = load_prompts(path, plain_tokenizer, PromptOptions(max_prompt_len=9, over_long="filter"))
    assert (len(prompts), prompts.report.n_too_long) == (1, 1)
    assert len(load_prompts(path, plain_tokenizer, PromptOptions(max_prompt_len=10))) == 2
    with pytest.raises(ValueError, match="all 2 prompts are longer than max_prompt_len = 1"):
        load_prompts(path, plain_tokenizer, PromptOptions(max_prompt_len=1, over_long="filter"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"max_prompt_len": 0},
            "data.prompts.max_prompt_len = 0: must be at least 1 and below 2^31; the default is None",
        ),
        (
            {"over_long": "drop"},
            "data.prompts.over_long = 'drop': must be one of error, filter; the default is 'error'",
        ),
        ({"suffix": None}, "data.prompts.suffix = None: must be str, not NoneType; the default is ''"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        PromptOptions(**options)
    assert str(caught.value) == says
    assert hash(PromptOptions(max_prompt_len=5)) == hash(PromptOptions(max_prompt_len=5))


GOOD = lines({"question": "1+1", "answer": "2"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"bad\.jsonl holds no prompts"),
        ("\n\n", r"bad\.jsonl holds no prompts"),
        (GOOD + '{"question": ', r"bad\.jsonl line 2 is not valid JSON .* at column 13"),
        (GOOD + "\n[1]\n", r"bad\.jsonl line 3 holds a list: one JSON object"),
        (GOOD + lines({"question": "1+1"}), r"line 2 lacks 'answer' \(it has question\)"),
        (lines({"text": "1+1"}), r"line 1 has the keys text, no schema known here"),
        (lines({}), r"line 1 has the keys \(none\)"),
        (lines({"question": "  ", "answer": "2"}), r"line 1: 'question' is '  '"),
        (lines({"question": 7, "answer": "2"}), r"line 1: 'question' is 7: a non-empty string"),
        (lines({"question": "1", "answer": " "}), r"line 1: 'answer' is empty"),
        (lines({"question": "1", "answer": ["2"]}), r"line 1: 'answer' is a list"),
        (lines({"prompt": [{"content": "1"}], "label": "2"}), r"line 1: 'prompt' is a list, but not of chat messages"),
        (lines({"prompt": [], "label": "2"}), r"line 1: 'prompt' is \[\]"),
    ],
)
def test_bad_files_are_named_with_their_line(plain_tokenizer: Tokenizer, write: Write, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load_prompts(write("bad.jsonl", text), plain_tokenizer)
    assert "\n" not in str(raised.value)


def test_other_encodings(plain_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD.encode("utf-8-sig") + GOOD.replace("+", "é").encode("latin-1"))
    with pytest.raises(ValueError, match=r"line 2 is not UTF-8"):
        load_prompts(str(path), plain_tokenizer)
    path.write_bytes(GOOD.encode("utf-8-sig"))
    assert len(load_prompts(str(path), plain_tokenizer)) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.jsonl", "prompt file nowhere.jsonl does not exist: give a"),
        ("toy:sort9/train", "is no toy task"),
        ("toy:sort6/train?size=x", "parameters are whole numbers"),
        ("toy:sort6/train?size=-5", "is no toy task"),
        ("toy:sort6/train?sise=3", "is no toy task"),
        ("tfds:gsm8k", "names no split"),
    ],
)
def test_bad_specs(plain_tokenizer: Tokenizer, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(spec, plain_tokenizer)


def test_toy_source(plain_tokenizer: Tokenizer) -> None:
    prompts = load_prompts("toy:sort6/test?size=20&seed=1", plain_tokenizer)
    assert len(prompts) == 20
    assert all(p.source == "sort6" and p.answer == "".join(sorted(p.text[:-1])) for p in prompts)


def test_parquet(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "dapo.parquet"
    pq.write_table(pa.Table.from_pylist([dapo("1+1", "2"), dapo("2+2", "4", "b")]), path)
    prompts = load_prompts(str(path), chat_tokenizer)
    assert [p.answer for p in prompts] == ["2", "4"]
    assert prompts[1].metadata["extra_info"] == {"index": "b"}
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"dapo\.parquet is no readable Parquet file"):
        load_prompts(str(path), chat_tokenizer)


@pytest.mark.parametrize(
    ("spec", "module", "package"),
    [
        ("reasoning_gym:chain_sum", "reasoning_gym", "reasoning-gym"),
        ("tfds:gsm8k/train", "tensorflow_datasets", "tensorflow-datasets"),
        ("x.parquet", "pyarrow.parquet", "pyarrow"),
    ],
)
def test_optional_packages_are_named_when_missing(
    plain_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, write: Write, spec: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    spec = write(spec, "") if spec == "x.parquet" else spec
    with pytest.raises(ValueError, match=rf"the package {package} is needed .* pip install {package}"):
        load_prompts(spec, plain_tokenizer)


def test_tfds_rows_become_plain_python(plain_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": b"1+1", "answer": b"#### 2", "tags": np.array([b"a", b"b"]), "level": np.int64(3)}]
    module = types.ModuleType("tensorflow_datasets")
    asked: list[tuple[str, str]] = []

    def data_source(name: str, split: str, data_dir: str | None) -> list[dict[str, Any]]:
        asked.append((name, split))
        if split == "nope":
            raise OSError("unknown split\nlong explanation")
        return rows

    monkeypatch.setattr(module, "data_source", data_source, raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    (p,) = load_prompts("tfds:gsm8k/train", plain_tokenizer)
    assert asked == [("gsm8k", "train")]
    assert (p.text, p.answer, p.source) == ("1+1", "2", "gsm8k")
    assert p.metadata == {"tags": ["a", "b"], "level": 3, "solution": "#### 2"}
    with pytest.raises(ValueError, match=r"tfds:gsm8k/nope cannot be opened \(unknown split\)"):
        load_prompts("tfds:gsm8k/nope", plain_tokenizer)


def test_tfds_is_read_without_tensorflow(
    plain_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prepared data set of a registered name, as TFDS lays it out."""
    tfds = pytest.importorskip("tensorflow_datasets")
    array_record = pytest.importorskip("array_record.python.array_record_module")
    folder = tmp_path / "gsm8k" / "1.0.0"
    folder.mkdir(parents=True)
    features = tfds.features.FeaturesDict({"question": tfds.features.Text(), "answer": tfds.features.Text()})
    features.save_config(folder)
    writer = array_record.ArrayRecordWriter(str(folder / "gsm8k-train.array_record-00000-of-00001"), "group_size:1")
    for i in range(3):
        writer.write(features.serialize_example({"question": f"{i}+1", "answer": f"#### {i + 1}"}))
    writer.close()
    split = {"name": "train", "shardLengths": ["3"], "numBytes": "1"}
    split["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    info = {"name": "gsm8k", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    prompts = load_prompts("tfds:gsm8k/train", plain_tokenizer)
    assert [(p.text, p.answer, p.source) for p in prompts] == [(f"{i}+1", str(i + 1), "gsm8k") for i in range(3)]
    assert "tensorflow" not in sys.modules


def test_reasoning_gym_rows(plain_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("reasoning_gym")

    def create_dataset(name: str, size: int, seed: int) -> list[dict[str, Any]]:
        if name != "chain_sum":
            raise ValueError(f"Dataset '{name}' not registered")
        return [{"question": f"{seed}+{i}", "answer": str(seed + i), "metadata": {"i": i}} for i in range(size)]

    monkeypatch.setattr(module, "create_dataset", create_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    prompts = load_prompts("reasoning_gym:chain_sum?size=3&seed=7", plain_tokenizer)
    assert [p.text for p in prompts] == ["7+0", "7+1", "7+2"]
    assert prompts[2].answer == "9"
    assert prompts[2].source == "reasoning_gym/chain_sum"
    assert prompts[2].metadata == {"metadata": {"i": 2}}
    with pytest.raises(ValueError, match="reasoning_gym:chain_som cannot be made"):
        load_prompts("reasoning_gym:chain_som", plain_tokenizer)
