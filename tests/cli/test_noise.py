"""``unsilent noise`` as a user meets it: table, JSON, page, and errors in one line."""

from __future__ import annotations

import json

import pytest

from conftest import in_process
from replicas.subjects import LOOP


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with a loop, and what one command said of it."""
    folder = tmp_path_factory.mktemp("noise")
    (folder / "loop.py").write_text(LOOP)
    words = ("--replicas", 3, "--variants", "control,algo+impl", "--switch", "tf32", "--store", "s.sqlite", "--quiet")
    return folder, words, in_process("noise", "loop.py:make", *words, "--plain", cwd=folder)


def test_plain_table_and_page(ran):
    folder, _, done = ran
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#") and line]
    assert lines[0] == ["variant", "measure", "of", "estimate", "low", "high", "n"]
    assert {len(line) for line in lines} == {7}
    assert ["CONTROL", "churn", "all", "0"] in [line[:4] for line in lines]
    assert "# tf32 was not run: tf32 needs a CUDA device" in done.stdout
    assert "# switch within: yes: changes the bits" in done.stdout
    page = (folder / "s.html").read_text()
    for part in (
        "figure-accuracy",
        "figure-loss",
        "figure-churn",
        "figure-parting",
        "figure-groups",
        "ALGO+IMPL",
        "Holm",
    ):
        assert part in page
    assert "http" not in page.split("<body")[1].split("<script")[0]


def test_json_and_table_from_the_store(ran):
    folder, words, plain = ran
    done = in_process("noise", "loop.py:make", *words, "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert found["schema"] == "unsilent/noise/1"
    assert {"command", "spec", "seed", "seconds", "cpu_seconds", "store", "versions", "results"} <= found.keys()
    for row in found["results"]:
        assert {"estimate", "low", "high", "confidence", "n", "unit"} <= row.keys()
    churn = {row["variant"]: row["estimate"] for row in found["results"] if row["measure"] == "churn"}
    assert churn["CONTROL"] == 0
    assert churn["ALGO+IMPL"] > 0
    assert f"{churn['ALGO+IMPL']:.6g}" in plain.stdout
    assert [e["changes"] for e in found["switches"] if e["switch"] == "tf32"] == [None]
    assert [v["distinct"] for v in found["variants"]] == [1, 3]
    table = in_process("noise", "loop.py:make", *words, cwd=folder).stdout
    for word in ("CONTROL", "ALGO+IMPL", "different final states", "parts at step", "not here", "never"):
        assert word in table


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loop.py:make", "--replicas", 2], "at least 3 are needed"),
        (["loop.py:make", "--level", "0.01"], "--replicas 99"),
        (["loop.py:make", "--variants", "contol"], "did you mean 'control'"),
        (["loop.py:make", "--switch", "treads=2"], "did you mean 'threads'"),
        (["loop.py:make", "--steps", 0], "from 1 on"),
        (["loop.py:make", "--runs", 3], "--explain and --control"),
        (["loop.py:make", "--explain", "loop.py:make"], "give one thing to look at"),
        (["--explain", "loop.py:make", "--replicas", 4], "leave out --replicas"),
        ([], "no training was named"),
        (["loop.py:make", "--with", "steps"], "expected key=value"),
        (["loop.py:make", "--html", "nowhere/x.html"], "no such folder"),
    ],
)
def test_bad_input_is_one_line(ran, words, said):
    done = in_process("noise", *words, "--quiet", cwd=ran[0])
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_workload_that_is_no_training_leaves_nothing_behind(ran):
    done = in_process("noise", "digits-cnn", "--quiet", "--store", "none.sqlite", cwd=ran[0])
    assert done.returncode == 2
    assert "expected one that trains" in done.stderr
    assert not (ran[0] / "none.sqlite").exists()
