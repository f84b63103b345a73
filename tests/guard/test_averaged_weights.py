"""Averages of weights that a loop keeps besides the model: restored with it after a fault, or named in the warning."""

from __future__ import annotations

import copy
import itertools
import types
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conftest import few
from unsilent.guard import Guard, NotRepeatable, RepeatabilityWarning

STEPS, FAULTY, DECAY = 40, 30, 0.9
X = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(3))


class Average:
    """Averages weights with its own update; ``values`` says where they lie."""

    def __init__(self, model):
        self.parts = [p.detach().clone() for p in model.parameters()]

    def update(self, model):
        for old, new in zip(self.parts, model.parameters(), strict=True):
            old.mul_(DECAY).add_(new.detach(), alpha=1 - DECAY)


@torch.no_grad()
def blend(old, new):
    for a, b in zip(old, new, strict=True):
        if not a.is_floating_point():
            a.copy_(b)
            continue
        a.mul_(DECAY).add_(b, alpha=1 - DECAY)


def module(model):
    average = copy.deepcopy(model)
    return average, lambda: blend(average.parameters(), model.parameters()), lambda: list(average.parameters())


def module_through_data(model):
    average = copy.deepcopy(model)

    def update():
        for a, b in zip(average.parameters(), model.parameters(), strict=True):
            a.data.mul_(DECAY).add_(b.data, alpha=1 - DECAY)

    return average, update, lambda: list(average.parameters())


def averaged_model(model):
    average = AveragedModel(model, avg_fn=lambda old, new, count: DECAY * old + (1 - DECAY) * new, use_buffers=True)
    return average, lambda: average.update_parameters(model), lambda: [*average.parameters(), *average.buffers()]


def dictionary(model):
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    return average, lambda: blend(average.values(), model.parameters()), lambda: list(average.values())


def state_dict(model):
    average = copy.deepcopy(model.state_dict())
    return average, lambda: blend(average.values(), model.state_dict().values()), lambda: list(average.values())


def listed(model):
    average = [p.detach().clone() for p in model.parameters()]
    return average, lambda: blend(average, model.parameters()), lambda: average


def plain_object(model):
    average = Average(model)
    return average, lambda: average.update(model), lambda: average.parts


def namespace(model):
    average = types.SimpleNamespace(inside=[p.detach().clone() for p in model.parameters()])
    return average, lambda: blend(average.inside, model.parameters()), lambda: average.inside


def replaced_in_a_dictionary(model):
    average = dict(dictionary(model)[0])

    def update():
        for name, p in model.named_parameters():
            average[name] = DECAY * average[name] + (1 - DECAY) * p.detach()

    return average, update, lambda: list(average.values())


def replaced_attribute(model):
    average = types.SimpleNamespace(weight=model[0].weight.detach().clone())

    def update():
        average.weight = DECAY * average.weight + (1 - DECAY) * model[0].weight.detach()

    return average, update, lambda: [average.weight]


def number(model):
    average = types.SimpleNamespace(norm=1.0)

    def update():
        average.norm = DECAY * average.norm + (1 - DECAY) * float(model[0].weight.detach().norm())

    return average, update, lambda: [torch.tensor(average.norm)]


RESTORED = [module, module_through_data, averaged_model, dictionary, state_dict, listed, plain_object, namespace]
NAMED = {
    replaced_in_a_dictionary: r"tensors that the loop changes are not restored: average\['0\.weight'\], average\['0\.bias'\]",
    replaced_attribute: r"tensors that the loop changes are not restored: average\.weight",
    number: r"variables of the loop are not restored: average\.norm was",
}


def trained(make, guarded, faulty=FAULTY, **options):
    """The model's parameters and the averages at the end, and the guard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    average, update, values = make(model)
    guard = Guard(model, optimizer, **options) if guarded else None
    for i, x in guard.iterate(enumerate(X)) if guard else enumerate(X):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if guard and i == faulty and not guard.alarms:
            model[0].weight.grad[0, 0] = 1e9
        optimizer.step()
        if i % 2:
            update()
    if guard:
        guard.close()
    assert average is not None
    return [t.detach().clone() for t in (*model.parameters(), *values())], guard


CASES = [(make, late) for make in RESTORED for late in (False, True)]


@pytest.mark.parametrize(("make", "late"), few(CASES, *CASES[0::4], *CASES[3::4], several=True))
def test_an_average_that_is_changed_in_place_is_restored(make, late):
    clean, _ = trained(make, False)
    for faulty in (FAULTY, FAULTY + 1):
        recovered, guard = trained(make, True, faulty, strict=True, delayed_check=late)
        assert len(guard.alarms) == 1
        assert all(map(torch.equal, clean, recovered))


@pytest.mark.parametrize("make", NAMED)
def test_what_is_replaced_is_named_in_the_warning_and_in_the_log(make, caplog):
    with pytest.warns(RepeatabilityWarning, match=NAMED[make]):
        trained(make, True)
    assert "; not restored: average" in caplog.records[-1].getMessage()
    if make is not number:
        with pytest.raises(NotRepeatable, match=NAMED[make]):
            trained(make, True, strict=True)


class Holder:
    """Has an average as its attribute, from some step on."""


def late_module(holder, model):
    if not hasattr(holder, "average"):
        holder.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    else:
        holder.average.update_parameters(model)


def late_copy(holder, model):
    holder.average = getattr(holder, "average", None) or copy.deepcopy(model)
    blend(holder.average.parameters(), model.parameters())


def late_entries(holder, model):
    for name, p in model.named_parameters():
        old = vars(holder).setdefault("average", {}).setdefault(name, p.detach().clone())
        old.mul_(DECAY).add_(p.detach(), alpha=1 - DECAY)


def trained_late(update, start, guarded, is_local):
    """The averages at the end, which begin with a step; of a local variable or of an attribute."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer) if guarded else None
    held, average = Holder(), None
    for i, x in guard.iterate(enumerate(X)) if guard else enumerate(X):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if guard and i == FAULTY and not guard.alarms:
            model.weight.grad[0, 0] = 1e9
        optimizer.step()
        if i >= start and not is_local:
            update(held, model)
        elif i >= start:
            holder = Holder()
            if average is not None:
                holder.average = average
            update(holder, model)
            average = holder.average
    if guard:
        guard.close()
        assert len(guard.alarms) == 1
    average = average if is_local else held.average
    return list(average.values() if isinstance(average, dict) else average.state_dict().values())


UPDATES, STARTS = (late_module, late_copy, late_entries), (FAULTY - 7, FAULTY - 6, FAULTY - 2, FAULTY, FAULTY + 1)
LATE = list(itertools.product(UPDATES, STARTS, (True, False)))


@pytest.mark.parametrize(("update", "start", "is_local"), few(LATE, *LATE[::3], several=True))
def test_an_average_that_begins_in_the_repeated_steps_is_named(update, start, is_local):
    clean = trained_late(update, start, False, is_local)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recovered = trained_late(update, start, True, is_local)
    named = " ".join(str(one.message) for one in caught)
    if FAULTY - 6 <= start <= FAULTY:  # the state before step 24 is restored
        assert "tensors that the loop changes are not restored: " + ("average" if is_local else "held.average") in named
    else:
        assert not named
        assert all(map(torch.equal, clean, recovered))


def test_data_that_never_change_are_not_kept_for_long():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(1000, 6)
    sizes = []
    with Guard(model, optimizer) as guard:
        for i in guard.iterate(range(20)):
            optimizer.zero_grad()
            model(data[i : i + 8]).sum().backward()
            optimizer.step()
            sizes.append(guard.nbytes)
    assert sizes[0] >= data.nbytes
    assert sizes[-1] < data.nbytes
