"""Planted faults under a guard, with the defaults of a CPU and of CUDA: how many are caught, and do those runs end bit-identical?

The law is fixed beforehand: bit 30 of one element is flipped once (in float32 the highest bit of the exponent), the element drawn
uniformly from all of one kind (parameters, first moments, second moments, moving statistics, in turn), at the end of a step drawn
uniformly from those after the warm-up. A training takes part if two fault-free runs of it end with the same bits.

Run: ``python -m benchmarks guard_faults [--device cuda]``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.guard import Subject, llama, small
from unsilent.guard import Guard, GuardStop
from unsilent.guard.bounds import WARM_UP
from unsilent.guard.guard import LOGGER
from unsilent.guard.guard_plan import GuardPlan, make_plan
from unsilent.guard.watched_tensors import KINDS, find_watched_tensors
from unsilent.outcomes.tensors import words_of

FAULTS = 60
STEPS = 60
BIT = 30


def main(rounds: int, device: str = "cpu") -> None:
    """Print a table for each training."""
    torch.set_num_threads(1)
    names = ("train-resnet", "train-chargpt")
    trainings: dict[str, Callable[[], Subject]] = {name: partial(small, name, device) for name in names}
    if device != "cpu":
        trainings["Llama, 5.3 M parameters"] = partial(llama, device)
    logging.getLogger(LOGGER).setLevel(logging.CRITICAL)
    for name, make in trainings.items():
        for on_cuda in (False, True):
            _report(name, make, make_plan(None, None, None, None, on_cuda))


def _report(name: str, make: Callable[[], Subject], plan: GuardPlan) -> None:
    golden = _end(make())
    if not _same(golden, _end(make())):
        print(f"\n{name}: two fault-free runs of {STEPS} steps end with different bits; no fault was planted")
        return
    rng, ends = np.random.default_rng(0), Counter[tuple[str, str]]()
    late: list[int] = []
    for number in range(FAULTS):
        subject = make()
        guard = Guard(
            subject.model, subject.optimizers, *subject.others, snapshot_gradients=subject.gradients, spread=plan.spread,
            snapshot_interval=plan.interval, delayed_check=plan.late,
        )  # fmt: skip
        step = int(rng.integers(WARM_UP + 2, STEPS))
        kind, reason = _run(subject, guard, number, step, float(rng.random()))
        if reason == "caught":
            late.append(guard.alarms[0].step - step)
            reason = "caught, bit-identical" if _same(golden, _tensors(subject)) else "caught, DIFFERENT"
        elif reason == "missed" and _same(golden, _tensors(subject)):
            reason = "missed, bit-identical"
        ends[kind, reason] += 1
        guard.close()
    print(f"\n{name}: {FAULTS} faults; {guard.plan}")
    for (kind, reason), count in sorted(ends.items()):
        print(f"  {kind:18}{reason:24}{count:4}")
    caught = sum(count for (_, reason), count in ends.items() if reason.startswith("caught"))
    print(f"  caught {caught} of {FAULTS}; steps from the fault to the alarm at most {max(late, default=0)}")


def _run(subject: Subject, guard: Guard, number: int, at: int, place: float) -> tuple[str, str]:
    """Run with one fault; its kind, and how the run ended: caught, missed or stopped. ``place``: of the element, from 0 to 1."""
    planted: list[str] = []

    def step() -> None:
        subject.step()
        if guard.overhead.steps == at and not planted:
            planted.append(_plant(subject, number, place))

    try:
        for _ in range(STEPS):
            guard.step(step)
        guard.check_pending_steps()
    except GuardStop:
        return planted[0], "stopped"
    return planted[0], "caught" if guard.recoveries else "missed"


def _plant(subject: Subject, number: int, fraction: float) -> str:
    parts = find_watched_tensors(subject.model, subject.optimizers)
    kinds = [kind for kind in KINDS if any(part.kind == kind for part in parts)]
    kind = kinds[number % len(kinds)]
    tensors = [part.tensor.detach() for part in parts if part.kind == kind]
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    place = int(fraction * int(ends[-1]))
    which = int(np.searchsorted(ends, place, side="right"))
    words = tensors[which].data.view(torch.int32).view(-1)
    words[place - int(ends[which] - tensors[which].numel())] ^= 1 << BIT
    return kind


def _end(subject: Subject) -> list[Tensor]:
    for _ in range(STEPS):
        subject.step()
    return _tensors(subject)


def _tensors(subject: Subject) -> list[Tensor]:
    moments = [v for o in subject.optimizers for table in o.state.values() for v in table.values()]
    return [
        t.detach().clone()
        for t in (*subject.model.parameters(), *subject.model.buffers(), *moments)
        if isinstance(t, Tensor)
    ]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, map(words_of, one), map(words_of, other)))
