"""``sat-jax``: one word picks the command, argparse the rest; a user's mistake is one line and exit status 2."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from sat_jax.cli.arguments import call, command
from sat_jax.names import nearest


class Command(NamedTuple):
    """``module:function`` is imported only when the command runs, so that ``sat-jax --help`` is instant."""

    target: str
    help: str
    raw: bool = False
    """It has a grammar of its own and takes the arguments unparsed; the others are plain typed functions."""


COMMANDS: dict[str, Command] = {
    "train": Command(
        "sat_jax.cli.train:main", "asynchronous RL of a policy; without CONFIG, the embedded default", raw=True
    ),
    "eval": Command("sat_jax.cli.evaluate:main", "avg@k and pass@k of a checkpoint or Hugging Face folder"),
    "upcycle": Command("sat_jax.cli.convert:upcycle", "dense folder -> mixture of experts with the same function"),
    "import-gguf": Command("sat_jax.cli.convert:import_gguf", "llama.cpp's GGUF file -> Hugging Face folder"),
    "export": Command(
        "sat_jax.cli.convert:export", "run or checkpoint -> Hugging Face folder that other software loads"
    ),
    "report": Command("sat_jax.cli.report:report", "one self-contained HTML page from run folders"),
    "data": Command("sat_jax.cli.data:data", "what a prompt source holds: schema, counts, lengths, one example"),
    "grade": Command("sat_jax.cli.data:grade", "grades the responses in a JSONL file"),
    "inspect": Command("sat_jax.cli.losses:inspect", "what a loss does to a batch dumped by any trainer"),
    "geometry": Command("sat_jax.cli.losses:geometry", "the clip geometry of a rule, as a figure"),
    "ledger": Command("sat_jax.cli.ledger:ledger", "where every prompt group of a run ended"),
    "methods": Command("sat_jax.cli.losses:methods", "every named method: its rules, its source"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 success, 2 wrong use, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if args[0] == "--version":
        from sat_jax import __version__

        print(f"sat-jax {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        return _wrong_use("sat-jax", f"no command '{name}'{nearest(name, COMMANDS)}")
    module, _, function = COMMANDS[name].target.partition(":")
    target = getattr(importlib.import_module(module), function)
    prog = f"sat-jax {name}"
    try:
        status = target(rest, prog) if COMMANDS[name].raw else call(target, command(target, prog).parse(rest))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (ValueError, OSError) as error:
        if not _is_users_mistake(error):
            raise
        return _wrong_use(prog, str(error))
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    return int(status or 0)


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main())


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: sat-jax COMMAND [--help] ...",
        "",
        "Staleness-adaptive trust regions for asynchronous RL, in JAX.",
        "",
    ]
    lines += [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(lines)


def _wrong_use(prog: str, message: str) -> int:
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _is_users_mistake(error: BaseException) -> bool:
    """Whether the error was raised on purpose by this package's own checks, or by the file system on a path it was
    given.

    Everything else is a defect and keeps its traceback. ``SAT_JAX_TRACEBACK=1`` keeps every traceback.
    """
    if os.environ.get("SAT_JAX_TRACEBACK") == "1":
        return False
    if isinstance(error, OSError) and error.filename is not None:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
