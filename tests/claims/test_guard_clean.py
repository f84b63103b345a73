"""No alarm in more than 20,000 clean steps of each of three trainings: whole runs, each with a seed and a guard of its own.

With no alarm in n steps the one-sided 95 % upper bound on the rate is 1 - 0.05^(1/n), about 3 / n (Clopper and Pearson); it takes
steps as independent, and the rate of those runs.
"""

from __future__ import annotations

import pytest
import torch

from unsilent.guard import AnalyticBounds, guard_training
from unsilent.workloads import load_training

pytestmark = pytest.mark.claim
RUNS = 17
STEPS = 20_000


@pytest.mark.parametrize("rule", ["calibrated", "analytic"])
@pytest.mark.parametrize("name", ["train-resnet", "train-resnet-sgd", "train-chargpt"])
def test_clean_steps_raise_no_alarm(name, rule, capsys):
    torch.set_num_threads(1)
    workload = load_training(name, {})
    steps, alarms = 0, []
    for seed in range(RUNS):
        state = workload.start(seed)
        guard = guard_training(state, bounds=AnalyticBounds() if rule == "analytic" else None)
        for _ in range(workload.steps):
            guard.step(lambda state=state: workload.step(state))
        steps += guard.overhead.steps
        alarms += guard.alarms
        guard.close()
    bound = 1 - 0.05 ** (1 / steps)
    with capsys.disabled():
        print(
            f"\n{name}, {rule}: {len(alarms)} alarms in {steps} clean steps of {RUNS} runs; with none, at most {bound:.2e} a step"
        )
    assert steps >= STEPS
    assert not alarms, [str(a) for a in alarms[:5]]
