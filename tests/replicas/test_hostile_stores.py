"""Stores of replicas in which one cell is wrong: each is refused in one line, whoever reads it; and stores of the other kind."""

from __future__ import annotations

import json
import shutil
import sqlite3
import zlib

import numpy as np
import pytest

from conftest import few, spread
from hostile_stores import loosened
from replicas.subjects import LOOP
from unsilent.errors import StoreError, UsageError
from unsilent.replicas import Look, Replica, ReplicaSpec, ReplicaStore, Switches
from unsilent.replicas.runner import ReplicaRunner
from unsilent.studies.noise import Asked, looks_at, read_noise
from unsilent.studies.pvf.kind import PVF, PvfStore

WITHIN = Switches.parse("within")
NESTED = "[" * 100_000 + "]" * 100_000


def packed(content):
    return zlib.compress(content if isinstance(content, bytes) else json.dumps(content).encode())


WRONG = {
    "null": None,
    "text": "abc",
    "number as text": "7",
    "bytes": b"abc",
    "negative": -1,
    "half": 1.5,
    "greatest": 2**62,
    "infinite": float("inf"),
    "empty text": "",
    "empty bytes": b"",
    "list": "[]",
    "list of lists": "[[1]]",
    "pair of a list": '[["a", [["b"]]]]',
    "pair of three": '[["a", "0f", "0f"]]',
    "pair that is no hash": '[["a", "0x"]]',
    "object": "{}",
    "object with a list": '{"a": [1]}',
    "object with too much": '{"a": 1' + "0" * 400 + "}",
    "number with an exponent": "1e400",
    "nested": NESTED,
    "nested in an object": '{"a": ' + NESTED + "}",
    "two lines": "a\nb",
    "array of one": packed(b"\0" * 8),
    "array of a few": packed(b"\0" * 24),
    "array of many": packed(b"\0" * 80_000),
    "array cut": packed(bytes(range(256)) * 8)[:-9],
    "array of part of an element": packed(b"\0" * 9),
    "array and more": packed(b"\0" * 32) + b"more",
    "packed list": packed([]),
    "packed object": packed({}),
    "packed short mask": packed({"a": "ff"}),
    "packed mask that is none": packed({"a": "xx"}),
    "packed mask that is a list": packed({"a": [1]}),
    "packed nested": packed(NESTED.encode()),
    "packed look with an exponent": packed(b'[[1e400], [1], [], ""]'),
    "packed look of unequal sides": packed([[1, 2], [1], [], ""]),
    "packed look with a short operation": packed([[], [], [["a", "b"]], ""]),
    "packed look with text for hashes": packed([["1"], ["1"], [], ""]),
    "packed no text": packed(b"\xff\xfe"),
}
RIGHT = {
    ("replica", "loss"): {"null", "half", "negative", "greatest", "infinite"},
    ("replica", "metrics"): {"object"},
    ("replica", "notes"): {"list"},
    ("replica", "finals"): {"list"},
    ("replica", "seconds"): {"half", "greatest"},
    ("replica", "worker"): {"negative", "greatest"},
    ("training", "groups"): {"packed object"},
    ("usage", "seconds"): {"half"},
    ("usage", "cpu_seconds"): {"half"},
}
"""What these cells may well hold."""
COLUMNS = {
    "training": ("hash", "spec", "found", "labels", "groups"),
    "replica": (
        "training", "switches", "number", "losses", "hashes", "finals", "loss", "metrics", "predictions", "weights", "dtype",
        "notes", "seconds", "worker",
    ),
    "look": ("training", "switches", "number", "step", "unordered", "seen"),
    "usage": ("seconds", "cpu_seconds"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A store of a few runs and looks how it was asked; its training."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "loop.py").write_text(LOOP)
    spec = ReplicaSpec(f"{folder}/loop.py:make", (("steps", "4"),))
    asked, runner = Asked(spec, (Switches(), WITHIN), replicas=3), ReplicaRunner(spec)
    with ReplicaStore(folder / "s.sqlite", write=True) as store:
        training = store.bind(spec, trained := runner.describe())
        for replica in dict.fromkeys(asked.wanted(trained)):
            store.add(training, runner.run(replica))
        for look in dict.fromkeys(looks_at(asked, store, training)):
            store.add_seen(training, look, runner.look(look))
        store.note_usage(1.0, 2.0)
    return folder / "s.sqlite", asked, training


def read_all(path, asked, training):
    """Everything that can be asked of a store."""
    with ReplicaStore(path) as store:
        trained = store.trained(training)
        store.trainings()
        for replica in store.done(training):
            store.weights(training, replica)
            for row in store.rows(training, replica.switches, 9, weights=True):
                for step in range(trained.steps):
                    for unordered in (False, True):
                        store.seen(training, Look(row.replica, step, unordered))
        store.usage()


def read_study(path, asked, training):
    with ReplicaStore(path) as store:
        return read_noise(asked, store, training)


def changed(sound, tmp_path, change, *values):
    path = tmp_path / "changed.sqlite"
    shutil.copy(sound[0], path)
    with loosened(path) as db:
        assert db.execute(change, values).rowcount == 1
    return path


def test_the_sound_store_is_read(sound):
    read_all(*sound)
    assert [v.distinct for v in read_study(*sound).variants] == [1, 3]


@pytest.mark.parametrize(
    ("place", "names"), spread([f"{table}.{column}" for table, own in COLUMNS.items() for column in own], WRONG)
)
@pytest.mark.parametrize("last", few([False, True], False), ids=["first", "last"])
def test_a_wrong_cell_is_refused_in_one_line(sound, tmp_path, place, names, last):
    _, asked, training = sound
    table, _, column = place.partition(".")
    row = f"(SELECT {'max' if last else 'min'}(rowid) FROM {table})"
    tried = 0
    for name in names:
        value = WRONG[name]
        path = changed(sound, tmp_path, f"UPDATE {table} SET {column} = ? WHERE rowid = {row}", value)
        if name in RIGHT.get((table, column), ()):
            read_all(path, asked, training)
            continue
        for read in (read_all, read_study):
            with pytest.raises((StoreError, UsageError)) as raised:
                read(path, asked, training)
            told = str(raised.value)
            assert "\n" not in told, (name, told)
            assert len(told) < 700, (name, told)
            # Asked for a training whose hash was overwritten, the store says that it has none, or that it is damaged.
            assert isinstance(raised.value, StoreError) or column == "hash", (name, told)
        tried += 1
    assert tried > len(names) - 8


@pytest.mark.parametrize("column", ["losses", "hashes", "predictions"])
def test_arrays_have_the_length_that_the_training_gives(sound, tmp_path, column):
    _, asked, training = sound
    for count in (0, 1, 3, 5, 49, 51):
        path = changed(sound, tmp_path, f"UPDATE replica SET {column} = ? WHERE rowid = 1", packed(b"\0" * 8 * count))
        for read in (read_all, read_study):
            with pytest.raises(StoreError, match=f"the {column} of run control/0 are not|an array is cut or too long"):
                read(path, asked, training)


@pytest.mark.parametrize("every", [1, 3, 4, 5])
def test_hashes_are_as_many_as_every_gives(sound, tmp_path, every):
    """The last step is always hashed."""
    asked = sound[1]
    spec = ReplicaSpec(asked.spec.workload, asked.spec.options, every=every)
    runner = ReplicaRunner(spec)
    with ReplicaStore(tmp_path / "s.sqlite", write=True) as store:
        training = store.bind(spec, runner.describe())
        store.add(training, runner.run(Replica(Switches(), 0)))
        (row,) = store.rows(training, Switches(), 1)
    assert len(row.hashes) == {1: 4, 3: 2, 4: 1, 5: 1}[every]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps", "not the one that its hash stands for"),
        ("parameters", "weights cannot be read"),
        ("fingerprint", "not the one that its hash stands for"),
        ("layouts", "parts of other types"),
        ("streams", "parts of other types"),
        ("extra", "one too many"),
    ],
)
def test_what_is_told_of_a_training_fits_its_hash(sound, tmp_path, change, said):
    path, asked, training = sound
    with sqlite3.connect(path) as db:
        told = json.loads(db.execute("SELECT found FROM training").fetchone()[0])
    told[change] = {"steps": 5, "parameters": 7, "layouts": 1, "streams": [1], "extra": 1, "fingerprint": {"a": "b"}}[
        change
    ]
    path = changed(sound, tmp_path, "UPDATE training SET found = ?", json.dumps(told))
    for read in (read_all, read_study):
        with pytest.raises(StoreError, match=said):
            read(path, asked, training)


def test_every_of_the_spec_fits_the_hash(sound, tmp_path):
    path, asked, training = sound
    with sqlite3.connect(path) as db:
        spec = json.loads(db.execute("SELECT spec FROM training").fetchone()[0])
    for change in ({"every": 2}, {"every": 0}, {"seed": 1}, {"options": [["a"]]}, {"more": 1}):
        path = changed(sound, tmp_path, "UPDATE training SET spec = ?", json.dumps(spec | change))
        with pytest.raises(StoreError, match="hash stands for|spec of a training"):
            read_all(path, asked, training)


def test_an_unknown_training_is_a_mistake_of_who_asks(sound, tmp_path):
    path, _, training = sound
    with ReplicaStore(path) as store, pytest.raises(UsageError) as raised:
        store.trained("0" * 32)
    assert f"has no training 00000000; it holds tiny {training[:8]}: give one of these" in str(raised.value)
    with ReplicaStore(tmp_path / "empty.sqlite", write=True) as store, pytest.raises(UsageError, match="it holds none"):
        store.trained("0" * 32)


def test_runs_that_evaluate_other_samples_are_not_stored(sound, tmp_path):
    asked = sound[1]
    runner = ReplicaRunner(asked.spec)
    row = runner.run(Replica(Switches(), 0))
    object.__setattr__(row, "predictions", np.zeros(3, np.int64))
    with ReplicaStore(tmp_path / "s.sqlite", write=True) as store:
        training = store.bind(asked.spec, runner.describe())
        with pytest.raises(UsageError, match="3 predictions where 50 samples are held out"):
            store.add(training, row)
        assert not store.done(training)


def test_a_store_of_the_other_verb_is_named(tmp_path):
    for other, opened, said in (
        (PVF, ReplicaStore, "holds a campaign of unsilent pvf; unsilent noise needs a store of replicas: give another --store"),
        (ReplicaStore, PvfStore, "holds replicas of unsilent noise; unsilent pvf needs a store of its own campaigns"),
    ):  # fmt: skip
        path = tmp_path / f"{other.application}.sqlite"
        with sqlite3.connect(path) as db:
            db.executescript(f"CREATE TABLE training (hash TEXT); PRAGMA application_id={other.application};")
        db.close()
        for write in (False, True):
            with pytest.raises(StoreError, match=said):
                opened(path, write=write)
