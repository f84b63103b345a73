"""Whether runs end in the same bits as they are, and the command's words, exit codes and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from unsilent.cli.explain_noise import explain_loop
from unsilent.errors import UsageError, UserCodeError
from unsilent.studies.explaining import control
from unsilent.studies.explaining.results import Explained, Finding, Machine, Parting, Place, Read

pytestmark = pytest.mark.slow


def test_a_clean_loop_is_reproducible(loops: str, capsys: pytest.CaptureFixture[str]):
    assert explain_loop(f"{loops}:clean", control=True, runs=2, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "unsilent/noise-control/1"
    assert told["results"]["reproducible"]
    assert told["results"]["switches"] == []
    # Three layers of two parameters; two moments and a step of each of the last.
    assert told["results"]["tensors"] == 4 + 2 + 3 * 2


@pytest.mark.claim
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores to race on")
def test_the_switches_that_make_runs_agree_are_told_and_tried(loops: str, capsys: pytest.CaptureFixture[str]):
    found = control(f"{loops}:torch_and_kernels", runs=2)
    assert not found.agreed
    assert found.switches == ("torch", "kernels")
    assert found.verified
    assert found.explained is not None
    assert [finding.source for finding in found.explained.findings] == ["torch", "kernels"]
    assert capsys.readouterr().out == ""


def test_findings_as_text_plain_text_and_json(
    loops: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert explain_loop(f"{loops}:source_generator", runs=2, as_json=True) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    (finding,) = told["results"]["findings"]
    assert (finding["source"], finding["with_it_pinned"], finding["runs"]) == ("generator", "agree", 2)
    assert finding["parting"]["place"]["function"] == "source_generator"
    assert told["spec"]["loop"] == f"{loops}:source_generator"
    assert said.err.splitlines()[:3] == ["unsilent: run 1", "unsilent: run 2", "unsilent: run 3, pinned: generator"]
    # The others show the same kind of record; a search takes seconds.
    place = Place("loops.py", 7, "train")
    first = Parting(4, 2, "add", "forward", place, None, "", "data", "", "")
    later = Parting(9, 3, "index_put", "backward", place, Place("loops.py", 3, "train"), "index", "kernel", "", "")
    findings = (Finding("clock", first, later, 4, (Read("time.time", place),)), Finding(None, later, later, 2))
    machine = Machine({}, 2, "7")
    explained = Explained("loops.py:train", 2, 9, 1234, 5, findings, machine, 3.0, first, 1, {"numpy": "it raised"})
    monkeypatch.setattr("unsilent.studies.explaining.explain", lambda ref, **asked: explained)
    assert explain_loop("loops.py:train") == 1
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "1,234 operations in 5 steps, 2 threads",
        "1. the clock where step 2, add at loops.py:7 (train)",
        "read time.time at loops.py:7",
        "runs part later: step 3, index_put at loops.py:7 (train), in the backward of index at loops.py:3",
        "2. an unknown source",
        "With 1 thread instead of 2 the bits differ from step 2, add",
        "PYTHONHASHSEED is 7 here",
        "Not possible to pin: numpy's random numbers, unseeded (it raised)",
    ):
        assert part in text
    assert explain_loop("loops.py:train", plain=True) == 1
    table = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert table[0] == ["source", "step", "phase", "operation", "place", "kind", "pinned"]
    assert table[1] == ["clock", "2", "forward", "add", "loops.py:7", "data", "part-later"]
    assert table[2] == ["unknown", "3", "backward", "index_put", "loops.py:3", "kernel", "unknown"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "has no 'absent'"),
        ("needs", "needs argument; expected a function without arguments"),
        ("WORDS", "expected a function without arguments that trains"),
    ],
)
def test_bad_loops_are_refused_in_one_line(loops: str, name: str, message: str):
    with pytest.raises(UsageError, match=message) as refused:
        explain_loop(f"{loops}:{name}")
    assert "\n" not in str(refused.value)


def test_bad_numbers_are_refused_before_anything_runs(loops: str):
    with pytest.raises(UsageError, match="--runs is 1; expected at least 2"):
        explain_loop(f"{loops}:clean", runs=1)
    with pytest.raises(UsageError, match="--steps is 0"):
        explain_loop(f"{loops}:clean", steps=0)
    with pytest.raises(UsageError, match="--deadline is -1 s"):
        explain_loop(f"{loops}:clean", deadline=-1)


def test_a_loop_that_raises_comes_with_its_own_traceback(loops: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(UserCodeError, match="ValueError: not today") as raised:
        explain_loop(f"{loops}:raises")
    assert "in raises" in raised.value.trace
    assert "unsilent/studies" not in raised.value.trace
    said = capfd.readouterr()
    assert said.out == ""
    assert "printed by the loop" in said.err


@pytest.mark.claim
def test_a_loop_that_never_ends_is_ended(loops: str):
    with pytest.raises(UsageError, match="was not over after 8 s; let it make fewer steps"):
        explain_loop(f"{loops}:endless", deadline=8)


def test_a_loop_that_trains_nothing_cannot_be_compared(loops: str):
    with pytest.raises(UsageError, match="nothing to compare; let it return what it trains"):
        explain_loop(f"{loops}:nothing", control=True)


@pytest.mark.parametrize("name", ["nothing", "leaves_at_once"])
def test_a_loop_that_does_nothing_does_not_pass(loops: str, name: str):
    with pytest.raises(UsageError, match="runs no operation of torch that could differ: .*let it train"):
        explain_loop(f"{loops}:{name}", runs=2)


@pytest.mark.claim
def test_a_loop_may_end_with_sys_exit_0(loops: str):
    assert control(f"{loops}:leaves", runs=2).agreed


@pytest.mark.claim
def test_a_hash_seed_of_the_caller_is_kept_and_told(
    loops: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert explain_loop(f"{loops}:source_hash", runs=2) == 0
    assert "PYTHONHASHSEED is 7 here" in capsys.readouterr().out


def test_the_driver_does_not_import_torch():
    code = "import sys, unsilent.studies.explaining, unsilent.cli.explain_noise; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
