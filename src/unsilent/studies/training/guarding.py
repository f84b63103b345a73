"""One trial again under the guard: forked where the guard keeps a state before the fault, with the bounds learnt by then."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from unsilent.engine.forking import GoldenTraining
from unsilent.faults.receipts import Hit
from unsilent.monitor import Alarm, GuardStop, RepeatabilityWarning
from unsilent.monitor.guard import EVERY, LOGGER
from unsilent.monitor.history import HISTORY, Remembered, magnitudes_of, watched
from unsilent.monitor.workload import guard_training
from unsilent.sites.training.step import Step
from unsilent.studies.training.fault_sampler import SampledFault
from unsilent.studies.training.spec import MOMENTS, Floats
from unsilent.workloads.trainings.base import TrainingState

AFTER = 10
"""Steps after that of the fault in which an alarm is waited for; one after the second comes too late."""


class History:
    """What optimizers and normalisation layers of golden remembered after each step."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        """After each step: name -> largest magnitude."""

    def watch(self, state: TrainingState) -> Floats:
        """Note a step of golden."""
        parts, values = _now(state)
        self.steps.append(dict(zip([part.name for part in parts], values.tolist(), strict=True)))
        return _summary([part.kind for part in parts], values)

    def before(self, step: int) -> tuple[list[str], Floats]:
        """Names, and the largest magnitudes after each step before this one, float64[step, n]; NaN where there was none yet."""
        names = list(dict.fromkeys(name for result in self.steps[:step] for name in result))
        rows = [[result.get(name, np.nan) for name in names] for result in self.steps[:step]]
        return names, np.array(rows, dtype=np.float64).reshape(step, len(names))

    def summary(self, state: TrainingState) -> Floats:
        """The largest of each kind now, float64[3]."""
        parts, values = _now(state)
        return _summary([part.kind for part in parts], values)


def _now(state: TrainingState) -> tuple[list[Remembered], Floats]:
    parts = watched(state.model, state.optimizers)
    return parts, np.asarray(magnitudes_of(parts).cpu(), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Guarded:
    """How it went.

    Attributes:
        reason: ``recovered`` (an alarm, and a final state identical to the fault-free run's), ``missed`` (no alarm within two
            steps of the fault, or none that helped), ``stopped`` (`GuardStop`).
        caught: steps from the fault to the alarm; None without one.
        alarm: its text.
        steps_run: steps that were run, repeated ones included.
        bit_identical: whether the final state is identical to the fault-free run's.
        hits: receipts of the injected faults.
    """

    reason: str
    caught: int | None
    alarm: str
    steps_run: int
    bit_identical: bool
    hits: tuple[Hit, ...]


def guarded(golden: GoldenTraining, drawn: SampledFault, history: History, moment: str = "start") -> Guarded:
    """Corrupt a step of a training that is guarded; ``moment``: one of `MOMENTS`, when faults corrupt memory."""
    step = drawn.injection.step
    begin = max(0, step // EVERY - 1) * EVERY  # a guard from the first step on would keep this state and the next one
    state = golden.at(begin)
    alarms: list[tuple[int, Alarm]] = []
    hits: list[Hit] = []
    runs: list[int] = []

    def one() -> None:
        runs.append(state.step)
        if state.step == step and not hits:
            with Step(state.model, drawn.faults, state.optimizers, moment=MOMENTS[moment]) as corrupted:
                golden.workload.step(state)
            hits.extend(corrupted.hits)
        else:
            golden.workload.step(state)

    reason = "missed"
    with _unreported(), guard_training(state, on_alarm=lambda a: alarms.append((state.step - 1, a))) as guard:
        guard.learn(*history.before(begin))
        try:
            while state.step <= min(step + AFTER, golden.steps - 1) and not alarms:
                if moment == "between" and state.step == step and not hits:
                    with Step(state.model, drawn.faults, state.optimizers) as corrupted:
                        pass
                    hits.extend(corrupted.hits)
                guard.step(one)
            if alarms and golden.same(state, state.step - 1):
                reason = "recovered"
        except GuardStop:
            reason = "stopped"
    at, alarm = alarms[0] if alarms else (None, "")
    return Guarded(reason, None if at is None else at - step, str(alarm), len(runs), reason == "recovered", tuple(hits))


@contextmanager
def _unreported() -> Iterator[None]:
    """What the guard does in a campaign is in its rows, and neither logged nor warned of."""
    log = logging.getLogger(LOGGER)
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RepeatabilityWarning)
            yield
    finally:
        log.disabled = before


def _summary(kinds: list[str], values: Floats) -> Floats:
    """The largest magnitude of each kind of history, float64[3]: inf for what is no number, NaN where there is none."""
    array = np.full(len(HISTORY), np.nan)
    for number, kind in enumerate(HISTORY):
        if own := [v for v, k in zip(values.tolist(), kinds, strict=True) if k == kind]:
            array[number] = max(np.inf if np.isnan(v) else abs(v) for v in own)
    return array
