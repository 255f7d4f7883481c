"""The ledger file and its audit."""

import json

import pytest

from sat_jax.rollout.ledger import Entry, Ledger, audit, read_ledger


def story(*states, group="g") -> list[Entry]:
    return [Entry(group, "p", state, 0, 0, 0.0) for state in states]


def test_lines_have_the_interfaces_keys_and_are_flushed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write([("0:a", "a", 7)], "issued", version=3, step=4)
    ledger.write([("0:a", "a", 7)], "failed", version=3, step=4, note="engine lost it")
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # before close: flushed each time
    assert set(lines[0]) >= {"group_id", "prompt_id", "state", "version", "step", "time"}
    assert lines[0]["position"] == 7
    assert lines[1]["note"] == "engine lost it"
    ledger.close()
    ledger.close()
    assert [e.state for e in read_ledger(path)] == ["issued", "failed"]


def test_a_torn_last_line_is_cut_before_appending(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write([("0:a", "a", 0)], "issued", 0, 0)
    ledger.close()
    with open(path, "a") as file:
        file.write('{"group_id": "1:b", "sta')
    assert len(read_ledger(path)) == 1
    ledger = Ledger(path)
    ledger.write([("0:a", "a", 0)], "generated", 0, 0)
    ledger.close()
    assert [e.state for e in read_ledger(path)] == ["issued", "generated"]


@pytest.mark.parametrize("line", ["not json", '{"group_id": "a"}', "[1]"])
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"ledger.jsonl:1"):
        read_ledger(path)


def test_an_unknown_state_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    entry = {"group_id": "a", "prompt_id": "p", "state": "eaten", "version": 0, "step": 0, "time": 0.0}
    path.write_text(json.dumps(entry) + "\n")
    with pytest.raises(ValueError, match="'eaten'"):
        read_ledger(path)


@pytest.mark.parametrize(
    "states",
    [
        ("issued", "generated", "trained"),
        ("issued", "generated", "stale"),
        ("issued", "generated", "stale", "requeued", "issued", "generated", "trained"),
        ("issued", "filtered"),
        ("issued", "failed"),
        ("issued", "generated", "requeued"),
        ("issued", "generated", "trained", "requeued", "issued", "generated", "trained"),
    ],
)
def test_good_lives(states):
    report = audit(story(*states))
    assert report.clean
    assert report.ends == {states[-1]: 1}


@pytest.mark.parametrize(
    ("states", "flaw"),
    [
        (("issued",), "unfinished"),
        (("issued", "generated"), "unfinished"),
        (("issued", "generated", "trained", "trained"), "doubled"),
        (("issued", "generated", "stale", "trained"), "doubled"),
        (("issued", "generated", "trained", "issued", "generated", "trained"), "doubled"),
        (("issued", "trained"), "misordered"),
        (("generated", "trained"), "misordered"),
    ],
)
def test_bad_lives(states, flaw):
    report = audit(story(*states) + story("issued", "failed", group="other"))
    assert not report.clean
    assert getattr(report, flaw) == ("g",)
