"""Runs one trial under the guard, from a state before the fault and with bounds from the golden run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.engine.forking import GoldenTraining
from unsilent.faults.receipts import AppliedFault
from unsilent.guard import GuardStop, RepeatabilityWarning
from unsilent.guard.guard import LOGGER
from unsilent.guard.guard_plan import SNAPSHOT_INTERVAL
from unsilent.guard.watched_tensors import HISTORY, WatchedTensor, find_watched_tensors, magnitudes_of
from unsilent.guard.workload import guard_training
from unsilent.monitor import Alarm
from unsilent.sites.training.step import StepInjection
from unsilent.studies.training.fault_sampler import SampledFault
from unsilent.studies.training.spec import MOMENTS
from unsilent.workloads.trainings.base import TrainingState

Floats = NDArray[np.float64]
ALARM_WAIT_STEPS = 10
"""Number of steps after the step of the fault in which the run waits for an alarm; after the second step it is too late."""


class GoldenHistory:
    """The largest magnitudes of optimizer state and moving statistics after each step of the golden run."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        """Largest magnitude of each tensor by name, after each step."""

    def record_step(self, state: TrainingState) -> Floats:
        """Record the magnitudes after a step of the golden run.

        Returns the largest magnitude of each kind, float64[3].
        """
        parts, values = _now(state)
        self.steps.append(dict(zip([part.name for part in parts], values.tolist(), strict=True)))
        return _summary([part.kind for part in parts], values)

    def magnitudes_before(self, step: int) -> tuple[list[str], Floats]:
        """Names of the tensors, and their magnitudes after each step before ``step``, float64[step, n].

        A magnitude is NaN if the tensor did not exist yet.
        """
        names = list(dict.fromkeys(name for result in self.steps[:step] for name in result))
        rows = [[result.get(name, np.nan) for name in names] for result in self.steps[:step]]
        return names, np.array(rows, dtype=np.float64).reshape(step, len(names))

    def largest_by_kind(self, state: TrainingState) -> Floats:
        """The largest current magnitude of each kind of history, float64[3]."""
        parts, values = _now(state)
        return _summary([part.kind for part in parts], values)


def _now(state: TrainingState) -> tuple[list[WatchedTensor], Floats]:
    parts = find_watched_tensors(state.model, state.optimizers)
    return parts, np.asarray(magnitudes_of(parts).cpu(), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class GuardedRunResult:
    """The result of a run under the guard.

    Attributes:
        end_reason: ``recovered`` (an alarm, and a final state identical to the fault-free run's), ``missed``
            (no alarm within `ALARM_WAIT_STEPS` steps, or another final state), ``stopped`` (`GuardStop`).
        detected_after: Number of steps from the fault to the alarm; ``None`` without an alarm.
        alarm: Text of the alarm.
        steps_run: Number of steps run, including repeated ones.
        bit_identical: Whether the final state is identical to the fault-free run's.
        applied_faults: Receipts of the injected faults.
    """

    end_reason: str
    detected_after: int | None
    alarm: str
    steps_run: int
    bit_identical: bool
    applied_faults: tuple[AppliedFault, ...]


def run_guarded_trial(
    golden: GoldenTraining, sampled_fault: SampledFault, history: GoldenHistory, moment: str = "start"
) -> GuardedRunResult:
    """Run a trial under the guard; ``moment`` is one of `MOMENTS`, for faults in memory."""
    step = sampled_fault.injection.step
    begin = (
        max(0, step // SNAPSHOT_INTERVAL - 1) * SNAPSHOT_INTERVAL
    )  # a guard active from the first step on would have snapshots of this state and the next one
    state = golden.state_before_step(begin)
    alarms: list[tuple[int, Alarm]] = []
    applied_faults: list[AppliedFault] = []
    runs: list[int] = []

    def one() -> None:
        runs.append(state.step)
        if state.step == step and not applied_faults:
            with StepInjection(
                state.model, sampled_fault.faults, state.optimizers, moment=MOMENTS[moment]
            ) as corrupted:
                golden.workload.step(state)
            applied_faults.extend(corrupted.applied_faults)
        else:
            golden.workload.step(state)

    reason = "missed"
    with (
        _without_guard_messages(),
        guard_training(
            state, on_alarm=lambda a: alarms.append((state.step - 1, a)), snapshot_interval=SNAPSHOT_INTERVAL, spread=1
        ) as guard,
    ):
        guard.learn(*history.magnitudes_before(begin))
        try:
            while state.step <= min(step + ALARM_WAIT_STEPS, golden.steps - 1) and not alarms:
                if moment == "between" and state.step == step and not applied_faults:
                    with StepInjection(state.model, sampled_fault.faults, state.optimizers) as corrupted:
                        pass
                    applied_faults.extend(corrupted.applied_faults)
                guard.step(one)
            if alarms and golden.is_golden_state(state, state.step - 1):
                reason = "recovered"
        except GuardStop:
            reason = "stopped"
    at, alarm = alarms[0] if alarms else (None, None)
    return GuardedRunResult(
        reason,
        None if at is None else at - step,
        alarm.summary if alarm else "",
        len(runs),
        reason == "recovered",
        tuple(applied_faults),
    )


@contextmanager
def _without_guard_messages() -> Iterator[None]:
    """A context in which the guard neither logs nor warns."""
    log = logging.getLogger(LOGGER)
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RepeatabilityWarning)
            yield
    finally:
        log.disabled = before


def _summary(kinds: list[str], values: Floats) -> Floats:
    """The largest magnitude of each kind of history, float64[3].

    The result is infinity if a value is NaN, and NaN if a kind has no tensor.
    """
    array = np.full(len(HISTORY), np.nan)
    for number, kind in enumerate(HISTORY):
        if of_kind := [v for v, k in zip(values.tolist(), kinds, strict=True) if k == kind]:
            array[number] = max(np.inf if np.isnan(v) else abs(v) for v in of_kind)
    return array
