"""Comparison of the largest magnitudes of watched tensors with their bounds, after each step or one step later."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.detectors.series import LARGEST
from unsilent.events.event_kinds import Alarm
from unsilent.events.host import host_name
from unsilent.guard.alarms import GuardOverhead
from unsilent.guard.analytic import RULE, AnalyticBounds, GradientTermCounter, analytic_moment_bounds
from unsilent.guard.bounds import Bounds
from unsilent.guard.magnitude_pass import MagnitudePass
from unsilent.guard.pending_magnitudes import PendingMagnitudes, Ranks, check_alike, process_group_for
from unsilent.guard.watched_tensors import (
    WatchedTensor,
    find_history_tensors,
    find_watched_tensors,
    has_history,
    no_gradient_history_message,
    possible_names,
    same_watched_tensors,
)
from unsilent.sites.modules import parameters_of


class StepCheck:
    """Base class of checks that a guard makes after each step."""

    def check(self, late: bool, stepped: Callable[[], bool], whole: bool = False) -> Alarm | None:
        """Check the previous step if it is pending, and this step unless ``late``; return the alarm, if any.

        ``stepped`` tells whether an optimizer has made a step since the last state that was kept. ``whole``: check everything,
        even if each step usually checks only one part.
        """
        raise NotImplementedError

    def check_last(self) -> Alarm | None:
        """Check all pending steps after the last one; return the alarm, if any."""
        raise NotImplementedError

    def drop_pending(self) -> None:
        """Discard pending steps, because an earlier state was restored."""

    def before_again(self, item: Any) -> None:
        """Prepare for an iteration that is executed again, with its item."""

    def restart(self) -> None:
        """Prepare for a new loop."""

    def close(self) -> None:
        """Release resources; nothing is checked afterwards."""


class MagnitudeCheck(StepCheck):
    """Finds the tensors to watch, learns their bounds from clean steps, and raises alarms for larger values.

    Args:
        model, optimizers: Model and optimizers to watch.
        factor, bounds, ranks, spread: See `Guard`.
        overhead: Counter to which steps and times are added.

    Attributes:
        bounds: Bounds of every tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        factor: float,
        bounds: Mapping[str, float] | AnalyticBounds | None,
        ranks: Ranks,
        overhead: GuardOverhead,
        spread: int = 1,
    ) -> None:
        self._spread, self._turn, self._are_new = spread, 0, False
        self._passes: list[tuple[MagnitudePass, list[int]]] = []
        self._model, self._optimizers, self._ranks, self._overhead = model, optimizers, ranks, overhead
        self._analytic = bounds if isinstance(bounds, AnalyticBounds) else None
        fixed = None if isinstance(bounds, AnalyticBounds) else bounds
        _check_bounds(factor, fixed, model, optimizers)
        self.bounds = Bounds(factor, fixed)
        self._positions = GradientTermCounter(model) if self._analytic else None
        self._parts: list[WatchedTensor] = []
        self._unread: PendingMagnitudes | None = None

    def close(self) -> None:
        """Remove the hooks that count gradient terms."""
        if self._positions is not None:
            self._positions.close()

    def drop_pending(self) -> None:
        """Discard the step that was not read yet."""
        self._unread = None

    def restart(self) -> None:
        """Discard the pending step and the list of tensors, but not the bounds."""
        self._unread, self._parts, self._passes = None, [], []

    def _has_base(self, optimizer: Optimizer) -> bool:
        """Whether other optimizers have moments, or will have, for all parameters of a wrapper optimizer."""
        remembering = [o for o in self._optimizers if has_history(o) or not o.state]
        return set(parameters_of([optimizer])) <= set(parameters_of(remembering))

    def check(self, late: bool, stepped: Callable[[], bool], whole: bool = False) -> Alarm | None:
        """Check the previous step if it is pending, and this step unless ``late``; return the alarm, if any.

        ``stepped`` tells whether an optimizer has made a step since the last state that was kept. It is called only if no
        optimizer has a state yet, because it reads every parameter. ``whole``: all parts are checked at once.
        """
        alarm = self.check_pending()
        if alarm is None:
            begun = time.perf_counter()
            self.update_watched_tensors(stepped)
            # Until bounds hold, every tensor is learnt from in every step.
            whole = whole or not self.bounds.all_hold or self._are_new
            self._are_new = False
            turns: Sequence[int] = range(len(self._passes)) if whole else [self._turn % len(self._passes)]
            self._turn += 1
            self._add_overhead(begun, 0.0)
            alarm = self._check_parts(self._overhead.steps, turns, late)
        self._overhead.steps += 1
        return alarm

    def check_last(self) -> Alarm | None:
        """Check the pending step, and all tensors if the last step checked only some; return the alarm, if any."""
        alarm = self.check_pending()
        if alarm is None and len(self._passes) > 1 and self._overhead.steps:
            alarm = self._check_parts(self._overhead.steps - 1, range(len(self._passes)), late=False)
        return alarm

    def _check_parts(self, step: int, turns: Sequence[int], late: bool) -> Alarm | None:
        """The first alarm in groups of tensors after a step; the last group remains pending if ``late``."""
        for number, turn in enumerate(turns):
            begun = time.perf_counter()
            find, numbers = self._passes[turn]
            self._unread = PendingMagnitudes(step, find, numbers, process_group_for(self._ranks))
            self._add_overhead(begun, self._unread.seconds_waited)
            if (number < len(turns) - 1 or not late) and (alarm := self.check_pending()) is not None:
                return alarm
        return None

    def check_pending(self) -> Alarm | None:
        """The alarm in the pending step; None if it has none or no step is pending."""
        unread, self._unread = self._unread, None
        if unread is None:
            return None
        begun, before = time.perf_counter(), unread.seconds_waited
        result = unread.read()
        passed = self.bounds.first_exceeded(result, unread.numbers)
        if passed is None:
            self.bounds.learn_step(result, unread.numbers)
        self._add_overhead(begun, unread.seconds_waited - before)
        if passed is None:
            return None
        part = self._parts[passed.tensor_number]
        group = process_group_for(self._ranks)
        return Alarm(
            time=time.time(),
            rank=0 if group is None else dist.get_rank(group),
            step=unread.step,
            host=host_name(),
            device=str(part.tensor.device),
            rule=passed.rule,
            feature=part.kind,
            tensor=part.name,
            statistic=LARGEST,
            level="alarm",
            value=passed.largest_magnitude,
            baseline=passed.bound,
            score=abs(passed.largest_magnitude) / passed.bound if passed.bound else float("inf"),
        )

    def _add_overhead(self, begun: float, waited: float) -> None:
        self._overhead.synchronise += waited
        self._overhead.check += time.perf_counter() - begun - waited

    def update_watched_tensors(self, stepped: Callable[[], bool]) -> None:
        """Update the list of watched tensors; ``stepped`` has the same meaning as in `check`."""
        if self._parts and same_watched_tensors(self._parts, self._optimizers):
            return
        parts = find_watched_tensors(self._model, self._optimizers)
        for optimizer in self._optimizers:
            if optimizer.state and not has_history(optimizer) and not self._has_base(optimizer):
                raise UsageError(no_gradient_history_message(optimizer))
        has_state = any(optimizer.state for optimizer in self._optimizers)
        if not has_state and not find_history_tensors(self._model, self._optimizers) and stepped():
            raise UsageError(no_gradient_history_message(self._optimizers[0]))
        changed = self.bounds.update_tensors(parts)
        if changed and (group := process_group_for(self._ranks)) is not None:
            check_alike(parts, group)
        if self._analytic and self._positions and has_state:
            bounds = analytic_moment_bounds(self._model, self._optimizers, self._positions, self._analytic)
            self.bounds.set_fixed_bounds(bounds, RULE)
            self._positions.close()
            self._positions = None
        self._parts, self._are_new = parts, True
        turns = divided(parts, self._spread)
        self._passes = [(MagnitudePass([parts[n] for n in numbers]), numbers) for numbers in turns]


def _check_bounds(factor: Any, fixed: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UsageError`` for a factor that is not above 1, and for bounds of unknown tensors."""
    if not (_is_finite(factor) and factor > 1):
        raise wrong_value_error("factor", factor, "a number above 1")
    if fixed is None:
        return
    if not isinstance(fixed, Mapping):
        raise wrong_value_error("bounds", fixed, "largest magnitudes by name, or AnalyticBounds()")
    names = possible_names(model, optimizers)
    for name, bound in fixed.items():
        if name not in names:
            raise unknown_name_error("watched tensor", str(name), names)
        if not (_is_finite(bound) and bound > 0):
            raise wrong_value_error(f"bounds: that of {name}", bound, "a number above 0")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def divided(parts: Sequence[WatchedTensor], count: int) -> list[list[int]]:
    """Tensor numbers in ``count`` groups with similar numbers of elements, equal on every rank."""
    order = sorted(range(len(parts)), key=lambda n: (-parts[n].tensor.numel(), parts[n].name))
    result: list[list[int]] = [[] for _ in range(max(1, min(count, len(parts))))]
    sizes = [0] * len(result)
    for number in order:
        least = sizes.index(min(sizes))
        result[least].append(number)
        sizes[least] += parts[number].tensor.numel() + 1
    return [sorted(numbers) for numbers in result]
