from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from sat_jax.report import figure_parts, figures
from sat_jax.report.contents import PANELS
from sat_jax.report.figure_parts import binned, smoothed
from sat_jax.runs.reader import Run, read_run
from sat_jax.runs.writer import MetricsWriter
from tests.helpers.synthetic_run import make_run, write_config

pytestmark = pytest.mark.slow


def drawn(title: str, runs: list[Run]) -> Figure:
    (panel,) = [panel for panel in PANELS if panel.title == title]
    return figures.draw(panel, runs)


every_panel = pytest.mark.parametrize("title", [panel.title for panel in PANELS])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        read_run(make_run(folder / "sat", steps=60)),
        read_run(make_run(folder / "base", name="gspo", sat=False, steps=60, seed=1)),
    ]


def texts(figure: Figure) -> str:
    return " ".join(t.get_text() for t in figure.findobj(matplotlib.text.Text))


@every_panel
def test_every_axis_is_named_and_every_line_is_finite(title: str, runs: list[Run]) -> None:
    for chosen in (runs[:1], runs):
        figure = drawn(title, chosen)
        assert figure.axes[-1].get_xlabel() in ("learner step", "lag (policy versions)", "reward")
        for axes in figure.axes:
            assert axes.get_title(loc="left") or axes.get_legend()
            for line in axes.lines:
                assert np.isfinite(np.asarray(line.get_ydata(), float)).all()


@every_panel
def test_missing_data_is_said_in_the_figure(title: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    assert re.search(r"not logged|no evaluations yet", texts(drawn(title, [read_run(tmp_path)])))


@every_panel
def test_one_step_is_enough_to_draw(title: str, tmp_path: Path) -> None:
    figure = drawn(title, [read_run(make_run(tmp_path, steps=1))])
    figure.draw_without_rendering()
    assert any(axes.has_data() or axes.texts for axes in figure.axes)


def test_the_learning_curve_carries_the_numbers(runs: list[Run]) -> None:
    values = [e["avg@k"] for e in runs[0].evaluations]
    said = texts(drawn("Learning curve", runs[:1]))
    assert f"{values[0]:.2f}" in said
    assert f"{values[-1]:.2f}" in said
    assert "held-out avg@8" in said
    compared = texts(drawn("Learning curve", runs))
    for run in runs:
        assert f"{run.evaluations[-1]['avg@k']:.3f}" in compared
        assert run.name in compared


def test_both_edges_of_the_nominal_interval_stand_in_the_picture_of_q(runs: list[Run], tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 11):
            writer.log(step, {"sat/q": 1e-4})  # far below both
    for run in (runs[0], read_run(tmp_path)):
        _, bottom = drawn("Mismatch", [run]).axes
        low, high = bottom.get_ylim()
        for edge in (math.log1p(0.2), -math.log1p(-0.2)):
            assert any(np.allclose(line.get_ydata(), edge) for line in bottom.lines)
            assert low < edge < high


def test_distributions_are_split_by_thirds_of_the_run(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for step, solved in enumerate((0, 1, 2, 3, 4, 4), 1):
            writer.log(step, {"rollout/reward_histogram": {"0": 4 - solved, "1": solved}})
    run = read_run(tmp_path)
    top, _ = drawn("Rewards", [run]).axes
    heights = {bar.get_label(): [patch.get_height() for patch in bar.patches] for bar in top.containers}
    assert heights == {"first third": [7 / 8, 1 / 8], "middle": [3 / 8, 5 / 8], "last third": [0, 1]}
    top, _ = drawn("Rewards", [run, run]).axes
    assert [[patch.get_height() for patch in bar.patches] for bar in top.containers] == [[0, 1], [0, 1]]


def test_continuous_rewards_are_binned(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"rollout/reward_histogram": {f"{i / 100}": 1 for i in range(101)}})
    top, _ = drawn("Rewards", [read_run(tmp_path)]).axes
    assert len(top.patches) == 20
    assert sum(bar.get_height() for bar in top.patches) == pytest.approx(1)


def test_rounding_error_of_the_first_step_does_not_stretch_the_mismatch_axis(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 41):
            writer.log(step, {"train/d_bar": 3e-7 if step == 1 else 0.2, "sat/q": 3e-7 if step == 1 else 0.01 * step})
    top, bottom = drawn("Mismatch", [read_run(tmp_path)]).axes
    assert top.get_yscale() == "linear"
    assert bottom.get_yscale() == "linear" or bottom.get_ylim()[0] > 1e-4


def test_a_constant_is_a_flat_line_in_the_middle(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 101):
            writer.log(step, {"train/kl_loss": 0.1, "train/entropy": 0.0})
    kl, entropy, _ = drawn("Optimisation", [read_run(tmp_path)]).axes
    assert kl.get_ylim() == pytest.approx((0.09, 0.11))
    assert entropy.get_ylim()[0] < 0 < entropy.get_ylim()[1]


def test_compilation_in_the_first_step_does_not_flatten_the_others(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 11):
            times = {"perf/step_time_s": 30.0 if step == 1 else 0.3, "perf/rollout_wait_s": 0.1}
            writer.log(step, {"perf/tokens_per_s": 100.0, **times})
    _, bottom = drawn("Throughput", [read_run(tmp_path)]).axes
    assert 0.4 <= bottom.get_ylim()[1] <= 1.0


def test_binning_keeps_spikes_and_the_mean() -> None:
    steps, values = np.arange(9_600), np.zeros(9_600)
    values[1234] = 100.0
    x, mean, low, high = binned(steps, values)
    assert len(x) == 240
    assert high.max() == 100.0
    assert low.max() == 0.0
    assert mean.mean() == pytest.approx(values.mean())
    assert (np.diff(x) > 0).all()
    for got, want in zip(binned(steps[:500], values[:500]), (steps[:500], *[values[:500]] * 3), strict=True):
        np.testing.assert_array_equal(got, want)


def test_smoothing_keeps_length_constants_and_short_series() -> None:
    np.testing.assert_allclose(smoothed(np.full(500, 3.0)), 3.0)
    np.testing.assert_array_equal(smoothed(np.array([1.0, 5.0, 2.0])), [1, 5, 2])
    assert len(smoothed(np.arange(333.0))) == 333


def test_colours_stand_out_from_the_page() -> None:
    def luminance(color: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    for color in figure_parts.PALETTE:  # 3:1 against white, as WCAG asks of graphics
        assert 1.05 / (luminance(color) + 0.05) >= 3.0, color
    for color in (figure_parts.INK, figure_parts.MUTED):  # 4.5:1, as it asks of text
        assert 1.05 / (luminance(color) + 0.05) >= 4.5, color


def test_svg_is_the_same_every_time_well_formed_and_prefixed(runs: list[Run]) -> None:
    first, again = (figure_parts.to_svg(drawn("Mismatch", runs[:1]), "x1") for _ in range(2))
    assert first == again
    ElementTree.fromstring(first)
    ids = set(re.findall(r'\bid="([^"]*)"', first))
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]*)', first))
    assert used <= ids
    assert all(name.startswith("x1-") for name in ids)
    assert "log(1 + ε) = 0.182" in first


def test_the_process_keeps_its_own_matplotlib_settings(runs: list[Run]) -> None:
    before = dict(matplotlib.rcParams)
    drawn("Gate, clip and intercept rate", runs)
    assert dict(matplotlib.rcParams) == before
