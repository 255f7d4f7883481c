"""``sat-jax methods``, ``inspect`` and ``geometry``: look at losses without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sat_jax import losses
from sat_jax.inspection import batch as inspection
from sat_jax.losses import rules

_SETTINGS = inspection.Settings()


def methods(*, json_: bool = False) -> None:
    """Every named method: its rules, its unit, its source.

    Args:
        json_: Print one JSON object instead of the table.
    """
    names = list(dict.fromkeys([*losses.TABLE_1, *losses.METHODS]))
    entries = {name: _describe(name) for name in names}
    if json_:
        print(json.dumps(entries, indent=1))
        return
    table = Table(title="methods (the first thirteen are the paper's Table 1)", title_justify="left")
    for column in ("method", "rules", "unit", "divides by", "replay", "what it does"):
        table.add_column(column, overflow="fold", no_wrap=column == "method")
    for name, entry in entries.items():
        replay = "R3" if entry["replay"] else ""
        table.add_row(name, " ".join(entry["rules"]), entry["unit"], entry["denominator"], replay, entry["description"])
    console = Console()
    console.print(table)
    sources = Table(title="rules", title_justify="left")
    for column in ("rule", "kind", "what it does", "source"):
        sources.add_column(column, overflow="fold", no_wrap=column == "rule")
    for rule in vars(rules).values():
        if isinstance(rule, type) and issubclass(rule, losses.Rule) and rule.source:
            sources.add_row(rule.section, rule.kind, rule.summary, rule.source)
    console.print(sources)


def inspect(
    batch: Path,
    *,
    method: str = "",
    rule: tuple[str, ...] = (),
    compare: str = "",
    json_: bool = False,
    grad: Path | None = None,
    plot: Path | None = None,
    settings: inspection.Settings = _SETTINGS,
) -> None:
    """What a loss does to a batch dumped by any trainer.

    Args:
        batch: An .npz with log_probs, behavior_log_probs, advantages, loss_mask (and optional arrays), or a folder of
            them. The names of verl, slime and TRL are recognised.
        method: Named method, see `sat-jax methods`, or file.py:name of a LossConfig. By default sat-gspo.
        rule: Rules of your own that join the loss: file.py:Class or module:Class.
        compare: Comma-separated methods to show side by side.
        json_: Print one JSON object.
        grad: Write d loss / d log_probs as `grad` [B, T] to this .npz.
        plot: Draw the histogram of d and the (ratio, advantage) plane.
        settings: Of a named method.
    """
    asked = [name.strip() for name in (method, *compare.split(",")) if name.strip()]
    names = list(dict.fromkeys(asked)) or ["sat-gspo"]
    configs = [inspection.configure(name, rules=rule, settings=settings) for name in names]
    files = inspection.batch_files(batch)
    single = len(files) == len(configs) == 1
    for option, path in (("--grad", grad), ("--plot", plot)):
        if path is not None and not single:
            raise ValueError(f"{option} {path}: it shows one method on one batch; name one file and one method")
    # Everything is read and checked before anything is computed.
    batches = [(path, *inspection.load_batch(path)) for path in files]
    found = [
        (path, notes, inspection.inspect_batch(config, inputs, settings.sat))
        for path, inputs, notes in batches
        for config in configs
    ]
    if grad is not None:
        if grad.suffix != ".npz":
            raise ValueError(f"--grad {grad}: the gradient is written as an .npz; name a file that ends in .npz")
        grad.parent.mkdir(parents=True, exist_ok=True)
        np.savez(grad, grad=found[0][2].gradient)
    if plot is not None:
        from sat_jax.inspection.geometry import batch_figure, save  # matplotlib, only where it draws

        save(batch_figure(found[0][2], configs[0]), plot)
    if json_:
        summaries = [{"file": path.name} | i.summary for path, _, i in found]
        print(json.dumps(found[0][2].summary if single else {"results": summaries}, indent=1))
        return
    _print_inspections(found, show_files=len(files) > 1)


def geometry(
    *,
    method: str = "sat-gspo",
    rule: tuple[str, ...] = (),
    out: Path = Path("geometry.png"),
    mu: float = 0.2,
    q: float = 0.05,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    exponent: float = 2.0,
    tis_cap: float = 2.0,
) -> None:
    """Draw the clip geometry of a method, computed by differentiating its own code over a grid of ratios.

    Args:
        method: Named method, see `sat-jax methods`, or file.py:name of a LossConfig.
        rule: Rules of your own that join the loss: file.py:Class or module:Class.
        out: Picture to write; the suffix picks the format.
        mu: Behaviour probability of the token, for the rules that depend on it.
        q: The batch's quantile of |d|, for SAT.
        eps_low: Lower radius.
        eps_high: Upper radius.
        exponent: SAT's Hill exponent.
        tis_cap: Cap of tis-reinforce.
    """
    from sat_jax.inspection.geometry import geometry_figure, save

    settings = inspection.Settings(eps_low=eps_low, eps_high=eps_high, exponent=exponent, tis_cap=tis_cap)
    config = inspection.configure(method, rules=rule, settings=settings)
    save(geometry_figure(config, mu, q), out)
    print(out)


def _describe(name: str) -> dict[str, Any]:
    config, replay = losses.split_method(name)
    return {
        "rules": [rule.name for rule in config.rules],
        "unit": config.unit,
        "denominator": config.denominator,
        "needs": list(config.needs()),
        "replay": replay,
        "description": losses.DESCRIPTIONS[config.name],
        "sources": [rule.source for rule in config.rules],
    }


def _print_inspections(found: list[Any], show_files: bool) -> None:
    console = Console()
    table = Table()
    table.add_column("")
    for path, _, seen in found:
        header = f"{seen.summary['method']}\n{path.name}" if show_files else seen.summary["method"]
        table.add_column(header, justify="right")
    for label, cells in inspection.table_rows([seen for _, _, seen in found]):
        table.add_row(label, *cells)
    console.print(table)
    for note in dict.fromkeys(note for _, notes, _ in found for note in notes):
        console.print(f"note: {note}", style="dim", highlight=False)
    for path, _, seen in found:
        if "sat" in seen.summary:
            name = f"{path.name}: " if show_files else ""
            window = seen.summary["sat"]["window"]
            console.print(f"{name}{seen.summary['method']}: SAT's window, on or off: {window}", highlight=False)
