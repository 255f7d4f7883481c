from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sat_jax.cli.main import main
from sat_jax.report import render, write_report
from sat_jax.report.contents import PANELS
from sat_jax.report.samples import MAX_TOKENS, pick_samples
from sat_jax.runs.reader import Run, read_run
from sat_jax.runs.writer import MetricsWriter
from tests.helpers.synthetic_run import make_run, write_config

pytestmark = pytest.mark.slow

VOID = {"meta", "input", "br", "path", "use", "rect", "link", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects tags, attributes and the text a reader sees."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(make_run(tmp_path_factory.mktemp("run"), steps=60, eval_every=20))


@pytest.fixture(scope="module")
def page(run: Run) -> str:
    return render([run])


@pytest.fixture
def few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time; tests about the rest of the page do with one figure."""
    monkeypatch.setattr("sat_jax.report.page.PANELS", PANELS[:1])


def test_the_page_needs_nothing_from_outside(page: str) -> None:
    parsed = Page(page)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "base"}
    targets = [v for _, attrs in parsed.tags for k, v in attrs.items() if k in ("src", "href", "xlink:href", "srcset")]
    assert all(target is not None and target.startswith("#") for target in targets)
    assert not re.search(r"@import|url\((?!#)", page)
    assert set(re.findall(r'https?://[^"<\s]+', page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_ids_are_unique(page: str) -> None:
    ids = [attrs["id"] for _, attrs in Page(page).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("few_figures")
def test_the_same_run_gives_the_same_page(run: Run) -> None:
    assert render([run]) == render([run])


def test_it_says_what_came_out(run: Run, page: str) -> None:
    text = Page(page).text
    first, last = run.evaluations[0]["avg@k"], run.evaluations[-1]["avg@k"]
    assert f"{first:.3f} → {last:.3f}" in text
    assert f"{100 * (last - first):+.1f} points, avg@8 of 64 problems" in text
    for expected in ("Learning curve", "log(1 + ε) = 0.182", "loss.sat.alpha", "jax 0.10.2", "sat-jax train --seed 0"):
        assert expected in text
    for e in run.evaluations:
        assert f"{e['pass@k']:.3f}" in text
    assert text.count("reference answer") == 6
    assert "not logged" not in text


def test_figures_follow_the_readers_theme(page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert drawings.count("var(--c0)") > 5
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) == set()
    assert "prefers-color-scheme: dark" in page


def test_an_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    write_config(tmp_path)
    text = Page(render([read_run(tmp_path)])).text
    for expected in (
        "no evaluations yet",
        "no samples yet",
        "not logged: train/kl_loss, train/entropy, train/grad_norm",
        "not logged: train/d_bar",
    ):
        assert expected in text


def test_a_run_without_sat_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sat_jax.report.page.PANELS", [panel for panel in PANELS if panel.title == "SAT radii"])
    text = Page(render([read_run(make_run(tmp_path, sat=False, steps=10))])).text
    assert "a method without SAT" in text
    assert "not logged: sat/eps_low_mean, sat/eps_high_mean, sat/c_low_min, sat/c_high_min" in text


@pytest.mark.usefixtures("few_figures")
def test_notices_reach_the_reader(tmp_path: Path) -> None:
    make_run(tmp_path, steps=6)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7')
    assert (
        "the last line of metrics.jsonl (line 7) is half-written and was skipped"
        in Page(render([read_run(tmp_path)])).text
    )


@pytest.mark.usefixtures("few_figures")
def test_what_a_model_writes_is_shown_and_not_run(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\n\x1b[31m\ud800"
    write_config(tmp_path, name="<b>name</b>")
    with MetricsWriter(tmp_path) as writer:
        writer.log_samples(1, [{"prompt": evil, "tokens": [evil, '"><img src=x>'], "verdict": "<i>", "reward": 0.0}])
    page = render([read_run(tmp_path)])
    parsed = Page(page)
    assert not {tag for tag, _ in parsed.tags} & {"script", "img", "i", "b"} - {"b"}
    assert "<b>name" not in page
    assert "<script>alert(1)</script>" in parsed.text
    assert "\x1b" not in page
    page.encode("utf-8")


@pytest.mark.usefixtures("few_figures")
def test_no_control_character_comes_through_from_anywhere(tmp_path: Path) -> None:
    write_config(tmp_path, name="na\x00me \udfff", unit="\x1b]0;evil\x07")
    page = render([read_run(tmp_path)])
    assert "na␀me �" in page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", page)


def set_config(folder: Path, **changes: object) -> None:
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(record | changes))


@pytest.mark.usefixtures("few_figures")
def test_the_method_and_the_rules_are_shown(tmp_path: Path) -> None:
    rules = [
        {"class": "sat_jax.losses.rules.sat:Sat", "alpha": 0.95},
        {"class": "/mine/rules.py:Huber", "sha256": "ab12"},
    ]
    for name in ("one", "two"):
        write_config(tmp_path / name, rules=rules)
    set_config(tmp_path / "one", method="sat-gspo-r3")
    run, other = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    text = " ".join(Page(render([run])).text.split())
    assert "sat_gspo_demo sat-gspo-r3 sat_jax 0.2.0" in text  # under the title
    for expected in ("loss.rules sat, huber", "loss.sat.alpha 0.95", "loss.huber.class /mine/rules.py:Huber"):
        assert expected in text
    compared = render([run, other])
    assert re.findall(r'data-label="method"[^>]*>([^<]*?)\s*<', compared) == ["sat-gspo-r3", "–"]


@pytest.mark.usefixtures("few_figures")
def test_cells_of_wide_tables_carry_their_columns_name_for_narrow_screens(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, name=name, steps=5)) for name in ("a", "b")]
    parsed = Page(render(runs))
    cells = [attrs for tag, attrs in parsed.tags if tag == "td" and "data-label" in attrs]
    assert {"held-out accuracy", "largest fall", "SAT can act at"} <= {cell["data-label"] for cell in cells}
    assert all(cell["data-label"] for cell in cells)


@pytest.mark.usefixtures("few_figures")
def test_a_collapse_stands_out_where_runs_are_compared(tmp_path: Path) -> None:
    for name, last in (("good", 0.8), ("bad", 0.1)):
        write_config(tmp_path / name, name=name)
        with MetricsWriter(tmp_path / name) as writer:
            for step, value in enumerate((0.2, 0.9, last)):
                writer.log_evaluation(step, {"avg@k": value, "k": 8})
    page = render([read_run(tmp_path / "good"), read_run(tmp_path / "bad")])
    assert page.count("fell below half its peak") == 2  # shown, and as the cell's title
    assert "80.0 points" in page


@pytest.mark.usefixtures("few_figures")
def test_tokens_are_tinted_by_what_the_samples_carry(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        sample = {"tokens": ["7", "9"], "log_ratio": [0.0912, -0.5], "policy_versions": [0, 2], "reward": 1.0}
        writer.log_samples(3, [sample])
    parsed = Page(render([read_run(tmp_path)]))
    tokens = [
        attrs for tag, attrs in parsed.tags if tag == "span" and "style" in attrs and attrs["class"] in ("t", "t d")
    ]
    assert [t["title"] for t in tokens] == ["log ratio +0.091, lag 2", "log ratio -0.500, lag 0"]
    assert [t["class"] for t in tokens] == ["t", "t d"]
    assert "--r:0.5;" in str(tokens[0]["style"])  # half of log(1.2)
    assert "--r:1;" in str(tokens[1]["style"])  # beyond the scale
    switches = [attrs["class"] for tag, attrs in parsed.tags if tag == "input"]
    assert switches == ["by-ratio", "by-lag"]


@pytest.mark.usefixtures("few_figures")
def test_a_long_response_is_cut_and_the_cut_is_said(tmp_path: Path) -> None:
    write_config(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        numbers = [0.1] * (MAX_TOKENS + 7)
        sample = {"tokens": ["x"] * len(numbers), "log_ratio": numbers, "reward": 1.0, "prompt": "p" * 5000}
        writer.log_samples(1, [sample])
    parsed = Page(render([read_run(tmp_path)]))
    assert sum(attrs.get("class") == "t" for tag, attrs in parsed.tags if tag == "span") == MAX_TOKENS
    text = parsed.text
    assert "… 7 more tokens" in text
    assert "1000 more characters" in text


def test_samples_come_from_start_middle_and_end_the_best_and_the_worst() -> None:
    samples = [{"step": step, "reward": float(i)} for step in range(1, 101) for i in range(2)]
    picked = pick_samples(samples, (0.0, 0.5, 1.0))
    assert [p["reward"] for p in picked].count(1.0) == 3
    steps = [p["step"] for p in picked]
    assert steps == sorted(steps)
    assert steps[1] <= 10
    assert all(45 <= step <= 56 for step in steps[2:4])
    assert steps[4] >= 91
    assert [p["step"] >= 91 for p in pick_samples(samples, (1.0,))] == [True, True]
    assert pick_samples([], (0.0, 0.5, 1.0)) == []
    assert pick_samples(samples[:1], (0.0, 0.5, 1.0)) == samples[:1]


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / "a", steps=20)),
        read_run(make_run(tmp_path / "b", name="gspo", sat=False, steps=30, seed=1)),
    ]
    page = render(runs)
    text = Page(page).text
    assert "2 runs compared" in text
    for run in runs:
        assert f"{run.evaluations[-1]['avg@k']:.3f}" in text
    differing = re.search(r"Settings that differ\.(.*?)</table>", page, re.DOTALL)
    assert differing
    assert "gspo" in differing[1]
    assert "loss.eps_high" not in differing[1]


def test_ten_thousand_steps_are_read_fast_and_stay_small(tmp_path: Path) -> None:
    path = make_run(tmp_path, steps=200) / "metrics.jsonl"
    bodies = [line.partition(",")[2] for line in path.read_text().splitlines()]
    path.write_text("".join(f'{{"step": {step},{bodies[step % 200]}\n' for step in range(1, 10_001)))
    began = time.process_time()
    run = read_run(tmp_path)
    assert len(run.steps) == 10_000
    page = render([run])
    assert time.process_time() - began < 15  # about 2.5 s of processor time
    assert len(page.encode()) < 1.5e6


# --------------------------------------------------------------------------------------------------- the command


@pytest.mark.usefixtures("few_figures")
def test_the_command_writes_into_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, steps=3)
    assert main(["report", str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path)]) == 0  # its own page may be written again


@pytest.mark.usefixtures("few_figures")
def test_several_runs_go_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(make_run(tmp_path / name, name=name, steps=3)) for name in ("a", "b")]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["report", *runs]) == 0
    assert "2 runs compared" in (tmp_path / "here" / "report.html").read_text()
    assert main(["report", *runs, "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").is_file()


@pytest.mark.usefixtures("few_figures")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["."], "holds no config.json"),
        ([], "no run folder was given"),
        (["run", "--out", "notes.txt"], "notes.txt exists and is no report"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["report", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("few_figures")
def test_a_failure_leaves_the_old_page(tmp_path: Path) -> None:
    out = write_report([make_run(tmp_path / "run", steps=1)], tmp_path)
    before = out.read_bytes()
    with pytest.raises(ValueError, match="no folder"):
        write_report([tmp_path / "gone"], out)
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_runs_of_one_configuration_go_by_their_folders(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_run(tmp_path / name, steps=3)
    page = write_report([tmp_path / "first", tmp_path / "second"], tmp_path / "r.html").read_text()
    assert "first" in page
    assert "second" in page
