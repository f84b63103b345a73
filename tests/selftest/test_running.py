"""What a self-test says of a device: counts, bounds, the first wrong element, exit codes."""

from __future__ import annotations

import json

import pytest

from conftest import in_process
from selftest.faulty_device import FAULTS, OPERATIONS
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.selftest.running import OperationCount, SelfTest, execute_tests, run_selftest
from unsilent.sites.faulty_device import FaultyDevice


@pytest.mark.parametrize(("n", "expected"), [(0, None), (2, None), (3, 1), (44, 14), (45, 15), (3_000, 1_000)])
def test_the_bound_holds_with_95_percent(n, expected):
    assert OperationCount("gemm", "float32", n).seen_from == expected
    if expected:
        assert (1 - 1 / expected) ** n < 0.05


def clean(*executions):
    counts = tuple(OperationCount("gemm", str(k), n) for k, n in enumerate(executions))
    return SelfTest("cpu", "CPU", 1.0, counts)


def test_a_clean_test_says_how_rare_a_failure_it_would_have_seen():
    said = clean(3_000, 300).report().headline
    assert said == (
        "No mismatch in 3,300 executions on cpu: if any row of the table gave a wrong answer in 1 of 100 of its "
        "executions, this would have been detected with a probability of 95 %"
    )
    assert "too few to say how rare a failure would have been found" in clean(3_000, 2).report().headline


def test_a_mismatch_has_exit_code_17_and_names_the_first_wrong_element():
    with FaultyDevice(FAULTS["all elements negated"], 1.0, OPERATIONS["gemm"]):
        result = run_selftest("cpu", 0)
    assert result.exit_code == 17
    assert {count.operation for count in result.mismatches} == {"gemm"}
    headline = result.report().headline
    assert headline.startswith("4 of 20 executions on cpu had a wrong answer. gemm in float64: element [0, 0] is ")


def test_what_raises_is_one_line():
    class Raising:
        operation, dtype = "gemm", "float32"

        def execute(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    with pytest.raises(
        UnsilentError, match="^gemm in float32 raised RuntimeError: CUDA error: an illegal memory access"
    ):
        execute_tests([Raising()], lambda: True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"minutes": -1}, "minutes= is -1; expected a number, 0 or more"),
        ({"minutes": "x"}, "minutes= is 'x'; expected a number, 0 or more"),
        ({"code": "own.py:make"}, "code= is given without step="),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"step": "none.recording"}, "none.recording"),
    ],
)
def test_wrong_arguments_are_named(arguments, said):
    with pytest.raises(UsageError, match=said):
        run_selftest(**{"device": "cpu", **arguments})


def test_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process("selftest", "record", "train-dlrm", "-o", "dlrm.recording", "--json", "--device", "cpu")
    assert (done.returncode, json.loads(done.stdout)["file"]) == (0, "dlrm.recording")
    words = ("selftest", "--device", "cpu", "--minutes", 0, "--step", "dlrm.recording", "--json", "--quiet")
    done = in_process(*words)
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["mismatches"], shown["executions"]) == (0, 0, 21)
    assert shown["results"][-1]["operation"] == "recorded step"
    with FaultyDevice(FAULTS["one bit flipped"], 1.0, OPERATIONS["reduction"]):
        done = in_process(*words)
    assert done.returncode == 17
    wrong = [row for row in json.loads(done.stdout)["results"] if row["wrong"]]
    assert wrong[0]["mismatch"]["operation"] == "reduction"
    assert {"index", "expected", "got", "layout"} <= set(wrong[0]["mismatch"])
