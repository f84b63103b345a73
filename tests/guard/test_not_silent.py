"""Loops that do something once, outside of the step, or now and then: after a fault they end as without it, or say why not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from monitor.unreachable import Unreachable
from unsilent.basics.errors import UsageError
from unsilent.guard import Guard, NotRepeatable, RepeatabilityWarning

STEPS = 60
torch.manual_seed(0)
X, Y = torch.randn(STEPS, 8, 6), torch.randn(STEPS, 8, 2)


class Parts:
    """A training whose second moment is corrupted once, in the step ``faulty``; None: never."""

    def __init__(self, faulty, **options):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.guard = Guard(self.model, self.optimizer, **options)
        self.faulty = faulty

    def over(self, batches=None):
        return self.guard.iterate(enumerate(zip(X, Y, strict=True) if batches is None else batches))

    def backward(self, x, y, extra=0.0):
        ((self.model(x) - y).square().mean() + extra).backward()

    def step(self, i):
        if i == self.faulty and not self.guard.alarms:
            self.optimizer.state[self.model[0].weight]["exp_avg_sq"].view(-1)[3] = 1e12
        self.optimizer.step()

    def update(self, i, x, y, extra=0.0):
        self.optimizer.zero_grad()
        self.backward(x, y, extra)
        self.step(i)


def freezes(parts):
    for i, (x, y) in parts.over():
        if i == 33:
            parts.model[3].requires_grad_(False)
        parts.update(i, x, y)


def unfreezes(parts):
    parts.model[3].requires_grad_(False)
    for i, (x, y) in parts.over():
        if i == 33:
            parts.model[3].requires_grad_(True)
        parts.update(i, x, y)


def stops_statistics(parts):
    for i, (x, y) in parts.over():
        if i == 33:
            parts.model[1].eval()
        parts.update(i, x, y)


def has_a_flag(parts):
    for i, (x, y) in parts.over():
        if i >= 33 and not getattr(parts.model, "shifted", False):
            parts.model.shifted = True
            parts.model[3].bias.data.sub_(0.5)
        parts.update(i, x, y)


def adds_a_group(parts):
    parts.optimizer.param_groups[0]["params"] = list(parts.model[:2].parameters())
    for i, (x, y) in parts.over():
        if i >= 33 and len(parts.optimizer.param_groups) == 1:
            parts.optimizer.add_param_group({"params": list(parts.model[3].parameters())})
        parts.update(i, x, y)


class Drop(Unreachable):
    """A schedule of somebody else's: one drop."""

    def __init__(self):
        self.count = 0

    def step(self, optimizer):
        self.count += 1
        if self.count == 33:
            optimizer.param_groups[0]["lr"] *= 0.1


def drops_once(parts):
    schedule = Drop()
    for i, (x, y) in parts.over():
        parts.update(i, x, y)
        schedule.step(parts.optimizer)


def makes_a_schedule_late(parts):
    schedule = None
    for i, (x, y) in parts.over():
        if i == 5:
            schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 40, 0.1)
        parts.update(i, x, y)
        if schedule is not None:
            schedule.step()


def changes_a_batch_once(parts):
    for i, (x, y) in parts.over([(x.clone(), y) for x, y in zip(X, Y, strict=True)]):
        if i == 34:
            x.mul_(1.5)
        parts.update(i, x, y)


def draws_now_and_then(parts):
    noise = iter([torch.randn(()) for _ in range(99)])

    def hidden(iterator=noise):
        return next(iterator)

    for i, (x, y) in parts.over():
        extra = hidden() * parts.model[3].weight.sum() if i % 8 == 5 else 0.0
        parts.update(i, x, y, extra)


def schedules_outside(parts):
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 3, 0.9)
    parts.guard._ring.stateful_objects.append(schedule)  # as if it were given
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        parts.guard.step(lambda i=i, x=x, y=y: parts.update(i, x, y))
        schedule.step()
    parts.guard.check_pending_steps()


def zeroes_outside(parts):
    def step(i, x, y):
        parts.backward(x, y)
        parts.step(i)

    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        parts.optimizer.zero_grad()
        parts.guard.step(step, i, x, y)
    parts.guard.check_pending_steps()


EXACT = (freezes, unfreezes, stops_statistics, has_a_flag, adds_a_group)
SAID = {
    drops_once: "parameter group 0 had lr",
    makes_a_schedule_late: "StepLR was created after the loop began",
    changes_a_batch_once: "a batch was changed in place",
    draws_now_and_then: "from the same state gave other bits",
    schedules_outside: "StepLR last_epoch was",
    zeroes_outside: r"zero_grad\(\) outside of the step",
}


def ran(loop, faulty, **options):
    torch.manual_seed(2)
    parts = Parts(faulty, **options)
    loop(parts)
    parts.guard.close()
    assert parts.guard.recoveries == (faulty is not None)
    return [t.detach().clone() for t in (*parts.model.parameters(), *parts.model.buffers())]


@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("faulty", [32, 33, 35, 39])
def test_what_modules_and_optimizers_remember_is_put_back(loop, faulty):
    golden = ran(loop, None)
    assert all(map(torch.equal, ran(loop, faulty, strict=True), golden))


@pytest.mark.parametrize("loop", SAID, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.filterwarnings("ignore:variables of the loop are not restored")  # of a schedule, besides what is expected
def test_what_cannot_be_done_again_is_said(loop, every):
    faulty = {1: 33, 4: 38}[every]
    if (loop, every) == (changes_a_batch_once, 1):
        faulty = 35
    if (loop, every) == (draws_now_and_then, 1):
        faulty = 38
    if (loop, every) == (makes_a_schedule_late, 1):
        faulty = 39
    with pytest.warns(RepeatabilityWarning, match=SAID[loop]):
        ran(loop, faulty, snapshot_interval=every)
    with pytest.raises(NotRepeatable, match=SAID[loop]):
        ran(loop, faulty, snapshot_interval=every, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_loop_that_is_left_while_steps_are_executed_again(strict):
    parts, count = Parts(47, strict=strict), 0
    with pytest.warns(RepeatabilityWarning, match="the loop was left while steps were executed again"):  # noqa: PT031
        for i, (x, y) in parts.over():
            parts.update(i, x, y)
            count += 1
            if count == 50:
                break
    if strict:
        with pytest.raises(NotRepeatable, match="the loop was left while"):
            parts.guard.check_pending_steps()
    else:
        parts.guard.check_pending_steps()
    parts.guard.close()


def test_nothing_is_held_that_is_not_needed():
    import gc
    import weakref

    parts, results = Parts(None), []
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        parts.guard.step(lambda i=i, x=x, y=y: parts.update(i, x, y) or torch.zeros(1))
    alive = parts.guard.step(lambda: torch.zeros(1))
    results.append(weakref.ref(alive))
    del alive
    gc.collect()
    assert results[0]() is None
    for _ in parts.over([(x, y) for x, y in zip(X, Y, strict=True)][:9]):
        pass
    assert not parts.guard._segments
    parts.guard.close()


def test_what_cannot_be_kept_is_refused_in_one_line():
    with pytest.raises(UsageError, match="without a shape"), warnings.catch_warnings():  # noqa: PT012
        warnings.simplefilter("ignore")
        model = nn.LazyLinear(2)
        Guard(model, torch.optim.Adam(model.parameters()))
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    guard = Guard(model, optimizer, snapshot_interval=1)
    with pytest.raises(UsageError, match="sparse"):  # noqa: PT012
        for n in guard.iterate(range(4)):
            optimizer.zero_grad(set_to_none=False)
            model(torch.tensor([n])).sum().backward()
            optimizer.step()
    guard.close()
