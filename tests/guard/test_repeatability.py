"""Loops that depend on more than the guard puts back: found and put back, or reported with the cause."""

from __future__ import annotations

import argparse
import logging
import random
import types
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from monitor.segments import oldest_kept
from monitor.unreachable import Unreachable
from unsilent.basics.errors import UsageError
from unsilent.guard import Guard, GuardStop, NotRepeatable, RepeatabilityWarning

STEPS, FAULTY = 24, 17
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))


class Plan(Unreachable):
    """When the fault is planted. Nothing leads to what it counts, which is no part of the loop."""

    def __init__(self, *steps):
        self.done, self.pending = 0, set(steps)

    def is_now(self):
        self.done += 1
        if self.done not in self.pending:
            return False
        self.pending.clear()
        return True


class Training:
    """A small training; a fault is planted once, in the first moment, after the optimizer's step number ``faulty``."""

    def __init__(self, guarded, faulty=FAULTY, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.guard = Guard(self.model, self.optimizer, **options) if guarded else None
        self.plan = Plan(*([faulty] if guarded else []))

    def over(self, batches):
        return batches if self.guard is None else self.guard.iterate(batches)

    def update(self, x):
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.step()

    def step(self):
        self.optimizer.step()
        if self.plan.is_now():
            self.optimizer.state[self.model[0].weight]["exp_avg"][0, 0] = 1e9

    def bits(self):
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]


def ran(loop, guarded, **options):
    """A training that a loop was run with, from the same global random state each time."""
    training = Training(guarded, **options)
    loop(training)
    return training


def same(one, other):
    return all(map(torch.equal, one.bits(), other.bits()))


def own_torch_generator(training):
    generator = torch.Generator().manual_seed(1)
    for _ in training.over(range(STEPS)):
        training.update(X[torch.randint(64, (8,), generator=generator)])


def own_numpy_generator(training):
    rng = np.random.default_rng(1)
    for _ in training.over(range(STEPS)):
        training.update(X[torch.from_numpy(rng.integers(64, size=8))])


def own_python_generator(training):
    class Data:
        chance = random.Random(1)

    def draw():
        return X[[Data.chance.randrange(64) for _ in range(8)]]

    for _ in training.over(range(STEPS)):
        training.update(draw())


def generator_in_slots(training):
    @dataclass(slots=True)
    class Data:
        rng: np.random.Generator

        def draw(self):
            return X[torch.from_numpy(self.rng.integers(64, size=8))]

    data = Data(np.random.default_rng(1))
    for _ in training.over(range(STEPS)):
        training.update(data.draw())


def python_generator_of_a_notebook(training):
    class Data:
        chance = random.Random(1)

    Data.__module__ = "there is no such module"
    for _ in training.over(range(STEPS)):
        training.update(X[[Data.chance.randrange(64) for _ in range(8)]])


def generator_of_a_data_loader(training):
    loader = DataLoader(TensorDataset(X), 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for (x,) in training.over(loader):
            training.update(x)


def custom_sampler(training):
    class Draws(Sampler):
        def __init__(self):
            self.rng = np.random.RandomState(1)

        def __iter__(self):
            return iter(self.rng.randint(64, size=64).tolist())

        def __len__(self):
            return 64

    loader = DataLoader(TensorDataset(X), 8, sampler=Draws())
    for _ in range(3):
        for (x,) in training.over(loader):
            training.update(x)


def enumerated_inside(training):
    for i, x in training.over(enumerate(X[:STEPS].repeat_interleave(8, 0).split(8))):
        training.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
        training.update(x + 0.1 * torch.randn(8, 6))


def accumulation_inside(training):
    for _ in training.over(range(STEPS)):
        training.optimizer.zero_grad()
        for _ in range(3):
            training.model(X[:8] + torch.randn(8, 6)).square().mean().backward()
        training.step()


def accumulation_across(training):
    for i, x in training.over(enumerate(X.repeat(6, 1).split(4)[: 4 * STEPS])):
        training.model(x + 0.1 * torch.randn(4, 6)).square().mean().backward()
        if i % 4 == 3:
            training.step()
            training.optimizer.zero_grad()


EXACT = [
    own_torch_generator, own_numpy_generator, own_python_generator, generator_in_slots, python_generator_of_a_notebook,
    generator_of_a_data_loader, custom_sampler,
    enumerated_inside, accumulation_inside, accumulation_across,
]  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("loop", EXACT)
def test_a_recovered_loop_ends_with_the_bits_of_a_fault_free_one(loop, late):
    faulty = ran(loop, True, delayed_check=late, strict=True)
    assert faulty.guard.recoveries == 1
    assert same(faulty, ran(loop, False))
    faulty.guard.close()


def enumerated_outside(training):
    for i, x in enumerate(training.over(X.repeat(3, 1).split(8))):
        training.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
        training.update(x)


def slow_schedule(training):
    for i, x in enumerate(training.over(X.repeat(3, 1).split(8))):
        training.optimizer.param_groups[0]["lr"] = 1e-2 * 0.1 ** (i // 22)
        training.update(x)


def in_place(training):
    batches = list(X.clone().split(8)) * 3
    for x in training.over(batches):
        training.update(x.add_(0.01))


def hidden_generator(training):
    hidden = Unreachable()
    hidden.rng = np.random.default_rng(1)
    for _ in training.over(range(STEPS)):
        training.update(X[torch.from_numpy(hidden.rng.integers(64, size=8))])


def hidden_noise(training):
    hidden = Unreachable()
    hidden.rng = np.random.default_rng(1)
    for x in training.over(X.repeat(3, 1).split(8)):
        training.optimizer.zero_grad()
        (training.model(x).square().mean() * hidden.rng.uniform(0.5, 1)).backward()
        training.step()


NOT_EXACT = {
    enumerated_outside: r"parameter group 0 had lr=.* \(give Guard the scheduler",
    in_place: "the model received other inputs",
    hidden_generator: "the model received other inputs",
    hidden_noise: "from the same state gave other bits",
}


@pytest.mark.filterwarnings("ignore:variables of the loop are not restored")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("loop", NOT_EXACT)
def test_a_loop_that_cannot_be_repeated_is_reported_with_its_cause(loop, late):
    with pytest.warns(RepeatabilityWarning, match=NOT_EXACT[loop]):
        faulty = ran(loop, True, delayed_check=late)
    assert not same(faulty, ran(loop, False))
    with pytest.raises(NotRepeatable, match=NOT_EXACT[loop]):
        ran(loop, True, delayed_check=late, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_number_that_goes_on_counting_is_named_and_no_error(strict):
    with pytest.warns(
        RepeatabilityWarning, match=r"variables of the loop are not restored: i was .* guard\.iterate\(enumerate"
    ):
        faulty = ran(slow_schedule, True, strict=strict, snapshot_interval=1)
    assert not same(faulty, ran(slow_schedule, False))


KEPT_BY_A_LOOP = {
    "a new key": (dict, lambda state, step: state.update(large=True)),
    "a longer list": (list, lambda state, step: state.append(step)),
    "a longer list inside": (lambda: {"steps": []}, lambda state, step: state["steps"].append(step)),
    "a new attribute": (types.SimpleNamespace, lambda state, step: setattr(state, "large", True)),
    "a new object": (types.SimpleNamespace, lambda state, step: setattr(state, "plan", argparse.ArgumentParser())),
    "a set": (set, lambda state, step: state.add(step)),
    "a key that is gone": (lambda: {"small": 1}, lambda state, step: state.clear()),
    "another key": (lambda: {"small": 1}, lambda state, step: (state.clear(), state.update(large=1))),
}


HOOKS = {
    "forward_hooks of 0": lambda model, _: model[0].register_forward_hook(lambda module, inputs, output: output * 0.9),
    "forward_pre_hooks of the model": lambda model, _: model.register_forward_pre_hook(lambda module, inputs: None),
    "backward_hooks of 4": lambda model, _: model[4].register_full_backward_hook(lambda module, given, came: None),
    "backward_hooks of 0.weight": lambda model, _: model[0].weight.register_hook(lambda gradient: gradient * 0.9),
    "optimizer_step_pre_hooks of optimizer 0": lambda _, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", HOOKS)
def test_a_hook_that_the_faulty_execution_registered_is_named(place, strict):
    training, hooks = Training(True, strict=strict), []

    def loop():
        for x in training.over(X[:STEPS].repeat_interleave(8, 0).split(8)):
            training.update(x)
            if training.optimizer.state[training.model[0].weight]["exp_avg"].abs().max() > 1e6:
                hooks.append(HOOKS[place](training.model, training.optimizer))
        training.guard.close()

    expected = f"hooks are not restored: {place} "
    if strict:
        with pytest.raises(NotRepeatable, match=expected):
            loop()
    else:
        with pytest.warns(RepeatabilityWarning) as caught:
            loop()
        assert expected in str(caught[0].message)
    assert len(hooks) == 1


@pytest.mark.parametrize("kind", KEPT_BY_A_LOOP)
def test_what_only_the_faulty_execution_changed_is_named(kind):
    make, change = KEPT_BY_A_LOOP[kind]
    training, state, unset = Training(True), make(), None
    with pytest.warns(RepeatabilityWarning) as caught:  # noqa: PT031
        for step, x in training.over(enumerate(X[:STEPS].repeat_interleave(8, 0).split(8))):
            training.update(x)
            if training.optimizer.state[training.model[0].weight]["exp_avg"].abs().max() > 1e6:
                change(state, step)
                unset = (unset or 0) + 1
    training.guard.close()
    (text,) = [str(one.message) for one in caught]
    assert text.startswith("variables of the loop are not restored: ")
    assert "state" in text
    assert "unset" in text


@pytest.mark.parametrize("kind", ["StepLR", "CosineAnnealingLR", "ReduceLROnPlateau"])
def test_schedulers_that_the_loop_uses_are_put_back_without_being_given(kind):
    options = {"StepLR": {"step_size": 3}, "CosineAnnealingLR": {"T_max": 30}, "ReduceLROnPlateau": {"patience": 1}}

    def loop(training):
        scheduler = getattr(torch.optim.lr_scheduler, kind)(training.optimizer, **options[kind])
        for number, x in training.over(enumerate(X.repeat(3, 1).split(8))):
            training.update(x)
            scheduler.step(*([number] if kind == "ReduceLROnPlateau" else []))

    faulty = ran(loop, True, strict=True)
    assert faulty.guard.recoveries == 1
    assert same(faulty, ran(loop, False))


def test_a_generator_that_is_handed_in_is_put_back():
    ends = []
    for guarded in (False, True):
        training = Training(False)

        hidden = Unreachable()
        hidden.rng = np.random.default_rng(1)
        if guarded:
            training.guard = Guard(training.model, training.optimizer, hidden.rng, strict=True)
            training.plan = Plan(FAULTY)
        for _ in training.over(range(STEPS)):
            training.update(X[torch.from_numpy(hidden.rng.integers(64, size=8))])
        ends.append(training.bits())
    assert all(map(torch.equal, *ends))


def test_a_generator_that_cannot_be_put_back_is_named():
    training = Training(False)
    with pytest.raises(UsageError, match=r"random\.SystemRandom cannot be saved and restored"):
        Guard(training.model, training.optimizer, random.SystemRandom())
    guard = Guard(training.model, training.optimizer)
    chance = random.SystemRandom()
    with pytest.warns(RepeatabilityWarning, match="chance: the state of the random generator random.SystemRandom"):  # noqa: PT031
        for _ in guard.iterate(range(2)):
            training.update(X[[chance.randrange(64) for _ in range(8)]])
    guard.close()


def test_a_stop_leaves_the_oldest_state_kept(caplog):
    training = Training(False)
    training.guard = Guard(training.model, training.optimizer)
    states = {}
    with pytest.raises(GuardStop) as stop:  # noqa: PT012
        for number, x in training.over(enumerate(X.repeat(3, 1).split(8))):
            states.setdefault(number, training.bits())
            training.update(x)
            if number >= FAULTY:
                training.optimizer.state[training.model[0].weight]["exp_avg"][0, 0] = 1e9
    assert stop.value.first.step == FAULTY
    assert all(map(torch.equal, training.bits(), states[oldest_kept(FAULTY)]))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "The oldest kept state was restored" in caplog.text


def test_a_recovery_is_one_line_in_the_log(caplog):
    training = Training(True)
    enumerated_inside(training)
    (record,) = caplog.records
    assert record.name == "unsilent.guard"
    assert "step 16: first moment of 0.weight/exp_avg (max) is 1e+09, baseline" in record.getMessage()
    assert f"went back {17 - oldest_kept(16)} iterations and executed them again" in record.getMessage()


@pytest.mark.parametrize("way", ["settle", "context"])
def test_the_last_step_before_a_break_is_checked(way):
    training = Training(True, delayed_check=True)
    for number, x in training.over(enumerate(X.repeat(3, 1).split(8))):
        before = training.bits()
        training.update(x)
        if number == FAULTY - 1:
            break
    with pytest.raises(GuardStop, match="the loop was left"):  # noqa: PT012
        if way == "settle":
            training.guard.check_pending_steps()
        else:
            with training.guard:
                pass
    assert len(training.guard.alarms) == 1
    assert before is not None


def test_after_the_warm_up_nan_is_called_not_finite():
    training = Training(False)
    guard = Guard(training.model, training.optimizer)
    for number, x in guard.iterate(enumerate(X.repeat(3, 1).split(8))):
        training.update(x)
        if number == 15 and not guard.alarms:
            training.optimizer.state[training.model[0].weight]["exp_avg"][0, 0] = float("nan")
    assert [alarm.rule for alarm in guard.alarms] == ["not finite"]


def test_parameters_and_signs_of_second_moments_are_watched():
    for plant, tensor in (
        (lambda m, o: m[4].weight.data[0].fill_(1e30), "4.weight"),
        (lambda m, o: o.state[m[4].weight]["exp_avg_sq"][0, 0].neg_(), "4.weight/exp_avg_sq"),
    ):
        clean = Training(False)
        for x in X.repeat(3, 1).split(8):
            clean.update(x)
        training = Training(False)
        with Guard(training.model, training.optimizer, strict=True) as guard:
            for number, x in guard.iterate(enumerate(X.repeat(3, 1).split(8))):
                training.update(x)
                if number == FAULTY and not guard.alarms:
                    plant(training.model, training.optimizer)
        assert [(alarm.step, alarm.tensor) for alarm in guard.alarms] == [(FAULTY, tensor)]
        assert same(clean, training)


def test_a_closed_guard_is_refused_and_closing_twice_is_not():
    training = Training(True)
    training.guard.close()
    training.guard.close()
    for use in (
        lambda: next(training.guard.iterate([1])),
        lambda: training.guard.step(print),
        training.guard.check_pending_steps,
    ):
        with pytest.raises(UsageError, match="this guard is closed"):
            use()


def test_settle_inside_the_loop_is_refused():
    training = Training(True)
    with pytest.raises(UsageError, match="inside the loop"):  # noqa: PT012
        for x in training.over(X.split(8)):
            training.update(x)
            training.guard.check_pending_steps()
    training.guard.close()


def test_clean_loops_raise_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loop in (*EXACT, *NOT_EXACT, slow_schedule):
            training = Training(True, faulty=10**9, strict=True)
            loop(training)
            assert not training.guard.alarms
            training.guard.close()
