"""``unsilent compare``: exit codes, JSON, plain columns, errors in one line."""

from __future__ import annotations

import json

import pytest
import torch

import unsilent
from conftest import in_process


@pytest.fixture
def broken(tiny):
    """A checkpoint of the tiny model with its classes in another order."""
    state = unsilent.load("tiny.py:make").model().state_dict()
    torch.save(
        {**state, "last.weight": state["last.weight"].roll(1, 0), "last.bias": state["last.bias"].roll(1, 0)}, "b.pt"
    )


def test_a_limit_sets_the_exit_code(broken):
    same = in_process("compare", "tiny.py:make", "tiny.py:make", "--plain", "--assert", "25%")
    assert (same.returncode, same.stderr) == (0, "")
    assert "within what is allowed, 25 %" in same.stdout
    for allowed in ("10%", "0.999"):
        changed = in_process("compare", "tiny.py:make", "b.pt", "--plain", "--assert", allowed)
        assert (changed.returncode, changed.stderr) == (1, "")
        assert "more than is allowed" in changed.stdout
    assert in_process("compare", "tiny.py:make", "b.pt", "--plain").returncode == 0


def test_json_has_each_estimate_with_its_limits(broken):
    shown = json.loads(in_process("compare", "tiny.py:make", "b.pt", "--json").stdout)
    assert shown["schema"] == "unsilent/compare/1"
    changed = next(row for row in shown["results"] if row["measure"] == "changed" and not row["class"])
    assert (changed["estimate"], changed["n"], changed["unit"]) == (1.0, 14, "input")
    assert changed["low"] == pytest.approx(0.768, abs=1e-3)
    assert shown["command"] == "unsilent compare tiny.py:make b.pt"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no original was given"),
        (("tiny.py:make",), "no deployed model was given"),
        (("b.pt", "b.pt"), "b.pt holds weights, not a model to run"),
        (("tiny.py:make", "b.pt", "--assert", "1.5"), "--assert is '1.5'; expected a share between 0 and 1, like 1%"),
        (("tiny.py:make", "b.pt", "--confidence", "2"), "--confidence is 2"),
        (("tiny.py:make", "b.pt", "--data", "x"), "takes no --data"),
        (("tiny.py:make", "digits-cnn"), "digits-cnn cannot run on batch 0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(broken, words, message):
    done = in_process("compare", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
