"""Where nothing can be written: a full disk, a folder that is none, names that no file can have. One line each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from conftest import TINY, command, few, in_process

LONG = "a" * 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("unwritable")
    (found / "tiny.py").write_text(TINY)
    words = ("tiny.py:make", "--at", "last.bias", "--trials", 2, "--store", "s.sqlite", "--quiet")
    assert in_process("pvf", *words, cwd=found).returncode == 0
    (found / "file").write_text("a file")
    return found


@pytest.mark.parametrize(
    "words",
    [
        *(("export", "s.sqlite", "-o", f"file/a.{ending}") for ending in ("csv", "json", "jsonl", "parquet")),
        ("export", "s.sqlite", "-o", f"{LONG}.csv"),
        ("merge", "s.sqlite", "-o", "file/a.sqlite"),
        ("merge", "s.sqlite", "-o", f"{LONG}.sqlite"),
        ("report", "s.sqlite", "-o", f"{LONG}.html"),
        ("report", "s.sqlite", "--card", "-o", f"{LONG}.json"),
        *((verb, f"{LONG}.sqlite") for verb in ("report", "export", "status")),
        ("replay", f"{LONG}.sqlite", "last/x1/0"),
        ("pvf", "tiny.py:make", "--store", f"{LONG}.sqlite"),
        ("pvf", "tiny.py:make", "--store", f"{LONG}.sqlite", "--dry-run"),
        ("noise", "tiny.py:make", "--store", f"{LONG}.sqlite"),
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG"),
)
def test_one_line(folder, words):
    before = sorted(folder.iterdir())
    done = in_process(*words, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("unsilent: error: ")
    assert sorted(folder.iterdir()) == before


def test_an_export_may_have_a_long_name(folder):
    name = f"{'b' * 250}.csv"
    assert in_process("export", "s.sqlite", "-o", name, cwd=folder).returncode == 0
    (folder / name).unlink()


def test_stores_of_workloads_with_long_names_have_a_name(folder):
    done = in_process("pvf", f"{'c' * 250}.py:make", cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot read" in done.stderr


PRINTING = [("export", "s.sqlite"), ("report", "s.sqlite", "--json"), ("status", "s.sqlite"), ("--help",)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", few(PRINTING, PRINTING[0], PRINTING[-1]))
def test_a_full_disk_behind_stdout(folder, words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(*words), stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "unsilent: error: cannot write what was printed: No space left on device; free space, or write elsewhere\n"
    )


def test_no_stdout_at_all(folder):
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command("export", "s.sqlite")],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_report_of_a_store_on_a_read_only_medium(folder, monkeypatch):
    (folder / "s.html").unlink()
    monkeypatch.setattr("os.access", lambda path, mode, **_: mode != os.W_OK)
    done = in_process("report", "s.sqlite", "--json", cwd=folder)
    assert done.returncode == 0
    assert json.loads(done.stdout)["report"] is None
    assert done.stderr == "unsilent: the report page was not written, as . cannot be written; name a file with -o\n"
    assert not (folder / "s.html").exists()
    assert in_process("report", "s.sqlite", "-o", "other.html", cwd=folder).returncode == 0
