"""Replicas in real processes: the same rows whatever the jobs, kills and order; each switch changes bits or does not."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from replicas.subjects import LOOP
from unsilent.basics.errors import StoreError, UnsilentError, UsageError
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.spec import DeferredTrial, WorkerSettings
from unsilent.replicas import Replica, ReplicaSpec, ReplicaStore, Switches, run_replicas
from unsilent.replicas.runner import ReplicaRunner
from unsilent.workloads import load_training
from unsilent.workloads.trainings import Seeds

pytestmark = pytest.mark.slow

ASKED = [Replica(Switches.parse(name), k) for name in ("control", "algo", "within", "isa=default") for k in (0, 1)]


ALGO, WITHIN = Switches.parse("algo"), Switches.parse("within")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("replicas")
    (path / "loop.py").write_text(LOOP)
    return path


@pytest.fixture(scope="module")
def stored(folder):
    """A store with all of `ASKED`, run by one worker after the other."""
    spec = ReplicaSpec(f"{folder}/loop.py:make")
    with ReplicaStore(folder / "one.sqlite", write=True) as store:
        run_replicas(spec, lambda trained: ASKED, store, jobs=1)
    return spec, folder / "one.sqlite"


def content(path):
    """All that is stored of runs but time and worker."""
    with ReplicaStore(path) as store:
        return {row.replica: (row.bitwise_results, row.reproducible_values(), row.weights) for row in store.rows()}


def test_rows_hold_what_the_training_gives(stored):
    spec, path = stored
    workload = load_training(spec.workload)
    state = workload.start(Seeds(**Replica(Switches.parse("algo"), 1).seeds(0)))
    losses = [workload.step(state).loss for _ in range(workload.steps)]
    with ReplicaStore(path) as store:
        row, trained = store.row_with_weights(Replica(ALGO, 1)), store.baseline
    assert row.losses.tolist() == losses
    assert row.hashes.shape == (8,)
    assert row.predictions.tolist() == workload.evaluate(state).predictions.tolist()
    assert list(trained.labels) == workload.evaluate(state).labels.tolist()
    flat = np.concatenate([p.detach().numpy().ravel() for p in state.model.parameters()])
    assert row.weights == flat.tobytes()
    masks = workload.evaluate(state).groups
    assert {name: mask.tolist() for name, mask in trained.group_masks.items()} == {n: list(m) for n, m in masks.items()}


def test_clean_twins_agree_and_switches_change_bits(stored):
    with ReplicaStore(stored[1]) as store:
        finals = {name: [r.final_state_hash for r in store.runs_with_switches(Switches.parse(name), 2)]
                  for name in ("control", "algo", "within", "isa=default")}  # fmt: skip
    assert len(set(finals["control"])) == 1
    assert len(set(finals["isa=default"])) == 1
    assert len({*finals["control"], *finals["algo"], *finals["within"], finals["isa=default"][0]}) == 6


def test_two_jobs_in_another_order_give_the_same_rows(stored, folder):
    spec, path = stored
    with ReplicaStore(folder / "two.sqlite", write=True) as store:
        run_replicas(spec, lambda trained: reversed(ASKED), store, jobs=2)
    assert content(folder / "two.sqlite") == content(path)


def test_a_killed_driver_loses_only_runs_in_flight(stored, folder):
    spec, path = stored
    killed, wanted = folder / "killed.sqlite", [r for r in ASKED if r.switches in (ALGO, WITHIN)]
    code = (
        "from unsilent.replicas import *\n"
        "asked = [Replica(Switches.parse('within'), k) for k in range(2000)]\n"
        f"with ReplicaStore({str(killed)!r}, write=True) as store:\n"
        f"    run_replicas(ReplicaSpec({spec.workload!r}), lambda t: asked, store)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        while _count(killed) < 2:
            assert driver.poll() is None
            time.sleep(0.02)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    before, ran = _count(killed), Observer()
    ran.trial = lambda row: ran.rows.append(str(row.replica))
    ran.rows = []
    assert 2 <= before < 2000
    with ReplicaStore(killed, write=True) as store:
        run_replicas(spec, lambda trained: wanted, store, observer=ran)
    # Two of them were stored before: these were not run again.
    assert set(ran.rows) == {str(r) for r in wanted if r.switches != WITHIN}
    found, whole = content(killed), content(path)
    assert {r: found[r] for r in wanted} == {r: whole[r] for r in wanted}


def _count(path):
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            return db.execute("SELECT count(*) FROM trial").fetchone()[0]
    except sqlite3.Error:
        return 0


def test_another_training_is_another_one(folder):
    spec = ReplicaSpec(f"{folder}/loop.py:make")
    runner = ReplicaRunner(spec)
    training = runner.establish_baseline().campaign
    assert ReplicaRunner(spec).establish_baseline().campaign == training
    assert ReplicaRunner(replace(spec, seed=1)).establish_baseline().campaign != training
    (folder / "edited").mkdir()
    (folder / "edited" / "loop.py").write_text(LOOP + "\n# edited\n")
    edited = replace(spec, workload=f"{folder}/edited/loop.py:make")
    assert ReplicaRunner(edited).establish_baseline().campaign != training
    with pytest.MonkeyPatch.context() as patch:  # what user code reads by itself, and what libraries choose kernels by
        patch.setenv("SUBJECT_SCALE", "2")
        assert ReplicaRunner(spec).establish_baseline().campaign != training
        patch.delenv("SUBJECT_SCALE")
        patch.setenv("MKL_CBWR", "COMPATIBLE")
        assert ReplicaRunner(spec).establish_baseline().campaign != training
    assert ReplicaRunner(replace(spec, steps=3)).run_replica(ASKED[0]).losses.shape == (3,)


def test_settings_are_put_back_and_each_switch_is_applied(folder):
    import torch

    from unsilent.replicas.runner import apply_switches

    def settings():
        return (
            torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark, torch.backends.cudnn.conv.fp32_precision == "tf32",
            torch.backends.cuda.matmul.fp32_precision == "tf32",
        )  # fmt: skip

    before = settings()
    seen = {}
    for name in ("control", "threads=2", "race=2", "onednn", "cudnn-benchmark", "tf32", "nondeterministic"):
        with apply_switches(Switches.parse(name)):
            seen[name] = settings()
        assert settings() == before
    assert seen["control"] == (1, True, True, False, False, False)
    assert seen["threads=2"] == (2, True, True, False, False, False)
    assert seen["race=2"] == (2, True, False, False, False, False)
    assert seen["onednn"] == (1, False, True, False, False, False)
    assert seen["cudnn-benchmark"] == (1, True, True, True, False, False)
    assert seen["tf32"] == (1, True, True, False, True, True)
    assert seen["nondeterministic"] == (1, True, False, False, False, False)


def test_a_worker_that_dies_is_told_with_its_replica(folder):
    spec = ReplicaSpec(f"{folder}/loop.py:make", (("dies", "yes"),))
    with ReplicaStore(folder / "dies.sqlite", write=True) as store:
        with pytest.raises(UnsilentError, match=r"replica control/0 ended its process.*stored results are safe"):
            run_replicas(spec, lambda trained: ASKED, store)
        assert store.baseline.name == "tiny"
    assert not os.path.exists(folder / "dies.sqlite.lock")


def test_a_run_that_hangs_is_ended(folder):
    spec = ReplicaSpec(f"{folder}/loop.py:make", (("dies", "never"),))
    with (
        ReplicaStore(folder / "hangs.sqlite", write=True) as store,
        pytest.raises(UsageError, match=r"replica control/0 did not end before the deadline.*--deadline"),
    ):
        run_replicas(spec, lambda trained: ASKED, store, deadline=8)


def test_threads_of_two_runs_do_not_share_processors(folder):
    """A run of two threads beside another takes a hundred times as long on two processors: they wait busily for each other."""
    wide, narrow = Replica(Switches.parse("threads=2"), 0).trial, Replica(Switches(), 0).trial
    spec = ReplicaSpec(f"{folder}/loop.py:make")
    first, second = ReplicaRunner(spec, worker_settings=WorkerSettings(jobs=2)).run_all([wide, narrow])
    assert first == DeferredTrial(wide, "")
    assert second.trial == narrow
    (row,) = ReplicaRunner(spec, worker_settings=WorkerSettings(jobs=2)).run_all([wide], alone=True)
    assert row.trial == wide
    (row,) = ReplicaRunner(spec).run_all([wide])
    assert row.trial == wide


def test_a_store_of_something_else_is_refused(stored, folder):
    path = stored[1]
    with sqlite3.connect(folder / "other.sqlite") as db:
        db.execute("CREATE TABLE notes (text)")
    with pytest.raises(StoreError, match="database of another program"):
        ReplicaStore(folder / "other.sqlite")
    from unsilent.studies.pvf.kind import PvfStore

    with pytest.raises(
        StoreError, match="holds a campaign of unsilent noise; unsilent pvf can only use stores of its own campaigns"
    ):
        PvfStore(path)


def test_steps_below_one_are_refused(folder):
    with pytest.raises(UsageError, match="at least 1"):
        ReplicaRunner(ReplicaSpec(f"{folder}/loop.py:make", steps=0))
