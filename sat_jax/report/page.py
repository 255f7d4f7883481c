"""The report: figures, tables and samples of one run, or of several compared, in one file without outside resources.

The functions here compute plain values; ``page.html.jinja`` is all the HTML there is.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2

from sat_jax.report.contents import PANELS, Fact, facts, radii
from sat_jax.report.figure_parts import PALETTE, to_svg
from sat_jax.report.figures import Panel, at_k, draw
from sat_jax.report.samples import cards, pick_samples, tints
from sat_jax.runs.reader import Run, flatten, read_run

GENERATOR = "sat_jax report"
"""Marks our own pages, which may be written over; nothing else is."""

# Control characters as the pictures that Unicode has for them; what cannot be encoded as the replacement character.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read run folders and write their page; an existing page of ours is replaced whole, or not at all.

    ``out`` is the file to write, or an existing folder that gets ``report.html``. Returns the file written.
    ``ValueError`` where ``out`` is a file that no report wrote.
    """
    out = out / "report.html" if out.is_dir() else out
    if out.exists() and GENERATOR not in out.read_text(encoding="utf-8", errors="replace")[:500]:
        raise ValueError(f"{out} exists and is no report of sat_jax: choose another --out")
    page = render(_told_apart([read_run(path) for path in runs]))
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".tmp")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, out)
    return out


def _told_apart(runs: Sequence[Run]) -> list[Run]:
    """Runs of one configuration share its name: those go by their folders'."""
    names = [run.name for run in runs]
    return [
        dataclasses.replace(run, name=run.path.resolve().name) if names.count(run.name) > 1 else run for run in runs
    ]


def render(runs: Sequence[Run]) -> str:
    """The page as a string: one run in detail, or several compared."""
    if not runs:
        raise ValueError("no run folder was given: name at least one that `sat-jax train --out` wrote")
    single = len(runs) == 1
    folder = resources.files("sat_jax.report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(folder.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        generator=GENERATOR,
        style=folder.joinpath("style.css").read_text(encoding="utf-8"),
        title=runs[0].name if single else f"{len(runs)} runs compared",
        about=_about(runs[0]),
        notices=[notice if single else f"{run.name}: {notice}" for run in runs for notice in run.notices],
        facts=facts(runs[0]),
        comparison={} if single else _comparison(runs),
        figures=[_figure(panel, runs, f"f{i}") for i, panel in enumerate(PANELS)],
        evaluations=_evaluations(runs[0]),
        samples=[_samples(run, (0.0, 0.5, 1.0) if single else (1.0,)) for run in runs],
        differing=_differing(runs),
        settings=[(run.name, _settings(run)) for run in runs],
        single=single,
    )


def _printable(value: Any) -> Any:
    return value if hasattr(value, "__html__") else str(value).translate(_PICTURES)


def _about(run: Run) -> dict[str, Any]:
    devices = [str(device) for device in run.info.get("devices", ())]
    commit = run.info.get("git_commit")
    origin = [
        ", ".join(f"{name} {version}" for name, version in run.info.get("versions", {}).items()),
        f"{len(devices)} × {devices[0]}" if len(devices) > 1 else "".join(devices),
        f"commit {commit[:12]}" if commit else "",
    ]
    return {
        "method": run.info.get("method", ""),
        "origin": " · ".join(part for part in origin if part),
        "command": " ".join(map(str, run.info.get("command", ()))),
    }


def _figure(panel: Panel, runs: Sequence[Run], prefix: str) -> dict[str, str]:
    missing = panel.missing(runs)
    svg = "" if missing else to_svg(draw(panel, runs), prefix)
    return {"title": panel.title, "caption": panel.caption, "missing": missing, "svg": svg}


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    methods = [Fact("method", run.info.get("method", "–"), "") for run in runs]
    found = [{fact.label: fact for fact in (method, *facts(run))} for method, run in zip(methods, runs, strict=True)]
    labels = list(dict.fromkeys(label for of_run in found for label in of_run))
    rows = [
        {"name": run.name, "color": i % len(PALETTE), "facts": of_run}
        for i, (run, of_run) in enumerate(zip(runs, found, strict=True))
    ]
    return {"labels": labels, "rows": rows}


def _evaluations(run: Run) -> dict[str, Any]:
    sources = sorted({name for e in run.evaluations for name in e.get("sources", {})})
    sources = sources if len(sources) > 1 else []
    return {
        "head": ["step", at_k(run), at_k(run, "pass"), "problems", "length", "cut off", *sources],
        "rows": [
            [
                f"{e['step']:,}",
                _fixed(e.get("avg@k")),
                _fixed(e.get("pass@k")),
                e.get("problems", "–"),
                _fixed(e.get("response_len_mean"), "{:.1f}".format),
                _fixed(e.get("truncated_ratio"), "{:.1%}".format),
                *(_fixed(e.get("sources", {}).get(name, {}).get("avg@k")) for name in sources),
            ]
            for e in run.evaluations
        ],
    }


def _fixed(value: float | None, text: Callable[[float], str] = "{:.3f}".format) -> str:
    return "–" if value is None or not math.isfinite(value) else text(value)


def _samples(run: Run, places: Sequence[float]) -> dict[str, Any]:
    picked = pick_samples(run.samples, places)
    return {"name": run.name, "tints": tints(picked), "cards": cards(picked, radii(run) or (0.2, 0.2))}


def _differing(runs: Sequence[Run]) -> dict[str, Any]:
    flat = [flatten(run.info["config"]) for run in runs]
    values = {path: [_setting(config.get(path, "–")) for config in flat] for path in sorted({*chain(*flat)})}
    return {
        "head": ["setting", *(run.name for run in runs)],
        "rows": [[path, *row] for path, row in values.items() if len(set(row)) > 1],
    }


def _settings(run: Run) -> Mapping[str, Any]:
    about = {f"versions.{name}": version for name, version in run.info.get("versions", {}).items()}
    about |= {"devices": run.info.get("devices", []), "git_commit": run.info.get("git_commit")}
    return {path: _setting(value) for path, value in (flatten(run.info["config"]) | about).items()}


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
