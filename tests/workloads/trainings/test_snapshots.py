"""Snapshots: exact, refused where they do not fit, and trainings that do not come back are found."""

from __future__ import annotations

import copy
import random
import struct

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from unsilent.basics.errors import UsageError
from unsilent.workloads import load_training
from unsilent.workloads.trainings import Training
from unsilent.workloads.trainings.restore_check import check_restorable
from unsilent.workloads.trainings.snapshots import first_snapshot_difference, snapshot_copy

from .conftest import Net, data, loss, make_own


class Odd(torch.optim.Optimizer):
    """State that loading a ``state_dict`` would round: float64 and integers beside a float32 parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01, "nested": {"a": [1, 2.5]}})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float64)
                    state["step"] = torch.zeros((), dtype=torch.int64)
                    state["precise"] = torch.zeros((), dtype=torch.float64)
                    state["history"] = []
                state["step"] += 1
                state["precise"] += 1 / 3
                state["mean"].lerp_(p.grad.double(), 0.1)
                state["history"] = [*state["history"][-1:], state["mean"].clone()]
                p -= (group["lr"] * (state["mean"] + state["history"][0]) * state["precise"]).to(p.dtype)
        self.param_groups[0]["nested"]["a"][0] += 1


@pytest.mark.parametrize(
    "optimizer",
    [
        Odd,
        torch.optim.NAdam,
        torch.optim.Adagrad,
        lambda p: torch.optim.Adam(p, amsgrad=True, lr=torch.tensor(0.01)),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ],
)
def test_optimizer_state_is_not_rounded(optimizer):
    workload = make_own(
        model=lambda: nn.Linear(6, 3), optimizer=lambda model: optimizer(model.parameters()), schedule=None
    )
    assert len(check_restorable(workload, steps=4).ways_checked) == 3


def test_state_is_as_it_lay_there():
    workload = make_own(model=lambda: nn.Linear(6, 3), optimizer=lambda m: Odd(m.parameters()), schedule=None)
    state = workload.start(0)
    for _ in range(3):
        workload.step(state)
    other = workload.restore(workload.snapshot(state))
    mine, theirs = (s.optimizers[0].state[s.model.weight] for s in (state, other))
    assert (theirs["mean"].dtype, theirs["step"].dtype) == (torch.float64, torch.int64)
    assert torch.equal(mine["mean"], theirs["mean"])
    assert other.optimizers[0].param_groups[0]["nested"]["a"] == [4, 2.5]
    # What load_state_dict does to it, for comparison.
    plain = Odd(other.model.parameters())
    plain.load_state_dict(state.optimizers[0].state_dict())
    assert plain.state[other.model.weight]["mean"].dtype == torch.float32


def schedules():
    s = torch.optim.lr_scheduler
    return [
        lambda o: s.OneCycleLR(o, 0.1, total_steps=50),
        lambda o: s.SequentialLR(o, [s.ConstantLR(o), s.CosineAnnealingLR(o, 5)], [2]),
        lambda o: s.MultiStepLR(o, [1, 3]),
        lambda o: s.LambdaLR(o, lambda step: 1 / (1 + step)),
    ]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_schedules_belong_to_the_state(number):
    workload = make_own(
        model=lambda: nn.Linear(6, 3),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        schedule=schedules()[number],
    )
    check_restorable(workload, steps=3)
    state = workload.start(0)
    rates = []
    for _ in range(5):
        rates.append(state.optimizers[0].param_groups[0]["lr"])
        workload.step(state)
    assert len(set(rates)) > 1


def test_memory_layout_is_kept():
    """A channels-last model comes back as one, or its kernels would sum in another order."""
    workload = load_training("train-resnet-sgd")
    state = workload.start(0)
    state.model.to(memory_format=torch.channels_last)
    workload.step(state)
    snapshot = workload.snapshot(state)
    other = workload.restore(snapshot)
    assert other.model.stem[0].weight.shape == state.model.stem[0].weight.shape
    weights = [s.model.block1.conv1.weight for s in (state, other)]
    assert weights[0].stride() == weights[1].stride() != torch.empty(weights[0].shape).stride()
    for s in (state, other):
        workload.step(s)
    assert first_snapshot_difference(workload.snapshot(state), workload.snapshot(other)) is None


def test_strides_of_a_weight_that_is_not_dense_are_kept():
    workload = of_kind(Training, lambda: Strided())
    state = workload.start(0)
    workload.step(state)
    other = workload.restore(workload.snapshot(state))
    assert other.model.weight.stride() == state.model.weight.stride() == (12, 2)
    assert torch.equal(other.model.weight, state.model.weight)


def test_evaluation_puts_every_mode_back():
    """A layer that is frozen in eval mode stays so, whatever the evaluation does to it."""
    workload = make_own(model=Frozen)
    state = workload.start(0)
    modes = [m.training for m in state.model.modules()]
    assert len(set(modes)) == 2
    workload.evaluate(state)
    assert [m.training for m in state.model.modules()] == modes


def test_a_snapshot_shares_nothing():
    workload = make_own()
    state = workload.start(0)
    workload.step(state)
    snapshot = workload.snapshot(state)
    before = copy.deepcopy(snapshot)
    workload.step(state)
    other = workload.restore(snapshot)
    workload.step(other)
    workload.restore_into(state, snapshot)
    workload.step(state)
    assert first_snapshot_difference(snapshot, before) is None


def test_snapshots_that_do_not_fit_are_refused():
    workload = make_own()
    state = workload.start(0)
    workload.step(state)
    good = workload.snapshot(state)

    def refused(change, message, of=workload):
        bad = copy.deepcopy(good)
        change(bad)
        before = of.snapshot(fresh := of.start(0))
        for restore in (of.restore, lambda s: of.restore_into(fresh, s)):
            with pytest.raises(UsageError) as caught:
                restore(bad)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
        assert first_snapshot_difference(of.snapshot(fresh), before) is None

    refused(lambda s: s.pop("epoch"), "not a snapshot of a training: it lacks 'epoch'")
    refused(lambda s: s.update(format=0), "snapshot has format 0, expected 1")
    refused(lambda s: s.update(workload="x"), "snapshot is of training 'x', expected a snapshot of 'own loop'")
    refused(lambda s: s["model"].pop("norm.weight"), "snapshot of 'own loop' lacks 'norm.weight'")
    refused(
        lambda s: s["model"].update({"last.bias": torch.ones(4)}),
        "has 'last.bias' as float32 [4], this model has float32 [3]",
    )
    refused(lambda s: s["model"].update(more=torch.ones(1)), "has 'more', which this model lacks")
    refused(lambda s: s["optimizers"].pop(), "has optimizers Adam, this training has Adam, SGD")
    refused(
        lambda s: s["optimizers"][0]["state"].update(x={}),
        "has optimizer state of 'x', which this training does not update",
    )
    refused(lambda s: s["schedulers"].pop(), "has 1 schedulers, this training has 2")
    refused(lambda s: None, "was taken with other settings (steps: 1000 and 7 in this training)", make_own(steps=7))


def test_what_cannot_be_held_is_named():
    class Strange(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["log"] = object()

    workload = make_own(optimizer=lambda m: Strange(m.parameters(), lr=0.1), schedule=None)
    state = workload.start(0)
    workload.step(state)
    with pytest.raises(UsageError, match=r"optim:scale/log is a object, which a snapshot cannot hold"):
        workload.snapshot(state)


def nan(bits):
    return struct.unpack("d", struct.pack("Q", bits))[0]


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ({"x": 1.0}, {"x": 1.0}, None),
        ({"x": 0.0}, {"x": -0.0}, "x: 0.0 and -0.0"),
        (nan(0x7FF8000000000000), nan(0x7FF8000000000000), None),
        ([nan(0x7FF8000000000000)], [nan(0x7FF8000000000001)], "0: nan and nan"),
        ({"t": torch.tensor([0.0, 1.0])}, {"t": torch.tensor([-0.0, 1.0])}, "t (float32 [2]) in 1 of 2 elements"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), " is float32 [2] and float64 [2]"),
        ({"a": 1}, {"a": 1, "b": 2}, "b: nothing and 2"),
        ({"a": 1}, {"a": True}, "a: 1 and True"),
        ({"a": [1, 2]}, {"a": [1]}, "a: [1, 2] and [1]"),
        (torch.ones(1, 3).T, torch.ones(3, 1), None),
        (torch.ones(0), torch.ones(0), None),
        (torch.tensor(True), torch.tensor(False), " (bool []) in 1 of 1 elements"),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), " (complex64 [1]) in 1 of 1 elements"),
        (torch.ones(4).bfloat16()[::2], torch.ones(2).bfloat16(), None),
    ],
)
def test_first_difference(a, b, told):
    assert first_snapshot_difference(a, b) == told


def test_copies_refuse_what_is_not_plain():
    with pytest.raises(UsageError, match="x/1 is a set"):
        snapshot_copy([1, {2}], "x")


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 12)[:, ::2])

    def forward(self, x):
        return x @ self.weight.t()


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).eval()


class Averaged(Net):
    """Evaluates with an average of its weights that no snapshot sees."""

    def forward(self, x):
        scale = next(iter(self.parameters())).detach()
        if self.training:
            object.__setattr__(self, "average", 0.9 * getattr(self, "average", 0.0) + 0.1 * scale.mean().item())
            return super().forward(x)
        return super().forward(x) * (1 + self.average)


class Counting(Net):
    """Its forward pass depends on a number that no snapshot sees."""

    calls_of_mine = 0

    def forward(self, x):
        self.calls_of_mine += 1
        return super().forward(x) * (1 + self.calls_of_mine / 1000)


def hidden_counter():
    return make_own(model=Counting)


def outside_draws():
    generator = random.Random(3)
    return make_own(loss=lambda m, b: loss(m, b)[0] * generator.random())


def clipped_by_history():
    seen = []

    def with_history(model, batch):
        value = loss(model, batch)[0]
        seen.append(float(value.detach()))
        return value / (1 + max(seen[-4:]))

    return make_own(loss=with_history)


class Forgetful(Training):
    """Momentum is left out of its snapshots."""

    def snapshot(self, state):
        whole = super().snapshot(state)
        whole["optimizers"] = [{**kept, "state": {}} for kept in whole["optimizers"]]
        return whole


class Sharing(Training):
    """Its snapshots are the live tensors."""

    def snapshot(self, state):
        return {**super().snapshot(state), "model": dict(state.model.state_dict())}


class Unsaveable(Training):
    def snapshot(self, state):
        return {**super().snapshot(state), "extra": object()}


def of_kind(kind, model=lambda: nn.Linear(6, 2)):
    return kind(
        model=model,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        batches=data(),
        loss=lambda m, b: cross_entropy(m(b[0]), b[1]),
        evaluate=data(),
        name="bad",
    )


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        (
            hidden_counter,
            "restored into fresh objects, its state differs 1 step later: model/scale (float64 [6]) in ",
        ),
        (lambda: make_own(model=Averaged), "steps later: evaluation/loss"),
        (outside_draws, "run again, its state differs immediately: model/scale"),
        (clipped_by_history, "its state differs "),
        (
            lambda: of_kind(Forgetful),
            "restored into fresh objects, its state differs 1 step later: model/weight (float32 [2, 6])",
        ),
        (lambda: of_kind(Sharing), "a snapshot changed while the training continued: model/weight (float32 [2, 6])"),
        (lambda: of_kind(Unsaveable), "a snapshot cannot be saved and read with weights_only=True"),
    ],
)
def test_trainings_that_do_not_come_back_are_found(workload, told):
    with pytest.raises(UsageError) as caught:
        check_restorable(workload())
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


UNSTABLE = """
import os, torch, unsilent
from torch import nn

def make():
    data = [(torch.ones(3, 2), torch.tensor([0, 1, 1]))]
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1 + os.getpid() / 1000)
    return unsilent.Training(model=lambda: nn.Linear(2, 2), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        batches=data, loss=loss, evaluate=data, name="pid")
"""


@pytest.mark.slow
def test_a_training_that_depends_on_the_process_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unstable.py").write_text(UNSTABLE)
    workload = load_training(f"{tmp_path}/unstable.py:make")
    with pytest.raises(UsageError, match="restored in a new process, its state differs 1 step later: model/weight"):
        check_restorable(workload)
    (tmp_path / "unstable.py").write_text("raise SystemError('gone')")
    with pytest.raises(UsageError, match="'pid' cannot be restored in a new process: .*gone"):
        check_restorable(workload)


def test_why_a_new_process_was_not_tried():
    assert "file.py:name" in check_restorable(make_own(), steps=1).why_not_new_process
    assert (
        check_restorable(load_training("train-vit"), steps=1, new_process=False).why_not_new_process == "not asked for"
    )
    with pytest.raises(UsageError, match="steps is 0"):
        check_restorable(make_own(), steps=0)
