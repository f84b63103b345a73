"""``unsilent status``: what stores hold, how far they are, and which command goes on."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
from contextlib import closing

import pytest

from cli.test_training import campaign
from conftest import in_process


@pytest.fixture
def folder(made_once, pvf_campaign, tmp_path):
    """Stores of two kinds, one that is damaged, and files that are none."""
    shutil.copy(pvf_campaign / "s.sqlite", tmp_path / "pvf.sqlite")
    training = made_once("training", campaign)
    for name in ("s.sqlite", "floor.sqlite", "faulty_loop.py"):
        shutil.copy(training / name, tmp_path / {"s.sqlite": "training.sqlite"}.get(name, name))
    shutil.copy(pvf_campaign / "tiny.py", tmp_path)
    (tmp_path / "notes.txt").write_text("SQLite format 4")
    return tmp_path


def told(folder, *words):
    done = in_process("status", *words, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def test_a_folder_lists_its_stores(folder):
    code, out, err = told(folder)
    assert (code, err) == (0, "")
    assert [block.split(":")[0] for block in out.split("\n\n")] == ["floor.sqlite", "pvf.sqlite", "training.sqlite"]
    assert "pvf.sqlite: pvf of tiny.py:make\n  240 of 240 trials, complete\n  result: A " in out
    assert "training.sqlite: training of tiny\n  16 of 16 trials, complete\n  result: " in out
    assert "floor.sqlite: noise of tiny" in out


@pytest.mark.slow
def test_the_command_that_is_named_goes_on(folder):
    with closing(sqlite3.connect(folder / "pvf.sqlite")) as db, db:
        db.execute("DELETE FROM trial WHERE k > 10")
    code, out, _ = told(folder, "pvf.sqlite", "--json")
    (found,) = json.loads(out)["stores"]
    assert (code, found["kind"], found["planned"]) == (0, "pvf", 240)
    assert 0 < found["done"] < 240
    done = in_process(*shlex.split(found["command"])[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert told(folder, "pvf.sqlite")[1].splitlines()[1] == "  240 of 240 trials, complete"


def test_what_cannot_be_read_is_said(folder):
    with closing(sqlite3.connect(folder / "training.sqlite")) as db, db:
        db.execute("UPDATE trial SET losses = x'00' WHERE k = 1")
    code, out, err = told(folder, "training.sqlite", "notes.txt", "pvf.sqlite")
    assert (code, err) == (1, "")
    blocks = out.split("\n\n")
    assert "cannot be read" in blocks[0]
    assert "damaged" in blocks[0]
    assert (
        "this is not a store of unsilent pvf, training, noise, checkpoint study, coverage or inference-coverage, or nothing"
        in blocks[1]
    )
    assert "complete" in blocks[2]


def test_mistakes_are_one_line(folder, tmp_path):
    code, out, err = told(folder, "nothing.sqlite")
    assert (code, out) == (2, "")
    assert err == "unsilent: error: there is no store nothing.sqlite; check the name\n"
    (tmp_path / "empty").mkdir()
    assert told(folder, "empty") == (0, "no store in empty\n", "")


@pytest.mark.parametrize(("part", "trials"), [(1, 3), (2, 2)])
def test_a_part_of_a_campaign_is_complete_by_itself(folder, part, trials):
    words = ("--at", "first.weight", "--trials", 5, "--shard", f"{part}/2", "--store", "part.sqlite")
    assert in_process("pvf", "tiny.py:make", *words, cwd=folder).returncode == 0
    out = told(folder, "part.sqlite")[1]
    assert f"\n  {trials} of {trials} trials of part {part}/2, complete\n" in out
    assert "continue with" not in out


def test_events_are_shown_by_other_commands(tmp_path):
    done = in_process("status", "run.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "use unsilent watch run.jsonl, or unsilent report run.jsonl" in done.stderr
