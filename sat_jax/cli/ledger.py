"""``sat-jax ledger``: where every prompt group of a run ended."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sat_jax.rollout.ledger import audit, read_ledger
from sat_jax.runs.folder import LEDGER_FILE

_SHOWN = 10


def ledger(run: Path) -> int:
    """Follow every prompt group through `ledger.jsonl`. Exit status 1 if one is lost, doubled or out of order.

    Args:
        run: Run folder. Groups of a run that is still going, or that was killed and not resumed, have no end yet.

    """
    path = run / LEDGER_FILE
    if not path.is_file():
        raise ValueError(f"{run} holds no {LEDGER_FILE}: name the folder of a run that has begun to train")
    found = audit(read_ledger(path))
    table = Table("last state", "groups")
    for state, count in sorted(found.ends.items()):
        table.add_row(state, str(count))
    console = Console()
    console.print(table)
    faults = {"without an end": found.unfinished, "doubled": found.doubled, "out of order": found.misordered}
    for what, groups in faults.items():
        if groups:
            more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
            console.print(f"{len(groups)} groups {what}: {', '.join(groups[:_SHOWN])}{more}")
    if found.clean:
        console.print("every group has exactly one end")
    return 0 if found.clean else 1
