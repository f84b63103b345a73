"""``unsilent attack``: what it prints, what it refuses, and that no attacked input was calibrated on."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from conftest import in_process
from unsilent import Workload
from unsilent.compare.attacks.attacking import attack_workload, labelled_inputs, valid_range
from unsilent.compare.attacks.objectives import diva
from unsilent.compare.attacks.search import Budget
from unsilent.errors import UsageError
from unsilent.workloads.base import CALIBRATION
from unsilent.workloads.registry import load

FILE = """
import torch
from torch import nn
from unsilent import Workload

def make(labels=True, limits=True, whole=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 10)).eval()
    x = torch.rand(60, 1, 4, 4)
    y = model(x).argmax(1)
    if whole:
        x = (x * 10).long()
    return Workload(model, [x], labels=[y] if labels else None, input_range=(0.0, 1.0) if limits else None)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FILE)
    return "own.py:make"


def typed(*words):
    return in_process("attack", *words)


def test_an_attack_prints_its_controls_and_repeats_exactly(file):
    words = (file, "int4", "--eps", "1/10", "--steps", "5", "--json")
    shown = json.loads(typed(*words).stdout)
    assert shown["schema"] == "unsilent/attack/1"
    assert [*dict.fromkeys(row["attack"] for row in shown["results"])] == ["diva", "pgd", "pgd-original", "noise", ""]
    row = next(row for row in shown["results"] if row["measure"] == "evasive, any step")
    assert row["n"] <= 48  # a fifth of 60 calibrates
    assert row["low"] <= row["estimate"] <= row["high"]
    assert shown["results"] == json.loads(typed(*words).stdout)["results"]


def test_a_page_is_written(file, tmp_path):
    done = typed(file, "prune:0.5", "--steps", "2", "--attack", "apgd-dlr", "-o", "page.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert "apgd-dlr" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no workload was given"),
        (("own.py:make",), "no adapter was given"),
        (("own.py:make", "int9"), "did you mean 'int8'"),
        (("own.py:make", "int8", "--attack", "dive"), "did you mean 'diva'"),
        (("own.py:make", "int8", "--loss", "probs"), "did you mean 'prob'"),
        (
            ("own.py:make", "int8", "--eps", "2"),
            "--eps is 2; expected a share of the valid range of inputs, from 0 to 1",
        ),
        (("own.py:make", "int8", "--eps", "8/0"), "--eps is '8/0'; expected a number or a fraction"),
        (("own.py:make", "int8", "--eps", "nan"), "--eps is 'nan'; expected a number or a fraction"),
        (("own.py:make", "int8", "--steps", "0"), "--steps is 0; expected 1 or more"),
        (("own.py:make", "int8", "--c", "-1"), "--c is -1; expected a number above 0"),
        (
            ("own.py:make", "int8", "--samples", "59"),
            "classified right by the original and the adapted model; expected 59",
        ),
        (("own.py:make", "int8", "--samples", "0"), "--samples is 0; expected 1 or more"),
        (("own.py:make", "int8", "--with", "labels=no"), "has no labels"),
        (("own.py:make", "int8", "--with", "limits=no"), "has no range of valid inputs"),
        (("own.py:make", "int8", "--with", "whole=yes"), "only such inputs have gradients"),
        (("dlrm", "int8"), "not one tensor of real numbers"),
    ],
)
def test_errors_are_one_line(file, words, message):
    done = typed(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("unsilent: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def rows_of(inputs):
    return {row.numpy().tobytes() for row in inputs.flatten(1)}


@pytest.mark.parametrize("evaluated", [128, 450])
def test_no_attacked_input_was_trained_or_calibrated_on(evaluated):
    from unsilent.workloads.digits import digits

    workload = load("digits-cnn", {"eval": str(evaluated)})
    inputs, labels, calibration = labelled_inputs(workload)
    assert len(inputs) == len(labels) == (128 if evaluated == 128 else 360)
    assert not rows_of(inputs) & rows_of(calibration)
    assert not rows_of(inputs) & rows_of(digits().train)
    if evaluated == 128:
        originals = {one for batch in workload.clean_originals(CALIBRATION, 200) for one in batch}
        assert originals
        assert min(originals) >= evaluated  # nor an altered copy of it


def test_the_range_of_built_in_images_is_theirs():
    low, high = valid_range(load("digits-cnn", {"eval": "20"}))
    assert (float(low), float(high)) == (-1, 1)
    from unsilent.workloads.cifar_resnet import DEVIATION, MEAN, input_range

    low, high = input_range()
    assert torch.allclose(low.flatten(), -torch.tensor(MEAN) / torch.tensor(DEVIATION))
    assert torch.allclose(high.flatten(), (1 - torch.tensor(MEAN)) / torch.tensor(DEVIATION))
    assert low.shape == (3, 1, 1)


def test_a_model_whose_inputs_have_no_gradient_is_refused():
    class Blind(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x).detach()

    torch.manual_seed(0)
    model, x = Blind().eval(), torch.rand(20, 4)
    workload = Workload(model, [x], labels=[model(x).argmax(1)], input_range=(0, 1))
    with pytest.raises(UsageError, match="gives no gradient for its inputs; expected a differentiable twin"):
        attack_workload(workload, "int8", "diva", diva(), Budget())


def test_a_twin_that_often_answers_otherwise_is_not_called_whitebox(monkeypatch):
    """The deployed model is exchanged for one that is the twin only for a part of the inputs."""
    from unsilent.compare.attacks import attacking

    workload = load("digits-cnn", {"eval": "60"})
    assert attack_workload(workload, "int8", "pgd", diva(), Budget(steps=1)).is_whitebox
    monkeypatch.setattr(
        attacking, "converted", lambda twin: lambda x: torch.roll(twin(x), 1, 1) * (x[:, :1, 0, 3] > 0) + twin(x)
    )
    other = attack_workload(workload, "int8", "pgd", diva(), Budget(steps=1))
    assert not other.is_whitebox
    assert "not called whitebox" in str(other.report().numbers)
