"""A guard around a training loop: it notices a fault by what optimizers remember, goes back two steps, and does them again.

    guard = Guard(model, optimizer, scheduler)
    for batch in guard.over(loader):      # instead of: for batch in loader
        ...

When the body of the loop is over, the largest magnitude of every moment and moving statistic is compared with its bound. Beyond
it, the state of two steps ago is put back bit for bit (parameters, buffers, gradients, optimizer, schedules, generators) and the
two batches come again, each with the generators as they were. A step that is a function is guarded by ``guard.step(function)``.
If a bound is passed again meanwhile, the fault is not transient or the bound is wrong: `GuardStop`. A transient fault that is
noticed leaves nothing: the run ends with the bits of a fault-free one.

Late: on CUDA the magnitudes of a step are read after the next one, so that nothing waits for the device. The oldest of the two
states is still the one before the step that was at fault. What is read last is settled when the loop ends.

What passes a bound is large; small corruption is not noticed. The body must be repeatable: what it writes elsewhere (logs,
counters of its own) is written again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import nn
from torch.optim import Optimizer

from unsilent.detectors.gradient_history import FACTOR, Floats
from unsilent.errors import UsageError
from unsilent.monitor.alarms import Alarm, GuardStop, Spent
from unsilent.monitor.analytic import RULE, Analytic, Positions, analytic_bounds
from unsilent.monitor.bounds import Bounds
from unsilent.monitor.history import Remembered, has_history, largest, remembered, unchanged
from unsilent.monitor.reading import Ranks, Reading, check_alike, group_of
from unsilent.recovery.ring import Ring, Where
from unsilent.workloads.trainings.randomness import held_generators

__all__ = ["Alarm", "Guard", "GuardStop"]

Batch = TypeVar("Batch")
Result = TypeVar("Result")
_guarded: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()


class Guard:
    """Watches and recovers one training.

    Args:
        model: what is trained; its parameters, buffers and moving statistics. optimizers: one, or several. others: schedulers,
            loss scalers and the like, with ``state_dict`` and ``load_state_dict``.
        factor: of the calibrated bounds. bounds: largest magnitudes by name of the tensor (see `names`), or `Analytic`; what
            these do not cover is calibrated.
        where: where the two states are kept: ``device``, ``host`` or ``file``. gradients: keep those, too; False where every step
            begins by setting them to zero.
        late: read the magnitudes of a step after the next one; None: where they are on CUDA. ranks: whose magnitudes count, so
            that all go back together: ``all`` of torch.distributed where it is in use, ``alone``, or a process group.
        told: is told of every alarm.

    Raises:
        UsageError: the model or an optimizer is guarded already, an optimizer remembers no gradients, a part cannot be put back.

    Attributes:
        alarms: all there were. recoveries: how often two steps were done again. spent: what it cost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *others: Any,
        factor: float = FACTOR,
        bounds: Mapping[str, float] | Analytic | None = None,
        where: Where = "device",
        gradients: bool = True,
        late: bool | None = None,
        ranks: Ranks = "all",
        told: Callable[[Alarm], None] | None = None,
    ) -> None:
        self._model = model
        found: Any = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._optimizers: list[Optimizer] = list(found)
        if not self._optimizers or not all(isinstance(o, Optimizer) for o in self._optimizers):
            raise UsageError("Guard needs a torch optimizer, or a list of them: Guard(model, optimizer)")
        for part in (model, *self._optimizers):
            if part in _guarded:
                raise UsageError(
                    f"this {type(part).__name__} is guarded already; make one Guard for a training, or close() the first"
                )
        self._told, self._late, self._ranks = told, late, ranks
        group_of(ranks)
        self._analytic = bounds if isinstance(bounds, Analytic) else None
        self._bounds = Bounds(factor, None if isinstance(bounds, Analytic) else bounds)
        self._parts: list[Remembered] = []
        self._ring = Ring(model, self._optimizers, others, where=where, gradients=gradients)
        self._recent: list[tuple[Any, Callable[[], None]]] = []
        self._unread: Reading | None = None
        self._positions = Positions(model) if self._analytic else None
        self.alarms: list[Alarm] = []
        self.recoveries = 0
        self.spent = Spent()
        _guarded.update((model, *self._optimizers))

    def close(self) -> None:
        """Let another guard take over."""
        _guarded.difference_update((self._model, *self._optimizers))
        if self._positions is not None:
            self._positions.close()
        self.forget()

    @property
    def nbytes(self) -> int:
        """Memory that both states take."""
        return self._ring.nbytes

    def names(self) -> list[str]:
        """Of tensors that are remembered now: ``fc.weight/exp_avg``, ``bn1.running_var``; those of optimizers after a step."""
        return [part.name for part in remembered(self._model, self._optimizers)]

    def magnitudes(self) -> Floats:
        """The largest magnitude of each tensor of `names`, in that order, float64[n]; of this rank alone."""
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
        self.forget()  # what a user does between two epochs cannot be done again
        for batch in batches:
            self._keep(batch)
            yield batch
            if (alarm := self._check()) is not None:
                yield from self._redone(alarm)
        if (alarm := self._last()) is not None:
            after = held_generators()  # the loader may have drawn at its end
            yield from self._redone(alarm)
            after()

    def step(self, run: Callable[..., Result], *arguments: Any) -> Result:
        """One step, ``run(*arguments)``, that can be run again with the same arguments; gives what it gave (the last time)."""
        given: list[Result] = []
        self.begin(lambda: given.append(run(*arguments)))
        given.append(run(*arguments))
        self.end()
        return given[-1]

    def begin(self, again: Callable[[], object]) -> None:
        """A step begins; ``again`` would do all of it once more. For loops that tell of the beginning and the end of a step."""
        self._keep(again)

    def end(self) -> None:
        """The step that began is over; raises `GuardStop`."""
        self._run_again(self._check())

    def settle(self) -> None:
        """Have no step unread, before a checkpoint or at the end; after `end`, never inside `over`. Raises `GuardStop`."""
        self._run_again(self._last())

    def forget(self) -> None:
        """Begin anew with states, not with bounds: what was done to the training since the last step cannot be done again."""
        self._ring.clear()
        self._recent.clear()
        self._unread, self._parts = None, []

    def _run_again(self, first: Alarm | None) -> None:
        if first is not None:
            for again in self._redone(first):
                again()

    def _redone(self, first: Alarm) -> Iterator[Any]:
        """What the last steps began with, each to be done again before the next is asked for."""
        for batch, put_back in self._recover(first):
            put_back()
            self._keep(batch)
            yield batch
            if (alarm := self._check(late=False)) is not None:
                raise GuardStop(alarm, first)

    def _keep(self, batch: Any) -> None:
        begun = time.perf_counter()
        put_back = self._ring.keep()
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
        self._unread = None
        self.spent.steps -= len(again)
        self.spent.recovery += time.perf_counter() - begun
        return again

    def _check(self, late: bool | None = None) -> Alarm | None:
        """The first bound that is passed after a step, or (late) after the one before it."""
        alarm = self._last()
        if alarm is None:
            begun = time.perf_counter()
            self._look()
            group = group_of(self._ranks)
            self._unread = Reading(self.spent.steps, self._parts, group)
            self._spend(begun, self._unread.waited)
            late = self._late if late is None else late
            if not (self._unread.on_device if late is None else late):
                alarm = self._last()
        self.spent.steps += 1
        return alarm

    def _last(self) -> Alarm | None:
        """The verdict on the step that is not read yet."""
        unread, self._unread = self._unread, None
        if unread is None:
            return None
        begun, before = time.perf_counter(), unread.waited
        found = unread.read()
        passed = self._bounds.passed(found)
        if passed is None:
            self._bounds.learn_step(found)
        self._spend(begun, unread.waited - before)
        if passed is None:
            return None
        part = unread.parts[passed.part]
        return Alarm(unread.step, part.name, part.kind, passed.largest, passed.bound, passed.rule)

    def _spend(self, begun: float, waited: float) -> None:
        self.spent.synchronise += waited
        self.spent.check += time.perf_counter() - begun - waited

    def _look(self) -> None:
        """See what is remembered now."""
        if self._parts and unchanged(self._parts, self._optimizers):
            return
        parts = remembered(self._model, self._optimizers)
        for optimizer in self._optimizers:
            if optimizer.state and not has_history(optimizer):
                raise UsageError(_without(optimizer))
        if not any(o.state for o in self._optimizers) and not parts:
            raise UsageError(_without(self._optimizers[0]))
        others = self._bounds.know(parts)
        if others and (group := group_of(self._ranks)) is not None:
            check_alike(parts, group)
        if self._analytic and self._positions and any(o.state for o in self._optimizers):
            self._bounds.fix(analytic_bounds(self._model, self._optimizers, self._positions, self._analytic), RULE)
            self._positions.close()
            self._positions = None
        self._parts = parts


def _without(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} remembers no gradients, so there is nothing to watch; "
        "train with momentum, or with an optimizer that keeps moments (Adam, AdamW, RMSprop)"
    )
