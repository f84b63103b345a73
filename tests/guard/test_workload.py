"""Training workloads under the guard, with their counters; across the end of an epoch, too."""

from __future__ import annotations

import pytest

from monitor.unreachable import Unreachable
from unsilent.guard import guard_training
from unsilent.workloads import load_training
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

STEPS = 47
"""The second epoch of the images begins with step 42."""


class Pending(Unreachable):
    """The steps that are still to be corrupted. Nothing leads to what it remembers, which is no part of the loop."""

    def __init__(self, *steps):
        self.steps = set(steps)

    def take(self, step):
        is_pending = step in self.steps
        self.steps.discard(step)
        return is_pending


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["train-resnet", "train-resnet-sgd", "train-chargpt"])
@pytest.mark.slow
def test_a_corrupted_workload_ends_as_one_that_was_not(name, late):
    workload = load_training(name, {})
    golden, state = workload.start(3), workload.start(3)
    for _ in range(STEPS):
        workload.step(golden)
    assert golden.epoch == (0 if "chargpt" in name else 1)
    guard, pending = guard_training(state, delayed_check=late), Pending(41, 44)

    def step():
        before = state.step
        record = workload.step(state)
        if pending.take(before):
            entries = next(iter(state.optimizers[0].state.values()))
            next(v for key, v in entries.items() if key in ("exp_avg", "momentum_buffer")).fill_(float("nan"))
        return record

    losses = []
    while state.step < STEPS:
        losses.append(guard.step(step).loss)
    guard.check_pending_steps()
    guard.close()
    assert len(guard.alarms) == 2
    assert first_snapshot_difference(workload.snapshot(golden), workload.snapshot(state)) is None
