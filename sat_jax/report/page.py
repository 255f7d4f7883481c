"""The report: figures, tables and samples of one run, or of several compared, in one file without outside resources."""

from __future__ import annotations

import dataclasses
import html
import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from sat_jax.report import figure_parts, figures
from sat_jax.report.contents import windows
from sat_jax.report.samples import pick_samples, samples_html
from sat_jax.runs.reader import Run, flatten, outcome, read_run

GENERATOR = "sat_jax report"
"""Marks our own pages, which may be written over; nothing else is."""


LIMITS = (
    "What the numbers do not say: SAT acts on the sampled surrogate and does not bound the realised policy; "
    "|log ratio| is neither a total variation nor a version age; q is relative to its batch."
)
"""The paper's own limits, which belong wherever results are shown."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One figure of the page; ``keys`` are the metrics it needs at least one of."""

    title: str
    caption: str
    keys: tuple[str, ...]
    plot: figure_parts.Plot
    missing: str = "not logged"


PANELS = (
    Panel(
        "Learning curve",
        "Held-out accuracy before, during and after training: mean over k samples of every problem.",
        ("eval/avg@k",),
        figures.learning_curve,
        "no evaluations yet",
    ),
    Panel(
        "Mismatch",
        "How far learner and rollout engine disagree on the sampled tokens. With q beyond log(1 + ε) SAT is inert for "
        "d > 0, beyond −log(1 − ε) for d < 0: there the nominal interval clips every gated token already.",
        ("train/d_bar", "sat/q"),
        figures.mismatch,
    ),
    Panel(
        "SAT radii",
        "Clip radii after contraction, averaged over active tokens, and the strongest contraction of each batch.",
        ("sat/eps_low_mean", "sat/eps_high_mean", "sat/c_low_min", "sat/c_high_min"),
        figures.radii,
    ),
    Panel(
        "Gate, clip and intercept rate",
        "The gate rate is close to 1 − α by construction. What SAT changes is the intercept rate: gradients that the "
        "nominal interval would have kept.",
        ("sat/gate_rate", "train/clip_fraction", "sat/intercept_rate"),
        figures.rates,
    ),
    Panel(
        "Staleness",
        "Policy versions between sampling a token and training on it.",
        ("async/staleness_mean", "async/staleness_max", "async/staleness_histogram"),
        figures.staleness,
    ),
    Panel(
        "Rewards",
        "Distribution over responses, and groups without a learning signal.",
        ("rollout/reward_mean", "rollout/reward_histogram", "rollout/zero_std_groups"),
        figures.rewards,
    ),
    Panel(
        "Optimisation",
        "KL and entropy in nats per token; gradient norm before clipping.",
        ("train/kl_loss", "train/entropy", "train/grad_norm"),
        figures.optimisation,
    ),
    Panel(
        "Queue and routing",
        "Finished groups waiting, groups that became too old, and how often the learner's router would have chosen the "
        "engine's experts.",
        ("async/queue_groups", "async/dropped_stale", "moe/router_agreement"),
        figures.asynchrony,
    ),
    Panel(
        "Throughput",
        "Tokens per second, and where the time of a learner step goes. Compilation in the first step is cut off.",
        ("rollout/tokens_per_s", "perf/tokens_per_s", "perf/step_time_s"),
        figures.throughput,
    ),
    Panel(
        "Responses",
        "Length, and the share that the token budget cut off.",
        ("rollout/response_len_mean", "rollout/truncated_ratio"),
        figures.responses,
    ),
)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read run folders and write their page; an existing page of ours is replaced whole, or not at all.

    Args:
        runs: run folders, finished or still being written.
        out: the file to write, or an existing folder that gets ``report.html``.

    Returns:
        The file written.

    Raises:
        ValueError: no run was given, a folder is no run, or ``out`` is a file that no report wrote.
    """
    out = Path(out)
    out = out / "report.html" if out.is_dir() else out
    if out.exists() and GENERATOR not in out.read_text(encoding="utf-8", errors="replace")[:500]:
        raise ValueError(f"{out} exists and is no report of sat_jax: choose another --out")
    page = render(_told_apart([read_run(Path(path)) for path in runs]))
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
    """The page as a string: one run in detail, or several compared.

    Raises:
        ValueError: no run was given.
    """
    if not runs:
        raise ValueError("no run folder was given: name at least one that `sat-jax train --out` wrote")
    single = len(runs) == 1
    title = runs[0].name if single else f"{len(runs)} runs compared"
    body = [
        f"<h1>{_text(title)}</h1>",
        _origin(runs[0]) if single else "",
        _notices(runs),
        _tiles(runs[0]) if single else _comparison(runs),
        '<h2>Training</h2><div class="grid">',
        *(_figure(panel, runs, i) for i, panel in enumerate(PANELS)),
        "</div>",
        _evaluations(runs[0]) if single else "",
        _samples(runs),
        _configuration(runs),
        f"<footer><p>{LIMITS}</p></footer>",
    ]
    style = resources.files("sat_jax.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="generator" content="{GENERATOR}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)} · sat_jax</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _origin(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.info.get("versions", {}).items())
    devices = [str(device) for device in run.info.get("devices", ())]
    where = f"{len(devices)} × {devices[0]}" if len(devices) > 1 else "".join(devices)
    commit = run.info.get("git_commit")
    parts = [versions, where, f"commit {commit[:12]}" if commit else ""]
    command = " ".join(map(str, run.info.get("command", ())))
    said = " · ".join(_text(part) for part in parts if part)
    return f'<p class="sub">{said}{f"<br><code>{_text(command)}</code>" if command else ""}</p>'


def _notices(runs: Sequence[Run]) -> str:
    said = [(f"{run.name}: " if len(runs) > 1 else "") + notice for run in runs for notice in run.notices]
    items = "".join(f"<li>{_text(notice)}</li>" for notice in said)
    return f'<div class="notices"><ul>{items}</ul></div>' if said else ""


def _tiles(run: Run) -> str:
    tiles = []
    result = outcome(run)
    at_k = figures.at_k(run)
    if result is None:
        tiles.append((f"held-out {at_k}", "–", "no evaluations yet"))
    else:
        problems = run.evaluations[-1].get("problems", "?")
        gain = f"{100 * (result.final - result.before):+.1f} points, {problems} problems"
        tiles.append((f"held-out {at_k}", f"{result.before:.3f} → {result.final:.3f}", gain))
        fall = (
            "fell below half its peak"
            if result.below_half_peak
            else f"largest fall {100 * result.max_drawdown:.1f} points"
        )
        tiles.append(("best evaluation", f"{result.best:.3f}", f"at step {result.best_step}; {fall}"))
    done = int(run.steps[-1]) if len(run.steps) else 0
    planned = run.setting("steps")
    tiles.append(
        (
            "learner steps",
            f"{done:,}",
            (f"of {planned:,}; " if planned else "") + f"{_wall_time(run)} from the first to the last",
        )
    )
    tiles.append(("tokens sampled per second", _median(run, "rollout/tokens_per_s"), "median over steps"))
    d_bar = _recent(run, "train/d_bar")
    tiles.append(
        ("mismatch d̄", "–" if d_bar is None else f"{d_bar:.3g}", "mean |log ratio| in nats, last tenth of the run")
    )
    tiles.append(("SAT can act at", *_window(run)))
    lag, oldest = _recent(run, "async/staleness_mean"), run.series("async/staleness_max")[1]
    age = (
        "not logged: async/staleness_max"
        if not len(oldest)
        else f"mean in versions, last tenth; never over {oldest.max():.0f}"
    )
    tiles.append(("staleness", "–" if lag is None else f"{lag:.1f}", age))
    if run.groups:
        others = ", ".join(f"{count:,} {state}" for state, count in run.groups.items() if state != "trained")
        tiles.append(("groups trained on", f"{run.groups.get('trained', 0):,}", others or "none lost, none dropped"))
    cells = "".join(
        f'<div class="tile"><div class="label">{_text(label)}</div><div class="value">{_text(value)}</div>'
        f'<div class="detail">{_text(detail)}</div></div>'
        for label, value, detail in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _window(run: Run) -> tuple[str, str]:
    """Share of steps at which SAT could act, and where the last tenth of the run stands."""
    stands = windows(run)
    if not stands:
        return "–", "sat/q is not logged: a method without SAT" if len(run.steps) else "no steps yet"
    recent = sorted(stands[-max(1, len(stands) // 10) :], key=lambda window: window.q)
    return f"{100 * np.mean([w.acts for w in stands]):.0f}% of steps", f"lately {recent[len(recent) // 2].text}"


def _comparison(runs: Sequence[Run]) -> str:
    head = "".join(
        f"<th{numeric}>{label}</th>"
        for label, numeric in (
            ("run", ""),
            ("steps", ' class="n"'),
            ("before", ' class="n"'),
            ("final", ' class="n"'),
            ("best (step)", ' class="n"'),
            ("largest fall", ' class="n"'),
            ("d̄, last tenth", ' class="n"'),
            ("SAT active", ' class="n"'),
            ("tokens/s", ' class="n"'),
            ("time", ' class="n"'),
        )
    )
    rows = []
    for i, run in enumerate(runs):
        result = outcome(run)
        d_bar = _recent(run, "train/d_bar")
        cells = [
            f"{int(run.steps[-1]) if len(run.steps) else 0:,}",
            *(["no evaluations yet", "", "", ""] if result is None else _outcome_cells(result)),
            "–" if d_bar is None else f"{d_bar:.3g}",
            _window(run)[0],
            _median(run, "rollout/tokens_per_s"),
            _wall_time(run),
        ]
        color = f"var(--c{i % len(figure_parts.PALETTE)})"
        name = f'<td class="name"><span class="chip" style="background:{color}"></span>{_text(run.name)}</td>'
        rows.append(f"<tr>{name}{''.join(f'<td class=n>{_text(cell)}</td>' for cell in cells)}</tr>")
    caption = (
        f"Held-out {figures.at_k(runs[0])}. The best evaluation alone hides a collapse: read it with the final one and "
        "the largest fall."
    )
    table = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f'<h2>Runs</h2><div class="card"><p class="caption">{caption}</p>{table}</div>'


def _outcome_cells(result: Any) -> list[str]:
    collapsed = " (below half peak)" if result.below_half_peak else ""
    return [
        f"{result.before:.3f}",
        f"{result.final:.3f}",
        f"{result.best:.3f} ({result.best_step})",
        f"{result.max_drawdown:.3f}{collapsed}",
    ]


def _figure(panel: Panel, runs: Sequence[Run], number: int) -> str:
    missing = not any(_has(run, key) for run in runs for key in panel.keys)
    if missing:
        keys = "" if panel.missing != "not logged" else f": {', '.join(panel.keys)}"
        content = f'<div class="missing">{_text(panel.missing + keys)}</div>'
    else:
        svg = figure_parts.to_svg(panel.plot(runs), prefix=f"f{number}")
        content = _themed(svg).replace("<svg ", f'<svg role="img" aria-label="{_text(panel.title)}" ', 1)
    return (
        f'<div class="card"><h3>{_text(panel.title)}</h3><p class="caption">{_text(panel.caption)}</p>{content}</div>'
    )


def _has(run: Run, key: str) -> bool:
    if key == "eval/avg@k":
        return bool(run.evaluations)
    return key in run.columns or key in run.histograms


def _themed(svg: str) -> str:
    """Literal colours become the style sheet's variables, so that figures follow the reader's light or dark theme."""
    variables = {figure_parts.INK: "--ink", figure_parts.MUTED: "--muted", figure_parts.GRID: "--grid"}
    variables |= {color: f"--c{i}" for i, color in enumerate(figure_parts.PALETTE)}
    for color, variable in variables.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def _evaluations(run: Run) -> str:
    if not run.evaluations:
        return '<h2>Evaluations</h2><div class="card"><div class="missing">no evaluations yet</div></div>'
    sources = sorted({name for e in run.evaluations for name in e.get("sources", {})})
    shown = sources if len(sources) > 1 else []
    labels = ["step", figures.at_k(run), figures.at_k(run, "pass"), "problems", "mean length", "truncated", *shown]
    head = "".join(f'<th class="n">{_text(label)}</th>' for label in labels)
    rows = []
    for e in run.evaluations:
        by_source = [e.get("sources", {}).get(name, {}).get("avg@k") for name in shown]
        cells = [
            f"{e['step']:,}",
            *(_fixed(e.get(key)) for key in ("avg@k", "pass@k")),
            str(e.get("problems", "–")),
            _fixed(e.get("response_len_mean"), 1),
            "–" if e.get("truncated_ratio") is None else f"{100 * e['truncated_ratio']:.1f}%",
            *map(_fixed, by_source),
        ]
        rows.append("<tr>" + "".join(f'<td class="n">{_text(cell)}</td>' for cell in cells) + "</tr>")
    table = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f'<h2>Evaluations</h2><div class="card">{table}</div>'


def _samples(runs: Sequence[Run]) -> str:
    parts = ["<h2>Samples</h2>"]
    for run in runs:
        picked = pick_samples(run.samples, phases=3 if len(runs) == 1 else 1)
        content = (
            samples_html(run, picked) if picked else '<div class="card"><div class="missing">no samples yet</div></div>'
        )
        if len(runs) > 1:
            content = f"<details><summary>{_text(run.name)}</summary>{content}</details>"
        parts.append(content)
    return "".join(parts)


def _configuration(runs: Sequence[Run]) -> str:
    flat = [flatten(run.info["config"]) for run in runs]
    parts = ["<h2>Configuration</h2>"]
    if len(runs) > 1:
        paths = sorted({path for config in flat for path in config})
        differing = [path for path in paths if len({repr(config.get(path)) for config in flat}) > 1]
        head = "".join(f"<th>{_text(run.name)}</th>" for run in runs)
        rows = "".join(
            f'<tr><td class="k">{_text(path)}</td>'
            + "".join(f'<td class="v">{_text(config.get(path, "–"))}</td>' for config in flat)
            + "</tr>"
            for path in differing
        )
        table = f'<div class="scroll"><table><tr><th>setting</th>{head}</tr>{rows}</table></div>'
        same = '<div class="missing">all settings are the same</div>'
        parts.append(
            f'<div class="card"><p class="caption">Settings that differ.</p>{table if differing else same}</div>'
        )
    for run, config in zip(runs, flat, strict=True):
        about = {f"versions.{name}": version for name, version in run.info.get("versions", {}).items()}
        about |= {"devices": ", ".join(map(str, run.info.get("devices", ()))), "git_commit": run.info.get("git_commit")}
        label = "all settings and versions" if len(runs) == 1 else run.name
        parts.append(
            f'<details class="card"><summary>{_text(label)}</summary>{_settings(config)}{_settings(about)}</details>'
        )
    return "".join(parts)


def _settings(flat: Mapping[str, Any]) -> str:
    rows = "".join(f'<tr><td class="k">{_text(k)}</td><td class="v">{_text(v)}</td></tr>' for k, v in flat.items())
    return f'<div class="scroll"><table>{rows}</table></div>'


def _recent(run: Run, key: str) -> float | None:
    """Mean over the last tenth of the run; None where it was never logged."""
    _, values = run.series(key)
    return float(values[-max(1, len(values) // 10) :].mean()) if len(values) else None


def _median(run: Run, key: str) -> str:
    _, values = run.series(key)
    return figure_parts.compact(float(np.median(values))) if len(values) else "–"


def _wall_time(run: Run) -> str:
    _, times = run.series("time")
    if len(times) < 2:
        return "time unknown"
    minutes, seconds = divmod(round(times[-1] - times[0]), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _fixed(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _text(value: Any) -> str:
    return html.escape(str(value).encode("utf-8", errors="replace").decode())
