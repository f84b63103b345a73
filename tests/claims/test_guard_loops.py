"""Faults planted in loops of many kinds, guarded: each ends with the bits of a fault-free run, or a warning names the cause.

Loops: own generators (torch, numpy, random), a DataLoader with its own generator and with 0 and 2 workers, a custom sampler,
``enumerate`` inside and outside, accumulation inside and across iterations, a schedule, a loss scaler, two optimizers, and a
script with transformers' Trainer. Faults: in each kind of memory, at each moment of a step that a script can reach.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import accelerate  # noqa: F401
    import transformers
except ImportError:
    transformers = None

from unsilent.guard import Guard, GuardStop, RepeatabilityWarning

pytestmark = pytest.mark.claim
HERE = Path(__file__).resolve().parent.parent


def module_of(path):
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


loops = module_of(HERE / "guard/test_repeatability.py")
X = loops.X


class Planted(loops.Training):
    """The training of those loops; the fault corrupts memory of any kind at some moment of a step."""

    def __init__(self, guarded, fault=None, **options):
        super().__init__(guarded, **options)
        self.plan, self.plan.corrupted = loops.Plan(), 0
        self.more = []
        if fault is not None:
            kind, moment = fault
            if moment == "start":
                self.model.register_forward_pre_hook(lambda *_: self.corrupt(kind))
            else:
                self.optimizer.register_step_pre_hook(lambda *_: self.corrupt(kind) if moment == "update" else None)
                self.optimizer.register_step_post_hook(lambda *_: self.corrupt(kind) if moment == "end" else None)

    def step(self):
        self.optimizer.step()
        self.plan.is_now()

    @torch.no_grad()
    def corrupt(self, kind):
        if self.plan.corrupted or self.plan.done < loops.FAULTY - 1:
            return
        weight, norm = self.model[0].weight, self.model[1]
        state = self.optimizer.state[weight]
        target, value = {
            "parameter": (weight, 1e25),
            "first moment": (state["exp_avg"], -1e12),
            "second moment": (state["exp_avg_sq"], float("nan")),
            "sign of a second moment": (state["exp_avg_sq"], -state["exp_avg_sq"].max()),
            "moving statistic": (norm.running_var, 1e20),
            "gradient": (weight.grad, 1e18),
        }[kind]
        self.plan.corrupted += 1
        target.view(-1)[3] = value


FAULTS = [
    ("parameter", "start"), ("parameter", "end"), ("first moment", "start"), ("first moment", "update"), ("second moment", "end"),
    ("sign of a second moment", "start"), ("sign of a second moment", "end"), ("moving statistic", "end"), ("gradient", "update"),
]  # fmt: skip


def with_workers(training):
    loader = DataLoader(TensorDataset(X), 8, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for (x,) in training.over(loader):
            training.update(x)


def global_generator(training):
    loader = DataLoader(TensorDataset(X), 8, shuffle=True)
    for _ in range(3):
        for (x,) in training.over(loader):
            training.update(x + 0.1 * torch.randn(8, 6))


def loss_scaler(training):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    for x in training.over(X.repeat(3, 1).split(8)):
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.plan.is_now()


def scheduled(training):
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 3)
    for x in training.over(X.repeat(3, 1).split(8)):
        training.update(x)
        scheduler.step()


def two_optimizers(training):
    torch.manual_seed(1)
    other = nn.Linear(2, 2)
    second = torch.optim.Adam(other.parameters(), lr=1e-2)
    training.more = list(other.parameters())
    if training.guard is not None:
        training.guard.close()
        both = nn.ModuleList([training.model, other])
        training.guard = Guard(both, [training.optimizer, second], delayed_check=training.late, strict=False)
    for x in training.over(X.repeat(3, 1).split(8)):
        training.optimizer.zero_grad()
        second.zero_grad()
        other(training.model(x)).square().mean().backward()
        training.step()
        second.step()


LOOPS = [*loops.EXACT, *loops.NOT_EXACT, global_generator, with_workers, scheduled, loss_scaler, two_optimizers]


def ran(loop, fault, late):
    training = Planted(fault is not None, fault, **({} if fault is None else {"delayed_check": late}))
    training.late = late
    stopped = False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            loop(training)
            if training.guard is not None:
                training.guard.check_pending_steps()
        except GuardStop:
            stopped = True
    if training.guard is not None:
        training.guard.close()
    bits = [*training.bits(), *(p.detach().clone() for p in training.more)]
    return training, bits, [w for w in said if issubclass(w.category, RepeatabilityWarning)], stopped


@pytest.mark.parametrize("late", [False, True])
def test_no_recovery_is_inexact_without_a_word(late, capsys):
    count, exact, warned, stopped, unnoticed, silent = 0, 0, Counter(), [], [], []
    for loop in LOOPS:
        _, golden, _, _ = ran(loop, None, late)
        for fault in FAULTS:
            training, bits, said, gave_up = ran(loop, fault, late)
            if not training.plan.corrupted:
                continue
            name = f"{loop.__name__}, {fault[0]} at {fault[1]}"
            count += 1
            if all(map(torch.equal, bits, golden)):
                exact += 1
            elif said:
                warned[loop.__name__] += 1
            elif gave_up:
                stopped.append(name)
            elif not training.guard.alarms:
                unnoticed.append(name)
            else:
                silent.append(name)
    with capsys.disabled():
        print(
            f"\nlate={late}: {count} planted faults in {len(LOOPS)} loops: {exact} end with the bits of a fault-free run, "
            f"{warned.total()} with a warning {dict(warned)}, {len(stopped)} with GuardStop {stopped}, "
            f"{len(unnoticed)} without an alarm {unnoticed}; silent: {silent}"
        )
    assert count >= 60
    assert not silent


class PlantedInTrainer(getattr(transformers, "TrainerCallback", object)):
    """Corrupts memory of a Trainer's model at one moment of a step."""

    def __init__(self, kind, moment):
        self.kind, self.moment, self.corrupted = kind, moment, False

    def on_step_begin(self, *given, **more):
        self.corrupt("start", **more)

    def on_pre_optimizer_step(self, *given, **more):
        self.corrupt("update", **more)

    def on_optimizer_step(self, *given, **more):
        self.corrupt("end", **more)

    @torch.no_grad()
    def corrupt(self, moment, model=None, optimizer=None, **more):
        self.steps = getattr(self, "steps", 0) + (moment == "start")
        if self.corrupted or moment != self.moment or self.steps < 17:
            return
        weight = next(iter(model.parameters()))
        state = next(s for s in optimizer.state.values() if s)
        target, value = {
            "parameter": (weight, 1e25),
            "first moment": (state["exp_avg"], -1e12),
            "second moment": (state["exp_avg_sq"], float("nan")),
            "sign of a second moment": (state["exp_avg_sq"], -state["exp_avg_sq"].max()),
            "gradient": (weight.grad, 1e18),
        }[self.kind]
        self.corrupted = True
        target.view(-1)[3] = value


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.skipif(transformers is None, reason="transformers or accelerate is missing")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainer_script_ends_exactly(tmp_path, accumulated, capsys):
    train = module_of(HERE / "integrations/test_transformers.py").train
    golden, _ = train(tmp_path, gradient_accumulation_steps=accumulated)
    exact, unlike = 0, []
    for kind, moment in FAULTS:
        if kind == "moving statistic":
            continue
        planted = PlantedInTrainer(kind, moment)
        bits, guard = train(tmp_path, planted, guarded=True, gradient_accumulation_steps=accumulated)
        assert planted.corrupted
        same = all(map(torch.equal, golden, bits))
        exact += same
        if not same:
            unlike.append((kind, moment, len(guard.alarms)))
    with capsys.disabled():
        print(
            f"\nTrainer, {accumulated} micro-steps: {exact} faults end with the bits of a fault-free run; others: {unlike}"
        )
    assert not [one for one in unlike if one[2]]
