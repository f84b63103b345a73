"""Campaigns survive: kill -9, dead and hanging workers, two writers, a full disk. Real processes, real files."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import resource
import select
import signal
import sqlite3
import subprocess
import termios
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from campaigns.forked import forked_workers
from conftest import TINY, command, in_process, unsilent_cli
from unsilent.studies.pvf.kind import PvfStore

pytestmark = pytest.mark.slow

TRIALS = 100
ASK = ("--with", "sleep=0.004", "--trials", TRIALS, "--flips", "1,4", "--quiet")


@pytest.fixture
def forked():
    """Workers that load in milliseconds."""
    with forked_workers():
        yield


def canonical(path: Path | str) -> str:
    done = unsilent_cli("export", path, "--canonical")
    assert done.returncode == 0, done.stderr
    return done.stdout


def codes_of(path: str, outcome: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in in_process("export", path).stdout.splitlines()]
    assert rows
    return [r for r in rows if r[outcome]]


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(p) for p in found.split()]


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Canonical export of an uninterrupted serial run."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.py").write_text(TINY)
    done = unsilent_cli("pvf", "tiny.py:make", *ASK, "--store", "whole.sqlite", cwd=folder)
    assert done.returncode == 0, done.stderr
    return canonical(folder / "whole.sqlite")


@pytest.mark.claim
def test_two_jobs_and_a_raised_budget_give_the_same_store(tiny, whole):
    for trials in (30, TRIALS):
        done = unsilent_cli("pvf", f"{tiny}:make", *ASK, "--trials", trials, "--jobs", 2, "--store", "two.sqlite")
        assert done.returncode == 0, done.stderr
    assert canonical("two.sqlite") == whole
    assert len(whole.splitlines()) == 1 + TRIALS * 3 * 2


def stored(path: str) -> int:
    """Trials in a store that was just killed; the file must be sound."""
    if not Path(path).exists():
        return 0
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'trial'").fetchone()[0]:
            return 0
        return int(db.execute("SELECT count(*) FROM trial").fetchone()[0])


@pytest.mark.parametrize("moments", [4, pytest.param(10, marks=pytest.mark.claim)])
def test_killed_at_random_moments_and_resumed(tiny, whole, moments):
    rng = random.Random(7)
    progress = []
    for number in range(moments):
        process = subprocess.Popen(
            command("pvf", f"{tiny}:make", *ASK, "--store", "killed.sqlite"), start_new_session=True
        )
        before = progress[-1] if progress else 0
        if number % 2:  # any moment, most of them while the workload loads
            time.sleep(rng.uniform(0.2, 4))
        else:  # a moment while trials run
            wait_until(lambda p=process, seen=before: stored("killed.sqlite") > seen or p.poll() is not None)
            time.sleep(rng.uniform(0, 0.6))
        workers = children(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda alive=workers: not any(Path(f"/proc/{w}/exe").exists() for w in alive))
        progress.append(stored("killed.sqlite"))
    assert progress == sorted(progress), "a kill lost stored trials"
    assert any(0 < p < TRIALS * 6 for p in progress), "no kill fell into the trials"
    done = unsilent_cli("pvf", f"{tiny}:make", *ASK, "--store", "killed.sqlite")
    assert done.returncode == 0, done.stderr
    assert canonical("killed.sqlite") == whole


def test_interrupt_leaves_a_store_to_resume(tiny):
    ask = ("pvf", f"{tiny}:make", "--with", "sleep=0.004", "--trials", 200, "--store", "s.sqlite", "--quiet")
    # A test run in the background has interrupts ignored, which children inherit.
    process = subprocess.Popen(
        command(*ask),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until(lambda: stored("s.sqlite") > 0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip().endswith("run the same command again to continue")
    with PvfStore("s.sqlite") as store:
        before = len(store.stored_trial_ids())
    assert 0 < before < 600
    done = unsilent_cli(*ask)
    assert done.returncode == 0
    with PvfStore("s.sqlite") as store:
        assert len(store.stored_trial_ids()) == 600


def test_a_closed_terminal_leaves_a_store_to_resume(tiny, monkeypatch, tmp_path):
    """As when its window is closed: the terminal is gone, the driver gets SIGHUP (the kernel's, and then the shell's)."""
    monkeypatch.setenv("TMPDIR", str(temporary := tmp_path / "temporary"))
    temporary.mkdir()
    before = set(tmp_path.iterdir())
    ask = ("pvf", f"{tiny}:make", "--with", "sleep=0.004", "--trials", 200, "--store", "s.sqlite")
    terminal, theirs = pty.openpty()

    def as_in_a_shell() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the tests themselves may have been started to ignore

    process = subprocess.Popen(
        command(*ask), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=as_in_a_shell
    )
    os.close(theirs)

    def some_are_stored() -> bool:
        while select.select([terminal], [], [], 0)[0]:  # the other end waits where nobody reads
            os.read(terminal, 65536)
        return stored("s.sqlite") > 0

    wait_until(some_are_stored)
    workers = children(process.pid)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 130
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "s.sqlite"}
    assert not any(temporary.iterdir())
    assert 0 < stored("s.sqlite") < 600


def test_a_worker_that_dies_is_that_trials_outcome(tiny, forked):
    done = in_process(
        "pvf",
        f"{tiny}:dies",
        "--trials",
        3,
        "--at",
        "last.*",
        "--per",
        "tensor",
        "--store",
        "s.sqlite",
        "--json",
        workers=True,
    )
    assert done.returncode == 0, done.stderr
    crashed = codes_of("s.sqlite", "crash")
    assert {r["target"] for r in crashed} == {"last.bias"}
    assert len(crashed) == 3
    assert all(r["crash"] == 14 for r in crashed)
    (row,) = [r for r in json.loads(done.stdout)["results"] if r["target"] == "last.bias"]
    assert row["estimate"] == 1
    assert row["due_kinds"]["crash"] == 42


def test_a_worker_killed_from_outside_is_nobodys_outcome(tiny):
    ask = ("pvf", f"{tiny}:make", "--with", "sleep=0.02", "--trials", 60, "--store", "s.sqlite")
    process = subprocess.Popen(command(*ask, "--plain"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: stored("s.sqlite") > 0)
    (worker,) = children(process.pid)
    os.kill(worker, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "died (signal 9)" in said
    assert not codes_of("s.sqlite", "crash")
    with PvfStore("s.sqlite") as store:
        assert len(store.stored_trial_ids()) == 180


def test_a_trial_that_hangs_is_an_outcome(tiny, forked):
    done = in_process(
        "pvf",
        f"{tiny}:hangs",
        "--trials",
        1,
        "--at",
        "last.*",
        "--per",
        "tensor",
        "--deadline",
        1,
        "--store",
        "s.sqlite",
        workers=True,
    )
    assert done.returncode == 0, done.stderr
    assert [r["target"] for r in codes_of("s.sqlite", "hang")] == ["last.bias"]


def test_a_model_that_raises_is_an_outcome_and_the_weights_stay(tiny, forked):
    done = in_process(
        "pvf", f"{tiny}:raises", "--trials", 4, "--at", "last.*", "--per", "tensor", "--store", "s.sqlite", workers=True
    )
    assert done.returncode == 0, done.stderr
    raised = codes_of("s.sqlite", "exception")
    assert [r["target"] for r in raised] == ["last.bias"] * 4
    assert raised[0]["error"] == "ArithmeticError: the model itself raises"


def test_two_processes_on_one_store(tiny):
    ask = ("pvf", f"{tiny}:make", "--with", "sleep=0.005", "--trials", 100, "--store", "s.sqlite", "--quiet")
    first = subprocess.Popen(command(*ask), stdout=subprocess.DEVNULL)
    lock = Path("s.sqlite.lock")
    wait_until(lambda: lock.exists() and lock.read_text() != "")
    second = unsilent_cli(*ask)
    assert second.returncode == 2
    assert second.stderr == (
        f"unsilent: error: store s.sqlite is in use by process {first.pid}; wait for it to end or give another --store\n"
    )
    assert first.wait(timeout=60) == 0
    with PvfStore("s.sqlite") as store:
        assert len(store.stored_trial_ids()) == 300
    assert not Path("s.sqlite.lock").exists()


def test_a_full_disk_is_one_line_and_loses_nothing(tiny):
    ask = ("pvf", f"{tiny}:make", "--trials", 300, "--flips", "8", "--store", "s.sqlite", "--quiet")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    stopped = unsilent_cli(*ask, preexec_fn=small_disk)
    assert stopped.returncode == 2, stopped.stderr
    assert stopped.stderr.count("\n") == 1
    assert "stored results are safe: free space and run the same command again" in stopped.stderr
    with PvfStore("s.sqlite") as store:
        kept = store.stored_trial_ids()
    done = unsilent_cli(*ask)
    assert done.returncode == 0, done.stderr
    with PvfStore("s.sqlite") as store:
        assert kept <= store.stored_trial_ids()
        assert len(store.stored_trial_ids()) == 900


@pytest.mark.claim
def test_a_machine_that_stood_still_is_no_hang(tiny):
    ask = (
        "pvf",
        f"{tiny}:make",
        "--with",
        "sleep=0.02",
        "--trials",
        60,
        "--deadline",
        2,
        "--store",
        "s.sqlite",
        "--quiet",
    )
    process = subprocess.Popen(command(*ask), stdout=subprocess.DEVNULL)
    wait_until(lambda: stored("s.sqlite") > 0)
    everyone = [process.pid, *children(process.pid)]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    assert process.wait(timeout=60) == 0
    assert not codes_of("s.sqlite", "hang")
