"""Stores of replicas in which one cell is wrong: each is refused in one line, whoever reads it; and stores of the other kind."""

from __future__ import annotations

import json
import shutil
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace

import pytest

from conftest import spread
from hostile_stores import loosened
from replicas.subjects import LOOP
from unsilent.basics.errors import StoreError, UsageError
from unsilent.replicas import Replica, ReplicaSpec, ReplicaStore, StepTraceId, Switches
from unsilent.replicas.kind import ReplicaRequest
from unsilent.replicas.runner import ReplicaRunner
from unsilent.replicas.step_trace import replica_or_step_trace
from unsilent.studies.noise.study import NoiseQuestion, read_noise, steps_to_trace, stored_question

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
    "look of unequal sides": '{"before": [1, 2], "after": [1], "operations": [], "note": ""}',
    "look with a short operation": '{"before": [], "after": [], "operations": [["a", "b"]], "note": ""}',
    "look with text for hashes": '{"before": ["a"], "after": ["a"], "operations": [], "note": ""}',
    "unknown switches": '{"variants": ["within=3"], "replicas": 3}',
    "none asked": '{"variants": [], "replicas": 3}',
}
RIGHT = {
    "trial.loss": {"null", "half", "negative", "greatest", "infinite"},
    "trial.metrics": {"object", "object with too much"},
    "trial.notes": {"list"},
    "trial.final_hashes": {"list"},
    "trial.step_trace_json": {"empty text"},
    "trial.seconds": {"half", "greatest"},
    "trial.worker": {"negative", "greatest"},
    "usage.seconds": {"half"},
    "usage.cpu_seconds": {"half"},
}
"""What these cells of a run may well hold."""
COLUMNS = {
    "campaign": ("hash", "spec", "description"),
    "trial": (
        "target", "flips", "k", "losses", "hashes", "final_hashes", "loss", "metrics", "predictions", "weights", "dtype", "notes",
        "step_trace_json", "seconds", "worker",
    ),
    "record": ("value",),
    "usage": ("seconds", "cpu_seconds"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A store of a few runs and looks."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "loop.py").write_text(LOOP)
    spec = ReplicaSpec(f"{folder}/loop.py:make", (("steps", "4"),))
    asked, runner = NoiseQuestion(spec, (Switches(), WITHIN), replicas=3), ReplicaRunner(spec)
    with ReplicaStore(folder / "s.sqlite", write=True) as store:
        store.bind_campaign(spec, trained := runner.establish_baseline())
        store.record_request(ReplicaRequest(tuple(map(str, asked.variants)), asked.replicas))
        store.add_rows(map(runner.run_replica, dict.fromkeys(asked.planned_runs(trained))))
        store.add_rows(map(runner.trace_step, dict.fromkeys(steps_to_trace(asked, store))))
        store.add_session_seconds(1.0, 2.0)
    return folder / "s.sqlite"


def read_all(path):
    """Everything that can be asked of a store."""
    with ReplicaStore(path) as store:
        for row in store.rows():
            if isinstance(look := replica_or_step_trace(row.trial), StepTraceId):
                store.find_step_trace(look)
        stored_question(store)
        store.total_session_seconds()


def read_study(path):
    with ReplicaStore(path) as store:
        return read_noise(stored_question(store), store)


def changed(sound, tmp_path, change, *values):
    path = tmp_path / "changed.sqlite"
    shutil.copy(sound, path)
    with loosened(path) as db:
        assert db.execute(change, values).rowcount == 1
    return path


def test_the_sound_store_is_read(sound):
    read_all(sound)
    assert [v.distinct_final_states for v in read_study(sound).variants] == [1, 3]


PLACES = [f"{table}.{column}" for table, own in COLUMNS.items() for column in own]


@pytest.mark.parametrize(("place", "names"), spread(PLACES, WRONG))
def test_a_wrong_cell_is_refused_in_one_line(sound, tmp_path, place, names):
    refuses(sound, tmp_path, place, "min(rowid)", [name for name in names if name not in RIGHT.get(place, ())])


@pytest.mark.parametrize("place", [place for place in PLACES if place.startswith("trial.")])
def test_a_wrong_cell_of_a_look_is_refused(sound, tmp_path, place):
    """The last rows are of looks, whose columns are empty but ``seen``."""
    refuses(sound, tmp_path, place, "max(rowid)", ["bytes", "pair of three", "nested", "array of a few"])


def refuses(sound, tmp_path, place, row, names):
    table, _, column = place.partition(".")
    for name in names:
        if place == "trial.flips" and name == "null":
            continue
        change = f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT {row} FROM {table})"
        path = changed(sound, tmp_path, change, WRONG[name])
        with pytest.raises(StoreError) as raised:
            read_all(path)
        told = str(raised.value)
        assert "\n" not in told, (name, told)
        assert len(told) < 700, (name, told)


@pytest.mark.parametrize("place", RIGHT)
def test_what_a_cell_may_hold_is_read(sound, tmp_path, place):
    table, _, column = place.partition(".")
    for name in RIGHT[place]:
        read_all(changed(sound, tmp_path, f"UPDATE {table} SET {column} = ? WHERE rowid = 1", WRONG[name]))


@pytest.mark.parametrize("column", ["losses", "hashes", "predictions", "weights"])
def test_arrays_have_the_length_that_the_training_gives(sound, tmp_path, column):
    for count in (0, 1, 3, 5, 49, 51):
        path = changed(sound, tmp_path, f"UPDATE trial SET {column} = ? WHERE rowid = 1", packed(b"\0" * 8 * count))
        with pytest.raises(
            StoreError,
            match=rf"trial control/x/0: (the array {column} has \d+ bytes, but its trial needs \d+|an array is truncated or too)",
        ):
            read_all(path)


@pytest.mark.parametrize("every", [1, 3, 4, 5])
def test_hashes_are_as_many_as_every_gives(sound, tmp_path, every):
    """The last step is always hashed."""
    with ReplicaStore(sound) as store:
        spec = replace(store.spec, every=every)
    runner = ReplicaRunner(spec)
    with ReplicaStore(tmp_path / "s.sqlite", write=True) as store:
        store.bind_campaign(spec, runner.establish_baseline())
        store.add_rows([runner.run_replica(Replica(Switches(), 0))])
        assert len(store.clean_twin().hashes) == {1: 4, 3: 2, 4: 1, 5: 1}[every]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 5}, r"the array losses has \d+ bytes, but its trial needs \d+"),
        ({"steps": 0}, "invalid numbers"),
        ({"parameters": 7}, "an array is truncated or too long"),
        ({"labels": [1, 2**80]}, "description cannot be read|invalid labels"),
        ({"labels": []}, "invalid numbers"),
        ({"groups": {"a": "ff"}}, "a group that does not fit its samples"),
        ({"groups": {"a": "x" * 14}}, "a group that does not fit its samples"),
        ({"fingerprint": {"a": "b"}}, "its campaign hash does not match its spec"),
        ({"effective_streams": [1]}, "description cannot be read"),
    ],
)
def test_what_is_told_of_a_training_is_checked(sound, tmp_path, change, said):
    with closing(sqlite3.connect(sound)) as db:
        told = json.loads(db.execute("SELECT description FROM campaign").fetchone()[0])
    path = changed(sound, tmp_path, "UPDATE campaign SET description = ?", json.dumps(told | change))
    with pytest.raises(StoreError, match=said):
        read_all(path)


@pytest.mark.parametrize(
    "target", ["within=3", "impl", "step:1:", "step:9:within", "step:-1:within", "step:x:within", "step:1"]
)
def test_a_target_that_is_no_run_is_refused(sound, tmp_path, target):
    path = changed(sound, tmp_path, "UPDATE trial SET target = ? WHERE target = 'within' AND k = 1", target)
    with pytest.raises(
        StoreError, match="which does not belong to its campaign|array|a step that its training does not have"
    ):
        read_all(path)


def test_runs_that_evaluate_other_samples_are_not_stored(sound, monkeypatch):
    with ReplicaStore(sound) as store:
        runner = ReplicaRunner(store.spec)
    evaluate = runner.workload.evaluate
    runner.establish_baseline()

    def few_samples(self, state):
        found = evaluate(state)
        return replace(found, predictions=found.predictions[:3], labels=found.labels[:3], groups={})

    monkeypatch.setattr(type(runner.workload), "evaluate", few_samples)
    with pytest.raises(UsageError, match="3 predictions; expected 50, one per held-out sample"):
        list(runner.run_all([Replica(Switches(), 0).trial]))
