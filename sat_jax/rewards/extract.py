"""Which part of a response is its final answer.

Three policies, from strict to lenient; each includes the ones before it:

    boxed    the content of the last ``\\boxed{...}`` (or ``\\fbox``), braces balanced.
    marked   else what follows the last ``####``, else the last "answer is" or "answer:". The default.
    number   else the last number in the text.

A response whose last box is still open was cut off while it answered: it has no answer under any policy, whatever
stands in earlier boxes. What a model thinks before ``</think>`` is not its answer.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Policy = Literal["boxed", "marked", "number"]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_MARKS = (re.compile("####"), re.compile(r"\banswer(?:\s+is|\s*[=:])", re.IGNORECASE))
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+|(?:[eE][-+]?\d+))?%?")
_SPECIAL = re.compile(r"(?:<\|\w{1,30}\|>|</?s>|<eos>|<pad>|<end_of_turn>)\Z")
_LONGEST_LINE = 500


def extract_answer(response: str, policy: Policy = "marked") -> str | None:
    """The final answer as it is written in ``response``, or None where the policy finds none."""
    if policy not in get_args(Policy):
        raise ValueError(f"policy = {policy!r}: choose one of {', '.join(get_args(Policy))}")
    text = response.rpartition("</think>")[2].rstrip()
    while special := _SPECIAL.search(text, max(0, len(text) - 40)):
        text = text[: special.start()].rstrip()
    if boxes := list(_BOX.finditer(text)):
        return _box_content(text, boxes[-1].end())
    if policy == "boxed":
        return None
    for mark in _MARKS:
        if found := list(mark.finditer(text)):
            rest = text[found[-1].end() :].lstrip(" \t\n:*_")
            return _sentence(rest.partition("\n")[0][:_LONGEST_LINE]) or None
    if policy == "number" and (numbers := _NUMBER.findall(text)):
        return numbers[-1].rstrip(",")
    return None


def _box_content(text: str, start: int) -> str | None:
    if text[start : start + 1] != "{":  # "\boxed 5": TeX takes one token, people mean one word
        word = re.match(r"[^\s$]+", text[start:])
        return word[0].rstrip(".,") or None if word and text[start - 1].isspace() else None
    depth, escaped = 0, False
    for i in range(start, len(text)):
        if escaped:
            escaped = False
        elif text[i] == "\\":
            escaped = True
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : i].strip() or None
    return None


def _sentence(text: str) -> str:
    """The answer that starts a line: formula delimiters, emphasis and the rest of the prose taken off."""
    text = text.strip().strip("*_ ")
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        # "$5 and $3" are dollars, "$5$" is a formula
        if text.startswith(opening) and (end := text.find(closing, len(opening))) > 0:
            inner = text[len(opening) : end].strip()
            if not (opening == "$" and re.match(r"\s*[\d.]", text[end + 1 :])):
                return inner
    text = re.split(r"(?<=[^\s])[.!?;](?=\s|\*|\Z)|\s+(?:because|since|so|which|where|as)\s", text, maxsplit=1)[0]
    return text.strip().strip("*_ ").rstrip(".,;:")
