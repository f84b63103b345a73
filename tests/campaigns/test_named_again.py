"""What a store names is used only where the user names it as well; what a query may take; cells for spreadsheets."""

from __future__ import annotations

import csv
import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest

from conftest import in_process
from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns.confirmed_files import with_confirmed_files
from unsilent.campaigns.spec import campaign_hash
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.spec import PvfSpec
from unsilent.studies.training.spec import TrainingSpec

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


def asked(path, **changes):
    """Another spec in a store, with the hash that goes with it."""
    with PvfStore(path) as store:
        spec, found = replace(store.spec, **changes), store.baseline
    found = replace(found, campaign=campaign_hash(spec, found.fingerprint))
    with closing(sqlite3.connect(path)) as db, db:
        values = (found.campaign, json.dumps(spec.to_json()), json.dumps(found.to_json()))
        db.execute("UPDATE campaign SET hash = ?, spec = ?, description = ?", values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workload": "digits-cnn", "data": "/dev/zero"}, "add --data /dev/zero"),
        ({"workload": "digits-cnn", "weights": "a b.pt"}, "add --weights 'a b.pt'"),
        ({"workload": "hf:/somebody/else"}, "add --workload hf:/somebody/else"),
        ({"workload": "evil.pt2"}, "add --workload evil.pt2"),
        ({"workload": "\x1b[31m\n.py:x", "data": "d"}, "add --workload '\\x1b[31m\\x0a.py:x' --data d"),
    ],
)
def test_a_replay_uses_nothing_that_only_the_store_names(stored, changes, said):
    asked(stored, **changes)
    done = in_process("replay", stored, "first/x1/0")
    assert done.returncode == 2
    assert said in done.stderr.replace("\\\\", "\\")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


REMOVED = "was made with other options (%s) than those of this version of unsilent pvf; give another store"


@pytest.mark.parametrize(
    "words",
    [("report",), ("export",), ("replay", "first/x1/0"), ("pvf", "tiny.py:make", "--quiet", "--store")],
)
def test_a_store_of_strata_that_are_not_drawn_any_more_says_so(stored, words):
    asked(stored, strata="risk")
    done = in_process(*words, stored) if words[-1] == "--store" else in_process(words[0], stored, *words[1:])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert REMOVED % "--strata risk" in done.stderr


def test_an_option_of_a_stored_command_that_there_is_not_any_more_is_not_passed_over(stored):
    with closing(sqlite3.connect(stored)) as db, db:
        db.execute("UPDATE budget SET command = 'unsilent pvf w.py:make --trials 9 --interval wilson --seed 0'")
    done = in_process("report", stored)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert REMOVED % "--interval" in done.stderr


def test_what_the_user_names_takes_the_place():
    spec = PvfSpec("cifar-resnet20", data="stored.npz", weights="stored.pt")
    given = {"workload": None, "data": "mine.npz", "weights": "mine.pt"}
    found = with_confirmed_files(spec, given, {"workload": ("cifar-resnet20",)})
    assert (found.workload, found.data, found.weights) == ("cifar-resnet20", "mine.npz", "mine.pt")
    with pytest.raises(UsageError, match="did not use --data; leave out --data"):
        with_confirmed_files(replace(spec, data=None), given, {})
    training = TrainingSpec("train-resnet", accelerator="evil.toml")
    with pytest.raises(UsageError, match="add --accelerator evil.toml"):
        with_confirmed_files(training, {"workload": None, "accelerator": None}, {"workload": ("train-resnet",)})


def test_options_of_ones_own_workload_are_named_again():
    spec, given = PvfSpec("mine.py:w", (("n", "3"), ("path", "/dev/zero"))), {"workload": "mine.py:w"}
    with pytest.raises(UsageError, match="add --with path=/dev/zero"):
        with_confirmed_files(spec, given, {}, (("n", "3"),))
    assert with_confirmed_files(spec, given, {}, (("n", "4"), ("path", "x"))).options == (("n", "4"), ("path", "x"))
    assert with_confirmed_files(spec, {"workload": None}, {"workload": ("mine.py:w",)}).options == spec.options


def test_a_query_ends_with_a_signal(stored):
    def stop(number, frame):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, stop)
    try:
        with PvfStore(stored, write=True) as store:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                store._one(ENDLESS)
            assert store.total_session_seconds()[0] > 0  # and the file can be used again
    finally:
        signal.signal(signal.SIGALRM, old)


def test_a_query_ends_after_more_steps_than_the_file_is_worth(stored):
    begun = time.process_time()
    with (
        PvfStore(stored) as store,
        pytest.raises(StoreError, match="takes more SQLite steps than a store of its size needs"),
    ):
        store._one(ENDLESS)
    assert time.process_time() - begun < 20


def test_a_journal_cannot_have_another_file_removed(stored, tiny):
    """SQLite removes the file that a journal names as its super-journal, whatever that is."""
    victim = stored.parent / "victim.txt"
    victim.write_text("precious")
    name, content = str(victim.resolve()).encode(), stored.read_bytes()
    size, magic = int.from_bytes(content[16:18], "big"), bytes.fromhex("d9d505f920a163d7")
    head = magic + b"".join(n.to_bytes(4, "big") for n in (0, 0, len(content) // size, 512, size))
    tail = (
        (2**30 // size + 1).to_bytes(4, "big")
        + name
        + len(name).to_bytes(4, "big")
        + sum(name).to_bytes(4, "big")
        + magic
    )
    (stored.parent / "s.sqlite-journal").write_bytes(head.ljust(512, b"\0") + tail)
    with pytest.raises(StoreError, match="would make SQLite delete another file"):
        PvfStore(stored, write=True)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-journal", ".lock"])
def test_pipes_beside_a_store_or_in_its_place(stored, ending):
    path = stored.with_name(stored.name + ending)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for write in (True,) if ending == ".lock" else (False, True):
        with pytest.raises(StoreError, match="not a regular file|not a lock file"):
            PvfStore(stored, write=write)


def test_cells_that_spreadsheets_would_compute(stored):
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "plain", ""]
    with closing(sqlite3.connect(stored)) as db, db:
        for k, text in enumerate(texts[:5]):
            db.execute("UPDATE trial SET error = ?, severity = -2.5 WHERE target = 'first' AND k = ?", (text, k))
        for k, text in enumerate(texts[5:]):
            db.execute("UPDATE trial SET error = ? WHERE target = 'last' AND k = ?", (text, k))
    assert in_process("export", stored, "-o", "out.csv").returncode == 0
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["target"], int(row["k"])): row["error"] for row in rows}
    assert [found["first", k] for k in range(5)] == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\tx"]
    assert [found["last", k] for k in range(3)] == ["'\rx", "plain", ""]
    assert {row["severity"] for row in rows if row["target"] == "first" and int(row["k"]) < 5} == {"-2.5"}


def test_names_that_are_no_valid_text_are_refused_before_anything_is_stored(stored, tmp_path):
    with PvfStore(stored) as store:
        spec, found = store.spec, store.baseline
    site = replace(found.tensors[0], site="param:a\udc80.weight")
    with PvfStore(tmp_path / "new.sqlite", write=True) as store:
        with pytest.raises(StoreError, match="cannot store a name that is not valid text"):
            store.bind_campaign(spec, replace(found, tensors=(site, *found.tensors[1:])))
        store.bind_campaign(spec, found)


def test_a_link_is_followed_before_the_files_beside_a_store_are_looked_at(stored, tmp_path):
    victim = tmp_path / "precious"
    victim.write_text("mine")
    magic = bytes.fromhex("d9d505f920a163d7")
    name = str(victim).encode()
    (tmp_path / "s.sqlite-journal").write_bytes(
        magic + bytes(504) + name + len(name).to_bytes(4, "big") + bytes(4) + magic
    )
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link = folder / "link.sqlite"
    link.symlink_to(tmp_path / "s.sqlite")
    for write in (False, True):
        with pytest.raises(StoreError, match="would make SQLite delete another file"):
            PvfStore(link, write=write)
    assert victim.read_text() == "mine"
    itself = folder / "itself.sqlite"
    itself.symlink_to(itself)
    for words in (("report", itself), ("merge", itself, "-o", folder / "out.sqlite")):
        done = in_process(*words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "statement", ["INSERT INTO usage VALUES (1.7e308, 1), (1.7e308, 1)", "UPDATE budget SET trials = 1e999"]
)
def test_numbers_that_cannot_be_added_up_are_refused(stored, statement):
    with closing(sqlite3.connect(stored)) as db, db:
        db.execute(statement)
    done = in_process("report", stored)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_reader_that_stops_early_may_close_the_store(stored):
    store = PvfStore(stored)
    rows = store.rows()
    next(rows)
    store.close()
    rows.close()
