"""``sat-jax grade`` and ``sat-jax data``: look at verdicts and prompts before a model is trained on them."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sat_jax.data.batching import make_sft_batch
from sat_jax.data.prompts import PromptOptions, PromptSet, load_prompts
from sat_jax.data.sources import read_rows
from sat_jax.data.tokenizer import Tokenizer
from sat_jax.rewards.functions import GradeJob
from sat_jax.rewards.grader import Grader
from sat_jax.types import Prompt

_GRADERS = {"boxed": "grade_boxed", "marked": "grade", "number": "grade_lenient"}
_AT_ONCE = 1024


def grade(
    file: Path,
    *,
    out: Path,
    policy: Literal["boxed", "marked", "number"] = "marked",
    reward: str | None = None,
    workers: int = 2,
    timeout: float = 10.0,
) -> None:
    """Grade the responses in a JSONL file and write them with their verdicts.

    Every line needs `response` and `answer`; its keys are kept, and `correct`, `parsed`, `verdict` and `reward` added.

    Args:
        file: JSONL file with one response a line.
        out: File to write; an existing one is replaced once everything is graded.
        policy: Where a final answer may stand: in a box; also after "####" or "answer is"; also as the last number.
        reward: Another reward function, as module:function; `policy` then does not apply.
        workers: Processes that grade. 0 grades in this one, without time limits.
        timeout: Seconds that one grading may take.
    """
    if out.exists() and file.exists() and out.samefile(file):
        raise ValueError(f"--out {out} is the file that is graded: write to another one")
    counts: Counter[str] = Counter()
    n = n_correct = 0
    _, rows = read_rows(str(file))
    unfinished = out.with_name(out.name + ".part")
    try:
        with (
            Grader(reward or f"sat_jax.rewards.math:{_GRADERS[policy]}", workers=workers, timeout_s=timeout) as grader,
            unfinished.open("w", encoding="utf-8") as output,
        ):
            while chunk := list(itertools.islice(rows, _AT_ONCE)):
                grades = grader.grade([_job(where, row) for where, row in chunk])
                for (_, row), given in zip(chunk, grades, strict=True):
                    correct = given.reward > 0 and not given.failed
                    added = {"correct": correct, "parsed": given.info.get("parsed")}
                    added |= {"verdict": given.verdict, "reward": given.reward}
                    output.write(json.dumps(row | added, ensure_ascii=False) + "\n")
                    counts[given.verdict] += 1
                    n, n_correct = n + 1, n_correct + correct
        if n == 0:
            raise ValueError(f"{file} holds no lines to grade: give it objects with 'response' and 'answer'")
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    table = Table("verdict", "responses", "share", title=f"{n} responses of {file}")
    for verdict, count in counts.most_common():
        table.add_row(verdict, str(count), f"{count / n:.1%}")
    console = Console()
    console.print(table)
    console.print(f"correct: {n_correct} of {n} ({n_correct / n:.1%}); written to {out}", highlight=False)


def _job(where: str, row: dict[str, Any]) -> GradeJob:
    for key in ("response", "answer"):
        if not isinstance(row.get(key), str | int | float):
            found = "lacks it" if key not in row else f"has a {type(row[key]).__name__}"
            raise ValueError(f"{where}: every line needs a string '{key}', this one {found}; mend or remove the line")
    prompt = row.get("prompt", row.get("question", ""))
    return GradeJob(
        prompt if isinstance(prompt, str) else json.dumps(prompt),
        str(row["response"]),
        str(row["answer"]),
        str(row.get("data_source", "")),
        {key: value for key, value in row.items() if key not in ("response", "answer")},
    )


def data(
    file: str,
    *,
    model: Path | None = None,
    options: PromptOptions = PromptOptions(),  # noqa: B008 - frozen
    example: int = 0,
) -> None:
    """Describe a prompt file: schema, counts, lengths, duplicates, and one rendered example with its masks.

    Args:
        file: JSONL or Parquet file, tfds:NAME/SPLIT, reasoning_gym:NAME or toy:sort6/SPLIT.
        model: Hugging Face folder whose tokenizer and chat template to use; without one, lengths are in bytes.
        options: How rows become prompts.
        example: Which prompt to show, from 0.
    """
    tokenizer = Tokenizer.of_bytes() if model is None else Tokenizer.from_folder(model)
    prompts = load_prompts(file, tokenizer, options)
    if not 0 <= example < len(prompts):
        raise ValueError(f"--example {example}: there are {len(prompts)} prompts, counted from 0; choose one of them")
    console = Console()
    console.print(_summary(prompts, tokenizer, "bytes" if model is None else "tokens"))
    for line in _example(prompts[example], tokenizer):
        console.print(line, highlight=False, soft_wrap=True)


def _summary(prompts: PromptSet, tokenizer: Tokenizer, unit: str) -> Table:
    report = prompts.report
    lengths = np.array([len(p.token_ids) for p in prompts])
    percentiles = ", ".join(f"{q}% {int(np.percentile(lengths, q))}" for q in (50, 90, 99))
    sources = Counter(p.source for p in prompts)
    table = Table("", "", title=report.spec, show_header=False)
    rendered = "chat template" if tokenizer.has_chat_template else "plain (no chat template)"
    rows = {
        "schema": report.schema,
        "rows": f"{report.n_rows} ({report.n_unique} unique, {report.n_duplicates} duplicates)",
        "prompts kept": f"{len(prompts)} ({report.n_too_long} left out as too long)",
        "same problem, other answer": str(report.n_conflicting),
        "sources": ", ".join(f"{name} {count}" for name, count in sources.most_common(8)),
        f"prompt length in {unit}": f"{lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}, {percentiles}",
        "rendered with": f"{rendered}, tokenizer {tokenizer.name} ({tokenizer.vocab_size} ids)",
        "end of sequence": ", ".join(f"{i} {tokenizer.token(i)}" for i in tokenizer.eos_ids) or "none",
    }
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def _example(prompt: Prompt, tokenizer: Tokenizer) -> Iterator[Text]:
    """The prompt and its reference answer as a training row: one line per run of equal mask."""
    answer = str(prompt.metadata.get("solution", prompt.answer))
    target = np.array([*tokenizer.encode(answer), *tokenizer.eos_ids[:1]], np.int32)
    batch = make_sft_batch([prompt.token_ids], [target], widths=[len(prompt.token_ids) + len(target)])
    tokens, mask = np.asarray(batch.tokens[0]), np.asarray(batch.loss_mask[0])
    yield Text(f"prompt {prompt.prompt_id} from {prompt.source}, reference answer {prompt.answer!r}", style="bold")
    starts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist()]
    for start, stop in itertools.pairwise([*starts, len(tokens)]):
        trained = bool(mask[start])
        kind = "loss mask 1 (reference answer, trained on)" if trained else "loss mask 0 (prompt)"
        yield Text(f"{kind}, positions {start} to {stop - 1}:", style="bold green" if trained else "bold")
        text = tokenizer.decode(tokens[start:stop], skip_special_tokens=False)
        yield Text(text, style="green" if trained else "dim")
