"""What a program trains is found among all its objects, and monitored from the first backward pass on."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.launch import attach
from unsilent.launch.attach import MOST_SHORT, SHORT, AutomaticMonitor, trained_model
from unsilent.monitor.actions import MonitorStop
from unsilent.monitor.settings import MonitorSettings


class Fake:
    """Stands for a monitor."""

    made: list  # of a test

    def __init__(self, model, optimizers, **options):
        self.model, self.optimizers, self.is_open = model, optimizers, True
        self.names = [name for name, _ in model.named_parameters()]
        self.notes = options["notes"]
        self.made.append(weakref.ref(self) if options["notes"] == ("weak",) else self)

    def close(self, wait=True):
        self.is_open = False


@pytest.fixture
def made(monkeypatch):
    """The monitors that were made."""
    monkeypatch.setattr(attach, "Monitor", type("OneTest", (Fake,), {"made": (made := [])}))
    return made


@pytest.fixture
def automatic(made):
    """Monitors what a test trains."""
    one = AutomaticMonitor(MonitorSettings(), ["a note"])
    one.start()
    yield one
    one.stop()


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_torch_is_as_before_afterwards():
    before = torch.autograd.backward, torch.optim.Optimizer.__init__
    one = AutomaticMonitor(MonitorSettings())
    one.start()
    assert torch.optim.Optimizer.__init__ is not before[1]
    one.stop()
    assert (torch.autograd.backward, torch.optim.Optimizer.__init__) == before


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        lambda model: nn.Sequential(nn.Identity(), model),
        lambda model: torch.compile(model, backend="eager"),
    ],
    ids=["plain", "inner", "compiled"],
)
def test_the_outermost_module_is_found(automatic, made, wrap):
    other, model = nn.Linear(3, 3), nn.Linear(3, 1)
    whole = wrap(model)
    train(whole, torch.optim.SGD(model.parameters(), 0.1))
    assert made[0].model is whole
    assert made[0].notes == ("a note",)
    assert other is not made[0].model


def test_several_models_are_one_bundle_with_names_of_their_classes():
    class Generator(nn.Linear): ...

    class Critic(nn.Linear): ...

    models = [Generator(3, 3), Critic(3, 1), Critic(3, 1)]
    loose = torch.ones(2, requires_grad=True)
    optimizers = [
        torch.optim.SGD(models[0].parameters(), 0.1),
        torch.optim.SGD([*models[1].parameters(), *models[2].parameters(), loose], 0.1),
    ]
    names = {name for name, _ in trained_model(optimizers).named_parameters()}
    assert names == {f"{owner}.{part}" for owner in ("Generator", "Critic", "Critic-2") for part in ("weight", "bias")}
    assert list(trained_model([torch.optim.SGD([loose], 0.1)].copy()).parameters()) == []


def test_a_second_module_around_the_same_model_is_left_out():
    model = nn.Linear(3, 1)
    wrappers = [nn.Sequential(model), nn.Sequential(model)]
    assert trained_model([torch.optim.SGD(model.parameters(), 0.1)]) in wrappers


def test_a_model_with_a_method_parameters_of_its_own():
    class Groups(nn.Linear):
        def parameters(self, recurse=True):
            return [{"params": [self.weight], "lr": 0.1}]

    model = Groups(3, 1)
    assert trained_model([torch.optim.SGD(model.parameters(), 0.1)]) is model


@pytest.mark.slow
def test_optimizers_made_later_and_a_second_training(automatic, made):
    first = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(first.parameters(), 0.1)
    train(first, optimizer, SHORT)
    second = nn.Linear(3, 2)
    later = torch.optim.SGD(second.parameters(), 0.1)
    assert [one.is_open for one in made] == [False]
    train(second, later, SHORT)
    assert [len(one.optimizers) for one in made] == [1, 2]
    assert sorted(made[1].names) == ["Linear-2.bias", "Linear-2.weight", "Linear.bias", "Linear.weight"]
    assert made[1].notes == ()
    made.clear()
    del first, optimizer, second, later
    third = nn.Linear(3, 1)
    train(third, torch.optim.SGD(third.parameters(), 0.1))
    assert made[0].model is third
    assert len(made[0].optimizers) == 1


@pytest.mark.slow
def test_an_earlier_training_does_not_stay_in_memory(made):
    one = AutomaticMonitor(MonitorSettings(), ["weak"])
    one.start()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    other = nn.Linear(3, 1)
    torch.optim.Adam(other.parameters())
    gc.collect()
    assert gone() is None
    one.stop()


@pytest.mark.parametrize("how", ["new", "end"])
def test_a_monitor_ends_when_the_program_drops_the_training(how):
    one = AutomaticMonitor(MonitorSettings(on_alarm="stop", sampling="fixed:1", rule=("nonfinite",)))
    one.start()
    try:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 3)
        model.weight.register_hook(lambda g: g * torch.nan)
        train(model, optimizer)
        gone = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert [part() for part in gone] == [None, None]
        with pytest.raises(MonitorStop, match="in step 3"):  # the verdict on the last step
            torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1) if how == "new" else one.stop()
    finally:
        one.stop()


@pytest.mark.slow
def test_optimizers_that_are_made_every_step_are_not_followed(automatic, made, caplog):
    model = nn.Linear(3, 1)
    outer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3 * MOST_SHORT):
        weight = model.weight.detach().clone().requires_grad_()
        torch.optim.SGD([weight], 0.1)
        train(model, outer)
    assert len(made) == MOST_SHORT
    assert made[-1].is_open
    assert ["new optimizers are made every few steps" in record.message for record in caplog.records] == [True]


def test_without_an_optimizer_there_is_no_monitor(automatic, made):
    nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()
    assert (automatic.backward_passes, automatic.monitors, made) == (1, 0, [])


@pytest.mark.parametrize("strict", [False, True])
def test_an_internal_error_is_logged_once(made, monkeypatch, caplog, strict):
    monkeypatch.setattr(attach, "trained_model", lambda optimizers: 1 / 0)
    one = AutomaticMonitor(MonitorSettings(strict=strict))
    one.start()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if strict:
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer)
    else:
        train(model, optimizer, 3)
        assert len(caplog.records) == 1
    one.stop()
    assert one.failed


def test_what_the_user_asked_for_and_cannot_be_is_raised(automatic, made, monkeypatch):
    def refuse(optimizers):
        raise UsageError("no such module")

    monkeypatch.setattr(attach, "trained_model", refuse)
    model = nn.Linear(3, 1)
    with pytest.raises(UsageError) as raised:
        train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert automatic.refused is raised.value
