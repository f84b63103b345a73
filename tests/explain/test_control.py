"""Whether runs end in the same bits as they are, and the command's words, exit codes and errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from unsilent.basics.errors import UsageError, UserCodeError
from unsilent.cli.explain import COMMAND
from unsilent.cli.main import run
from unsilent.explain import check_reproducibility
from unsilent.explain.results import (
    FoundSource,
    Machine,
    NondeterminismResult,
    RunDivergence,
    SourceRead,
    UserCodeLine,
)
from unsilent.explain.running import Launcher
from unsilent.explain.sources import SOURCES

pytestmark = pytest.mark.slow


def explain_loop(ref: str, *, control: bool = False, as_json: bool = False, **more: object) -> int:
    """What the command does, by arguments."""
    code: int = COMMAND.call(loop=ref, check_only=control, json=as_json, **more)
    return code


def test_a_clean_loop_is_reproducible(loops: str, capsys: pytest.CaptureFixture[str]):
    assert explain_loop(f"{loops}:clean", control=True, runs=2, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "unsilent/noise-control/2"
    assert told["results"]["has_no_difference"]
    assert told["results"]["sources_to_pin"] == []
    # Three layers of two parameters; two moments and a step of each of the last.
    assert told["results"]["tensors"] == 4 + 2 + 3 * 2


@pytest.mark.claim
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores to race on")
def test_the_switches_that_make_runs_agree_are_told_and_tried(loops: str, capsys: pytest.CaptureFixture[str]):
    found = check_reproducibility(f"{loops}:torch_and_kernels", runs=2)
    assert not found.has_no_difference
    assert found.sources_to_pin == ("torch", "kernels")
    assert found.pins_verified
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
    assert (finding["source"], finding["divergence_when_pinned"], finding["runs"]) == ("generator", None, 2)
    assert "torch.Generator" in told["results"]["sources"]["generator"]["title"]
    assert finding["parting"]["place"]["function"] == "source_generator"
    assert told["spec"]["loop"] == f"{loops}:source_generator"
    lines = [re.sub(r" \(\d+ s so far\)$", "", line) for line in said.err.splitlines()]
    lines = [line for line in lines if "still running" not in line]
    assert lines[:3] == ["unsilent: run 1", "unsilent: run 2", "unsilent: run 3, pinned: generator"]
    (shown,) = [line for line in lines if line.startswith("unsilent: found: ")]
    assert "torch.Generator" in shown
    assert "step 0" in shown
    # The others show the same kind of record; a search takes seconds.
    place = UserCodeLine("loops.py", 7, "train")
    first = RunDivergence(4, 2, "add", "forward", place, None, "", "data", "", "")
    later = RunDivergence(
        9, 3, "index_put", "backward", place, UserCodeLine("loops.py", 3, "train"), "index", "kernel", "", ""
    )
    findings = (
        FoundSource("clock", first, later, 4, (SourceRead("time.time", place),)),
        FoundSource(None, later, later, 2),
    )
    machine = Machine({}, 2, "7")
    explained = NondeterminismResult(
        "loops.py:train", 2, 9, 1234, 5, findings, machine, 3.0, first, 1, {"numpy": "it raised"}
    )
    monkeypatch.setattr("unsilent.explain.explain_run_differences", lambda ref, **asked: explained)
    assert explain_loop("loops.py:train") == 1
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "1,234 operations in 5 steps, 2 threads",
        "1. the clock where step 2, add at loops.py:7 (train)",
        "read time.time at loops.py:7",
        "runs diverge later: step 3, index_put at loops.py:7 (train), in the backward of index at loops.py:3",
        "2. an unknown source",
        "With 1 thread instead of 2 the values differ, first at step 2, add",
        "PYTHONHASHSEED is set to 7",
        "Could not be pinned: numpy's random numbers, unseeded (it raised)",
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
        ("needs", "has required arguments .argument.; expected a function without arguments"),
        ("WORDS", "expected a function without arguments that trains"),
    ],
)
def test_bad_loops_are_refused_in_one_line(loops: str, name: str, message: str):
    with pytest.raises(UsageError, match=message) as refused:
        explain_loop(f"{loops}:{name}")
    assert "\n" not in str(refused.value)


def test_bad_numbers_are_refused_before_anything_runs(loops: str):
    with pytest.raises(UsageError, match="runs= is 1; expected at least 2"):
        explain_loop(f"{loops}:clean", runs=1)
    with pytest.raises(UsageError, match="steps= is 0"):
        explain_loop(f"{loops}:clean", steps=0)
    with pytest.raises(UsageError, match="deadline= is -1 s"):
        explain_loop(f"{loops}:clean", deadline=-1)


def test_a_loop_that_raises_comes_with_its_own_traceback(loops: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(UserCodeError, match="ValueError: not today") as raised:
        explain_loop(f"{loops}:raises")
    assert "in raises" in raised.value.traceback_text
    assert "unsilent/studies" not in raised.value.traceback_text
    said = capfd.readouterr()
    assert said.out == ""
    assert "printed by the loop" in said.err


@pytest.mark.claim
def test_a_loop_that_never_ends_is_ended(loops: str):
    with pytest.raises(UsageError, match="did not finish within 8 s; run fewer steps"):
        explain_loop(f"{loops}:endless", deadline=8)


def test_a_loop_that_trains_nothing_cannot_be_compared(loops: str):
    with pytest.raises(UsageError, match="nothing to compare; return the trained model or its tensors"):
        explain_loop(f"{loops}:nothing", control=True)


@pytest.mark.parametrize("name", ["nothing", "leaves_at_once"])
def test_a_loop_that_does_nothing_does_not_pass(loops: str, name: str):
    with pytest.raises(UsageError, match="runs no torch operation that could differ: .*give a loop that trains"):
        explain_loop(f"{loops}:{name}", runs=2)


@pytest.mark.claim
def test_a_loop_may_end_with_sys_exit_0(loops: str):
    assert check_reproducibility(f"{loops}:leaves", runs=2).has_no_difference


@pytest.mark.claim
def test_a_hash_seed_of_the_caller_is_kept_and_told(
    loops: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert explain_loop(f"{loops}:source_hash", runs=2) == 0
    assert "PYTHONHASHSEED is set to 7" in capsys.readouterr().out


def test_the_driver_does_not_import_torch():
    code = "import sys, unsilent.explain, unsilent.cli.explain; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the script's own arguments -----------------------------------------------------------------------------------------

SCRIPT = """
import argparse, sys
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
given = parser.parse_args()

def loop():
    print("argv", *sys.argv)
    return torch.nn.functional.relu(torch.full((3,), given.lr))
"""


def test_a_script_has_its_own_arguments(loops: str, capfd: pytest.CaptureFixture[str]):
    Path("script.py").write_text(SCRIPT)
    assert run(["explain", "--check-only", "script.py:loop", "--runs", "2", "--json", "--", "--lr", "0.5"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["spec"]["arguments"] == ["--lr", "0.5"]
    assert said.err.count("argv script.py --lr 0.5\n") == 2


def test_arguments_reach_the_search(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked = {}

    def noted(ref: str, **more: object) -> None:
        asked.update(more, ref=ref)
        raise UsageError("nothing is run")

    searches = {"explain_run_differences": (), "check_reproducibility": ("--check-only",)}
    for name, flags in searches.items():
        monkeypatch.setattr(f"unsilent.explain.{name}", noted)
        assert run(["explain", *flags, "train.py:main", "--runs", "2", "--", "--runs", "7", "--", "x"]) == 2
        assert (asked["ref"], asked["runs"], asked["arguments"]) == ("train.py:main", 2, ("--runs", "7", "--", "x"))
        assert run(["explain", *flags, "train.py:main"]) == 2
        assert asked["arguments"] == ()


# -- interrupted --------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch):
    """Runs of a loop that has three sources, one after the other; Ctrl-C comes with run number ``at``."""
    clock = UserCodeLine("loops.py", 7, "train")

    def first_difference(folder, one, other):
        for index, source in enumerate(("clock", "numpy", "random")):
            if source not in one["pinned"]:
                return RunDivergence(index, index, "add", "forward", clock, None, "", "random", "global", "")
        return None

    def interrupted(at: int, **more) -> int:
        def one_run(launcher, pinned, number, **asked):
            launcher.launched += 1
            if launcher.launched == at:
                raise KeyboardInterrupt
            launcher.report(f"run {launcher.launched}")
            told = {"pinned": pinned, "touched": ["clock", "numpy", "random"], "reads": [], "steps": 3, "versions": {}}
            told |= {
                "operations": 100,
                "own": 100,
                "threads": 1,
                "called": True,
                "final": [["weight", launcher.launched]],
            }
            launcher._plain = launcher._plain or told
            return told

        monkeypatch.setattr(Launcher, "run", one_run)
        searching = sys.modules["unsilent.explain.source_search"]
        monkeypatch.setattr(searching, "find_divergence", first_difference)
        monkeypatch.setattr(searching, "candidates", lambda *_: ["clock", "numpy", "random"])
        return explain_loop("loops.py:train", runs=2, **more)

    return interrupted


def test_what_was_found_is_shown_when_the_search_is_interrupted(made_up, capsys: pytest.CaptureFixture[str]):
    # Two runs as they are; two with the clock pinned, which helps; the third pair is for the next source.
    assert made_up(at=6) == 130
    said = capsys.readouterr()
    text = " ".join(said.out.split())
    assert (
        "Interrupted. Runs differ because of the clock; with these pinned, runs first differ at step 1, add at loops.py:7"
        in text
    )
    assert "1. the clock" in text
    assert "same bits" not in text
    (found,) = [line for line in said.err.splitlines() if "found: " in line]
    assert found.startswith("unsilent: found: the clock, step 0, add at loops.py:7")
    assert said.err.index("run 4") < said.err.index("found: ") < said.err.index("run 5")
    assert made_up(at=6, plain=True) == 130
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith("#")] == [
        "source",
        "clock",
    ]
    assert made_up(at=6, as_json=True, quiet=True) == 130
    said = capsys.readouterr()
    assert said.err == ""
    printed = json.loads(said.out)
    assert printed["command"] == "explain"
    results = printed["results"]
    assert (results["interrupted"], results["unexplained_divergence"]["step"]) == (True, 1)
    assert [f["source"] for f in results["findings"]] == ["clock"]


@pytest.mark.parametrize(("at", "candidates"), [(4, ["clock"]), (6, ["numpy"]), (8, ["random"])])
def test_the_candidate_that_was_being_tested_is_shown(made_up, capsys: pytest.CaptureFixture[str], at, candidates):
    assert made_up(at=at) == 130
    text = " ".join(capsys.readouterr().out.split())
    titles = {"clock": "the clock", "numpy": SOURCES["numpy"].title, "random": SOURCES["random"].title}
    assert f"; when interrupted, the search was testing {titles[candidates[0]]}" in text
    assert made_up(at=at, as_json=True, quiet=True) == 130
    assert json.loads(capsys.readouterr().out)["results"]["candidates"] == candidates


def test_an_interrupt_before_anything_was_found(made_up, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt):
        made_up(at=1)
    assert made_up(at=2) == 130
    assert "Interrupted before a source was found; whether runs differ is not known" in capsys.readouterr().out
    assert made_up(at=3) == 130
    assert "Interrupted before a source was found; runs first differ at step 0, add at" in capsys.readouterr().out


def test_a_control_that_is_interrupted_still_says_that_runs_differ(made_up, capsys: pytest.CaptureFixture[str]):
    assert made_up(at=3, control=True) == 130
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "Not reproducible on this machine: runs ended with different bits; the first tensor that differs is weight"
        in text
    )
    assert "Interrupted" in text
    assert made_up(at=8, control=True, as_json=True) == 130
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["interrupted"]
    assert [f["source"] for f in results["explained"]["findings"]] == ["clock"]


def test_a_long_run_is_reported_while_it_lasts(loops: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unsilent.explain.running.SECONDS_BETWEEN", 0.05)
    said: list[str] = []
    with pytest.raises(UserCodeError):
        check_reproducibility(f"{loops}:raises", notify=said.append)
    assert said[0].startswith("run 1 (0 s so far)")
    assert said[1].startswith("run 1: still running (")


def test_ctrl_c_ends_the_command_with_130(loops: str):
    command = [sys.executable, "-m", "unsilent", "explain", f"{loops}:endless"]
    # Tests that run in the background ignore the signal, and so would what they start.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("unsilent: run 1")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "unsilent: interrupted"
