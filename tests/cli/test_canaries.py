"""``unsilent canaries``: what make writes, what check says of models and files, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import in_process
from unsilent.compare.canaries import load_canaries
from unsilent.workloads import load


@pytest.fixture
def canaries(tiny):
    done = in_process("canaries", "make", f"{tiny}:make", "-k", 4, "-o", "c")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Canaries: 4 of tiny.py:make, boundary" in done.stdout
    return "c"


def test_make_writes_a_file_and_says_so_as_json(tiny):
    done = in_process("canaries", "make", f"{tiny}:make", "--choice", "random", "--count", 3, "--json")
    (row,) = json.loads(done.stdout)["results"]
    assert (row["canaries"], row["choice"], row["file"]) == (3, "random", "tiny.canaries")
    assert load_canaries("tiny.canaries").count == 3


def test_a_workload_without_a_name_is_called_as_the_user_named_it(tiny):
    Path("other.py").write_text(OTHER.replace(', name="wide"', ""))
    done = in_process("canaries", "make", "other.py:wide", "-k", 2, "--json")
    (row,) = json.loads(done.stdout)["results"]
    assert (row["workload"], row["file"]) == ("other.py:wide", "wide.canaries")
    assert "but other.py:wide has 14 samples" in in_process("canaries", "make", "other.py:wide", "-k", 41).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no workload was given"),
        (("tiny.py:make", "-k", "15"), "-k (--count) is 15, but tiny.py:make has 14 samples; give at most that many"),
        (("tiny.py:make", "--choice", "random", "--seed", "-1"), "--seed is -1; expected 0 or more"),
        (("tiny.py:make", "--choice", "nearest"), "unknown --choice 'nearest'"),
        (("tiny.py:make", "-k", "2", "-o", "no/c"), "cannot write the canaries no/c"),
        (("tiny.py:none",), "none"),
    ],
)
def test_make_refuses_in_one_line(tiny, words, message):
    done = in_process("canaries", "make", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def check(*words):
    pytest.importorskip("unsilent.compare.models")
    return in_process("canaries", "check", *words)


def test_the_same_model_passes_in_another_process(canaries, tiny):
    pytest.importorskip("unsilent.compare.models")
    words = [sys.executable, "-m", "unsilent", "canaries", "check", canaries, f"{tiny}:make", "--json"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert (shown["changed"], shown["canaries"], shown["weights_are_the_same"]) == (0, 4, True)
    assert [row["answer"] for row in shown["results"]] == 4 * ["same bits"]


def test_a_corrupted_checkpoint_fails_and_each_canary_says_by_how_much(canaries, tiny):
    state = load(f"{tiny}:make").model().state_dict()
    torch.save(state, "good.pt")
    torch.save({**state, "last.bias": state["last.bias"] + 0.25}, "bad.pt")
    assert check(canaries, "good.pt", "--workload", f"{tiny}:make").returncode == 0
    bad = check(canaries, "bad.pt", "--workload", f"{tiny}:make", "--json")
    assert bad.returncode == 1
    shown = json.loads(bad.stdout)
    assert (shown["changed"], shown["weights_are_the_same"]) == (4, False)
    assert [row["largest difference"] for row in shown["results"]] == pytest.approx(4 * [0.25])


def test_an_adapted_model_is_checked_by_label_or_tolerance(canaries, tiny):
    assert check(canaries, "int8", "--workload", f"{tiny}:make", "--compare", "0.2").returncode == 0
    assert check(canaries, "int8", "--workload", f"{tiny}:make", "--compare", "0").returncode == 1


@pytest.mark.parametrize("adapter", ["bf16", "fp16", "compiled", "int8", "prune:0.5+fp16"])
def test_bits_of_an_adapted_model_are_refused(canaries, tiny, adapter):
    done = check(canaries, adapter, "--workload", f"{tiny}:make")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"c: {adapter} adapts a model: bits may differ without a fault; give --compare labels" in done.stderr


def test_a_program_is_compared_bit_for_bit_only_in_the_dtypes_of_the_canaries(canaries, tiny):
    workload = load(f"{tiny}:make")
    for dtype, code in ((torch.float32, 0), (torch.float64, 2)):
        model = workload.model().to(dtype)
        inputs, sizes = workload.batches()[0].to(dtype), ({0: torch.export.Dim.DYNAMIC},)
        torch.export.save(torch.export.export(model, (inputs,), dynamic_shapes=sizes), "program.pt2")
        done = check(canaries, "program.pt2", "--workload", f"{tiny}:make")
        assert done.returncode == code, done.stderr
    assert "a model in float32, this is float64: bits may differ without a fault" in done.stderr


OTHER = """
import torch
from tiny import batches
import unsilent

wide = unsilent.Workload(torch.nn.Linear(6, 3).eval(), batches(), name="wide")
"""


def test_check_refuses_in_one_line(canaries, tiny):
    Path("other.py").write_text(OTHER)
    Path("cut").write_bytes(Path(canaries).read_bytes()[:-1])
    for words, message in (
        ((canaries,), "no model was given"),
        ((canaries, "other.py:wide"), "the canaries are of a model of another architecture, which lacks 'weight'"),
        ((canaries, "other.py:wide", "--compare", "labels"), "another architecture"),
        (("cut", f"{tiny}:make"), "cut is not a file of canaries"),
        (("none", f"{tiny}:make"), "cannot read none"),
        ((canaries, f"{tiny}:make", "--compare", "label"), "expected bits, labels or a tolerance"),
        (
            (canaries, "int8", "--compare", "labels"),
            "the canaries are of 'tiny.py:make', which is not built in; give it with --workload",
        ),
    ):
        done = check(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), words
        assert message in done.stderr
