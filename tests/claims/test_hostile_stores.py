"""Stores that somebody damaged on purpose, hundreds of them: every verb ends in one line, in ten seconds, in a gigabyte.

``pytest tests/claims/test_hostile_stores.py -s --override-ini addopts=--import-mode=importlib`` prints the figures.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import time
import zlib
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import hostile_stores
import hostile_verbs as verbs
from conftest import command
from unsilent.studies.pvf.kind import PvfStore

EACH = {"pvf": 110, "rounds": 44, "training": 110, "replicas": 110}
"""Damaged stores of each kind; ``rounds``: of unsilent pvf, planned in rounds."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Kind -> store, a trial of it, and how replicas were asked."""
    found = {}
    for kind in EACH:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "replicas":
            path, asked = verbs.make_replicas(folder)
            found[kind] = path, "within/x/0", asked
        elif kind == "training":
            found[kind] = verbs.make_training(folder), "random/x/0", None
        else:
            more = ("--ci", "30%") if kind == "rounds" else ()
            found[kind] = verbs.make_pvf(folder, *more), "first/x1/0", None
    return found


@pytest.mark.parametrize("kind", EACH)
def test_every_verb_on_damaged_stores(sound, kind, monkeypatch, capsys):
    path, trial, asked = sound[kind]
    monkeypatch.chdir(path.parent)
    plain, watch = kind.replace("rounds", "pvf"), verbs.Watch()
    verbs.attack(watch, "sound", verbs.copy(path, path.parent / "sound"), plain, path, trial, 0, asked)
    assert watch.codes[0] >= (2 if kind != "replicas" else 1), "what is sound is read"
    before, broken = watch.codes.get(2, 0), []
    damaged = hostile_stores.mutants(path, path.parent, f"{kind} 1", EACH[kind], verbs.repair)
    for turn, (told, mutant) in enumerate(damaged):
        try:
            verbs.attack(watch, told, mutant, plain, path, trial, turn, asked)
        except verbs.Broken as error:
            broken.append(str(error))
        shutil.rmtree(mutant.parent)
    with capsys.disabled():
        print(
            f"\n{kind}: {EACH[kind]} stores, {sum(watch.count.values())} commands {watch.count}, exit codes {watch.codes}, "
            f"longest {watch.longest:.1f} s of CPU, {watch.memory >> 20} MiB more memory"
        )
    assert not broken, "\n".join(broken)
    assert watch.codes.get(2, 0) - before > EACH[kind], "most are refused"


def limited(*words, seconds, stop=None):
    """Exit code, text on stderr, CPU seconds and largest memory of a command in a process of its own."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))  # noqa: E731
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=limit)
    begun = time.monotonic()
    if stop is not None:
        time.sleep(stop)
        os.kill(process.pid, signal.SIGTERM)  # send_signal() would wait for one that has ended
    err = process.stderr.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    assert time.monotonic() - begun < 6 * seconds
    assert used.ru_utime + used.ru_stime < seconds
    assert "Traceback" not in err, err
    return process.returncode, err, used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss


def bombs(path):
    """Twenty megabytes that unpack to twenty gigabytes, no two alike."""
    with PvfStore(path) as store:
        found = replace(store.baseline, samples=(10**7,))
    codes = bytearray(10**7)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE campaign SET description = ?", (json.dumps(found.to_json()),))
        row = list(db.execute("SELECT * FROM trial WHERE target = 'first'").fetchone())
        blobs = []
        for k in range(20):
            codes[k] = 1
            blobs.append(zlib.compress(bytes(codes), 9))
        db.execute("DELETE FROM trial")
        for k in range(2000):
            db.execute(
                f"INSERT INTO trial VALUES ({','.join('?' * len(row))})", (*row[:2], k, row[3], blobs[k % 20], *row[5:])
            )


def evaluated(path):
    """A column that takes 400 MB and a second for each row that anything reads, a check of the file included."""
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"ALTER TABLE trial ADD COLUMN heavy INTEGER NOT NULL AS ({hostile_stores.HEAVY}) VIRTUAL")


def endless(path):
    """A file with so many rows that reading them takes longer than anybody waits."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 4000000) "
            "INSERT INTO usage SELECT 1, 1 FROM n"
        )


@pytest.mark.parametrize("harm", [bombs, evaluated])
@pytest.mark.parametrize("verb", ["report", "export", "merge"])
def test_stores_that_would_fill_the_machine(sound, tmp_path, harm, verb, capsys):
    path = verbs.copy(sound["pvf"][0], tmp_path)
    harm(path)
    words = {"report": (path,), "export": (path, "--canonical"), "merge": (path, "-o", tmp_path / "out.sqlite")}[verb]
    code, err, seconds, memory = limited(verb, *words, seconds=10)
    with capsys.disabled():
        print(f"\n{verb} of {harm.__name__}: {seconds:.1f} s of CPU, {memory >> 20} MiB")
    assert (code, err.count("\n")) == ((0, 0) if harm is bombs else (2, 1)) or code == 2, err
    assert memory < 1.3 * 2**30


@pytest.mark.parametrize("harm", [bombs, endless])
def test_sigterm_ends_a_verb(sound, tmp_path, harm):
    path = verbs.copy(sound["pvf"][0], tmp_path)
    harm(path)
    code, err, *_ = limited("report", path, seconds=30, stop=1)
    # Interrupted while a dataclass is made, Python ends itself by SIGINT, which a shell tells as 130 too.
    assert code in (130, 2, -signal.SIGTERM, -signal.SIGINT), (code, err)
    assert err.count("\n") <= 1


def test_a_large_honest_store_is_read(sound, tmp_path, capsys):
    """200,000 trials of 1,000 samples, half of them with outcomes that no other trial has."""
    path = verbs.copy(sound["pvf"][0], tmp_path)
    with PvfStore(path) as store:
        spec, found = store.spec, replace(store.baseline, samples=(500, 500))
        old = next(row for row in store.rows() if row.trial.target == "first")
    path.unlink()
    rng = np.random.default_rng(0)

    def rows(count):
        for k in range(count):
            codes = np.zeros(1000, np.uint8)
            if k % 2:
                codes[rng.integers(0, 1000, 30)] = 1
            yield replace(old, trial=old.trial._replace(k=k), outcome_codes=codes.tobytes(), incorrect_batches=0)

    with PvfStore(path, write=True) as store:
        store.bind_campaign(spec, found)
        store.add_rows(rows(200_000))
    begun = time.process_time()
    with PvfStore(path) as store:
        assert sum(1 for _ in store.rows()) == 200_000
        assert len(store.stored_trial_ids()) == 200_000
    with capsys.disabled():
        print(f"\n200,000 trials read twice in {time.process_time() - begun:.1f} s of CPU")
    assert limited("report", path, "--plain", seconds=200)[0] == 0
