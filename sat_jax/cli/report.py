"""``sat-jax report``: one HTML page from run folders."""

from __future__ import annotations

from pathlib import Path

from sat_jax.report import write_report


def report(*runs: Path, out: Path | None = None) -> None:
    """Write one self-contained HTML page about one run, or comparing several.

    Args:
        runs: Run folders, as `sat-jax train --out` wrote them.
        out: File to write. Default: report.html in the run's own folder; in the current folder for several runs.

    Raises:
        ValueError: no run given, a folder that is no run, or a file at `out` that no report wrote.
    """
    if not runs:
        raise ValueError("no run folder was given: name at least one, as in `sat-jax report runs/my_run`")
    if out is None:
        out = (runs[0] if len(runs) == 1 else Path()) / "report.html"
    written = write_report(runs, out)
    print(f"{written} ({written.stat().st_size / 1024:.0f} KiB)")
