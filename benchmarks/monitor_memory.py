"""How many harmful memory faults between two steps the fingerprints of a monitor catch: all of them, or a rotating part.

    python -m benchmarks.monitor_memory [--training train-chargpt] [--steps 200] [--harmful 100] [--interval 8]

One bit of a parameter or of a moment is flipped before a step of the fault-free run, unnoticed by torch, and the training goes on
to its end. A fault is harmful if the training ends with a value that is not finite, or with a held-out loss that is worse than
those of trainings with other orders of the data, by more than these differ. Each harmful fault is then injected again under a
monitor that began some steps before: with the full fingerprint, the rotating one, and none. Reported is the share whose bits were
noticed before the next optimizer step, and the share with any alarm within the period of the rotation.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from unsilent.engine.forking import GoldenTraining
from unsilent.monitor.monitor import Monitor
from unsilent.statistics.intervals import clopper_pearson
from unsilent.workloads import load_training
from unsilent.workloads.trainings.base import Seeds, TrainingState

BEFORE = 60
"""Steps that the monitor has seen before a fault."""
SEEDS = 6


class MemoryFault(NamedTuple):
    """Flip one bit before a step."""

    step: int
    parameter: int
    key: str
    place: float
    bit: int

    def flip(self, state: TrainingState) -> None:
        """In place, unnoticed by torch."""
        (optimizer,) = state.optimizers
        parameter = [p for group in optimizer.param_groups for p in group["params"]][self.parameter]
        tensor = parameter if not self.key else optimizer.state[parameter][self.key]
        words = tensor.detach().numpy(force=True).reshape(-1).view(np.uint32)
        words[int(self.place * len(words))] ^= np.uint32(1 << self.bit)


def final_loss(training: Any, state: TrainingState, steps: int) -> float:
    """Held-out loss at the end; infinity where a loss is not finite."""
    while state.step < steps:
        if not np.isfinite(training.step(state).loss):
            return float("inf")
    loss = float(training.evaluate(state).loss)
    return loss if np.isfinite(loss) else float("inf")


def drawn(generator: np.random.Generator, count: int, steps: int) -> MemoryFault:
    """A fault: uniform over steps, tensors, elements and bits of float32."""
    key = str(generator.choice(["", "exp_avg", "exp_avg_sq"]))
    step = int(generator.integers(BEFORE + 1, steps - 10))
    return MemoryFault(
        step, int(generator.integers(count)), key, float(generator.random()), int(generator.integers(32))
    )


def monitored(
    training: Any, golden: GoldenTraining, fault: MemoryFault, period: int, **options: Any
) -> tuple[bool, bool]:
    """Whether bits were noticed before the next step, and whether there was any alarm within a period."""
    state = golden.state_before_step(fault.step - BEFORE)
    events: list[Any] = []
    with Monitor(state.model, state.optimizers, sinks=[events.append], ranks="alone", **options) as monitor:
        while state.step < min(fault.step + period, golden.steps):
            if state.step == fault.step:
                fault.flip(state)
            training.step(state)
        alarms = [one for one in monitor.alarms if one.level == "alarm" and one.step >= BEFORE]
    return any(one.feature == "fingerprint" and one.step == BEFORE for one in alarms), bool(alarms)


def main() -> None:
    """Draw, find the harmful ones, and inject them under a monitor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--training", default="train-chargpt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--harmful", type=int, default=100)
    parser.add_argument("--interval", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    training = load_training(asked.training, {"steps": str(asked.steps)})
    golden = GoldenTraining(training, Seeds.same_for_all(0))
    others = [final_loss(training, training.start(Seeds(0, seed, 0, 0)), asked.steps) for seed in range(1, SEEDS + 1)]
    limit = max(others) + (max(others) - min(others))
    generator = np.random.default_rng(asked.seed)
    count = len([p for group in golden.state_before_step(0).optimizers[0].param_groups for p in group["params"]])
    harmful: list[MemoryFault] = []
    tried = 0
    while len(harmful) < asked.harmful:
        fault, tried = drawn(generator, count, asked.steps), tried + 1
        state = golden.state_before_step(fault.step)
        fault.flip(state)
        if final_loss(training, state, asked.steps) > limit:
            harmful.append(fault)
    result: dict[str, Any] = {
        "training": asked.training, "steps": asked.steps, "tried": tried, "harmful": len(harmful),
        "of parameters": sum(not one.key for one in harmful), "golden loss": golden.evaluation.loss, "harmful above": limit,
    }  # fmt: skip
    for name, interval, fingerprint in (
        ("full", 1, "full"), ("rotating", asked.interval, "rotating"), ("off", 1, "off"),
    ):  # fmt: skip
        begun = time.process_time()
        found = [
            monitored(training, golden, one, asked.interval, sampling=f"fixed:{interval}", fingerprint=fingerprint)
            for one in harmful
        ]
        bits, alarms = (sum(column) for column in zip(*found, strict=True))
        interval95 = clopper_pearson(bits, len(found), 0.95)
        result[name] = {
            "bits noticed before the next step": bits, "interval 95 %": [round(interval95.low, 3), round(interval95.high, 3)],
            f"any alarm within {asked.interval} steps": alarms, "cpu seconds": round(time.process_time() - begun, 1),
        }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
