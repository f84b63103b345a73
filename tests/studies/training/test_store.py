"""Stores of faulty training runs: rows come back bit for bit, and a file that means harm is one line."""

from __future__ import annotations

import itertools
import json
import math
import resource
import shutil
import signal
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaigns.faulty_loop import Here, running, write_loop
from conftest import spread
from hostile_stores import loosened
from hostile_verbs import repair
from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns.driver import Budget, run_campaign, run_trials
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.sqlite_file import APPLICATION_OWNERS
from unsilent.replicas import ReplicaStore
from unsilent.replicas.noise_floor_records import NoiseFloors, ReplicaDifferences, store_noise_floors, stored_floors
from unsilent.studies.campaign_kinds import KINDS
from unsilent.studies.noise.kind import NOISE
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.training.kind import TrainingStore
from unsilent.studies.training.spec import EarlyEndRule, InjectionPoint, TrainingRow, TrainingSpec
from unsilent.studies.training.study import TrainingAnalysisOptions, read_training

STEPS, TRIALS = 12, 8
FLOOR = ReplicaDifferences(
    "within",
    tuple(0.01 * (i - 10) for i in range(20)),
    tuple(0.02 * (i - 9) for i in range(20)),
    (0.1,) * 20,
    (False,) * 20,
    10,
    (0.3, 0.2),
)
FLOORS = NoiseFloors(FLOOR, replace(FLOOR, switches="init+order+augment+dropout"))
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Spec, description and store of a small campaign, with a row under the guard."""
    folder = tmp_path_factory.mktemp("store")
    spec = TrainingSpec(write_loop(folder), (("steps", str(STEPS)),), faults=(("RD", 1.0), ("bitflip", 1.0)))
    with running(spec) as runner, TrainingStore(folder / "s.sqlite", write=True) as store:
        executor = Here(runner)
        run_campaign(spec, Budget(TRIALS), executor, store, command="unsilent training …")
        more = [TrialId("guarded:random", None, 0)]
        run_trials(more, executor, store)
        store_noise_floors(store, FLOORS)
        found = runner.establish_baseline()
    return spec, found, folder / "s.sqlite"


@pytest.fixture
def copy(ran, tmp_path):
    shutil.copy(ran[2], tmp_path / "copy.sqlite")
    return tmp_path / "copy.sqlite"


def change(path, sql, *values, rows=None):
    with closing(sqlite3.connect(path)) as db, db:
        done = db.execute(sql, values)
        assert rows is None or done.rowcount == rows


def read_all(path):
    """Everything that can be asked of a store."""
    with TrainingStore(path) as store:
        assert isinstance(store.spec, TrainingSpec)
        store.total_session_seconds()
        store.largest_budget()
        list(store.rows(omit_arrays=("losses", "metric")))
        return read_training(store, TrainingAnalysisOptions())


def refused(path, kinds=StoreError):
    """The one line in which it is refused."""
    with pytest.raises(kinds) as raised:
        read_all(path)
    told = str(raised.value)
    assert "\n" not in told
    assert len(told) < 700
    return told


# -- round trips --------------------------------------------------------------------------------------------------------

REALS = st.one_of(
    st.floats(width=64), st.sampled_from([math.nan, -math.nan, math.inf, -0.0, 5e-324, 1.7976931348623157e308])
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


def curve(count, columns=None):
    shape = count if columns is None else (count, columns)
    size = count * (columns or 1)
    return st.lists(REALS, min_size=size, max_size=size).map(lambda v: np.array(v, dtype=np.float64).reshape(shape))


@st.composite
def some_row(draw, k):
    step = draw(st.integers(0, STEPS - 1))
    target = draw(st.sampled_from(["random", "guarded:random"]))
    followed = ("end", "same-bits", "not-finite", "horizon")
    kinds = ("recovered", "missed", "stopped") if target.startswith("guarded") else followed
    reason = draw(st.sampled_from((*kinds, "raised", "crash", "hang")))
    ran = draw(st.integers(1, STEPS - step)) if reason in followed else draw(st.integers(0, 2 * STEPS))
    count = ran if reason in followed else 0
    return TrainingRow(
        trial=TrialId(target, None, k),
        injection=InjectionPoint(step, *(draw(TEXTS) for _ in range(4))),
        faults=draw(st.sampled_from(["[]", '[{"a":1}]', '{"digest":"ä"}'])),
        injected_max=draw(REALS),
        reference_max=draw(REALS),
        end_reason=reason,
        steps_run=ran,
        losses=draw(curve(count)),
        metric=draw(curve(count)),
        history_magnitudes=draw(curve(min(count, 3), 3)),
        test_accuracy=draw(REALS),
        test_loss=draw(REALS),
        churn=draw(REALS),
        detected_after=draw(st.none() | st.integers(-1, 12)),
        error=draw(TEXTS),
        seconds=draw(st.floats(0, 1e6)),
        worker=draw(st.integers(0, 2**62)),
        bit_identical=draw(st.booleans()),
    )


@pytest.fixture(scope="module")
def empty(ran, tmp_path_factory):
    """An open store of the same campaign, and numbers for its trials."""
    with TrainingStore(tmp_path_factory.mktemp("trip") / "s.sqlite", write=True) as store:
        store.bind_campaign(ran[0], ran[1])
        yield store, itertools.count()


@given(st.data())
def test_rows_come_back_bit_for_bit(empty, data):
    store, numbers = empty
    row = data.draw(some_row(next(numbers)))
    store.add_rows([row])
    back = store.row(row.trial)
    assert back.reproducible_values() == row.reproducible_values()
    assert (back.seconds, back.worker) == (row.seconds, row.worker)
    (short,) = [one for one in store.rows(omit_arrays=("losses", "metric")) if one.trial == row.trial]
    assert replace(short, losses=row.losses, metric=row.metric).reproducible_values() == row.reproducible_values()
    assert len(short.losses) == len(short.metric) == 0
    assert row.trial in store.stored_trial_ids()


def test_spec_description_and_floor_come_back(ran):
    spec, found, path = ran
    with TrainingStore(path) as store:
        assert store.spec == spec
        again = store.baseline
        assert json.dumps(again.to_json()) == json.dumps(found.to_json())
        assert again == found
        assert stored_floors(store) == FLOORS
        assert store.largest_budget() == (TRIALS, "unsilent training …")
    horizon = replace(spec, horizon=EarlyEndRule(5, 4, (0.5, math.pi), 0.25), per="layer", value="set:value=1", steps=7)
    assert TrainingSpec(**{**horizon.to_json(), "horizon": horizon.horizon}) == horizon


def test_a_floor_takes_the_place_of_the_one_before(ran, copy):
    other = NoiseFloors(replace(FLOOR, window=3), FLOOR)
    with TrainingStore(copy, write=True) as store:
        store_noise_floors(store, other)
        assert stored_floors(store) == other
        store_noise_floors(store, FLOORS)
        assert stored_floors(store) == FLOORS


def test_a_trial_is_stored_once(ran, copy):
    with TrainingStore(copy, write=True) as store:
        row = store.row(TrialId("random", None, 3))
        before = store.stored_trial_ids()
        with pytest.raises(StoreError, match="UNIQUE"):
            store.add_rows([replace(row, trial=TrialId("random", None, 99)), row])
        assert store.stored_trial_ids() == before


def test_a_trial_that_was_not_run_is_named(ran):
    with (
        TrainingStore(ran[2]) as store,
        pytest.raises(StoreError, match=r"has no trial random/x/99; expected TARGET/xFLIPS/N"),
    ):
        store.row(TrialId("random", None, 99))


# -- hostile files ------------------------------------------------------------------------------------------------------

COLUMNS = (
    "target", "k", "step", "site", "phase", "layer", "model", "faults", "injected_max", "reference_max", "end_reason",
    "steps_run", "losses", "metric", "history_magnitudes", "test_accuracy", "test_loss", "churn", "detected_after", "error",
    "bit_identical", "seconds", "worker",
)  # fmt: skip
WRONG = {
    "null": None,
    "text": "abc",
    "number as text": "7",
    "bytes": b"abc",
    "negative": -1,
    "half": 1.5,
    "greatest": 2**62,
    "infinite": math.inf,
    "empty bytes": b"",
    "list": "[]",
    "nested": NESTED,
    "array of none": zlib.compress(b""),
    "array of three": zlib.compress(b"\0" * 24),
    "array of many": zlib.compress(b"\0" * 8 * 1000),
    "array of part of an element": zlib.compress(b"\0" * 9),
    "array cut": zlib.compress(bytes(range(256)) * 8)[:-9],
    "bomb": zlib.compress(b"\0" * 100_000_000),
}
TEXT = {"text", "number as text", "list", "nested"}
REAL = {"null", "negative", "half", "greatest", "infinite"}
RIGHT = {
    "site": TEXT,
    "phase": TEXT,
    "layer": TEXT,
    "model": TEXT,
    "error": TEXT,
    "faults": {"list"},
    **dict.fromkeys(("injected_max", "reference_max", "test_accuracy", "test_loss", "churn"), REAL),
    "detected_after": {"null", "negative", "greatest"},
    "seconds": {"half", "greatest"},
    "worker": {"negative", "greatest"},
}
"""What these cells may well hold, in the row of a trial that ran for more than three steps."""


@pytest.mark.parametrize(("column", "names"), spread(COLUMNS, WRONG))
def test_a_wrong_cell_is_refused_in_one_line(ran, tmp_path, column, names):
    tried = 0
    for name in names:
        value = WRONG[name]
        path = tmp_path / "changed.sqlite"
        shutil.copy(ran[2], path)
        row = "(SELECT min(rowid) FROM trial WHERE target = 'random' AND steps_run > 3 AND end_reason = 'end')"
        with loosened(path) as db:
            assert db.execute(f"UPDATE trial SET {column} = ? WHERE rowid = {row}", (value,)).rowcount == 1
        if name in RIGHT.get(column, ()):
            assert read_all(path).n == TRIALS, name
        else:
            assert "damaged" in refused(path), name
            tried += 1
    assert tried >= 11 or len(names) < len(WRONG)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE trial SET end_reason = 'ended'",
        "UPDATE trial SET step = 12",
        "UPDATE trial SET steps_run = steps_run + 1 WHERE end_reason = 'end'",
        "UPDATE trial SET steps_run = 0 WHERE end_reason = 'end'",
        "UPDATE trial SET end_reason = 'end' WHERE target LIKE 'guarded%'",
        "UPDATE trial SET losses = x'789c030000000001' WHERE end_reason = 'end'",
        "UPDATE trial SET target = 'evil' WHERE k = 1",
        "UPDATE trial SET target = '' WHERE k = 1",
        "UPDATE trial SET end_reason = 'recovered' WHERE k = 1",
        "UPDATE trial SET history_magnitudes = x'' WHERE end_reason = 'end'",
        "UPDATE trial SET steps_run = 1000000 WHERE target LIKE 'guarded%'",
        "UPDATE trial SET target = 'guarded:evil' WHERE target LIKE 'guarded%'",
        "UPDATE trial SET target = 'guarded:guarded:random' WHERE target LIKE 'guarded%'",
        "CREATE VIEW other AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON trial BEGIN SELECT 1; END",
        "UPDATE campaign SET spec = '{'",
        "UPDATE campaign SET spec = x'00ff'",
        "UPDATE campaign SET description = '{}'",
        "UPDATE record SET value = 'nonsense'",
        "UPDATE record SET value = 5",
        "UPDATE record SET value = '[]'",
        "UPDATE record SET value = '[]' WHERE rowid = 2",
        "UPDATE record SET value = x'00'",
        "DROP TABLE trial",
        "DROP TABLE record",
        "DELETE FROM campaign",
    ],
)
def test_other_damage_is_one_line(copy, damage):
    with closing(sqlite3.connect(copy)) as db:
        db.executescript(damage)
    assert "copy.sqlite" in refused(copy)


def with_json(path, table, column, **changed):
    with closing(sqlite3.connect(path)) as db, db:
        value = json.loads(db.execute(f"SELECT {column} FROM {table}").fetchone()[0])
        db.execute(f"UPDATE {table} SET {column} = ?", (json.dumps({**value, **changed}),))


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 0},
        {"steps": STEPS + 1},
        {"steps": 10**9},
        {"targets": []},
        {"epochs": [0]},
        {"losses": [0.5]},
        {"losses": [math.nan] * STEPS},
        {"metric": [0.5] * (STEPS + 1)},
        {"metric": [math.inf] * STEPS},
        {"history_magnitudes": [[1.0, 2.0, 3.0]]},
        {"history_magnitudes": [[1.0, 2.0]] * STEPS},
        {"history_magnitudes": [[1.0, 2.0, -3.0]] * STEPS},
        {"history_magnitudes": [[1.0, 2.0, math.inf]] * STEPS},
        {"test_accuracy": math.nan},
        {"test_loss": "none"},
        {"samples": 0},
        {"samples": 1.5},
        {"parameters": -1},
        {"golden_seconds": -1.0},
        {"golden_seconds": 0.0},
        {"models": [["RD", -1.0]]},
        {"models": [["RD"]]},
        {"fingerprint": []},
        {"optimizers": 3},
        {"operation_phases": [["a", "b"]]},
        {"notes": NESTED},
    ],
)
def test_an_impossible_description_is_one_line(copy, changed):
    with_json(copy, "campaign", "description", **changed)
    assert "damaged" in refused(copy)


HORIZON = {"steps": 5, "window": 4, "loss": [0.5, 0.5, 0.5], "test": 0.1}


@pytest.mark.parametrize(
    "changed",
    [
        {"horizon": {**HORIZON, "steps": 0}},
        {"horizon": {**HORIZON, "window": 0}},
        {"horizon": {**HORIZON, "loss": []}},
        {"horizon": {**HORIZON, "loss": [-1.0]}},
        {"horizon": {**HORIZON, "loss": [math.nan]}},
        {"horizon": {**HORIZON, "test": -1.0}},
        {"horizon": {**HORIZON, "test": math.inf}},
        {"horizon": {"steps": 5}},
        {"horizon": 5},
        {"faults": [["RD", 0.0]]},
        {"faults": [["RD", -1.0]]},
        {"faults": [["RD", math.nan]]},
        {"faults": [["RD"]]},
        {"phases": 3},
        {"options": [["a"]]},
        {"seed": "x"},
        {"steps": 1.5},
    ],
)
def test_an_impossible_spec_is_one_line(copy, changed):
    with_json(copy, "campaign", "spec", **changed)
    assert "damaged" in refused(copy)


def test_a_possible_horizon_is_read(copy):
    with_json(copy, "campaign", "spec", horizon=HORIZON)
    repair(copy)
    assert read_all(copy).n == TRIALS


@pytest.mark.parametrize(
    "changed",
    [
        {"accuracy": []},
        {"accuracy": [0.1] * 19},
        {"loss": [0.1] * 21},
        {"churn": []},
        {"identical_to_twin": [False]},
        {"accuracy": [math.nan] * 20},
        {"loss": [math.inf] * 20},
        {"churn": [-0.5] * 20},
        {"loss_band": [math.nan]},
        {"loss_band": [-1.0]},
        {"window": 0},
        {"identical_to_twin": [3] * 20},
        {"switches": None},
    ],
)
def test_an_impossible_floor_is_one_line(copy, changed):
    with_json(copy, "record", "value", **changed)
    assert "damaged" in refused(copy)


def test_a_floor_of_too_few_replicas_says_how_many_there_must_be(copy):
    few = {name: getattr(FLOOR, name)[:5] for name in ("accuracy", "loss", "churn", "identical_to_twin")}
    with_json(copy, "record", "value", **few)
    assert "make at least 19 replicas" in refused(copy, UsageError)


def test_what_is_missing_is_said(ran, copy, tmp_path):
    for floor in ("WHERE rowid = 2", ""):  # one floor alone is what stores of before had
        change(copy, f"DELETE FROM record {floor}")
        said = refused(copy, UsageError)
        assert "copy.sqlite lacks a noise floor" in said
        assert "run again the command that made it, which adds the missing runs" in said
    change(copy, "DELETE FROM trial")
    with TrainingStore(copy, write=True) as store:
        store_noise_floors(store, FLOORS)
    assert "has no trial yet; run again the command that made it" in refused(copy, UsageError)
    assert "there is no store" in refused(tmp_path / "none.sqlite")


@pytest.mark.slow
def test_a_bomb_takes_no_memory(copy):
    """300 MB of zeros in 300 kB."""
    change(copy, "UPDATE trial SET losses = ?", zlib.compress(b"\0" * 300_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "an array is truncated or too long" in refused(copy)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


# -- other files --------------------------------------------------------------------------------------------------------


def test_arrays_that_are_not_asked_for_are_empty(ran):
    with TrainingStore(ran[2]) as store:
        row = next(row for row in store.rows() if row.losses.size)
        bare = next(one for one in store.rows(omit_arrays=("losses",)) if one.trial == row.trial)
        assert (bare.losses.size, bare.losses.dtype) == (0, row.losses.dtype)
        assert bare.metric.tolist() == row.metric.tolist()


def test_a_store_of_another_verb_is_named(ran, tmp_path):
    assert {kind.application_id for kind in KINDS} <= set(APPLICATION_OWNERS)
    needs = "unsilent training can only use stores of its own campaigns: give another store"
    for other, said in (
        (PVF.application_id, f"holds a campaign of unsilent pvf; {needs}"),
        (NOISE.application_id, f"holds a campaign of unsilent noise; {needs}"),
        (0x556E737A, f"holds results of another unsilent command; {needs}"),
    ):
        path = tmp_path / f"{other}.sqlite"
        with closing(sqlite3.connect(path)) as db:
            db.executescript(f"CREATE TABLE campaign (hash TEXT); PRAGMA application_id={other};")
        for write in (False, True):
            with pytest.raises(StoreError, match=said):
                TrainingStore(path, write=write)
    for other, said in (
        (PvfStore, "holds a campaign of unsilent training; unsilent pvf can only use stores of its own campaigns"),
        (
            ReplicaStore,
            "holds a campaign of unsilent training; unsilent noise can only use stores of its own campaigns",
        ),
    ):
        with pytest.raises(StoreError, match=said):
            other(ran[2])


def test_another_campaign_in_the_file_is_refused_with_what_differs(ran, copy):
    spec, found, _ = ran
    wide = EarlyEndRule(5, 1, tuple(math.pi for _ in range(5000)), 1.0)
    for changed, said in (
        ({"seed": 7}, "seed: 0 in the store, 7 now"),
        ({"phases": ("fwd",)}, "phases: fwd grad_in grad_wt in the store, fwd now"),
        ({"faults": (("ZERO", 2.0),)}, r"faults: RD bitflip in the store, 2\*ZERO now"),
        ({"per": "layer"}, "per: none in the store, layer now"),
        ({"options": (("steps", "13"),)}, "options: steps=12 in the store, steps=13 now"),
        ({"horizon": wide}, "horizon: none in the store, "),
    ):
        with TrainingStore(copy, write=True) as store, pytest.raises(StoreError, match=said) as raised:
            store.bind_campaign(replace(spec, **changed), replace(found, campaign="0" * 32))
        assert "holds another campaign" in str(raised.value)
        assert "give another --store, or remove the file" in str(raised.value)
        assert len(str(raised.value)) < 700
    other = replace(found, campaign="0" * 32, fingerprint={**found.fingerprint, "golden": "1"})
    with TrainingStore(copy, write=True) as store, pytest.raises(StoreError, match="golden changed"):
        store.bind_campaign(spec, other)
    with TrainingStore(copy, write=True) as store:
        store.bind_campaign(spec, found)  # its own is welcome


def test_a_full_disk_is_one_line_and_loses_nothing(copy):
    def fill(store, row, stored):
        for k in range(1000, 5000):
            noise = np.random.default_rng(k).normal(size=row.steps_run)
            store.add_rows([replace(row, trial=TrialId("random", None, k), losses=noise, error="x" * 500)])
            stored.add(TrialId("random", None, k))

    with TrainingStore(copy, write=True) as store:
        row = next(r for r in store.rows() if r.end_reason == "end" and r.steps_run > 3)
        before = store.stored_trial_ids()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
        try:
            with pytest.raises(StoreError, match="stored results are safe: free space and run the same command again"):
                fill(store, row, before)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
    with TrainingStore(copy) as store:
        assert store.stored_trial_ids() == before
        assert len(before) > TRIALS + 2
