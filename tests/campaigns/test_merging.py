"""Stores of one campaign become one store: the same as if it had been run in one place, or an error and nothing else."""

from __future__ import annotations

import json
import resource
import shutil
import sqlite3
import tracemalloc
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import unsilent
from conftest import TINY, in_process, unsilent_cli
from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns import Budget, run_campaign
from unsilent.campaigns.driver import ROUND, plan_trials
from unsilent.campaigns.export import canonical_lines
from unsilent.campaigns.merging import merge_stores
from unsilent.campaigns.rounds import CellPlan
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.spec import PvfSpec
from unsilent.studies.pvf.study import live_executor

pytestmark = pytest.mark.slow

TRIALS = 12


def live(width=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 3))
    return unsilent.Workload(model, [torch.randn(6, width), torch.randn(2, width)], name="live")


def change(path, sql, *values):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql, values)


def described(path, **changes):
    with closing(sqlite3.connect(path)) as db, db:
        value = json.loads(db.execute("SELECT description FROM campaign").fetchone()[0])
        db.execute("UPDATE campaign SET description = ?", (json.dumps({**value, **changes}),))


def copied(source, name, sql=None):
    """A copy of a store beside it, changed by ``sql``."""
    path = source.with_name(name)
    shutil.copy(source, path)
    if sql:
        change(path, sql)
    return path


def content(path):
    with PvfStore(path) as store:
        return list(canonical_lines(store))


def files(folder):
    return {p.name for p in folder.iterdir()}


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "whole.sqlite"
    unsilent.pvf(live(), trials=TRIALS, flips=[1, 4], store=path)
    return path


@pytest.fixture
def halves(whole):
    return [copied(whole, f"{n}.sqlite", f"DELETE FROM trial WHERE k % 2 = {n}") for n in (0, 1)]


def test_parts_that_overlap_join_to_the_whole(tmp_path, whole, halves):
    some = copied(whole, "some.sqlite", "DELETE FROM trial WHERE k > 3 OR flips = 4")
    merged = merge_stores(tmp_path / "out.sqlite", [*halves, some], PVF)
    assert content(tmp_path / "out.sqlite") == content(whole)
    told = [(p.trials, p.new, p.duplicates) for p in merged.merged_inputs]
    assert told == [(24, 24, 0), (24, 24, 0), (8, 0, 8)]
    assert (merged.trials, merged.trials_before) == (48, 0)
    assert files(tmp_path) == {p.name for p in (whole, *halves, some)} | {"out.sqlite"}


def test_the_order_of_the_stores_changes_no_row(tmp_path, whole, halves):
    merge_stores(tmp_path / "out.sqlite", halves[::-1], PVF)
    assert content(tmp_path / "out.sqlite") == content(whole)


def test_where_a_fault_model_says_how_many(tmp_path):
    """No number of flips (NULL) sorts before any."""
    whole = tmp_path / "whole.sqlite"
    unsilent.pvf(live(), trials=9, fault="bitflip:rate=0.01", per="tensor", store=whole)
    parts = [copied(whole, f"{n}.sqlite", f"DELETE FROM trial WHERE k % 3 = {n}") for n in range(3)]
    merged = merge_stores(tmp_path / "out.sqlite", parts, PVF)
    assert content(tmp_path / "out.sqlite") == content(whole)
    assert [p.new for p in merged.merged_inputs] == [24, 12, 0]


def test_a_store_of_the_same_campaign_is_extended(tmp_path, whole, halves):
    first, second = halves
    with PvfStore(first) as store:
        before = {row.trial: row for row in store.rows()}
    change(second, "UPDATE trial SET worker = 7")
    merged = merge_stores(first, [second], PVF)
    assert (merged.trials_before, merged.merged_inputs[0].new, merged.trials) == (24, 24, 48)
    assert content(first) == content(whole)
    with PvfStore(first) as store:
        assert {row.trial: row for row in store.rows() if row.worker != 7} == before
    again = merge_stores(first, [second], PVF)
    assert (again.trials_before, again.merged_inputs[0].new, again.merged_inputs[0].duplicates) == (48, 0, 24)
    assert files(tmp_path) == {"whole.sqlite", "0.sqlite", "1.sqlite"}


def test_time_is_summed_over_the_stores_that_gave_trials(tmp_path, whole, halves):
    for path, seconds in zip((*halves, whole), (10, 200, 3000), strict=True):
        change(path, "UPDATE usage SET seconds = ?, cpu_seconds = ?", seconds, seconds + 1)
    out = tmp_path / "out.sqlite"
    merge_stores(out, [*halves, whole], PVF)
    with PvfStore(out) as store:
        assert store.total_session_seconds() == (210, 212)
    merge_stores(out, [whole], PVF)
    with PvfStore(out) as store:
        assert store.total_session_seconds() == (210, 212), "a store that adds nothing was counted"


def test_the_largest_budget_comes_with_its_command_and_without_its_part(tmp_path, halves):
    out = tmp_path / "out.sqlite"
    change(halves[0], "INSERT INTO budget (trials, command) VALUES (70, 'unsilent pvf x --trials 70 --shard 2/3')")
    merge_stores(out, halves, PVF)
    with PvfStore(out) as store:
        assert store.largest_budget() == (70, "unsilent pvf x --trials 70")
    change(halves[1], "INSERT INTO budget (trials, command) VALUES (80, 'none')")
    merge_stores(out, [halves[1]], PVF)
    with PvfStore(out) as store:
        assert store.largest_budget() == (70, "unsilent pvf x --trials 70"), "of a store that added nothing"


def plans(look, **more):
    start = {"0": 3, "2": 3}
    fixed = {"group": "model", "flips": 1, "target_precision": "0.1"}
    return [CellPlan(**(fixed | {"pilot_trials": start, "first_look_trials": start, "look": look} | more))]


def decided(path, *rounds):
    with PvfStore(path, write=True) as store:
        for cells in rounds:
            store.add_record(ROUND, [cell.to_json() for cell in cells])


def test_decisions_of_looks_are_carried_over(tmp_path, halves):
    pilot_means = {"0": 0.25, "2": 0.5}
    first, second, third = (plans(look, pilot_means=pilot_means) for look in range(3))
    decided(halves[0], first)
    decided(halves[1], first, second)
    out = tmp_path / "out.sqlite"
    for stores in (halves, halves[1:]):
        merge_stores(out, stores, PVF)
        with PvfStore(out) as store:
            assert store.records(ROUND) == [first, second]
    decided(halves[0], plans(1, pilot_means={"0": 0.3, "2": 0.5}))
    before = content(out)
    with pytest.raises(StoreError, match=r"0.sqlite and .*1.sqlite have different records of round"):
        merge_stores(tmp_path / "more.sqlite", halves, PVF)
    with pytest.raises(StoreError, match=r"out.sqlite and .*0.sqlite have different records of round"):
        merge_stores(out, [halves[0]], PVF)
    decided(halves[1], third)
    merge_stores(out, [halves[1]], PVF)
    with PvfStore(out) as store:
        assert store.records(ROUND) == [first, second, third]
    assert content(out)[1:] == before[1:]  # all but the head, which has the decisions
    assert not (tmp_path / "more.sqlite").exists()


CONFLICTS = {
    "faults": "UPDATE trial SET faults = '[]' WHERE flips = 4 AND k = 5 AND target = '2'",
    "outcome_codes": f"UPDATE trial SET outcome_codes = x'{zlib.compress(bytes([0] * 6 + [2] * 2)).hex()}' "
    "WHERE flips = 4 AND k = 5 AND target = '2'",
    "incorrect_batches": "UPDATE trial SET incorrect_batches = incorrect_batches = 0 WHERE flips = 4 AND k = 5 AND target = '2'",
    "severity": "UPDATE trial SET severity = severity + 1 WHERE flips = 4 AND k = 5 AND target = '2'",
    "error": "UPDATE trial SET error = 'x' WHERE flips = 4 AND k = 5 AND target = '2'",
}


@pytest.mark.parametrize("column", CONFLICTS)
@pytest.mark.parametrize("extend", [False, True])
def test_one_trial_with_two_ends_is_named_and_nothing_is_written(tmp_path, whole, column, extend):
    other = copied(whole, "other.sqlite", CONFLICTS[column])
    out = tmp_path / "out.sqlite"
    held = []
    if extend:
        copied(whole, "out.sqlite", "DELETE FROM trial WHERE target = '2' OR k = 3")
        held = content(out)
    before = files(tmp_path)
    with pytest.raises(
        StoreError, match=rf"trial 2/x4/5 .*whole.sqlite and .*other.sqlite \(column {column}\)"
    ) as caught:
        merge_stores(out, [whole, other], PVF)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == before
    if extend:
        assert content(out) == held


def test_other_campaigns_are_told_apart(tmp_path, whole):
    unsilent.pvf(live(), trials=2, flips=[1, 4], seed=9, store=tmp_path / "seed.sqlite")
    unsilent.pvf(live(3), trials=2, flips=[1, 4], store=tmp_path / "model.sqlite")
    unsilent.pvf(live(), trials=2, flips=1, dtype="float64", store=tmp_path / "asked.sqlite")
    before = files(tmp_path)
    asked = r"\(flips: 1,4 and 1; dtype: as built and float64"
    for name, told in (
        ("seed", r"\(seed: 0 and 9\)"),
        ("asked", asked),
        ("model", r"\(different weights; different inputs; different golden\)"),
    ):
        other = tmp_path / f"{name}.sqlite"
        for out, stores in ((tmp_path / "out.sqlite", [whole, other]), (whole, [other])):
            with pytest.raises(StoreError, match=rf"whole.sqlite and .*{name}.sqlite hold different campaigns {told}"):
                merge_stores(out, stores, PVF)
    assert files(tmp_path) == before


def duplicated(path):
    change(path, "DROP INDEX trial_identity")
    change(path, "INSERT INTO trial SELECT * FROM trial WHERE k = 7")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:5000]), "damaged|cannot be used"),
        (lambda p: p.write_text("this is not a database, it is a text that is long enough"), "is not an Unsilent store"),
        (lambda p: p.write_bytes(b""), "is empty"),
        (Path.unlink, "there is no store"),
        (lambda p: change(p, "UPDATE trial SET outcome_codes = x'00' WHERE k = 11"), "damaged"),
        (lambda p: change(p, "UPDATE trial SET target = 'gone' WHERE k = 11 AND flips = 1 AND target = '0'"), "trial gone/x"),
        (lambda p: change(p, "UPDATE trial SET flips = 3 WHERE k = 11 AND flips = 1"), "holds trial 0/x3/11"),
        (lambda p: change(p, "UPDATE trial SET k = -1 WHERE k = 11"), "holds trial 0/x1/-1"),
        (duplicated, "has other columns than this version of unsilent pvf writes"),
        (lambda p: described(p, samples=[6, 3]), "hold one campaign but different samples"),
        (lambda p: described(p, campaign="0" * 32), "its campaign hash does not match its spec"),
        (lambda p: change(p, "UPDATE campaign SET spec = '{'"), "damaged"),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_store_is_one_line_and_writes_nothing(tmp_path, whole, harm, said):
    bad = copied(whole, "bad.sqlite")
    harm(bad)
    held = copied(whole, "held.sqlite", "DELETE FROM trial WHERE k > 5")
    before, rows = files(tmp_path), content(held)
    for out in (tmp_path / "out.sqlite", held):
        with pytest.raises(StoreError, match=said) as caught:
            merge_stores(out, [whole, bad], PVF)
        assert "\n" not in str(caught.value)
        assert "bad.sqlite" in str(caught.value)
    assert files(tmp_path) == before
    assert content(held) == rows


def test_names_that_cannot_be(tmp_path, whole, halves):
    out = tmp_path / "out.sqlite"
    with pytest.raises(UsageError, match="0.sqlite is named twice; name it once"):
        merge_stores(out, [halves[0], halves[1], tmp_path / "." / "0.sqlite"], PVF)
    with pytest.raises(UsageError, match="the output store cannot also be an input"):
        merge_stores(whole, [halves[0], whole], PVF)
    with pytest.raises(StoreError, match="check that its folder exists"):
        merge_stores(tmp_path / "no" / "out.sqlite", halves, PVF)
    with pytest.raises(StoreError, match="is a folder"):
        merge_stores(tmp_path, halves, PVF)
    for ending in ("-wal", "-journal"):
        left = tmp_path / f"out.sqlite{ending}"
        left.write_bytes(b"of a store that was removed")
        with pytest.raises(StoreError, match=f"out.sqlite{ending} exists already"):
            merge_stores(out, halves, PVF)
        left.unlink()
    assert not out.exists()


def test_a_store_that_is_written_to_is_waited_for(whole, halves):
    with PvfStore(whole, write=True), pytest.raises(StoreError, match="is in use by process"):
        merge_stores(whole, halves, PVF)


def test_rows_stream(tmp_path, whole):
    """Twenty megabytes of rows in two stores; a tenth of them would be seen."""
    with PvfStore(whole) as store:
        row = next(store.rows())
        spec, description = store.spec, store.baseline
    paths = [tmp_path / "a.sqlite", tmp_path / "b.sqlite"]
    for part, path in enumerate(paths):
        with PvfStore(path, write=True) as store:
            store.bind_campaign(spec, description)
            store.add_rows(
                replace(row, trial=row.trial._replace(k=k), error=f"{k:010000}") for k in range(2000) if k % 3 != part
            )
    tracemalloc.start()
    try:
        merged = merge_stores(tmp_path / "out.sqlite", paths, PVF)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (merged.trials, [p.duplicates for p in merged.merged_inputs]) == (2000, [0, 666])
    assert peak < 2e6


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_shards_are_disjoint_even_and_whole(tmp_path, whole, parts):
    with PvfStore(whole) as store:
        spec, description = store.spec, store.baseline
    everything = list(plan_trials(spec, description, Budget(TRIALS)))
    shards = [list(plan_trials(spec, description, Budget(TRIALS, (i, parts)))) for i in range(1, parts + 1)]
    assert sorted(trial for shard in shards for trial in shard) == sorted(everything)
    for shard in shards:
        sizes = {sum(t.target == name and t.flips == f for t in shard) for name in "02" for f in (1, 4)}
        assert len(sizes) == 1, "a shard is uneven over the strata"


def test_shards_run_apart_join_to_the_whole(tmp_path):
    spec = PvfSpec("live", flips=(1, 4))
    paths = [tmp_path / f"{i}.sqlite" for i in (1, 2)]
    for i, path in enumerate(paths, 1):
        with live_executor(spec, live()) as executor, PvfStore(path, write=True) as store:
            run_campaign(spec, Budget(TRIALS, (i, 2)), executor, store)
            assert len(store.stored_trial_ids()) == TRIALS * 2
    with live_executor(spec, live()) as executor, PvfStore(tmp_path / "whole.sqlite", write=True) as store:
        run_campaign(spec, Budget(TRIALS), executor, store)
    merge_stores(tmp_path / "out.sqlite", paths, PVF)
    assert content(tmp_path / "out.sqlite") == content(tmp_path / "whole.sqlite")


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ((0, 3), "--shard is 0/3; expected I/N"),
        ((4, 3), "--shard is 4/3"),
        ((5, 5), "--shard 5/5 has no trials, because --trials is 4"),
    ],
)  # fmt: skip
def test_shards_that_cannot_be(shard, said):
    with pytest.raises(UsageError, match=said):
        Budget(4, shard)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A campaign run by the command line: whole, and in two shards, one of which was cut short and has trials of the other."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "tiny.py").write_text(TINY)
    ask = ("pvf", "tiny.py:make", "--flips", "1,4", "--quiet")
    for words in (
        ("--trials", 20, "--store", "whole.sqlite"),
        ("--trials", 20, "--shard", "1/2", "--store", "a.sqlite"),
        ("--trials", 20, "--shard", "2/2", "--store", "b.sqlite"),
        ("--trials", 6, "--store", "a.sqlite"),
    ):
        done = in_process(*ask, *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_the_command_line_joins_shards(sharded):
    done = in_process("merge", "a.sqlite", "b.sqlite", "-o", "out.sqlite", cwd=sharded)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "a.sqlite: 78 trials, 78 new, 0 duplicates\n"
        "b.sqlite: 60 trials, 42 new, 18 duplicates\n"
        "out.sqlite: 120 trials\n"
    )
    one, other = (in_process("export", f"{n}.sqlite", "--canonical", cwd=sharded).stdout for n in ("whole", "out"))
    assert one == other
    assert len(one.splitlines()) == 121
    told = json.loads(in_process("report", "out.sqlite", "--json", cwd=sharded).stdout)
    whole = json.loads(in_process("report", "whole.sqlite", "--json", cwd=sharded).stdout)
    assert told["results"] == whole["results"]
    assert told["command"] == whole["command"]
    part = json.loads(in_process("report", "b.sqlite", "--json", cwd=sharded).stdout)
    assert "--trials 20 --shard 2/2" in part["command"]


def test_the_command_line_tells_as_json(sharded):
    done = in_process("merge", "a.sqlite", "b.sqlite", "-o", "j.sqlite", "--json", cwd=sharded)
    told = json.loads(done.stdout)
    assert told["inputs"][1] == {"store": "b.sqlite", "trials": 60, "new": 42, "duplicates": 18}
    assert (told["store"], told["trials"], told["before"]) == ("j.sqlite", 120, 0)


def test_the_command_line_refuses_in_one_line(sharded):
    before = files(sharded)
    for words in (
        ("merge", "a.sqlite", "gone.sqlite", "-o", "n.sqlite"),
        ("merge", "a.sqlite", "tiny.py", "-o", "n.sqlite"),
        ("merge", "a.sqlite", "a.sqlite", "-o", "n.sqlite"),
        ("merge", "-o", "n.sqlite"),
        ("merge", "a.sqlite", "b.sqlite"),
        ("pvf", "tiny.py:make", "--shard", "2"),
        ("pvf", "tiny.py:make", "--shard", "1/2/3"),
    ):
        done = in_process(*words, cwd=sharded)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1, done.stderr
    assert files(sharded) == before


@pytest.mark.parametrize("out", ["new.sqlite", "old.sqlite"])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(sharded, tmp_path, out):
    shutil.copy(sharded / "b.sqlite", tmp_path / "old.sqlite")
    change(tmp_path / "old.sqlite", "DELETE FROM trial WHERE k > 2")
    held, before = content(tmp_path / "old.sqlite"), files(tmp_path)

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    words = ("merge", sharded / "a.sqlite", sharded / "b.sqlite", "-o", out)
    stopped = unsilent_cli(*words, cwd=tmp_path, preexec_fn=small_disk)
    assert stopped.returncode == 2, stopped.stderr
    assert stopped.stderr.count("\n") == 1
    assert f"cannot write {out}" in stopped.stderr
    assert files(tmp_path) == before
    assert content(tmp_path / "old.sqlite") == held
    done = in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / out) == content(sharded / "whole.sqlite")
