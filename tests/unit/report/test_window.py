"""One answer to where SAT can act: inspect, the page and the terminal say the same line about the same q."""

from __future__ import annotations

import io
import math
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sat_jax.inspection.batch import configure, inspect_batch, load_batch
from sat_jax.losses.window import edges, window
from sat_jax.report import render
from sat_jax.report.terminal import Display
from sat_jax.runs import read_run
from sat_jax.runs.writer import MetricsWriter
from tests.helpers.synthetic_run import write_config

pytestmark = pytest.mark.slow

LOW, HIGH = edges(0.2, 0.2)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sat_jax.report.page.PANELS", ())


@pytest.mark.parametrize(
    ("q", "state"),
    [
        (0.0, "off"),
        (9e-6, "noise"),
        (2e-5, "acts"),
        (HIGH - 1e-4, "acts"),
        (HIGH + 1e-4, "half inert"),
        (0.2, "half inert"),
        (LOW - 1e-4, "half inert"),
        (LOW + 1e-4, "inert"),
    ],
)
def test_inspect_page_and_terminal_agree(q: float, state: str, tmp_path: Path) -> None:
    behavior = np.full((1, 10), -1.0, np.float32)
    d = np.array([[0.0] * 8 + [-q, 3 * q]], np.float32)  # the 0.9-quantile of ten is the ninth
    arrays = {"log_probs": behavior + d, "advantages": np.ones((1, 10)), "loss_mask": np.ones((1, 10), int)}
    np.savez(tmp_path / "batch.npz", behavior_log_probs=behavior, **arrays)
    inputs, _ = load_batch(tmp_path / "batch.npz")
    inspected = inspect_batch(configure("sat-grpo"), inputs).summary
    line = inspected["sat"]["window"]
    assert line.startswith(f"{state}: ")

    write_config(tmp_path / "run")
    with MetricsWriter(tmp_path / "run") as writer:
        writer.log(1, {"sat/q": inspected["q"]})
    run = read_run(tmp_path / "run")
    page = unescape(render([run]))
    assert line in page
    acts = state in ("acts", "half inert")
    assert f"{100 * acts}% of steps" in page
    out = io.StringIO()
    Display(1, console=Console(file=out, width=300)).summary(run)
    assert line in out.getvalue()
    assert f"{100 * acts}% of steps" in out.getvalue()
    assert window(inspected["q"], 0.2, 0.2).acts == acts


def test_a_run_is_judged_by_its_own_radii_exponent_and_cap(tmp_path: Path) -> None:
    write_config(tmp_path, eps_low=0.1, eps_high=0.3, sat={"alpha": 0.9, "exponent": 4.0, "q_cap": 0.2})
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"sat/q": 0.7})
    assert window(0.2, 0.1, 0.3, 4.0).text in unescape(render([read_run(tmp_path)]))
    assert math.isclose(edges(0.1, 0.3)[1], math.log1p(0.3))
