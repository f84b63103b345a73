"""What campaigns of every kind can do, shown of the smallest one: `contracts.pi`."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from contracts.pi import PI, PiSpec, analyse
from unsilent.campaigns import Budget, Store, TrialId, make_executor, run_campaign
from unsilent.campaigns.export import canonical_lines, export_store
from unsilent.campaigns.inline import InlineExecutor
from unsilent.campaigns.merging import merge_stores
from unsilent.campaigns.replay import check_same
from unsilent.cli.main import run as cli
from unsilent.errors import StoreError
from unsilent.studies import registered

SPEC = PiSpec(points=50)
TRIALS = 40
TESTS = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def workers_find_the_kind(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))


def run(path, trials=TRIALS, shard=(1, 1), executor=None):
    with executor or InlineExecutor(SPEC) as running, Store(path, PI, write=True) as store:
        run_campaign(SPEC, Budget(trials, shard), running, store, command="by hand")
    return path


def lines(path):
    with Store(path, PI) as store:
        return list(canonical_lines(store))


def test_a_campaign_extends_and_reads(tmp_path):
    path = run(tmp_path / "a.sqlite", 10)
    assert lines(run(path)) == lines(run(tmp_path / "b.sqlite"))
    with Store(path, PI) as store:
        found = analyse(store, confidence=0.9999)
    assert (found.n, found.low < 3.14159 < found.high) == (TRIALS, True)


@pytest.mark.parametrize(
    ("name", "jobs"),
    [
        ("serial", 1),
        pytest.param("processes", 2, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=pytest.mark.slow),
    ],
)
def test_every_executor_makes_the_same_store(tmp_path, name, jobs):
    if name == "ray" and find_spec("ray") is None:
        pytest.skip("ray is not installed")
    here = lines(run(tmp_path / "here.sqlite"))
    assert lines(run(tmp_path / "there.sqlite", executor=make_executor(name, SPEC, jobs=jobs))) == here


def test_shards_are_merged_into_the_whole(tmp_path):
    parts = [run(tmp_path / f"{i}.sqlite", shard=(i, 3)) for i in (1, 2, 3)]
    merged = merge_stores(tmp_path / "out.sqlite", parts, PI)
    assert merged.trials == TRIALS
    assert lines(tmp_path / "out.sqlite") == lines(run(tmp_path / "whole.sqlite"))


@pytest.mark.parametrize("ending", [".csv", ".json", ".jsonl"])
def test_an_export_has_the_fields_of_a_row(tmp_path, ending):
    with Store(run(tmp_path / "a.sqlite"), PI) as store:
        export_store(store, tmp_path / f"out{ending}")
    text = (tmp_path / f"out{ending}").read_text()
    assert all(word in text for word in ("inside", "square/x/0", "worker"))
    assert len(text.splitlines()) == {".csv": TRIALS + 1, ".json": 1, ".jsonl": TRIALS}[ending]


def verb(capsys, *words):
    assert cli(list(map(str, words))) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert cli(list(map(str, words))) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_verbs_work_for_a_kind_that_is_registered(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registered, "KINDS", [*registered.KINDS, PI])
    monkeypatch.chdir(tmp_path)
    parts = [run(tmp_path / f"{i}.sqlite", shard=(i, 2)).name for i in (1, 2)]
    assert f"out.sqlite: {TRIALS} trials" in verb(capsys, "merge", *parts, "-o", "out.sqlite")
    assert "pi is 3." in verb(capsys, "report", "out.sqlite")
    assert "Pi" in Path("out.html").read_text()
    told = json.loads(verb(capsys, "report", "out.sqlite", "--json", "--confidence", "0.5"))
    assert (told["schema"], told["results"][0]["confidence"]) == ("unsilent/pi/1", 0.5)
    assert "Two of pi" in verb(capsys, "report", *parts, "--plain")
    assert len(verb(capsys, "export", "out.sqlite", "--canonical").splitlines()) == TRIALS + 1
    assert f"{TRIALS} of {TRIALS} trials, complete" in verb(capsys, "status", "out.sqlite")


def test_a_trial_of_a_kind_that_is_registered_is_replayed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registered, "KINDS", [*registered.KINDS, PI])
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "a.sqlite", 5)
    words = ("replay", "a.sqlite", "square/x/3")
    assert "opens no file by itself; to run it again add --workload pi" in refused(capsys, *words)
    words = (*words, "--workload", "pi")
    with Store("a.sqlite", PI) as store:
        inside = store.row(TrialId("square", None, 3)).inside
    assert verb(capsys, *words) == f"square/x/3 ended the same\ninside: {inside}\n"
    for more in (("--trace",), ("--log", "x.txt")):
        assert f"trials of unsilent pi are replayed without that: leave out {more[0]}" in refused(capsys, *words, *more)
    with closing(sqlite3.connect("a.sqlite")) as db, db:
        db.execute("UPDATE trial SET inside = inside + 1, seconds = 9, worker = 9 WHERE k = 3")
    assert cli(list(words)) == 1
    verdict, *_, last = capsys.readouterr().out.splitlines()
    assert verdict == "square/x/3 ENDED DIFFERENTLY (inside)"
    assert last == f"inside: {inside + 1} stored, {inside} now"
    assert cli([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["trial"], told["same"]) == ("unsilent/replay/1", "square/x/3", False)
    assert (told["differing"], told["again"]["inside"]) == (["inside"], inside)


def test_a_campaign_that_is_another_now_is_not_replayed(tmp_path):
    with Store(run(tmp_path / "a.sqlite", 3), PI) as store:
        found = store.description
        check_same(store, SPEC, found)
        with pytest.raises(StoreError, match="a.sqlite was made with another points, numpy; a bit-exact replay needs"):
            check_same(store, PiSpec(points=51), replace(found, fingerprint={"numpy": "0"}))


def test_reports_of_two_runs_are_equal_where_they_are_canonical(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registered, "KINDS", [*registered.KINDS, PI])
    monkeypatch.chdir(tmp_path)
    for name in ("a.sqlite", "b.sqlite"):
        run(tmp_path / name)
    for more in ((), ("a.sqlite",)):
        one, two = (verb(capsys, "report", name, *more, "--json", "--canonical") for name in ("a.sqlite", "b.sqlite"))
        assert one == two
        assert "sqlite" not in one
    assert "only --json has that: leave out --canonical" in refused(capsys, "report", "a.sqlite", "--canonical")


@pytest.mark.parametrize(
    "change", ["inside = -1", "inside = 'many'", "inside = 1.5", "seconds = 9e999", "target = 'x'", "k = -1"]
)
def test_a_cell_that_cannot_be_is_refused(tmp_path, change):
    path = run(tmp_path / "a.sqlite", 3)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE trial SET {change} WHERE k = 0")
    with Store(path, PI) as store, pytest.raises(StoreError, match="is damaged or was not made by this program"):
        list(store.rows())


DRIVER = """
import sys
from contracts.pi import PI, PiSpec
from unsilent.campaigns import Budget, Store, TrialId, make_executor, run_campaign

if __name__ == "__main__":
    spec = PiSpec(points=50)
    with Store(sys.argv[1], PI, write=True) as store, make_executor("serial", spec) as executor:
        run_campaign(spec, Budget(int(sys.argv[2])), executor, store)
"""


@pytest.mark.slow
def test_what_was_killed_goes_on(tmp_path):
    path, many = tmp_path / "a.sqlite", 20_000
    process = subprocess.Popen([sys.executable, "-c", DRIVER, path, str(many)])
    end = time.monotonic() + 60
    while time.monotonic() < end and held(path) < 10:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 10 <= held(path) < many
    fewer = held(path)
    assert lines(run(path, fewer + 50)) == lines(run(tmp_path / "b.sqlite", fewer + 50))


def held(path):
    if not path.exists():
        return 0
    try:
        with Store(path, PI) as store:
            return len(store.done())
    except StoreError:  # not written yet
        return 0
