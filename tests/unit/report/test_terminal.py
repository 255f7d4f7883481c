from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sat_jax.report.contents import duration, facts
from sat_jax.report.terminal import Display, sparkline
from sat_jax.runs import read_run
from sat_jax.runs.writer import MetricsWriter
from tests.helpers.synthetic_run import evaluation, make_run, step_metrics, write_config


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=80), out


def metrics(step: int, total: int = 40) -> dict[str, object]:
    return step_metrics(step, step / total, True, np.random.default_rng(step))


def terminal(width: int, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    return Console(file=out, width=width, height=50, force_terminal=True, no_color=True), raw


def rendered(display: Display, console: Console, raw: io.BytesIO) -> str:
    """The live panel as the terminal would show it, without styles."""
    raw.truncate(0)
    console.print(display.render())
    return re.sub(r"\x1b\[[0-9;]*m", "", raw.getvalue().decode(console.encoding)).lstrip("\0")


def test_without_a_terminal_there_is_one_line_every_few_steps() -> None:
    console, out = plain()
    with Display(40, console=console) as display:
        for step in range(1, 41):
            display.step(step, metrics(step))
    said = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in said] == [f"step {s}/40" for s in (1, 10, 20, 30, 40)]
    assert "\x1b" not in out.getvalue()
    reward = metrics(10)["rollout/reward_mean"]
    for expected in (
        f"reward {reward:.3g}",
        "accuracy ",
        "d_bar ",
        "q ",
        "gate ",
        "lag 8 ",
        "queue ",
        "tokens/s ",
        "left ",
    ):
        assert expected in said[1]


def test_every_line_stays_one_line_however_narrow_the_console() -> None:
    out = io.StringIO()
    with Display(5, console=Console(file=out, force_terminal=False, width=20)) as display:
        display.step(1, metrics(1))
    assert out.getvalue().count("\n") == 1


def test_evaluations_and_messages_stay_on_screen() -> None:
    console, out = plain()
    with Display(40, console=console) as display:
        display.phase("warm start, step 1 of 500")
        display.phase("warm start, step 2 of 500")
        display.evaluation(0, {"avg@k": 0.2575, "pass@k": 0.5, "k": 8, "problems": 64})
        display.message("checkpoint [bold]not markup[/bold]")
    assert out.getvalue().splitlines() == [
        "warm start, step 1 of 500",
        "evaluation at step 0: avg@8 0.258, pass@8 0.500 on 64 held-out problems",
        "checkpoint [bold]not markup[/bold]",
    ]


def test_the_scrollback_is_left_alone() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=30)
    with Display(10, console=console) as display:
        for step in range(1, 11):
            display.step(step, metrics(step, 10))
            display.evaluation(step, evaluation(step / 10, np.random.default_rng(0)))
    written = out.getvalue()
    for forbidden in (
        "\x1b[2J",
        "\x1b[3J",
        "\x1b[H",
        "\x1b[?1049h",
        "\x1bc",
    ):  # clear, forget, home, other screen, reset
        assert forbidden not in written
    assert "\x1b[?25h" in written  # the cursor comes back


def test_the_panel_shows_what_was_asked_for() -> None:
    clock = Clock()
    console, raw = terminal(100)
    display = Display(40, name="demo", console=console, clock=clock)
    for step in range(1, 21):
        clock.now += 2.0
        display.step(step, metrics(step))
    display.evaluation(20, {"avg@k": 0.5, "k": 8})
    shown = rendered(display, console, raw)
    for expected in (
        "demo",
        "step 20/40",
        "40 s elapsed, 40 s left",
        "accuracy",
        "d_bar",
        "gate",
        "lag max",
        "queue",
        "tokens/s",
    ):
        assert expected in shown
    assert "held-out avg@8 0.500" in shown
    assert "█" in shown


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_the_panel_fits_its_terminal(width: int) -> None:
    console, raw = terminal(width)
    display = Display(40, name="a rather long name of a run", console=console)
    for step in range(1, 21):
        display.step(step, metrics(step))
    assert max(map(len, rendered(display, console, raw).splitlines())) <= width


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    console, raw = terminal(80, encoding="ascii")
    display = Display(40, name="demo", console=console)
    for step in range(1, 21):
        display.step(step, metrics(step))
    assert "reward " in rendered(display, console, raw)
    display.summary(read_run(make_run(tmp_path, steps=40)))
    assert b" -> " in raw.getvalue()


def test_values_that_are_missing_or_not_finite_do_no_harm() -> None:
    console, out = plain()
    with Display(2, console=console) as display:
        display.step(1, {"rollout/reward_mean": float("nan"), "train/d_bar": None, "custom/metric": "text"})
        assert "nan" in out.getvalue()
        display.step(2, {})
        console.print(display.render())


def test_time_left_follows_the_present_pace_not_the_first_step() -> None:
    clock = Clock()
    display = Display(1000, console=plain()[0], clock=clock)
    assert display.seconds_left() is None
    clock.now = 600.0  # ten minutes of compilation
    for step in range(1, 101):
        display.step(step, {})
        clock.now += 0.5
    assert display.seconds_left() == pytest.approx(450.0)


def test_a_resumed_run_counts_its_own_pace() -> None:
    clock = Clock()
    display = Display(100, start_step=90, console=plain()[0], clock=clock)
    for step in (91, 92):
        clock.now += 3.0
        display.step(step, {})
    assert display.seconds_left() == pytest.approx(24.0)


def test_sparkline() -> None:
    assert sparkline([0, 1], 8) == "▁█"
    assert sparkline([0.5] * 4, 8) == "████"
    assert sparkline([0.0] * 4, 8) == "▁▁▁▁"
    assert sparkline([-1.0, 0.0, 1.0], 8) == "▁▅█"
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert sparkline([float("nan"), 1.0], 8) == "▁█"


def test_duration() -> None:
    assert [duration(s) for s in (-1, 42, 725, 11045)] == ["0 s", "42 s", "12 min 05 s", "3 h 04 min"]


def test_the_summary_says_what_came_out(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=40))
    out = io.StringIO()
    display = Display(40, console=Console(file=out, width=200))
    display.summary(run)
    first, last = run.evaluations[0]["avg@k"], run.evaluations[-1]["avg@k"]
    assert f"{first:.3f} → {last:.3f}  {100 * (last - first):+.1f} points" in out.getvalue()
    assert "never over 8" in out.getvalue()
    write_config(tmp_path / "empty")
    display.summary(read_run(tmp_path / "empty"))
    assert "no evaluations yet" in out.getvalue()


def test_a_collapse_is_said(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for step, value in enumerate((0.2, 0.9, 0.3)):
            writer.log_evaluation(step, {"avg@k": value, "k": 8})
    (fall,) = [fact for fact in facts(read_run(tmp_path)) if fact.label == "largest fall"]
    assert fall.alarming
    assert (fall.value, fall.detail) == ("60.0 points", "fell below half its peak")
