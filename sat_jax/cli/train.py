"""``sat-jax train``: pick a configuration, apply the overrides, hand it to the trainer."""

from __future__ import annotations

import argparse
import difflib
import functools
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from sat_jax.cli import overrides
from sat_jax.cli.arguments import Parser, UsageError, argument_type
from sat_jax.config import ExperimentConfig, config_functions, load_config
from sat_jax.runs.folder import CONFIG_FILE
from sat_jax.training.restore import stored_config

_DEFAULT = "mix6"
_DEFAULT_FOR_REAL_INPUT = "post_train"
_SWITCHES = ("--resume", "--help", "-h", "--help-all")  # every other flag is followed by its value


@dataclass(frozen=True)
class TrainOptions:
    """What ``sat-jax train`` was asked for."""

    config: ExperimentConfig
    out: Path | None = None
    resume: bool = False


def main(args: Sequence[str], prog: str) -> int:
    """Parses ``args`` and runs the training; returns the exit status."""
    options = parse_options(args, prog)
    # Imported here: --help and a mistake in the arguments should not wait for all of JAX.
    from sat_jax.training.trainer import Trainer

    return Trainer(options.config, _run_folder(options), resume=options.resume).run()


def parse_options(args: Sequence[str], prog: str = "sat-jax train") -> TrainOptions:
    """The options that ``args`` ask for: configuration looked up, overrides applied."""
    name, flags = _split_config_name(list(args))
    base = _base(name, flags)
    parser = _parser(prog, base, everything="--help-all" in flags)
    _reject_unknown(flags, base, parser)
    given = parser.parse(flags)
    out, resume, model, prompts = (given.pop(name) for name in ("out", "resume", "model", "prompts"))
    if model is not None:
        # The folder is the policy: neither the configuration's random initialisation nor its warm start applies.
        base = replace(base, policy=replace(base.policy, path=str(model), init=None, tokenizer=""), warm_start=None)
    if prompts is not None:
        base = replace(base, data=replace(base.data, source=prompts))
    config = overrides.apply(base, given)
    if not config.policy.path and config.policy.init is None:
        raise UsageError("no policy: give --model HF_DIR")
    if not config.data.source:
        raise UsageError("no prompts: give --prompts FILE")
    paths = {"policy": ("path", "tokenizer"), "data": ("source",), "evaluation": ("source",)}
    whole = {f"{part}.{key}": _absolute(getattr(getattr(config, part), key)) for part in paths for key in paths[part]}
    return TrainOptions(overrides.apply(config, whole), out, resume)


def _base(name: str | None, flags: Sequence[str]) -> ExperimentConfig:
    """The configuration that the overrides apply to."""
    if "--resume" in flags:
        if name is not None:
            raise UsageError(f"--resume continues the run's own configuration; leave out '{name}'")
        out = _value_of(flags, "--out")
        if out is None:
            raise UsageError("--resume needs --out RUN, the folder of the run to continue")
        config = stored_config(Path(out)) if (Path(out) / CONFIG_FILE).is_file() else None
        if config is None:
            raise UsageError(f"{out} holds no run to resume: check --out, or start one without --resume")
        return config
    if name is not None:
        return load_config(name)
    real = _value_of(flags, "--model") is not None or _value_of(flags, "--prompts") is not None
    return load_config(_DEFAULT_FOR_REAL_INPUT if real else _DEFAULT)


def _parser(prog: str, base: ExperimentConfig, everything: bool) -> Parser:
    """Options of the command, and of every field of ``base``; the fields are in the help where ``everything`` is."""
    named = {name: (function.__doc__ or "").partition("\n")[0] for name, function in config_functions().items()}
    parser = Parser(
        prog,
        "Asynchronous reinforcement learning of a policy. CONFIG is file.py:function, or one of the named\n"
        "configurations below; without one, mix6, or post_train where --model or --prompts is given.",
        usage=f"{prog} [CONFIG] [--out DIR] [--resume] [--model HF_DIR] [--prompts FILE] [--FIELD VALUE ...]",
        epilog="configurations:\n"
        + "\n".join(
            textwrap.fill(doc, 100, initial_indent=f"  {name:20}", subsequent_indent=" " * 22)
            for name, doc in named.items()
        )
        + "\n\nAny field of the configuration by its dotted path, --rollout.schedule.delay 1 --loss.sat.alpha 0.95;\n"
        "--help-all lists them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--help-all", action="help", help="this page, and every field of the configuration")
    parser.option("--out", Path, None, "run folder, by default runs/NAME-TIME; with --resume, the run to continue")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its newest checkpoint")
    parser.option("--model", Path, None, "Hugging Face folder of the policy; short for --policy.path, no warm start")
    parser.option("--prompts", str, None, "JSONL, Parquet, tfds:NAME/SPLIT, ...; short for --data.source")
    group = parser.add_argument_group("fields of the configuration, with their values in it") if everything else None
    for leaf in overrides.leaves(base):
        flag = "--" + leaf.path.replace("_", "-")
        told = argument_type(leaf.hint) | {"dest": leaf.path, "group": group}
        doc = f"{leaf.doc} ({leaf.value})".strip() if everything else argparse.SUPPRESS
        parser.option(flag, leaf.hint, argparse.SUPPRESS, doc, **told)
    return parser


def _split_config_name(args: list[str]) -> tuple[str | None, list[str]]:
    """The positional CONFIG and the rest. Switches take no value, lists all that follow, the others one."""
    rest: list[str] = []
    loose: list[str] = []
    while args:
        token = args.pop(0)
        if not token.startswith("-"):
            loose.append(token)
            continue
        rest.append(token)
        if token in _SWITCHES or "=" in token:
            continue
        is_list = token.rpartition(".")[2].lstrip("-").replace("-", "_") in _list_fields()
        while args and not args[0].startswith("--"):
            rest.append(args.pop(0))
            if not is_list:
                break
    if len(loose) > 1:
        raise UsageError(f"one CONFIG at most, found {', '.join(loose)}")
    return (loose[0] if loose else None), rest


@functools.cache
def _list_fields() -> frozenset[str]:
    """Last names of the fields that hold lists."""
    return frozenset(
        leaf.path.rpartition(".")[2]
        for leaf in overrides.leaves(load_config(_DEFAULT))
        if typing.get_origin(leaf.hint) is tuple
    )


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


def _reject_unknown(flags: Sequence[str], base: ExperimentConfig, parser: Parser) -> None:
    """Names a misspelt override and the nearest real one, or says which part of the configuration is not in it."""
    for token in flags:
        flag = token.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in _SWITCHES or flag in parser.flags:
            continue
        path = flag[2:]
        for off in overrides.switched_off(base):
            if path.startswith(off.replace("_", "-") + "."):
                raise UsageError(f"{flag}: '{off}' is off in configuration '{base.name}'; choose one that has it")
        if flag == "--loss.rules" or (
            path.startswith("loss.") and path.count(".") > 1 and not _names_a_rule(path, base)
        ):
            rules = ", ".join(rule.name for rule in base.loss.rules)
            raise UsageError(
                f"{flag}: the loss of '{base.name}' is made of the rules {rules}, whose settings may be overridden; "
                "other rules are composed in a configuration function"
            )
        by_last = sorted(f for f in parser.flags if f.rpartition(".")[2].lstrip("-") == path)
        close = by_last[:3] or difflib.get_close_matches(flag, parser.flags, n=1, cutoff=0.6)
        if close:
            raise UsageError(f"no field '{flag}'; did you mean {' or '.join(repr(f) for f in close)}?")
        raise UsageError(f"no field '{flag}'; --help-all lists all of them")


def _names_a_rule(path: str, base: ExperimentConfig) -> bool:
    """Whether ``loss.NAME.field`` means a rule of the loss, misspelt perhaps."""
    names = [rule.name for rule in base.loss.rules]
    return bool(difflib.get_close_matches(path.split(".")[1].replace("-", "_"), names, n=1, cutoff=0.6))


def _run_folder(options: TrainOptions) -> Path:
    """Where the run lives; nothing that is there already is overwritten."""
    if options.out is None:
        return Path("runs") / f"{options.config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    out = options.out
    if options.resume or not out.exists():
        return out
    if not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    if (out / CONFIG_FILE).exists():
        raise UsageError(f"--out {out} holds another run: continue it with --resume, or choose another folder")
    if any(out.iterdir()):
        raise UsageError(f"--out {out} is not empty: choose another folder")
    return out
