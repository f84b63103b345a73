"""One faulty training run, from the golden state before its fault to its end, or to where its end is known.

A run ends early where its state has the golden bits again: every later step is golden's. It ends where a loss is not finite: what
class that is does not depend on what follows, and the published runs stop there; with a loss scaler, which leaves such updates
out, where parameters are not finite either. With a band it also ends when nothing has been
out of the fault-free band for so many steps, neither its loss nor what it is worth on held-out samples: a guess, and said.
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

from unsilent.engine.forking.golden import METRIC, GoldenTraining, metric_of
from unsilent.errors import InjectionError, UsageError, UserCodeError
from unsilent.faults import Fault
from unsilent.faults.drawn import Draw
from unsilent.faults.naming import SiteName
from unsilent.faults.receipts import Hit
from unsilent.outcomes.training import Ending
from unsilent.sites.landing import CorruptedTensor, Landings, Wanted
from unsilent.sites.training.step import Moment, Step
from unsilent.workloads.trainings.base import Evaluation, TrainingState

Watch = Callable[[TrainingState], NDArray[np.float64]]
AROUND = 2
"""Golden evaluations before and after one, whose range tells what is usual there."""


class Reason(StrEnum):
    """Why a run ended where it did."""

    END = "end"
    SAME_BITS = "same-bits"
    NOT_FINITE = "not-finite"
    HORIZON = "horizon"


class NotInjected(InjectionError):
    """A fault did not land in its step: the operation does not run in each."""


@dataclass(frozen=True, eq=False, slots=True)
class Forked:
    """How a faulty training run went.

    Attributes:
        step: of the fault. ending: from that step on; where the run has golden bits again, golden's values follow. ran: steps
            that were run from the fault on. reason: why no more. watched: float64[n, k], what was asked after the first of these
            steps. hits: what landed. usual: the largest magnitude in what was corrupted, before. evaluation: of the state that it
            ended in; None where nobody looked.
    """

    step: int
    ending: Ending
    ran: int
    reason: Reason
    watched: NDArray[np.float64]
    hits: tuple[Hit, ...]
    usual: float
    evaluation: Evaluation | None


@dataclass(frozen=True, slots=True)
class Band:
    """How far fault-free runs are from golden, and how long a run has to be that near.

    Attributes:
        loss: float64[steps], widest difference of the mean loss of the last ``window`` steps. test: of what a run is worth on
            held-out samples, beyond the range of golden's evaluations around. horizon: steps inside before a run is given up.
    """

    loss: NDArray[np.float64]
    horizon: int
    test: float = np.inf
    window: int = 1


class FaultyStep(Step):
    """A step that also says how large what it corrupted was before: ``usual``."""

    def _start(self) -> None:
        super()._start()
        self._landings: Landings = _Measured()

    @property
    def usual(self) -> float:
        """The largest magnitude in any corrupted tensor; 0 where nothing was corrupted."""
        assert isinstance(self._landings, _Measured)
        return self._landings.largest


class _Measured(Landings):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def corrupt(self, site: SiteName, wanted: Wanted, tensor: Tensor, *how: Any, **more: Any) -> CorruptedTensor | None:
        if tensor.numel() and tensor.is_floating_point():
            with torch.no_grad():
                self.largest = max(self.largest, float(tensor.detach().double().abs().max()))
        return super().corrupt(site, wanted, tensor, *how, **more)


class ForkEngine:
    """Forks of one golden training.

    Args:
        watch: asked after the first ``watched`` steps of a fork (None: all). band: see `Band`; golden must have been looked at on
            the way (``look``).
    """

    def __init__(
        self,
        golden: GoldenTraining,
        watch: Watch | None = None,
        band: Band | None = None,
        watched: int | None = None,
    ) -> None:
        self.golden, self._watch, self._band = golden, watch, band
        self._watched = golden.steps if watched is None else watched

    def run(self, step: int, faults: Sequence[Fault | Draw], moment: Moment = "start") -> Forked:
        """Corrupt one step, memory at a ``moment`` of it (see `Step`), and go on.

        Raises ``UsageError`` for a fault that does not fit the step, ``InjectionError`` for one that does not land.
        """
        golden, state = self.golden, self.golden.at(step)
        inside = None if self._band is None else _Inside(golden, self._band, step)
        losses, metric, watched = list[float](), list[float](), list[NDArray[np.float64]]()
        reason, usual, hits = Reason.END, 0.0, tuple[Hit, ...]()
        for now in range(step, golden.steps):
            if now == step:
                try:
                    with FaultyStep(state.model, faults, state.optimizers, moment=moment) as corrupted:
                        record = golden.workload.step(state)
                except UserCodeError:
                    raise
                except (InjectionError, UsageError) as error:
                    raise NotInjected(str(error)) from None
                hits, usual = tuple(corrupted.hits), corrupted.usual
            else:
                record = golden.workload.step(state)
            losses.append(record.loss)
            metric.append(metric_of(record))
            if self._watch is not None and len(watched) < self._watched:
                watched.append(self._watch(state))
            if not np.isfinite(record.loss) and not _goes_on(state):
                reason = Reason.NOT_FINITE
                break
            if self._is_golden(state, now, record.loss):
                reason = Reason.SAME_BITS
                break
            if inside is not None and inside.long_enough(state, now, record.loss):
                reason = Reason.HORIZON
                break
        ran = len(losses)
        evaluation = self._evaluation(state, reason)
        ending = self._ending(step, losses, metric, reason, evaluation)
        return Forked(step, ending, ran, reason, np.array(watched), hits, usual, evaluation)

    def _is_golden(self, state: TrainingState, now: int, loss: float) -> bool:
        """Whether the state after a step has golden's bits; a loss with other bits spares the hash."""
        same = struct.pack("d", loss) == struct.pack("d", float(self.golden.losses[now]))
        return same and self.golden.same(state, now)

    def _evaluation(self, state: TrainingState, reason: Reason) -> Evaluation | None:
        """Of the end; golden's where it has golden's bits, or is taken for one like it."""
        if reason is Reason.NOT_FINITE:
            return None
        return self.golden.workload.evaluate(state) if reason is Reason.END else self.golden.evaluation

    def _ending(
        self, step: int, losses: list[float], metric: list[float], reason: Reason, result: Evaluation | None
    ) -> Ending:
        golden, ran = self.golden, step + len(losses)
        if result is None:
            return Ending(np.array(metric), np.array(losses), float("nan"))
        rest = slice(0, 0) if reason is Reason.END else slice(ran, None)
        return Ending(
            np.concatenate([metric, golden.metric[rest]]),
            np.concatenate([losses, golden.losses[rest]]),
            held_out(result),
            same_bits=reason is Reason.SAME_BITS,
        )


def _goes_on(state: TrainingState) -> bool:
    """Whether a loss that is not finite may be the only one: a loss scaler leaves out the update."""
    return state.scaler is not None and all(bool(p.isfinite().all()) for p in state.model.parameters())


class _Inside:
    """How long one run has been inside the band."""

    def __init__(self, golden: GoldenTraining, band: Band, step: int) -> None:
        self._golden, self._band, self._count = golden, band, 0
        self._off = [0.0] * step  # differences of the loss; those before the fault are none
        self._worth = {at: held_out(result) for at, result in golden.looks.items()}

    def long_enough(self, state: TrainingState, now: int, loss: float) -> bool:
        """Told of each step; true where the run can be given up."""
        golden, band = self._golden, self._band
        self._off.append(loss - float(golden.losses[now]))
        off = abs(float(np.mean(self._off[-band.window :])))
        self._count = self._count + 1 if off <= band.loss[now] else 0
        if self._count < band.horizon:
            return False
        if golden.look is None or not np.isfinite(band.test):
            return True
        if not golden.looked(now):
            return False
        around = [self._worth[at] for i in range(-AROUND, AROUND + 1) if (at := now + i * golden.look) in self._worth]
        worth = held_out(golden.workload.evaluate(state))
        return min(around) - band.test <= worth <= max(around) + band.test


def held_out(evaluation: Evaluation) -> float:
    """Accuracy on held-out samples, or the negative loss."""
    return float(evaluation.metrics.get(METRIC, -evaluation.loss))
