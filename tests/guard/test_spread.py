"""A guard that checks a part of the tensors in each step: every fault is noticed in time, and undone bit for bit."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from torch import nn

from conftest import few
from monitor.unreachable import Unreachable
from unsilent.basics.errors import UsageError
from unsilent.guard import Guard
from unsilent.guard.alarms import GuardStop
from unsilent.guard.guard_plan import make_plan, states_needed
from unsilent.guard.magnitude_check import divided
from unsilent.guard.watched_tensors import find_watched_tensors

STEPS = 26
GRID = [
    (1, 1, False),
    (1, 1, True),
    (4, 1, True),
    (4, 4, True),
    (3, 5, False),
    (2, 7, True),
    (8, 16, True),
    (16, 8, True),
]
"""Interval, spread, late."""
CASES = [(*case, moment) for case in GRID for moment in ("end", "between")]
FAST = [(1, 1, False, "end")]


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def learnt():
    """Names and magnitudes of a clean run, so that bounds hold from the first step on."""
    model, optimizer = made()
    guard, rows = Guard(model, optimizer), []
    for x in torch.randn(STEPS, 5, 3, generator=torch.Generator().manual_seed(1)):
        guard.step(one_step, model, optimizer, x)
        rows.append(guard.magnitudes())
    names = guard.names()
    guard.close()
    return names, np.array(rows)


def one_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


LEARNT = learnt()
NAMES = [name for name in LEARNT[0] if name.endswith("exp_avg_sq")]
"""A second moment that is far too large stops its weight, and is seen nowhere else: only its own check notices it."""


def run(when=None, moment="end", tensor=0, guarded=True, **options):
    """``when``: the step in which a second moment is corrupted once, at its ``end`` or ``between`` it and the next."""
    model, optimizer = made()
    guard = Guard(model, optimizer, **options) if guarded else None
    if guard:
        guard.learn(*LEARNT)
    parameter = list(model.parameters())[tensor]
    hit = []

    def corrupt():
        if not hit:
            hit.append(when)
            optimizer.state[parameter]["exp_avg_sq"].view(-1)[0] = 1e30

    def batches():
        for number, x in enumerate(torch.randn(STEPS, 5, 3, generator=torch.Generator().manual_seed(1))):
            if moment == "between" and when is not None and number == when + 1:
                corrupt()
            yield number, x

    for number, x in guard.iterate(batches()) if guard else batches():
        one_step(model, optimizer, x)
        if moment == "end" and number == when:
            corrupt()
    tensors = [p.detach().clone() for p in model.parameters()]
    tensors += [v.clone() for p in model.parameters() for v in optimizer.state[p].values()]
    return tensors, guard


GOLDEN = run(guarded=False)[0]


@pytest.mark.parametrize(("interval", "spread", "late", "moment"), few(CASES, *FAST, several=True))
def test_a_fault_in_any_step_is_undone(interval, spread, late, moment):
    for when in range(STEPS if moment == "end" else STEPS - 1):
        tensors, guard = run(
            when, moment, tensor=when % 6, snapshot_interval=interval, spread=spread, delayed_check=late
        )
        assert guard.recoveries == 1, when
        assert guard.alarms[0].tensor == NAMES[when % 6]
        assert when <= guard.alarms[0].step <= when + guard.plan.latency + (moment == "between")
        assert all(map(torch.equal, tensors, GOLDEN)), when
        guard.close()


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "spread", "late"), [(1, 1, True), (4, 4, True), (3, 5, False), (2, 7, True)])
def test_with_a_state_less_some_fault_cannot_be_undone(monkeypatch, interval, spread, late):
    monkeypatch.setattr("unsilent.guard.guard_plan.states_needed", lambda *case: states_needed(*case) - 1)
    options = {"snapshot_interval": interval, "spread": spread, "delayed_check": late}

    def every_fault():
        for when, tensor in itertools.product(range(STEPS - 1), range(6)):
            run(when, "between", tensor, **options)[1].close()

    with pytest.raises(GuardStop):
        every_fault()


class Once(Unreachable):
    """Whether something has not been asked before. Nothing leads to what it remembers, which is no part of the loop."""

    def __init__(self):
        self.asked = False

    def is_first(self):
        was_asked, self.asked = self.asked, True
        return not was_asked


def train_with_large_moment(guard, model, optimizer, at):
    """Guarded steps, in one of which a second moment becomes 1e30, once."""
    hit = Once()

    def step(x):
        one_step(model, optimizer, x)
        if guard.overhead.steps == at and hit.is_first():
            optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = 1e30

    for x in torch.randn(STEPS, 5, 3, generator=torch.Generator().manual_seed(1)):
        guard.step(step, x)


def test_bounds_are_learnt_as_soon_as_without_parts():
    """Until they hold, each step checks all tensors: a fault in the step after that is noticed."""
    model, optimizer = made()
    guard = Guard(model, optimizer, snapshot_interval=16, spread=8)
    train_with_large_moment(guard, model, optimizer, 10)
    assert guard.recoveries == 1
    assert 10 <= guard.alarms[0].step <= 10 + guard.plan.latency


def test_gradients_that_are_not_kept_do_not_count(recwarn):
    """A step that sets them to zero may be repeated from the first one, before which there were none."""
    model, optimizer = made()
    guard = Guard(model, optimizer, snapshot_interval=16, snapshot_gradients=False, strict=True)
    train_with_large_moment(guard, model, optimizer, 12)
    assert guard.recoveries == 1
    assert not list(recwarn)


def test_too_few_states_are_refused():
    with pytest.raises(UsageError, match="snapshot_count is 2; expected 3 or more, because with snapshot_interval=4"):
        Guard(*made(), snapshot_count=2, snapshot_interval=4, spread=5)
    with pytest.raises(UsageError, match="spread is 0; expected 1 or more"):
        Guard(*made(), spread=0)


def test_defaults_of_a_device():
    on_cpu, on_cuda = (make_plan(None, None, None, None, on_cuda) for on_cuda in (False, True))
    assert (on_cpu.interval, on_cpu.spread, on_cpu.late, on_cpu.states, on_cpu.latency) == (4, 1, False, 2, 0)
    assert (on_cuda.interval, on_cuda.spread, on_cuda.late, on_cuda.states, on_cuda.latency) == (16, 8, True, 2, 8)
    assert on_cuda.batches == 32


def test_parts_are_all_tensors_and_about_as_large():
    model = nn.Sequential(*(nn.Linear(n, n) for n in (50, 40, 30, 20, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    parts = find_watched_tensors(model, [optimizer])
    groups = divided(parts, 3)
    assert sorted(n for group in groups for n in group) == list(range(len(parts)))
    sizes = [sum(parts[n].tensor.numel() for n in group) for group in groups]
    assert max(sizes) < 2 * min(sizes)
    assert len(divided(parts, 100)) == len(parts)
    assert divided([], 4) == [[]]


def test_what_it_takes_is_said_before_the_first_state_is_kept(caplog):
    model, optimizer = made()
    guard = Guard(model, optimizer, snapshot_interval=4, spread=5, delayed_check=True)
    with caplog.at_level(logging.INFO, "unsilent.guard"):
        for _ in range(3):
            guard.step(one_step, model, optimizer, torch.ones(5, 3))
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert said == (
        "guard: a large value is noticed at most 5 steps after the step of the fault; 3 states of at least 164 B each are kept "
        "(device), and the batches of up to 12 steps"
    )


def test_the_size_of_a_state_is_rounded_down_because_it_is_a_lower_bound():
    state = [torch.zeros(2056, dtype=torch.uint8)]  # 2.008 KiB, to the nearest hundredth 2.01
    text = make_plan(None, None, None, None, False).sentence(state, "device")
    assert "states of at least 2 KiB each" in text
