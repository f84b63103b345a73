"""Files and processes that mean harm, or are merely damaged: one line, no code run, nothing overwritten."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from conftest import command, in_process, unsilent_cli

pytestmark = pytest.mark.slow
HERE = os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH")]))


def change(path, sql, *values):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql, values)


def described(path, **changes):
    with closing(sqlite3.connect(path)) as db, db:
        value = json.loads(db.execute("SELECT description FROM campaign").fetchone()[0])
        db.execute("UPDATE campaign SET description = ?", (json.dumps({**value, **changes}),))


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: change(p, "UPDATE campaign SET spec = '{'"),
        lambda p: change(p, "UPDATE campaign SET spec = ?", "[" * 100_000),
        lambda p: change(p, "UPDATE campaign SET description = '{}'"),
        lambda p: change(p, "UPDATE campaign SET description = ?", b"\x00\xff"),
        lambda p: described(p, targets=[]),
        lambda p: described(p, samples=[10**12]),
        lambda p: described(p, samples=[-1]),
        lambda p: change(p, "UPDATE trial SET outcome_codes = 5"),
        lambda p: change(p, "UPDATE trial SET outcome_codes = ?", b"not zlib"),
        lambda p: change(p, "UPDATE trial SET outcome_codes = ?", zlib.compress(b"\x00" * 3)),
        lambda p: change(p, "UPDATE trial SET outcome_codes = ?", zlib.compress(b"\xc8" * 14)),
        lambda p: change(p, "UPDATE trial SET outcome_codes = ?", zlib.compress(b"\x00" * 300_000_000)),
        lambda p: change(p, "UPDATE trial SET faults = 'nonsense'"),
        lambda p: change(p, "UPDATE trial SET faults = '[5]'"),
        lambda p: change(p, "UPDATE trial SET faults = replace(faults, 'param:', 'param:no')"),
        lambda p: change(p, "UPDATE trial SET error = ?", b"\xff"),
        lambda p: change(p, "CREATE VIEW other AS SELECT 1"),
        lambda p: change(p, "UPDATE trial SET target = 'evil' WHERE k = 0 AND target = 'first'"),
        lambda p: change(p, "UPDATE trial SET k = -1 WHERE k = 0"),
        lambda p: change(p, 'UPDATE trial SET faults = replace(faults, \'"operands":[\', \'"operands":[],"was":[\')'),
        lambda p: described(p, lookups={"first.weight": [1, 2]}),
    ],
)
def test_a_damaged_or_hostile_store_is_one_line(stored, damage):
    damage(stored)
    done = in_process("report", stored, "-o", "r.html")
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_replay_runs_no_code_that_only_the_store_names(stored):
    Path("evil.py").write_text("open('was-run', 'w').close()\ndef make(): ...\n")
    spec = json.loads(sqlite3.connect(stored).execute("SELECT spec FROM campaign").fetchone()[0])
    change(stored, "UPDATE campaign SET spec = ?", json.dumps({**spec, "workload": "evil.py:make"}))
    done = in_process("replay", stored, "first/x1/0")
    assert done.returncode == 2
    assert not Path("was-run").exists()


@pytest.mark.parametrize("trial", ["first/x1/99999999999999999999", "first/x²/1", "first/x1/-1"])
def test_odd_trial_names(stored, trial):
    done = in_process("replay", stored, trial)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_the_report_never_overwrites_the_store_or_a_strangers_file(stored, tiny):
    before = stored.read_bytes()
    assert in_process("report", stored, "-o", stored).returncode == 2
    assert stored.read_bytes() == before
    done = in_process("pvf", f"{tiny}:make", "--trials", 2, "--quiet", "--store", "out.html")
    assert done.returncode == 0
    assert Path("out.html").read_bytes()[:6] == b"SQLite"
    Path("s.html").write_text("my own notes")
    done = in_process("report", stored)
    assert done.returncode == 2
    assert Path("s.html").read_text() == "my own notes"


def test_the_lock_follows_no_link(stored, tiny):
    Path("victim.txt").write_text("precious")
    Path("t.sqlite.lock").symlink_to("victim.txt")
    done = in_process("pvf", f"{tiny}:make", "--trials", 2, "--quiet", "--store", "t.sqlite")
    assert done.returncode == 2
    assert Path("victim.txt").read_text() == "precious"
    Path("u.sqlite.lock").write_text("somebody's data")
    done = in_process("pvf", f"{tiny}:make", "--trials", 2, "--quiet", "--store", "u.sqlite")
    assert done.returncode == 2
    assert Path("u.sqlite.lock").read_text() == "somebody's data"


def test_reading_writes_nothing_beside_the_store(stored):
    before = {p.name for p in Path().iterdir()}
    assert in_process("export", stored, "--canonical").returncode == 0
    assert {p.name for p in Path().iterdir()} == before


FORKS = """
import os, time, tiny, unsilent

def dies_with_a_child():
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return os._exit(7)

def fork_in_trial():
    def run(model, batch):
        if tiny.corrupted(model):
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            os._exit(7)
        return model(batch)
    return unsilent.Workload(tiny.Tiny().eval(), tiny.batches(), run=run)

def holds_the_lock():
    import re
    def run(model, batch):
        if tiny.corrupted(model):
            re.match(r"(a+)+$", "a" * 40 + "b")
        return model(batch)
    return unsilent.Workload(tiny.Tiny().eval(), tiny.batches(), run=run)

W = unsilent.Workload(tiny.Tiny().eval(), tiny.batches())
if "UNGUARDED" in os.environ:
    unsilent.pvf("forks.py:W", trials=2)
"""


@pytest.fixture
def forks(tiny):
    Path("forks.py").write_text(FORKS)
    return "forks.py"


def test_a_worker_that_leaves_children_behind_is_seen_to_die(forks):
    start = time.monotonic()
    done = unsilent_cli("pvf", f"{forks}:dies_with_a_child", "--quiet", env={**os.environ, "PYTHONPATH": HERE})
    assert done.returncode == 2
    assert "exit code 7" in done.stderr
    done = unsilent_cli(
        "pvf", f"{forks}:fork_in_trial", "--quiet", "--trials", 1, "--at", "last.bias", "--store", "f.sqlite",
        env={**os.environ, "PYTHONPATH": HERE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"crash": 14' in in_process("export", "f.sqlite").stdout
    assert time.monotonic() - start < 500, "waited for the children"


def test_a_killed_driver_takes_a_worker_that_holds_the_interpreter_with_it(forks):
    process = subprocess.Popen(
        command("pvf", f"{forks}:holds_the_lock", "--quiet", "--trials", 1, "--at", "last.bias", "--deadline", 100),
        env={**os.environ, "PYTHONPATH": HERE},
    )
    workers: list[str] = []
    end = time.monotonic() + 30
    while not workers and time.monotonic() < end:
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        time.sleep(0.1)
    time.sleep(6)
    process.kill()
    process.wait()
    time.sleep(1)
    assert workers
    assert not any(Path(f"/proc/{w}/exe").exists() for w in workers)


def test_a_script_that_starts_itself_in_its_workers_is_told(forks):
    done = subprocess.run(
        [*command()[:1], forks], capture_output=True, text=True, timeout=60, env={**os.environ, "UNGUARDED": "1"}
    )
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr
