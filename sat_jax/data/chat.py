"""Chat templates: Jinja programs that turn messages into the text a chat model was trained on.

The environment is the one that the templates on the Hub are written for: immutable sandbox, ``trim_blocks`` and
``lstrip_blocks``, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, and a
``{% generation %}`` block that renders as what it holds.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
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


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment.from_string(template)


def render(template: str, messages: Messages, **variables: Any) -> str:
    """The text of ``messages``, ``{"role": ..., "content": ...}`` objects, under a Jinja chat template.

    ``variables`` are whatever else the template reads: ``enable_thinking``, special tokens, documents, ``tools``;
    ``add_generation_prompt``, which opens the assistant's turn, is True if not given.
    """
    try:
        return _compile(template).render(
            **{"messages": messages, "tools": None, "add_generation_prompt": True, **variables}
        )
    except jinja2.TemplateError as error:
        roles = [message.get("role") for message in messages]
        raise ValueError(
            f"the chat template rejects messages with roles {roles}: {error}; "
            "change the messages, or pass another template"
        ) from error


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """A Hugging Face folder's template: ``chat_template.jinja`` first, then ``tokenizer_config.json``; None where there
    is none. Of several named ones it is ``default``."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    declared = tokenizer_config.get("chat_template")
    if declared is None or isinstance(declared, str):
        return declared
    if isinstance(declared, list) and all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in declared):
        return {entry["name"]: entry["template"] for entry in declared}.get("default")
    raise ValueError(
        f"chat_template in {folder / 'tokenizer_config.json'} is a {type(declared).__name__}: "
        "it must be a string or a list of {name, template} objects"
    )
