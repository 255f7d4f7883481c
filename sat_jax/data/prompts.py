"""Data sets of problems to rendered, tokenised ``Prompt`` records.

Columns are recognised without configuration where they follow DAPO-Math-17k (``prompt`` as messages,
``reward_model.ground_truth``), slime (``prompt``, ``label``) or the plain forms (``question`` or ``problem``, with
``answer``; GSM8K's ``#### 18`` tail is taken off, and the worked solution kept). Other columns can be named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from sat_jax.checked import Checked, Count
from sat_jax.data.sources import read_rows
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class PromptOptions(Checked, section="data.prompts"):
    """How rows become prompts."""

    prompt_key: str | None = None
    """Column of the problem, a string or chat messages; dots reach into objects. None: recognised."""
    answer_key: str | None = None
    """Column of the reference answer. None: recognised."""
    source_key: str = "data_source"
    """Column of the data source's name; where it is absent the file's own name is used."""
    id_key: str | None = None
    """Column of a unique identity. None: a hash of the problem and its answer."""
    system_prompt: str | None = None
    """Put before the conversation where it has no system message of its own."""
    suffix: str = ""
    """Appended to the last user message, e.g. how to write the final answer."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Use the tokenizer's chat template: where it has one, always, or never."""
    enable_thinking: bool | None = None
    """Handed to the template; None leaves the template's own default."""
    max_prompt_len: Count | None = None
    """Longest prompt in tokens, or None."""
    over_long: Literal["error", "filter"] = "error"
    """What to do with longer ones: stop with an error, or leave them out and count them."""
    drop_duplicates: bool = False
    """Keep only the first of exactly equal rows."""


@dataclasses.dataclass(frozen=True)
class PromptReport:
    """What loading found."""

    spec: str  # the source as given
    schema: str  # the recognised one, or the named columns
    n_rows: int
    n_duplicates: int  # rows equal to an earlier one in problem and answer; kept unless told otherwise
    n_conflicting: int  # rows whose problem occurred before with another answer
    n_too_long: int  # prompts left out for their length

    @property
    def n_unique(self) -> int:
        """Rows that differ in problem or answer."""
        return self.n_rows - self.n_duplicates


class PromptSet(Sequence[Prompt]):
    """Prompts in file order, with the report of how they were read."""

    def __init__(self, prompts: Sequence[Prompt], report: PromptReport) -> None:
        self._prompts, self.report = tuple(prompts), report

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        return self._prompts[index]


@dataclasses.dataclass(frozen=True)
class _Schema:
    name: str
    prompt: str
    answer: str


_SCHEMAS = (
    _Schema("DAPO (prompt, reward_model.ground_truth)", "prompt", "reward_model.ground_truth"),
    _Schema("slime (prompt, label)", "prompt", "label"),
    _Schema("plain (question, answer)", "question", "answer"),
    _Schema("plain (problem, answer)", "problem", "answer"),
    _Schema("plain (prompt, answer)", "prompt", "answer"),
)

_GSM8K_TAIL = re.compile(r"####[ \t]*(\S.*?)\s*\Z")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclasses.dataclass(frozen=True)
class _Record:
    """A row understood, not yet rendered."""

    where: str
    prompt_id: str
    content: str | list[dict[str, Any]]
    answer: str
    source: str
    metadata: dict[str, Any]


def load_prompts(spec: str, tokenizer: Tokenizer, options: PromptOptions | None = None) -> PromptSet:
    """Every problem of a data set, rendered and tokenised, in file order.

    ``prompt_id`` is stable: a hash of the problem and its answer (with ``-2``, ``-3``, ... for kept duplicates), or the
    column ``id_key``. ``metadata`` holds the other columns, and ``solution`` where the answer came with a worked one.
    For ``spec`` see ``sat_jax.data.sources.read_rows``.

    Raises:
        ValueError: whatever is wrong with the source or one of its rows, with the file and the line; a prompt that is
            too long; no prompt left.
    """
    options = options or PromptOptions()
    name, rows = read_rows(spec)
    counts: Counter[str] = Counter()
    schema, records = _understand(name, rows, options, counts, spec)
    texts, special = _render(records, tokenizer, options)
    prompts = []
    for record, text, ids in zip(
        records, texts, tokenizer.encode_batch(texts, add_special_tokens=special), strict=True
    ):
        if not ids:
            raise ValueError(f"{record.where}: the prompt is empty after rendering; give it a problem")
        if options.max_prompt_len is not None and len(ids) > options.max_prompt_len:
            if options.over_long == "error":
                raise ValueError(
                    f"{record.where}: prompt {record.prompt_id} has {len(ids)} tokens, max_prompt_len is "
                    f"{options.max_prompt_len}: raise it, or set over_long to 'filter' to leave such prompts out"
                )
            counts["too long"] += 1
            continue
        token_ids = np.array(ids, np.int32)
        prompts.append(Prompt(record.prompt_id, text, token_ids, record.answer, record.source, record.metadata))
    if not prompts:
        raise ValueError(
            f"{spec}: all {len(records)} prompts are longer than max_prompt_len = {options.max_prompt_len}: raise it"
        )
    report = PromptReport(
        spec, schema.name, counts["rows"], counts["duplicates"], counts["conflicting"], counts["too long"]
    )
    return PromptSet(prompts, report)


def _understand(
    name: str, rows: Iterator[tuple[str, dict[str, Any]]], options: PromptOptions, counts: Counter[str], spec: str
) -> tuple[_Schema, list[_Record]]:
    schema: _Schema | None = None
    records: list[_Record] = []
    answers: dict[str, str] = {}
    seen: Counter[str] = Counter()
    ids: dict[str, str] = {}
    for where, row in rows:
        schema = schema or _recognise(where, row, options)
        content = _content(where, _lookup(where, row, schema.prompt, schema), schema.prompt)
        answer, solution = _answer(where, _lookup(where, row, schema.answer, schema), schema.answer)
        problem = json.dumps(content, sort_keys=True, ensure_ascii=False)
        identity = hashlib.sha256(f"{problem}\0{answer}".encode()).hexdigest()[:16]
        counts["rows"] += 1
        seen[identity] += 1
        if seen[identity] > 1:
            counts["duplicates"] += 1
            if options.drop_duplicates:
                continue
        elif answers.setdefault(problem, answer) != answer:
            counts["conflicting"] += 1
        prompt_id = identity if seen[identity] == 1 else f"{identity}-{seen[identity]}"
        if options.id_key is not None:
            prompt_id = str(_lookup(where, row, options.id_key, schema))
            if prompt_id in ids:
                raise ValueError(f"{where}: id {prompt_id!r} was already used by {ids[prompt_id]}: ids must be unique")
            ids[prompt_id] = where
        used = {schema.prompt.split(".")[0], schema.answer.split(".")[0], options.source_key}
        metadata = {key: value for key, value in row.items() if key not in used}
        if solution is not None:
            metadata["solution"] = solution
        source = row.get(options.source_key)
        records.append(_Record(where, prompt_id, content, answer, str(source) if source else name, metadata))
    if schema is None:
        raise ValueError(f"{spec} holds no prompts: give it at least one row")
    return schema, records


def _recognise(where: str, row: Mapping[str, Any], options: PromptOptions) -> _Schema:
    if options.prompt_key is not None and options.answer_key is not None:
        named = f"named ({options.prompt_key}, {options.answer_key})"
        return _Schema(named, options.prompt_key, options.answer_key)
    for schema in _SCHEMAS:
        prompt, answer = options.prompt_key or schema.prompt, options.answer_key or schema.answer
        if _find(row, prompt) is not None and _find(row, answer) is not None:
            changed = (prompt, answer) != (schema.prompt, schema.answer)
            return _Schema(f"named ({prompt}, {answer})", prompt, answer) if changed else schema
    known = "; ".join(schema.name for schema in _SCHEMAS)
    raise ValueError(
        f"{where} has the keys {', '.join(row) or '(none)'}, no schema known here ({known}): name the columns with "
        "prompt_key and answer_key"
    )


def _find(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None; a key that itself holds dots is found too."""
    value: Any = row
    if path in row:
        return row[path]
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _lookup(where: str, row: Mapping[str, Any], path: str, schema: _Schema) -> Any:
    value = _find(row, path)
    if value is None:
        raise ValueError(
            f"{where} lacks '{path}' (it has {', '.join(row) or 'no keys'}), which schema {schema.name} needs: add it, "
            "remove the row, or name other columns"
        )
    return value


def _content(where: str, value: Any, key: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        if all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value):
            return value
        raise ValueError(f"{where}: '{key}' is a list, but not of chat messages with role and content; mend the row")
    raise ValueError(f"{where}: '{key}' is {value!r:.60}: a non-empty string or a list of chat messages is expected")


def _answer(where: str, value: Any, key: str) -> tuple[str, str | None]:
    """The reference answer, and the worked solution that it was the tail of."""
    if not isinstance(value, str | int | float):
        raise ValueError(
            f"{where}: '{key}' is a {type(value).__name__}: a string or a number is expected as the answer"
        )
    text = str(value).strip()
    if not text:
        raise ValueError(f"{where}: '{key}' is empty: every problem needs a reference answer")
    if tail := _GSM8K_TAIL.search(text):
        return _THOUSANDS.sub("", tail[1]), text
    return text, None


def _render(records: Sequence[_Record], tokenizer: Tokenizer, options: PromptOptions) -> tuple[list[str], bool]:
    """The text of every prompt, and whether the tokenizer is to add its own special tokens to it."""
    use_template = options.chat == "always" or (options.chat == "auto" and tokenizer.has_chat_template)
    extra: dict[str, Any] = {} if options.enable_thinking is None else {"enable_thinking": options.enable_thinking}
    texts = []
    for record in records:
        content = record.content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(m) for m in content]
        if options.suffix:
            last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages) - 1)
            messages[last]["content"] = f"{messages[last]['content']}{options.suffix}"
        if options.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": options.system_prompt})
        if use_template:
            try:
                texts.append(tokenizer.render_chat(messages, **extra))
            except ValueError as error:
                raise ValueError(f"{record.where}: {error}") from error
        else:
            texts.append("\n\n".join(str(m["content"]) for m in messages))
    return texts, not use_template
