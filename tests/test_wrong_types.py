"""What is of another type than a function takes is refused at once, in one line that says what was found and expected."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.faults import FaultModel
from unsilent.workloads import load_training

MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
WEIGHT, OPERATION = "param:0.weight", "op:0"
FAULTS = "expected an address"
WRONG = {
    "texts for faults": (lambda: unsilent.inject(MODEL, [WEIGHT]), FAULTS),
    "a class for faults": (lambda: unsilent.inject(MODEL, FaultModel), FAULTS),
    "a number for faults": (lambda: unsilent.inject(MODEL, 3), FAULTS),
    "no faults": (lambda: unsilent.inject(MODEL, []), FAULTS),
    "a class for a fault model": (lambda: unsilent.inject(MODEL, WEIGHT, FaultModel), "expected a string"),
    "a class for a fault model of an operation": (lambda: unsilent.inject(MODEL, OPERATION, FaultModel), "expected a string"),
    "a number for a fault model": (lambda: unsilent.inject(MODEL, WEIGHT, 3), "expected a string"),
    "a text for a bit": (lambda: unsilent.inject(MODEL, WEIGHT, bit="a"), "bit is 'a'; expected a whole number"),
    "a bit that is no whole number": (lambda: unsilent.inject(MODEL, OPERATION, bit=1.5), "bit is 1.5; expected a whole number"),
    "a negative bit": (lambda: unsilent.inject(MODEL, WEIGHT, bit=-1), "bit is -1; expected 0 or more"),
    "a number for a law": (lambda: unsilent.inject(MODEL, WEIGHT, law=3), "unknown sampling law '3'"),
    "a number for an optimizer": (lambda: unsilent.inject(MODEL, "optim:0.weight/exp_avg", optimizers=3), "optimizers is 3"),
    "a model for a seed": (lambda: unsilent.inject(MODEL, WEIGHT, seed=MODEL), "seed is Sequential("),
    "a model as a text": (lambda: unsilent.inject("m", WEIGHT), "expected a torch.nn.Module"),
    "a number as a text of a fault model": (lambda: unsilent.fault_model(3), "fault model is 3; expected a string"),
    "a workload": (lambda: unsilent.load(3), "workload is 3; expected a string"),
    "a training": (lambda: load_training(None), "workload is None; expected a string"),
    "options of a workload": (lambda: unsilent.load("digits-cnn", 3), "options= is 3; expected"),
    "a result": (lambda: unsilent.read_result(3), "path is 3; expected a file name"),
    "a checkpoint to save": (lambda: unsilent.verified_save({"w": torch.ones(2)}, 3), "path is 3; expected a file name"),
    "a checkpoint to load": (lambda: unsilent.verified_load(None), "path is None; expected a file name"),
    "a state of safetensors": (lambda: unsilent.verified_save([torch.ones(2)], "w.safetensors"), "expected a mapping"),
    "a state of a folder": (lambda: unsilent.verified_save([torch.ones(2)], "w"), "expected a mapping"),
    "a store": (lambda: unsilent.pvf("digits-cnn", store=3), "store= is 3; expected a file name"),
    "a decision": (lambda: unsilent.judge_by_decision(3), "decision is 3; expected a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_another_type_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, said = WRONG[name]
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
