"""One struck training, from the golden state before its fault to its end, or to where its end is known.

A run ends early where its state has the golden bits again: every later step is golden's. It ends where a loss is not finite: what
class that is does not depend on what follows, and the published runs stop there. With a horizon it also ends when nothing has
been out of the fault-free band for so many steps, which is a guess, and said.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from unsilent.engine.forking.golden import METRIC, GoldenTraining, metric_of, state_hash
from unsilent.faults import Fault
from unsilent.faults.drawn import Draw
from unsilent.faults.receipts import Hit
from unsilent.outcomes.training import Ending
from unsilent.sites.training.step import Step
from unsilent.workloads.trainings.base import Evaluation, TrainingState

Watch = Callable[[TrainingState], NDArray[np.float64]]


class Reason(StrEnum):
    """Why a run ended where it did."""

    END = "end"
    SAME_BITS = "same-bits"
    NOT_FINITE = "not-finite"
    HORIZON = "horizon"


@dataclass(frozen=True, eq=False, slots=True)
class Forked:
    """How a struck training went.

    Attributes:
        step: of the fault. ending: from that step on; where the run has golden bits again, golden's values follow. ran: steps
            that were run from the fault on. reason: why no more. watched: float64[ran, k], what was asked after each of these
            steps. hits: what landed.
    """

    step: int
    ending: Ending
    ran: int
    reason: Reason
    watched: NDArray[np.float64]
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """How far fault-free runs are from golden (largest difference of the loss of each step, float64[steps]), and the horizon."""

    loss: NDArray[np.float64]
    horizon: int


class ForkEngine:
    """Forks of one golden training."""

    def __init__(self, golden: GoldenTraining, watch: Watch | None = None, band: Band | None = None) -> None:
        self.golden, self._watch, self._band = golden, watch, band

    def run(self, step: int, faults: Sequence[Fault | Draw]) -> Forked:
        """Strike one step, and go on.

        Raises ``UsageError`` for a fault that does not fit the step, ``InjectionError`` for one that does not land.
        """
        golden = self.golden
        state = golden.at(step)
        losses, metric, watched = [], [], []
        reason, inside, hits = Reason.END, 0, tuple[Hit, ...]()
        for now in range(step, golden.steps):
            if now == step:
                with Step(state.model, faults, state.optimizers) as struck:
                    record = golden.workload.step(state)
                hits = tuple(struck.hits)
            else:
                record = golden.workload.step(state)
            losses.append(record.loss)
            metric.append(metric_of(record))
            watched.append(np.zeros(0) if self._watch is None else self._watch(state))
            if not np.isfinite(record.loss):
                reason = Reason.NOT_FINITE
                break
            if self._is_golden(state, now, record.loss):
                reason = Reason.SAME_BITS
                break
            if self._band is not None:
                inside = inside + 1 if abs(record.loss - golden.losses[now]) <= self._band.loss[now] else 0
                if inside >= self._band.horizon:
                    reason = Reason.HORIZON
                    break
        return Forked(
            step, self._ending(state, step, losses, metric, reason), len(losses), reason, np.array(watched), hits
        )

    def _is_golden(self, state: TrainingState, now: int, loss: float) -> bool:
        """Whether the state after a step has golden's bits; a loss with other bits spares the hash."""
        same = struct.pack("d", loss) == struct.pack("d", float(self.golden.losses[now]))
        return same and state_hash(state) == self.golden.hashes[now]

    def _ending(
        self, state: TrainingState, step: int, losses: list[float], metric: list[float], reason: Reason
    ) -> Ending:
        golden, ran = self.golden, step + len(losses)
        if reason is Reason.NOT_FINITE:
            return Ending(np.array(metric), np.array(losses), float("nan"))
        same = reason is Reason.SAME_BITS
        rest = slice(ran, None) if same or reason is Reason.HORIZON else slice(0, 0)
        test = golden.evaluation if same else golden.workload.evaluate(state)
        return Ending(
            np.concatenate([metric, golden.metric[rest]]),
            np.concatenate([losses, golden.losses[rest]]),
            held_out(test),
            same_bits=same,
        )

    def golden_ending(self, step: int) -> Ending:
        """What golden did from a step on."""
        found = self.golden.evaluation
        return Ending(self.golden.metric[step:], self.golden.losses[step:], held_out(found), same_bits=True)


def held_out(found: Evaluation) -> float:
    """Accuracy on held-out samples, or the negative loss."""
    return float(found.metrics.get(METRIC, -found.loss))
