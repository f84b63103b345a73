"""``unsilent attack``: what it prints, what it refuses, and that no attacked input was calibrated on."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from conftest import in_process
from unsilent import Workload
from unsilent.basics.errors import UsageError
from unsilent.compare.adapters.fake_quant import converted, fake_quantised
from unsilent.compare.attacks.attacking import (
    ModelsUnderAttack,
    attack_models,
    attack_workload,
    calibration_inputs,
    labelled_inputs,
    valid_range,
)
from unsilent.compare.attacks.objectives import diva
from unsilent.compare.attacks.search import Budget
from unsilent.workloads.base import CALIBRATION
from unsilent.workloads.registry import load

FILE = """
import torch
from torch import nn
from unsilent import Workload

def make(labels=True, limits=True, whole=False, maps=False, added=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 10)).eval()
    x = torch.rand(60, 1, 4, 4)
    y = model(x).argmax(1)
    if maps:
        model = nn.Conv2d(1, 3, 1).eval()
    y = y + added
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
            "classified right by all models: the original, the adapted one and its twin; expected 59",
        ),
        (("own.py:make", "int8", "--samples", "0"), "--samples is 0; expected 1 or more"),
        (("own.py:make", "int8", "--with", "labels=no"), "has no labels"),
        (("own.py:make", "int8", "--with", "limits=no"), "has no range of valid inputs"),
        (("own.py:make", "int8", "--with", "whole=yes"), "only such inputs have gradients"),
        (("own.py:make", "int8", "--with", "labels=no"), "workload 'own.py:make' has no labels"),
        (
            ("own.py:make", "int8", "--with", "labels=no", "--with", "maps=yes"),
            "the model is no classifier: it returns [60, 3, 4, 4] for 60 inputs",
        ),
        (
            ("own.py:make", "int8", "--with", "added=20"),
            ", but its model has 10 classes; expected labels from 0 to 9",
        ),
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
    inputs, labels = labelled_inputs(workload, "digits-cnn")
    calibration, attacked, _ = calibration_inputs(workload, inputs, "digits-cnn")
    inputs, labels = inputs[attacked], labels[attacked]
    assert len(inputs) == len(labels) == (128 if evaluated == 128 else 360)
    assert not rows_of(inputs) & rows_of(calibration)
    assert not rows_of(inputs) & rows_of(digits().train)
    if evaluated == 128:
        originals = {one for batch in workload.clean_originals(CALIBRATION, 200) for one in batch}
        assert originals
        assert min(originals) >= evaluated  # nor an altered copy of it


def test_the_range_of_built_in_images_is_theirs():
    low, high = valid_range(load("digits-cnn", {"eval": "20"}), "digits-cnn")
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
    with pytest.raises(
        UsageError, match="the original gives no gradient for its inputs; expected a model that computes with gradients"
    ):
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
    assert "not called whitebox" in str(other.report().findings)


class Wrapped(nn.Module):
    """A network whose output is a mapping with the class scores, like those of transformers, next to other numbers."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return {"hidden": x.flatten(1), "logits": self.network(x)}


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.BatchNorm1d(24), nn.Linear(24, 5)).eval()


@pytest.mark.parametrize("adapter", ["int8", "prune:0.5"])
def test_a_model_is_attacked_as_its_workload_runs_and_judges_it(adapter):
    """A mapping of outputs, and inputs that ``run`` reflects, against the same network that does so itself."""
    network = small_network()
    reflected = nn.Sequential(Reflection(), network).eval()
    x = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    labels, found = [reflected(x).argmax(1)], []
    for model, run in (
        (reflected, lambda model, batch: model(batch)),
        (network, lambda model, batch: model(1 - batch)),
        (Wrapped(network).eval(), lambda model, batch: model(1 - batch)),
        (Wrapped(network).eval(), lambda model, batch: model(1 - batch)["logits"]),
    ):
        workload = Workload(model, [x], labels=labels, input_range=(0, 1), run=run)
        found.append(attack_workload(workload, adapter, "diva", diva(), Budget(eps=0.5, steps=5)))
    assert found[0].accuracy[0].estimate == 1
    assert found[0].scores["pgd"].wrong["last step"].any()
    for other in found[1:]:
        assert other.accuracy == found[0].accuracy
        for name, scores in other.scores.items():
            assert torch.equal(scores.wrong["last step"], found[0].scores[name].wrong["last step"])


class Reflection(nn.Module):
    """1 minus its input."""

    def forward(self, x):
        return 1 - x


def test_every_fifth_input_calibrates_and_the_report_says_so():
    """Of sorted classes each one is seen."""
    network = small_network()
    x = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    workload = Workload(network, [x[:7], x[7:]], labels=[network(x).argmax(1)], input_range=(0, 1))
    calibration, attacked, _ = calibration_inputs(workload, x, "own")
    assert torch.equal(calibration, x[::5])
    assert attacked.nonzero()[:, 0].tolist() == [at for at in range(60) if at % 5]
    findings = attack_workload(workload, "int8", "pgd", diva(), Budget(steps=1)).report().findings
    assert "calibration: every fifth input of the workload, 12 of 60; these are not attacked" in findings
    single = Workload(network, [x[:1]], labels=[torch.zeros(1)], input_range=(0, 1))
    with pytest.raises(UsageError, match="has 1 input; expected 2 or more"):
        attack_workload(single, "int8", "pgd", diva(), Budget(steps=1))


def test_a_terminal_says_what_was_attacked(file):
    shown = " ".join(typed(file, "int8", "--eps", "8/255", "--steps", "3", "--samples", "20").stdout.split())
    assert ": any step: diva " in shown
    assert "; last step: diva " in shown
    assert shown.startswith(
        "Of 20 inputs that the original, the deployed model and its twin get right, attacks made evasive ("
    )
    assert "diva on own.py:make, int8" in shown
    assert "right without an attack: the original 100 % [" in shown
    assert (
        "the twin, a differentiable copy whose gradients the attacks use, answers like the deployed model for 100 % ["
        in shown
    )
    assert "of clean inputs: whitebox" in shown
    assert "2 of 2 layers with weights are quantised, 94.8 % of the parameters" in shown
    assert "due to its objective" not in shown
    assert "--eps 8/255" in shown


def test_a_model_that_is_deployed_already_is_attacked_through_its_twin():
    """All inputs are attacked; the deployed model need be no module."""
    network = small_network()
    x = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    workload = Workload(network, [x], labels=[network(x).argmax(1)], input_range=(0, 1))
    twin = fake_quantised(network, [x], 4)
    integers = converted(twin)
    models = ModelsUnderAttack(twin, lambda batch: integers(batch), "mine")
    found = attack_models(workload, models, "pgd", diva(), Budget(eps=0.5, steps=5))
    assert (found.adapter, found.accuracy[0].n) == ("mine", 60)
    assert found.n > 40
    assert found.scores["pgd"].wrong["last step"].any()
    assert "pgd on custom, mine" in found.report().title
    blind = ModelsUnderAttack(integers, integers)
    with pytest.raises(UsageError, match="attacked as the twin gives no gradient .* or attack a differentiable twin"):
        attack_models(workload, blind, "diva", diva(), Budget())
