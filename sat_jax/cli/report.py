"""``sat-jax report``: one HTML page from run folders."""

from __future__ import annotations

from pathlib import Path

from sat_jax.report import write_report


def report(*runs: Path, out: Path | None = None) -> None:
    """Write one self-contained HTML page about one run, or comparing several.

    Args:
        runs: Run folders, as `sat-jax train --out` wrote them.
        out: File to write. Default: report.html in the run's own folder; in the current folder for several runs.

    """
    if out is None:
        out = (runs[0] if len(runs) == 1 else Path()) / "report.html"
    written = write_report(runs, out)
    print(f"{written} ({written.stat().st_size / 1024:.0f} KiB)")
