"""A guard around a training loop: it notices a fault by what optimizers remember, goes back two steps, and does them again.

    guard = Guard(model, optimizer, scheduler)
    for batch in guard.over(loader):      # instead of: for batch in loader
        ...

When the body of the loop is over, the largest magnitude of every moment and moving statistic is compared with its bound. Beyond
it, the state of two steps ago is put back bit for bit (parameters, buffers, gradients, optimizer, schedules, generators) and the
two batches come again, each with the generators as they were. A step that is a function is guarded by ``guard.step(function)``.
If a bound is passed again meanwhile, the fault is not transient or the bound is wrong: `GuardStop`. A transient fault that is
noticed leaves nothing: the run ends with the bits of a fault-free one.

What passes a bound is large; small corruption is not noticed. The body must be repeatable: what it writes elsewhere (logs,
counters of its own) is written again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import nn
from torch.optim import Optimizer

from unsilent.detectors.gradient_history import FACTOR, Floats
from unsilent.errors import UnsilentError, UsageError
from unsilent.monitor.bounds import Bounds
from unsilent.monitor.history import Remembered, has_history, largest, remembered
from unsilent.recovery.ring import Ring, Where
from unsilent.workloads.trainings.randomness import held_generators

Batch = TypeVar("Batch")
Result = TypeVar("Result")
_guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Alarm:
    """What passed its bound: step of the guard (from 0), tensor, its kind, largest magnitude, bound and its rule."""

    step: int
    tensor: str
    kind: str
    largest: float
    bound: float
    rule: str

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.kind} {self.tensor} reaches {self.largest:.3g}, beyond its bound {self.bound:.3g} "
            f"({self.rule})"
        )


class GuardStop(UnsilentError):
    """A bound was passed again while two steps were done again: not a transient fault, or a bound that is too tight."""

    exit_code = 17

    def __init__(self, alarm: Alarm, first: Alarm) -> None:
        super().__init__(
            f"{alarm}, again after two steps were done again (first at {first}); the fault is not transient, or the bound is too "
            "tight: check this device, or give Guard a larger factor"
        )
        self.alarm, self.first = alarm, first


@dataclass
class Spent:
    """Seconds (wall) that the guard itself took, and over how many steps."""

    steps: int = 0
    check: float = 0.0
    snapshot: float = 0.0
    recovery: float = 0.0


class Guard:
    """Watches and recovers one training.

    Args:
        model: what is trained; its parameters, buffers and moving statistics. optimizers: one, or several. others: schedulers,
            loss scalers and the like, with ``state_dict`` and ``load_state_dict``.
        factor: of the calibrated bounds. bounds: largest magnitudes by name of the tensor (see `names`); the others are learnt.
        where: where the two states are kept: ``device``, ``host`` or ``file``. gradients: keep those, too; False where every step
            begins by setting them to zero. told: is told of every alarm.

    Raises:
        UsageError: the model is guarded already, an optimizer remembers no gradients, a part cannot be put back.

    Attributes:
        alarms: all there were. recoveries: how often two steps were done again. spent: what it cost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *others: Any,
        factor: float = FACTOR,
        bounds: dict[str, float] | None = None,
        where: Where = "device",
        gradients: bool = True,
        told: Callable[[Alarm], None] | None = None,
    ) -> None:
        if model in _guarded:
            raise UsageError(
                f"this {type(model).__name__} is guarded already; make one Guard for a model, or close() the first"
            )
        self._model = model
        found: Any = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._optimizers: list[Optimizer] = list(found)
        if not self._optimizers or not all(isinstance(o, Optimizer) for o in self._optimizers):
            raise UsageError("Guard needs a torch optimizer, or a list of them: Guard(model, optimizer)")
        self._told = told
        self._bounds = Bounds(factor, bounds)
        self._parts: list[Remembered] = []
        self._ring = Ring(model, self._optimizers, others, where=where, gradients=gradients)
        self._recent: list[tuple[Any, Callable[[], None]]] = []
        self.alarms: list[Alarm] = []
        self.recoveries = 0
        self.spent = Spent()
        _guarded.add(model)

    def close(self) -> None:
        """Let another guard take over."""
        _guarded.discard(self._model)
        self._ring.clear()

    def names(self) -> list[str]:
        """Of tensors that are remembered now: ``fc.weight/exp_avg``, ``bn1.running_var``; those of optimizers after a step."""
        return [part.name for part in remembered(self._model, self._optimizers)]

    def magnitudes(self) -> Floats:
        """The largest magnitude of each tensor of `names`, in that order, float64[n]."""
        parts = remembered(self._model, self._optimizers)
        return np.asarray(largest([part.tensor for part in parts]).cpu(), dtype=np.float64)

    def learn(self, names: Sequence[str], largest: Floats) -> None:
        """Begin with the bounds of a guard that has seen these clean steps: for a run that starts in the middle.

        Args:
            names: as of `names`; what is not remembered yet is learnt for later. largest: `magnitudes` after each step,
                float64[steps, n]; NaN where there was no such tensor yet.

        Raises:
            UsageError: the shape does not fit, a name comes twice, a value is infinite or negative.
        """
        self._bounds.learn(names, largest)

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, and those of two steps again after an alarm; the body between two of them is one step."""
        self._forget()  # what a user does between two epochs cannot be done again
        for batch in batches:
            pending = [(batch, held_generators())]
            first: Alarm | None = None
            while pending:
                batch, put_back = pending.pop(0)
                if first is not None:
                    put_back()
                self._keep(batch, put_back)
                yield batch
                alarm = self._check()
                if alarm is None:
                    continue
                if first is not None:
                    raise GuardStop(alarm, first)
                first = alarm
                pending = self._recover(alarm)

    def step(self, run: Callable[[], Result]) -> Result:
        """One step as a function without arguments, that can be run again; gives what it gave (the last time)."""
        given: list[Result] = []
        self.begin(lambda: given.append(run()))
        given.append(run())
        self.end()
        return given[-1]

    def begin(self, again: Callable[[], object]) -> None:
        """A step begins; ``again`` would do all of it once more. For loops that tell of the beginning and the end of a step."""
        self._keep(again, held_generators())

    def end(self) -> None:
        """The step that began is over; raises `GuardStop`."""
        first = self._check()
        if first is None:
            return
        for again, put_back in self._recover(first):
            put_back()
            self._keep(again, put_back)
            again()
            if (alarm := self._check()) is not None:
                raise GuardStop(alarm, first)

    def _forget(self) -> None:
        self._ring.clear()
        self._recent.clear()

    def _keep(self, batch: Any, put_back: Callable[[], None]) -> None:
        begun = time.perf_counter()
        self._ring.keep()
        self._recent = [*self._recent, (batch, put_back)][-2:]
        self.spent.snapshot += time.perf_counter() - begun

    def _recover(self, alarm: Alarm) -> list[tuple[Any, Callable[[], None]]]:
        """Put back the oldest state there is, and give the batches that are to be done again."""
        self.alarms.append(alarm)
        self.recoveries += 1
        if self._told is not None:
            self._told(alarm)
        begun = time.perf_counter()
        self._ring.back(len(self._ring))
        again, self._recent = self._recent, []
        self.spent.steps -= len(again)
        self.spent.recovery += time.perf_counter() - begun
        return again

    def _check(self) -> Alarm | None:
        """The first bound that is passed after a step."""
        begun = time.perf_counter()
        self._look()
        found = np.asarray(largest([part.tensor for part in self._parts]).cpu())
        alarm = self._judged(found)
        self.spent.check += time.perf_counter() - begun
        self.spent.steps += 1
        return alarm

    def _judged(self, found: Floats) -> Alarm | None:
        passed = self._bounds.passed(found)
        if passed is None:
            self._bounds.learn_step(found)
            return None
        part = self._parts[passed.part]
        return Alarm(self.spent.steps, part.name, part.kind, passed.largest, passed.bound, passed.rule)

    def _look(self) -> None:
        """See what is remembered now."""
        parts = remembered(self._model, self._optimizers)
        if [p.name for p in parts] != [p.name for p in self._parts] or not parts:
            for optimizer in self._optimizers:
                if optimizer.state and not has_history(optimizer):
                    raise UsageError(_without(optimizer))
            if not any(o.state for o in self._optimizers) and not parts:
                raise UsageError(_without(self._optimizers[0]))
            self._bounds.know(parts)
        self._parts = parts


def _without(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} remembers no gradients, so there is nothing to watch; "
        "train with momentum, or with an optimizer that keeps moments (Adam, AdamW, RMSprop)"
    )
