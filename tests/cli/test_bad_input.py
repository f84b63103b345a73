"""Bad input: one clear line on stderr, exit code 2, nothing on stdout, no traceback, no file left behind."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from conftest import in_process, unsilent_cli
from unsilent.cli.main import run

pytestmark = pytest.mark.slow

USER_FILE = """
import unsilent, torch
from torch import nn

def raises():
    return helper()

def helper():
    raise KeyError("my own mistake")

def not_a_workload():
    return 42

def nan():
    return unsilent.Workload(nn.Linear(2, 2), [torch.ones(1, 2), torch.full((1, 2), float("nan"))])

def noisy():
    import itertools
    count = itertools.count()
    return unsilent.Workload(nn.Linear(2, 2), [torch.ones(1, 2)], run=lambda m, b: m(b) + next(count))

def flat():
    return unsilent.Workload(nn.Linear(2, 2), [torch.ones(1, 2)], judge="threshold")

def ends():
    import os
    return os._exit(3)
"""


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line the command line says; nothing else may happen."""
    code = run([str(w) for w in words])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("unsilent: error: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


PVF = ("pvf", "--quiet", "digits-cnn")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pvf", "digits-cn"), "did you mean 'digits-cnn'? Known: "),
        (("pvf", "nowhere.py:make"), "nowhere.py"),
        (("pvf", "no.such.module:make"), "no module named"),
        ((*PVF, "--fault", "bitfip"), "did you mean 'bitflip'?"),
        ((*PVF, "--fault", "bitflip:bit=3"), "unknown parameter of fault model 'bitflip': 'bit'; did you mean 'bits'?"),
        ((*PVF, "--fault", "bitflip:bits=99"), "99"),
        ((*PVF, "--fault", "bitflip:rate=2"), "rate=2"),
        ((*PVF, "--fault", "bitflip:count=-1"), "expected 1 or more"),
        ((*PVF, "--fault", "bitflip:count=3", "--flips", "1"), "give only one"),
        ((*PVF, "--flips", "0"), "expected 1 or more"),
        ((*PVF, "--flips", "-4"), "expected 1 or more"),
        ((*PVF, "--flips", "1,1"), "expected each number once"),
        ((*PVF, "--flips", "one"), "expected whole numbers"),
        ((*PVF, "--trials", "0"), "expected 1 or more"),
        ((*PVF, "--trials", "-5"), "expected a number of trials of 1 or more, or all"),
        ((*PVF, "--trials", "many"), "--trials"),
        ((*PVF, "--jobs", "0"), "expected 1 or more"),
        ((*PVF, "--jobs", "2", "--executor", "serial"), "use --executor processes"),
        ((*PVF, "--executor", "spark"), "unknown executor 'spark'"),
        ((*PVF, "--deadline", "0"), "expected a number of seconds above 0"),
        ((*PVF, "--threads", "0"), "expected 1 or more"),
        ((*PVF, "--unit", "epoch"), "unknown --unit 'epoch'"),
        ((*PVF, "--interval", "wilson"), "No such option: --interval"),
        ((*PVF, "--strata", "risk"), "unknown --strata 'risk'"),
        ((*PVF, "--confidence", "95"), "like 0.95"),
        ((*PVF, "--fit-per-bit", "-1"), "0 or more"),
        (
            (*PVF, "--fit-per-bit", "1e-4", "--at", "op:*"),
            "a fault rate of parameters in memory, but the targets are values of a run",
        ),
        ((*PVF, "--assert", "stem<0.1"), "cannot read --assert"),
        ((*PVF, "--assert", "stem<=7"), "from 0 to 1"),
        ((*PVF, "--device", "tpu"), "unknown device 'tpu'"),
        ((*PVF, "--with", "eval"), "expected key=value"),
        ((*PVF, "--nonsense"), "--nonsense"),
        ((*PVF, "--memory", "lots"), "cannot read 'lots' as a number of bytes"),
        (("prove", "digits-cnn"), "prove"),
        (("report", "missing.sqlite"), "there is no store missing.sqlite"),
        (("export", "missing.sqlite"), "there is no store missing.sqlite"),
        (("replay", "missing.sqlite", "a/x1/1"), "there is no store missing.sqlite"),
    ],
)
def test_refused_before_anything_is_loaded(capsys, words, said):
    assert said in refused(capsys, *words)
    assert not list(Path().iterdir()), "a file was left behind"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--at", "stem.9*"), "matches nothing"),
        (("--at", "head.weigth"), "did you mean"),
        (("--per", "neuron"), "unknown --per 'neuron'"),
        (("--law", "uniform"), "unknown --law 'uniform'"),
        (("--judge", "topk:k=10"), "k is 10, but the output has 10 classes"),
        (("--judge", "next-token"), "does not fit an output of shape"),
        (("--dtype", "float99"), "unknown dtype 'float99'"),
        (("--with", "evil=3"), "unknown option of workload 'digits-cnn' 'evil'"),
        (("--with", "eval=no"), "expected a value of type int"),
        (("--data", "x.csv"), "brings its own data"),
        (("--per", "tensor", "--flips", "100000"), "too small"),
        (("--law", "per-tensor", "--fault", "bitflip:rate=1e-6"), "rate"),
        (("--per", "bit", "--fault", "bitflip:bits=3"), "leave bits= out"),
        (("--per", "bit", "--fault", "zero"), "bits"),
        (("--assert", "stemm<=0.5", "--trials", "1"), "did you mean 'stem'"),
    ],
)
def test_refused_once_the_workload_is_known(words, said):
    done = in_process(*PVF, *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.startswith("unsilent: error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    if "--trials" not in words:
        assert not list(Path().iterdir()), "a file was left behind"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "not_a_workload"),
        ("not_a_workload", "expected a workload"),
        ("nan", "golden run, batch 1: the output holds NaN"),
        ("noisy", "golden run, batch 0: two fault-free runs differ"),
        ("flat", "one score per sample"),
        ("ends", "the worker process died while loading 'mine.py:ends' (exit code 3)"),
    ],
)
def test_a_users_file_that_does_not_fit(name, said):
    Path("mine.py").write_text(USER_FILE)
    ask = unsilent_cli if name == "ends" else in_process  # that ends the process it is in
    done = ask("pvf", f"mine.py:{name}", "--quiet")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert {p.name for p in Path().iterdir()} == {"mine.py"}


def test_a_users_file_that_raises_shows_its_own_traceback_in_a_frame():
    Path("mine.py").write_text(USER_FILE)
    done = in_process("pvf", "mine.py:raises", "--quiet")
    assert done.returncode == 2
    assert "your code raised" in done.stderr
    assert "in helper" in done.stderr
    assert "site-packages" not in done.stderr
    assert "src/unsilent" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("unsilent: error: ")


def text_file(path):
    path.write_text("this is not a database, it is a text that is long enough")


def foreign_database(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE trial (a)")
    db.close()


def empty_file(path):
    path.touch()


def newer_store(path):
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA application_id = {0x556E7369}")
        db.execute("PRAGMA user_version = 99")
        db.execute("CREATE TABLE trial (a)")
    db.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (text_file, "is not an Unsilent store"),
        (foreign_database, "is an SQLite database of another program"),
        (newer_store, "has store version 99"),
        (empty_file, "is empty; run a campaign first"),
        (Path.mkdir, "is a folder"),
    ],
)
@pytest.mark.parametrize("verb", ["report", "export", "pvf"])
def test_files_that_are_not_stores(capsys, folder, make, said, verb):
    path = folder / "some.sqlite"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    if verb == "pvf" and make is empty_file:
        return  # an empty file is a fine place for a new store
    words = ("pvf", "digits-cnn", "--quiet", "--store", path) if verb == "pvf" else (verb, path)
    assert said in refused(capsys, *words)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_store_in_a_folder_that_does_not_exist(capsys):
    assert "check that its folder exists" in refused(capsys, *PVF, "--store", "no/such/folder/s.sqlite")


def test_a_damaged_store_is_named_and_left_alone(capsys, stored):
    raw = bytearray(stored.read_bytes())
    raw[4096 * 3 : 4096 * 6] = b"\xff" * 4096 * 3
    stored.write_bytes(raw)
    assert "s.sqlite" in refused(capsys, "report", stored)
    assert stored.read_bytes() == raw


def test_another_question_under_the_same_name(stored, tiny):
    done = in_process("pvf", f"{tiny}:make", "--trials", 5, "--flips", "1,8", "--quiet", "--store", stored, "--seed", 9)
    assert done.returncode == 2
    assert "holds another campaign (seed: 0 in the store, 9 now)" in done.stderr


def test_an_edited_file_is_another_campaign(stored, tiny):
    Path(tiny).write_text(Path(tiny).read_text() + "\n# edited\n")
    done = in_process("pvf", f"{tiny}:make", "--trials", 5, "--flips", "1,8", "--quiet", "--store", stored)
    assert done.returncode == 2
    assert "holds another campaign (code changed)" in done.stderr
    unasked = in_process("replay", stored, "first/x1/0")
    assert unasked.returncode == 2
    assert "used only if the command names them too; add --workload tiny.py:make" in unasked.stderr
    again = in_process("replay", stored, "first/x1/0", "--workload", f"{tiny}:make")
    assert again.returncode == 2
    assert "differs from this replay in code" in again.stderr


def test_trials_that_are_not_there(capsys, stored):
    assert "has no trial first/x1/77" in refused(capsys, "replay", stored, "first/x1/77")
    assert "cannot read trial 'first'" in refused(capsys, "replay", stored, "first")


def test_exports_that_cannot_be(capsys, stored):
    assert "expected a name that ends in .csv" in refused(capsys, "export", stored, "-o", "s.xls")
    assert "--canonical writes JSON lines" in refused(capsys, "export", stored, "--canonical", "-o", "s.csv")
    assert "choose another path" in refused(capsys, "export", stored, "-o", "no/such/s.csv")


def test_a_report_that_cannot_be_written(capsys, stored):
    assert "no/such" in refused(capsys, "report", stored, "-o", "no/such/r.html")
