"""One self-contained HTML page from run folders."""

from sat_jax.report.page import render, write_report

__all__ = ["render", "write_report"]
