"""Typed functions and dataclasses as argparse options, whose mistakes are one line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from sat_jax.names import nearest


class UsageError(ValueError):
    """Wrong use of the command line; its text is the one line that is shown."""


class Parser(argparse.ArgumentParser):
    """argparse that raises its mistakes, and names the nearest option where one is misspelt."""

    def __init__(self, prog: str, description: str = "", **kwargs: Any) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, **kwargs)
        self.flags: list[str] = []

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse(self, args: Sequence[str]) -> dict[str, Any]:
        """The options that were given, and the others' defaults. ``_`` and ``-`` are the same in a flag."""
        namespace, unknown = self.parse_known_args([_hyphenated(arg) for arg in args])
        for arg in unknown:
            if arg.startswith("-"):
                name = arg.partition("=")[0]
                raise UsageError(f"no option '{name}'{nearest(name, self.flags)}")
        if unknown:
            raise UsageError(f"'{unknown[0]}' is one argument too many; see --help")
        return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}

    def option(self, flag: str, hint: Any, default: Any, doc: str, group: Any = None, **kwargs: Any) -> None:
        """An option of the type that ``hint`` says; ``bool`` takes ``--flag`` and ``--no-flag``."""
        self.flags.append(flag)
        if hint is bool and "type" not in kwargs:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs = argument_type(hint) | kwargs
        (group or self).add_argument(flag, default=default, help=doc.replace("%", "%%"), **kwargs)


def command(function: Callable[..., Any], prog: str) -> Parser:
    """A parser for a typed function: its positional parameters are arguments, its keyword-only ones options.

    Help comes from its docstring. A keyword-only parameter that is a dataclass gives an option for each of its fields.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    description, docs = _docstring(function)
    parser = Parser(prog, description)
    for name, parameter in inspect.signature(function).parameters.items():
        hint, default, doc = hints[name], parameter.default, docs.get(name, "")
        if parameter.kind is parameter.VAR_POSITIONAL:
            parser.add_argument(name, nargs="*", help=doc, **(argument_type(hint) | {"metavar": name.upper()}))
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            optional = {} if default is parameter.empty else {"nargs": "?", "default": default}
            parser.add_argument(name, help=doc, **(argument_type(hint) | {"metavar": name.upper()} | optional))
        elif dataclasses.is_dataclass(hint):
            kinds, texts = typing.get_type_hints(hint), field_docs(hint)  # type: ignore[arg-type]
            for field in dataclasses.fields(hint):
                value = getattr(default, field.name)
                parser.option(_flag(field.name), kinds[field.name], value, texts.get(field.name, ""), dest=field.name)
        else:
            required = {"required": True} if default is parameter.empty else {}
            default = None if required else default
            parser.option(_flag(name), hint, default, doc, dest=name, **required)
    return parser


def call(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Calls a function with what its ``command`` parser found."""
    positional, keywords = [], {}
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += values[name]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(values[name])
        elif dataclasses.is_dataclass(hints[name]):
            keywords[name] = hints[name](**{f.name: values[f.name] for f in dataclasses.fields(hints[name])})
        else:
            keywords[name] = values[name]
    return function(*positional, **keywords)


def argument_type(hint: Any) -> dict[str, Any]:
    """What ``add_argument`` is told about a value of type ``hint``."""
    if typing.get_origin(hint) is Annotated:
        return argument_type(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (inner,) = (option for option in typing.get_args(hint) if option is not type(None))
        told = argument_type(inner)
        return told | {"type": _or_none(told.get("type", str))}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return argument_type(typing.get_args(hint)[0]) | {"nargs": "+"}
    if hint is bool:
        return {"type": _truth, "metavar": "True|False"}
    return {"type": hint, "metavar": {Path: "PATH", str: "TEXT"}.get(hint, hint.__name__.upper())}


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(convert, updated=())
    def converted(text: str) -> Any:
        return None if text == "None" else convert(text)

    return converted


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither True nor False")
    return text.lower() == "true"


def _hyphenated(arg: str) -> str:
    flag, equals, value = arg.partition("=")
    return _kebab(flag) + equals + value if arg.startswith("--") else arg


def _flag(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{_kebab(name.rstrip('_'))}"


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What comes before ``Args:``, and the text of each argument."""
    text = inspect.getdoc(function) or ""
    description, _, rest = text.partition("\nArgs:\n")
    entries = re.split(r"^    (?=\w+: )", rest.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    named = (entry.partition(": ") for entry in entries)
    return description.strip(), {name: " ".join(doc.split()) for name, _, doc in named}


@functools.cache
def field_docs(record: Any) -> dict[str, str]:
    """What is written about each field of a dataclass: the string below it, or its entry under ``Attributes:``."""
    found: dict[str, str] = {}
    listed = (inspect.getdoc(record) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"^    (?=[\w, ]+: )", listed, flags=re.MULTILINE)[1:]:
        names, _, doc = entry.partition(": ")
        found |= dict.fromkeys(names.split(", "), " ".join(doc.split()))
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    previous = None
    for node in typing.cast(ast.ClassDef, body).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(previous, ast.AnnAssign):
            found[ast.unparse(previous.target)] = " ".join(str(node.value.value).split())
        previous = node
    return found
