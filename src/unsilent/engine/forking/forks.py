"""One faulty training run, from the golden state before its fault until its result is known.

A run ends early if its state has the golden bits again, because every later step is then the same as the golden one. It
ends if a loss is not finite: its class does not depend on later steps, and the published runs stop there. With a loss
scaler, which skips such updates, it ends only if parameters are not finite either. With a band, it also ends if its
loss has been inside the fault-free band for a number of steps, and its score on held-out samples is inside too. The
result is then a guess, and is marked as such.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import InjectionError, UsageError, UserCodeError
from unsilent.engine.forking.golden import METRIC, GoldenTraining, metric_of
from unsilent.faults import Fault
from unsilent.faults.naming import SiteName
from unsilent.faults.receipts import AppliedFault
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.outcomes.training import TrainingCurves
from unsilent.sites.landing import CorruptedTensor, FaultOrDraw, Landings
from unsilent.sites.training.step import Moment, StepInjection
from unsilent.workloads.trainings.base import Evaluation, TrainingState

MeasureState = Callable[[TrainingState], NDArray[np.float64]]
AROUND = 2
"""Number of golden evaluations before and after a step whose range is taken as usual."""


class EndReason(StrEnum):
    """The reason why a faulty run ended."""

    END = "end"
    SAME_BITS = "same-bits"
    NOT_FINITE = "not-finite"
    HORIZON = "horizon"


class NotInjected(InjectionError):
    """Raised when a fault did not land in its step, because the operation does not run in every step."""


@dataclass(frozen=True, eq=False, slots=True)
class Forked:
    """The results of one faulty training run.

    Attributes:
        step: Step of the fault.
        ending: Curves from that step on; after the run has golden bits again, they have golden's values.
        steps_run: Number of steps that were run from the fault on.
        reason: Reason why the run ended.
        measurements: float64[n, k], results of ``measure_state`` after the first n of these steps.
        applied_faults: Faults as they were applied.
        reference_max: The largest magnitude in the corrupted tensors before the corruption.
        evaluation: Evaluation of the final state; None if it was not evaluated.
    """

    step: int
    ending: TrainingCurves
    steps_run: int
    reason: EndReason
    measurements: NDArray[np.float64]
    applied_faults: tuple[AppliedFault, ...]
    reference_max: float
    evaluation: Evaluation | None


@dataclass(frozen=True, slots=True)
class FaultFreeBand:
    """The range in which fault-free runs differ from golden.

    A faulty run that stays inside for long enough is ended.

    Attributes:
        loss_tolerance: float64[steps], largest difference of the mean loss over the last ``window`` steps.
        held_out_tolerance: Tolerance for the score on held-out samples, beyond the range of golden's neighbouring
            evaluations.
        steps_inside: Number of steps inside the band after which a run is ended.
    """

    loss_tolerance: NDArray[np.float64]
    steps_inside: int
    held_out_tolerance: float = np.inf
    window: int = 1


class FaultyStep(StepInjection):
    """A step with faults, which records the largest fault-free magnitude in corrupted tensors as ``reference_max``."""

    def _start(self) -> None:
        super()._start()
        self._landings: Landings = _Measured()

    @property
    def reference_max(self) -> float:
        """The largest magnitude in any tensor before its corruption; 0 if nothing was corrupted."""
        assert isinstance(self._landings, _Measured)
        return self._landings.largest


class _Measured(Landings):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def corrupt(
        self, site: SiteName, wanted: FaultOrDraw, tensor: Tensor, *how: Any, **more: Any
    ) -> CorruptedTensor | None:
        if tensor.numel() and tensor.is_floating_point():
            with torch.no_grad():
                self.largest = max(self.largest, float(tensor.detach().double().abs().max()))
        return super().corrupt(site, wanted, tensor, *how, **more)


class ForkEngine:
    """Runs faulty trainings that are forked from one golden training.

    Args:
        measure_state: Function that is called after the first ``measured_steps`` steps of a fork (None: all).
        band: See `FaultFreeBand`; for a tolerance of the held-out score, golden must have interim evaluations
            (``look``).
    """

    def __init__(
        self,
        golden: GoldenTraining,
        measure_state: MeasureState | None = None,
        band: FaultFreeBand | None = None,
        measured_steps: int | None = None,
    ) -> None:
        self.golden, self._watch, self._band = golden, measure_state, band
        self._watched = golden.steps if measured_steps is None else measured_steps

    def run(
        self, step: int, faults: Sequence[Fault | UnresolvedFault], moment: Moment = "start", lasts: int | None = 1
    ) -> Forked:
        """Inject faults in one step and continue the training.

        ``moment``: the moment in the step at which memory is corrupted; see `Step`. ``lasts``: number of steps in which
        the same faults act, from this step on; None: all steps until the end. Raises ``UsageError`` for a fault that
        does not fit the step, ``InjectionError`` for one that does not land.
        """
        golden, state = self.golden, self.golden.state_before_step(step)
        inside = None if self._band is None else _Inside(golden, self._band, step)
        losses, metric, watched = list[float](), list[float](), list[NDArray[np.float64]]()
        reason, usual, applied_faults = EndReason.END, 0.0, tuple[AppliedFault, ...]()
        last = golden.steps - 1 if lasts is None else step + lasts - 1
        for now in range(step, golden.steps):
            if now <= last:
                try:
                    with FaultyStep(state.model, faults, state.optimizers, moment=moment) as corrupted:
                        record = golden.workload.step(state)
                except UserCodeError:
                    raise
                except (InjectionError, UsageError) as error:
                    raise NotInjected(str(error)) from None
                if now == step:
                    applied_faults, usual = tuple(corrupted.applied_faults), corrupted.reference_max
            else:
                record = golden.workload.step(state)
            losses.append(record.loss)
            metric.append(metric_of(record))
            if self._watch is not None and len(watched) < self._watched:
                watched.append(self._watch(state))
            if not np.isfinite(record.loss) and not _goes_on(state):
                reason = EndReason.NOT_FINITE
                break
            if now < last:
                continue
            if self._is_golden(state, now, record.loss):
                reason = EndReason.SAME_BITS
                break
            if inside is not None and inside.long_enough(state, now, record.loss):
                reason = EndReason.HORIZON
                break
        ran = len(losses)
        evaluation = self._evaluation(state, reason)
        ending = self._ending(step, losses, metric, reason, evaluation)
        return Forked(step, ending, ran, reason, np.array(watched), applied_faults, usual, evaluation)

    def _is_golden(self, state: TrainingState, now: int, loss: float) -> bool:
        """Whether the state after a step is bit-identical to the golden state.

        The hash of the state is computed only if the loss is the golden one.
        """
        same = struct.pack("d", loss) == struct.pack("d", float(self.golden.losses[now]))
        return same and self.golden.is_golden_state(state, now)

    def _evaluation(self, state: TrainingState, reason: EndReason) -> Evaluation | None:
        """The final evaluation, or None after a loss that is not finite.

        The golden evaluation is used if the state is golden or counts as golden.
        """
        if reason is EndReason.NOT_FINITE:
            return None
        return self.golden.workload.evaluate(state) if reason is EndReason.END else self.golden.evaluation

    def _ending(
        self, step: int, losses: list[float], metric: list[float], reason: EndReason, result: Evaluation | None
    ) -> TrainingCurves:
        golden, ran = self.golden, step + len(losses)
        if result is None:
            return TrainingCurves(np.array(metric), np.array(losses), float("nan"))
        rest = slice(0, 0) if reason is EndReason.END else slice(ran, None)
        all_metrics = np.concatenate([metric, golden.metric[rest]])
        all_losses = np.concatenate([losses, golden.losses[rest]])
        same_bits = reason is EndReason.SAME_BITS
        return TrainingCurves(all_metrics, all_losses, held_out_score(result), same_bits=same_bits)


def _goes_on(state: TrainingState) -> bool:
    """Whether a run can continue after a loss that is not finite, because a loss scaler skips the update."""
    return state.scaler is not None and all(bool(p.isfinite().all()) for p in state.model.parameters())


class _Inside:
    """Counts the steps that one run has spent inside the fault-free band."""

    def __init__(self, golden: GoldenTraining, band: FaultFreeBand, step: int) -> None:
        self._golden, self._band, self._count = golden, band, 0
        self._off = [0.0] * step  # differences of the loss, which are 0 before the fault
        self._worth = {at: held_out_score(result) for at, result in golden.interim_evaluations.items()}

    def long_enough(self, state: TrainingState, now: int, loss: float) -> bool:
        """Whether the run has been inside the fault-free band for long enough to be ended.

        Called after each step.
        """
        golden, band = self._golden, self._band
        self._off.append(loss - float(golden.losses[now]))
        off = abs(float(np.mean(self._off[-band.window :])))
        self._count = self._count + 1 if off <= band.loss_tolerance[now] else 0
        if self._count < band.steps_inside:
            return False
        if golden.look is None or not np.isfinite(band.held_out_tolerance):
            return True
        if not golden.is_evaluated_after(now):
            return False
        around = [self._worth[at] for i in range(-AROUND, AROUND + 1) if (at := now + i * golden.look) in self._worth]
        worth = held_out_score(golden.workload.evaluate(state))
        return min(around) - band.held_out_tolerance <= worth <= max(around) + band.held_out_tolerance


def held_out_score(evaluation: Evaluation) -> float:
    """Accuracy on held-out samples, or the negative loss if there is no accuracy."""
    return float(evaluation.metrics.get(METRIC, -evaluation.loss))
