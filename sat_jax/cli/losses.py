"""``sat-jax methods``, ``inspect`` and ``geometry``: look at losses without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sat_jax import losses
from sat_jax.losses import rules


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
    for rule in (thing for thing in vars(rules).values() if isinstance(thing, type) and issubclass(thing, losses.Rule)):
        if rule.source:
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
    loss_agg_mode: losses.Aggregation | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    alpha: float = 0.90,
    exponent: float = 2.0,
    tis_cap: float = 2.0,
    kl_loss_coef: float = 0.0,
    count_empty_rows: bool = False,
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
        loss_agg_mode: How tokens become a loss; by default seq-mean-token-mean.
        eps_low: Lower radius.
        eps_high: Upper radius.
        alpha: SAT's quantile level.
        exponent: SAT's Hill exponent.
        tis_cap: Cap of the -tis methods and of tis-reinforce.
        kl_loss_coef: Add the KL term with this weight; needs reference_log_probs.
        count_empty_rows: Rows without an active token count in the mean over responses, as in TRL and slime.
    """
    from sat_jax.inspection import batch as inspection

    asked = [name.strip() for name in (method, *compare.split(",")) if name.strip()]
    names = list(dict.fromkeys(asked)) or ["sat-gspo"]
    configs = [
        inspection.configure(
            name,
            rules=rule,
            loss_agg_mode=loss_agg_mode,
            eps_low=eps_low,
            eps_high=eps_high,
            alpha=alpha,
            exponent=exponent,
            tis_cap=tis_cap,
            kl_loss_coef=kl_loss_coef,
            count_empty_rows=count_empty_rows,
        )
        for name in names
    ]
    files = inspection.batch_files(batch)
    single = len(files) == len(configs) == 1
    for option, path in (("--grad", grad), ("--plot", plot)):
        if path is not None and not single:
            raise ValueError(f"{option} {path}: it shows one method on one batch; name one file and one method")
    sat = losses.Sat(alpha=alpha, exponent=exponent)
    # Everything is read and checked before anything is computed.
    batches = [(path, *inspection.load_batch(path)) for path in files]
    found = [
        (path, notes, inspection.inspect_batch(c, inputs, sat)) for path, inputs, notes in batches for c in configs
    ]
    if grad is not None:
        _save_gradient(grad, found[0][2].gradient)
    if plot is not None:
        from sat_jax.inspection.geometry import batch_figure, save

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
    from sat_jax.inspection.batch import configure
    from sat_jax.inspection.geometry import geometry_figure, save

    config = configure(method, rules=rule, eps_low=eps_low, eps_high=eps_high, exponent=exponent, tis_cap=tis_cap)
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


def _save_gradient(path: Path, gradient: Any) -> None:
    import numpy as np

    if path.suffix != ".npz":
        raise ValueError(f"--grad {path}: the gradient is written as an .npz; name a file that ends in .npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, grad=gradient)


def _print_inspections(found: list[Any], show_files: bool) -> None:
    from sat_jax.inspection.batch import table_rows

    console = Console()
    table = Table()
    table.add_column("")
    for path, _, inspection in found:
        header = f"{inspection.summary['method']}\n{path.name}" if show_files else inspection.summary["method"]
        table.add_column(header, justify="right")
    for label, cells in table_rows([inspection for _, _, inspection in found]):
        table.add_row(label, *cells)
    console.print(table)
    for note in dict.fromkeys(note for _, notes, _ in found for note in notes):
        console.print(f"note: {note}", style="dim", highlight=False)
    for path, _, inspection in found:
        if "sat" in inspection.summary:
            name = f"{path.name}: " if show_files else ""
            summary = inspection.summary
            line = f"{name}{summary['method']}: SAT's window, on or off: {summary['sat']['window']}"
            console.print(line, highlight=False)
