"""Chat templates: Jinja programs that turn messages into the text a chat model was trained on.

The environment is the one that the templates on the Hub are written for: immutable sandbox, ``trim_blocks`` and
``lstrip_blocks``, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, and a
``{% generation %}`` block that renders as what it holds.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Messages = Sequence[Mapping[str, Any]]


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks an assistant's own words for trainers; it adds nothing to the text."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def render(
    template: str,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of ``messages`` under a Jinja chat template.

    Args:
        template: the program.
        messages: ``{"role": ..., "content": ...}`` objects, oldest first.
        add_generation_prompt: end with the opening of the assistant's turn.
        tools: JSON schemas of callable functions.
        **variables: whatever else the template reads: ``enable_thinking``, special tokens, documents.

    Raises:
        ValueError: the template does not parse, or refuses these messages.
    """
    try:
        return _compile(template).render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
    except jinja2.TemplateError as error:
        roles = [message.get("role") for message in messages]
        raise ValueError(
            f"the chat template rejects messages with roles {roles}: {error}; "
            "change the messages, or pass another template"
        ) from error


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> Callable[[bool], str | None]:
    """Where a Hugging Face folder keeps its template: ``chat_template.jinja`` first, then ``tokenizer_config.json``.

    Returns:
        A function from "are there tools?" to the template, or to None where the folder has none. A folder may hold one
        template or several named ones: ``tool_use`` is meant for calls with tools, ``default`` for the rest.

    Raises:
        ValueError: ``chat_template`` is neither a string nor a list of named templates.
    """
    declared = tokenizer_config.get("chat_template")
    if declared is None or isinstance(declared, str):
        named = {} if declared is None else {"default": declared}
    elif isinstance(declared, list) and all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in declared):
        named = {str(entry["name"]): str(entry["template"]) for entry in declared}
    else:
        raise ValueError(
            f"chat_template in {folder / 'tokenizer_config.json'} is a {type(declared).__name__}: "
            "it must be a string or a list of {name, template} objects"
        )
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        named["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")

    def pick(with_tools: bool) -> str | None:
        if with_tools and "tool_use" in named:
            return named["tool_use"]
        return named.get("default")

    return pick
