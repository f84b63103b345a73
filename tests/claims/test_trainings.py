"""Full runs of the built-in trainings: what they reach, what they cost, and that they come back bit for bit.

Claims (docs/evidence/training.md): at least 1,000 steps in at most 15 s of one core, the floors below, and the same bits when
run again, in fresh objects, in the same ones and in a new process.
"""

from __future__ import annotations

import time

import pytest
import torch

from unsilent.workloads import TRAININGS, load_training
from unsilent.workloads.trainings.restore_check import check_restorable
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

SECONDS = 15
FLOORS = {
    "train-resnet": 0.96,
    "train-resnet-nobn": 0.9,
    "train-resnet-sgd": 0.95,
    "train-vit": 0.88,
    "train-chargpt": 0.38,
    "train-llama": 0.48,
    "train-dlrm": 0.72,
}
SEEDS = 3


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", TRAININGS)
def test_full_runs(name):
    workload = load_training(name)
    assert workload.steps >= 1000
    reached, seconds = [], []
    for seed in range(SEEDS):
        begun = time.process_time()
        state = workload.start(seed)
        for step in range(workload.steps):
            if seed == 0 and step == workload.steps // 2:
                half = workload.snapshot(state)
            workload.step(state)
        seconds.append(time.process_time() - begun)
        reached.append(workload.evaluate(state))
        if seed == 0:
            end = workload.snapshot(state)
    numbers = sum(p.numel() for p in state.model.parameters())
    shown = "  ".join(f"{e.metrics['accuracy']:.3f}" for e in reached)
    print(
        f"\n{name}: {numbers} parameters, {workload.steps} steps, {min(seconds):.1f} to {max(seconds):.1f} s, accuracy {shown}"
    )
    assert max(seconds) <= SECONDS
    assert min(e.metrics["accuracy"] for e in reached) >= FLOORS[name]
    other = workload.restore(half)
    for _ in range(workload.steps - workload.steps // 2):
        workload.step(other)
    assert first_snapshot_difference(workload.snapshot(other), end) is None


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("amp", ["none", "bfloat16"])
def test_comes_back_in_every_way(name, amp):
    found = check_restorable(load_training(name, {"amp": amp}), steps=5)
    assert found.why_not_new_process is None
    assert len(found.ways_checked) == 4
