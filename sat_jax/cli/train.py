"""``sat-jax train``: pick a configuration, apply the overrides, hand it to the trainer."""

from __future__ import annotations

import difflib
import functools
import json
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from sat_jax.cli.main import UsageError, parse
from sat_jax.config import ExperimentConfig, check, load_config
from sat_jax.dataclass_json import field_paths, from_dict

_DEFAULT = "mix6"
_DEFAULT_FOR_REAL_INPUT = "post_train"
_BOOLEAN = {"--resume", "--no-resume", "--help", "-h"}  # every other flag is followed by its value


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``sat-jax train`` beside the configuration's own fields."""

    config: Annotated[ExperimentConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    out: Path | None = None
    """Run folder; by default ``runs/NAME-TIME``. With --resume, the run to continue."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint: model, optimizer, step, data cursor, queued rollouts."""
    model: Path | None = None
    """Hugging Face folder of the policy; short for --policy.path, without a warm start."""
    prompts: str | None = None
    """Prompts: JSONL, Parquet, tfds:NAME/SPLIT, ...; short for --data.source."""


def main(args: Sequence[str], prog: str) -> int:
    """Parses ``args`` and runs the training; returns the exit status."""
    options = parse_options(args, prog)
    # Imported here: --help and a mistake in the arguments should not wait for JAX.
    from sat_jax.training.trainer import Trainer

    return Trainer(options.config, _run_folder(options), resume=options.resume).run()


def parse_options(args: Sequence[str], prog: str = "sat-jax train") -> TrainOptions:
    """The options that ``args`` ask for: configuration looked up, overrides applied, checked.

    Raises:
        UsageError, ValueError: an unknown configuration or field, a bad value, a contradiction.
    """
    name, flags = _split_config_name(list(args))
    asks_for_help = any(flag in ("-h", "--help") for flag in flags)
    if "--resume" in flags and not asks_for_help:
        if name is not None:
            raise UsageError(f"--resume continues the run's own configuration; leave out '{name}'")
        base = _stored_config(_value_of(flags, "--out"))
    elif name is not None:
        base = load_config(name)
    else:
        real = _value_of(flags, "--model") is not None or _value_of(flags, "--prompts") is not None
        base = load_config(_DEFAULT_FOR_REAL_INPUT if real else _DEFAULT)
    _reject_unknown(flags, base)
    options = parse(TrainOptions, flags, prog, default=TrainOptions(config=base))
    config = options.config
    if options.model is not None:
        # The folder is the policy: neither the configuration's random initialisation nor its warm start applies.
        config = replace(config, policy=replace(config.policy, path=str(options.model), tokenizer=""), warm_start=None)
    if options.prompts is not None:
        config = replace(config, data=replace(config.data, source=options.prompts))
    if not config.policy.path and config.policy.init is None:
        raise UsageError("no policy: give --model HF_DIR")
    if not config.data.source:
        raise UsageError("no prompts: give --prompts FILE")
    check(config)
    policy = replace(config.policy, path=_absolute(config.policy.path), tokenizer=_absolute(config.policy.tokenizer))
    data = replace(config.data, source=_absolute(config.data.source))
    evaluation = replace(config.evaluation, source=_absolute(config.evaluation.source))
    return replace(options, config=replace(config, policy=policy, data=data, evaluation=evaluation))


def _split_config_name(args: list[str]) -> tuple[str | None, list[str]]:
    """The positional CONFIG and the rest. Boolean flags take no value, lists all that follow, the others one."""
    rest: list[str] = []
    loose: list[str] = []
    while args:
        token = args.pop(0)
        if not token.startswith("-"):
            loose.append(token)
            continue
        rest.append(token)
        if token in _BOOLEAN or "=" in token:
            continue
        is_list = token.rpartition(".")[2].lstrip("-").replace("-", "_") in _list_fields(ExperimentConfig)
        while args and not args[0].startswith("--"):
            rest.append(args.pop(0))
            if not is_list:
                break
    if len(loose) > 1:
        raise UsageError(f"one CONFIG at most, found {', '.join(loose)}")
    return (loose[0] if loose else None), rest


@functools.cache
def _list_fields(record: type) -> frozenset[str]:
    """Names of the fields of a configuration, at any depth, that hold lists."""
    found: set[str] = set()
    for name, hint in typing.get_type_hints(record).items():
        for option in (hint, *typing.get_args(hint)):
            if typing.get_origin(option) is tuple:
                found.add(name)
            elif isinstance(option, type) and is_dataclass(option):
                found |= _list_fields(option)
    return frozenset(found)


def _absolute(source: str) -> str:
    """A path that still leads there from another folder; anything that is no path as it is."""
    return str(Path(source).resolve()) if source and Path(source).exists() else source


def _value_of(flags: Sequence[str], name: str) -> str | None:
    for i, token in enumerate(flags):
        if token == name and i + 1 < len(flags):
            return flags[i + 1]
        if token.startswith(name + "="):
            return token.partition("=")[2]
    return None


def _reject_unknown(flags: Sequence[str], base: ExperimentConfig) -> None:
    """Names a misspelt override and the nearest real one, or says which part of the configuration is switched off."""
    known = {*field_paths(base), *(f.name for f in fields(TrainOptions) if f.name != "config")}
    spelled = {path.replace("_", "-"): path for path in known}
    for token in flags:
        if not token.startswith("--") or token in _BOOLEAN:
            continue
        path = token[2:].partition("=")[0].replace("_", "-")
        if path in spelled:
            continue
        for off in _switched_off(base):
            if path.startswith(off.replace("_", "-") + "."):
                raise UsageError(f"--{path}: '{off}' is off in configuration '{base.name}'; choose one that has it")
        raise UsageError(f"no field '{token.partition('=')[0]}'{_nearest_flag(path, known)}")


def _nearest_flag(path: str, known: Collection[str]) -> str:
    """The nearest real flag, also where only the last word of its path was typed; else where to look."""
    by_last = sorted(k for k in known if k.rpartition(".")[2].replace("_", "-") == path)
    close = by_last or difflib.get_close_matches(path.replace("-", "_"), known, n=1, cutoff=0.6)
    named = " or ".join(f"'--{flag}'" for flag in close[:3])
    return f"; did you mean {named}?" if close else "; see --help for all of them"


def _switched_off(record: Any, prefix: str = "") -> list[str]:
    """Paths whose value is None."""
    found: list[str] = []
    for f in fields(record):
        value = getattr(record, f.name)
        if value is None:
            found.append(prefix + f.name)
        elif is_dataclass(value):
            found += _switched_off(value, f"{prefix}{f.name}.")
    return found


def _stored_config(out: str | None) -> ExperimentConfig:
    if out is None:
        raise UsageError("--resume needs --out RUN, the folder of the run to continue")
    path = Path(out) / "config.json"
    if not path.is_file():
        raise UsageError(f"{out} holds no run to resume (no config.json): check --out, or start one without --resume")
    try:
        return from_dict(ExperimentConfig, json.loads(path.read_text(encoding="utf-8"))["config"])
    except (json.JSONDecodeError, KeyError) as error:
        raise UsageError(f"{path} is damaged ({error}): restore it, or start a new run in another --out") from error


def _run_folder(options: TrainOptions) -> Path:
    """Where the run lives; nothing that is there already is overwritten.

    Raises:
        ValueError: the folder holds another run, or other files.
    """
    if options.out is None:
        return Path("runs") / f"{options.config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    out = options.out
    if options.resume or not out.exists():
        return out
    if not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    if (out / "config.json").exists():
        raise UsageError(f"--out {out} holds another run: continue it with --resume, or choose another folder")
    if any(out.iterdir()):
        raise UsageError(f"--out {out} is not empty: choose another folder")
    return out
