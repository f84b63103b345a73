"""Campaigns whose faults are functions of the user, whole slices, or mixtures."""

from __future__ import annotations

import json

import pytest

from conftest import in_process
from unsilent.outcomes.base import Outcome
from unsilent.studies.pvf.kind import PvfStore

FUNCTIONS = """
import numpy as np
import unsilent

@unsilent.value_model("exponent-up")
def exponent_up(words, random):
    return np.where(random % np.uint64(4) > 0, words + np.uint32(1 << 23), words).astype(np.uint32)
"""
FAULTS = (
    "mine.py:exponent-up",
    "mine.py:exponent-up:whole=channel",
    "random:whole=channel",
    "0.7*bitflip + 0.3*burst:length=3",
    "1*mine.py:exponent-up:count=3 + 1*zero:whole=channel",
)


@pytest.fixture
def here(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


@pytest.fixture
def workload(tiny):
    return f"{tiny}:make"


def campaign(workload, store, *words):
    done = in_process("pvf", workload, "--trials", 30, "--store", store, "--quiet", *words)
    assert done.returncode == 0, done.stderr
    with PvfStore(store) as opened:
        return opened.baseline.campaign, [row.reproducible_values() for row in opened.rows()]


@pytest.mark.parametrize("at", ["param:*", "op:*"])
@pytest.mark.parametrize("fault", FAULTS)
def test_shortcuts_change_no_row(here, workload, fault, at):
    rows = [
        campaign(workload, f"{engine}.sqlite", "--fault", fault, "--at", at, "--engine", engine)
        for engine in ("auto", "plain")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0][1]) >= 30


def test_a_replay_needs_the_function_to_be_named_again(here, workload):
    campaign(workload, "s.sqlite", "--fault", "mine.py:exponent-up")
    with PvfStore("s.sqlite") as store:
        trial = str(next(iter(store.rows())).trial)
    named = ("replay", "s.sqlite", trial, "--workload", workload)
    refused = in_process(*named)
    assert refused.returncode == 2
    assert "add --fault mine.py:exponent-up" in refused.stderr
    assert in_process(*named, "--fault", "mine.py:exponent-up").returncode == 0
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "other.py").write_text(FUNCTIONS)
    assert in_process(*named, "--fault", "elsewhere/other.py:exponent-up").returncode == 0
    (here / "mine.py").write_text(FUNCTIONS.replace("> 0", "> 1"))
    changed = in_process(*named, "--fault", "mine.py:exponent-up")
    assert changed.returncode == 2
    assert "differs from this replay in code" in changed.stderr
    surplus = in_process(
        "replay", "s.sqlite", trial, "--workload", workload, "--fault", "mine.py:exponent-up", "--data", "x"
    )
    assert "leave out --data" in surplus.stderr


def test_a_changed_function_is_another_campaign(here, workload):
    first, _ = campaign(workload, "a.sqlite", "--fault", "mine.py:exponent-up")
    (here / "mine.py").write_text(FUNCTIONS.replace("> 0", "> 1"))
    second, _ = campaign(workload, "b.sqlite", "--fault", "mine.py:exponent-up")
    assert first != second


def test_a_card_finds_the_function_by_its_content(here, workload):
    words = ("--fault", "1*mine.py:exponent-up + 1*zero")
    first, rows = campaign(workload, "a.sqlite", *words)
    assert in_process("report", "a.sqlite", "--card", "-o", "c.json").returncode == 0
    assert set(json.loads((here / "c.json").read_text())["files"]) == {"workload", "fault"}
    (here / "files").mkdir()
    (here / "mine.py").rename(here / "files" / "renamed.py")
    (here / "mine.py").write_text("raise SystemExit('not the file of the card')")
    again = in_process("pvf", "--config", "c.json", "--find", ".", "--store", "b.sqlite", "--quiet")
    assert again.returncode == 0, again.stderr
    with PvfStore("b.sqlite") as store:
        assert store.baseline.campaign == first
        assert [row.reproducible_values() for row in store.rows()] == rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fault", "1*bitflip + 1*zero", "--flips", "2"), "--flips and the mixture of --fault both set the number"),
        (("--fault", "1*bitflip + 1*zero", "--per", "bit"), "--per bit splits flips by bit, but --fault is a mixture"),
        (("--fault", "1*bitflip + 1*zero", "--trials", "all"), "--trials all tries single bit flips"),
        (("--fault", "mine.py:nothing"), "unknown value model of mine.py 'nothing'"),
        (("--fault", "gone.py:f"), "cannot read gone.py of --fault"),
        (("--fault", "1*mine.py:exponent-up + 1*gone.py:f"), "names functions of 2 files"),
    ],
)
def test_what_is_refused(here, workload, words, message):
    done = in_process("pvf", workload, "--store", "s.sqlite", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_function_that_fails_ends_the_campaign_with_its_error(here, workload):
    (here / "mine.py").write_text(FUNCTIONS.replace("return np.where", "return None and np.where"))
    done = in_process(
        "pvf", workload, "--trials", 5, "--store", "s.sqlite", "--quiet", "--fault", "mine.py:exponent-up"
    )
    assert done.returncode == 2
    assert "value model exponent-up returned NoneType; expected uint32 of shape (1,)" in done.stderr


def test_a_list_with_a_function_is_refused(here, workload):
    campaign(workload, "a.sqlite", "--fault", "mine.py:exponent-up")
    assert in_process("export", "a.sqlite", "-o", "faults.jsonl").returncode == 0
    done = in_process("pvf", workload, "--faults", "faults.jsonl", "--store", "b.sqlite")
    assert done.returncode == 2
    assert "the fault is made by a Python function, which a list does not have" in done.stderr


def outcome_batches(store):
    """For each trial, the batches that were evaluated and the elements that were corrupted in each."""
    with PvfStore(store) as opened:
        sizes = opened.baseline.samples
        for row in opened.rows():
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            parts = [row.outcome_codes[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            evaluated = [i for i, part in enumerate(parts) if part.count(Outcome.SPARED) < len(part)]
            faults = json.loads(row.faults)
            yield evaluated, {(fault["step"], tuple(fault["elements"]), fault["site"]) for fault in faults}


@pytest.mark.parametrize("lasts", ["2", "end"])
def test_a_fault_that_lasts_is_in_the_same_elements_of_later_batches(here, workload, lasts):
    rows = [
        campaign(workload, f"{engine}.sqlite", "--fault", f"random:lasts={lasts}", "--at", "op:*", "--engine", engine)
        for engine in ("auto", "plain")
    ]
    assert rows[0] == rows[1]
    seen = set()
    for evaluated, faults in outcome_batches("auto.sqlite"):
        first = evaluated[0]
        end = 2 if lasts == "end" else min(2, first + 2)
        assert evaluated == list(range(first, end))
        assert {step for step, *_ in faults} == set(evaluated)
        assert len({(elements, site) for _, elements, site in faults}) == 1
        seen.add(first)
    assert seen == {0, 1}


def test_a_fault_in_parameters_lasts_anyway(here, workload):
    done = in_process("pvf", workload, "--store", "s.sqlite", "--fault", "random:lasts=2")
    assert done.returncode == 2
    assert "a fault in parameters is in all batches of its trial; leave out lasts" in done.stderr
