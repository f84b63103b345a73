"""What is checked in every step at once, whatever the sampling: the loss, and the norm of gradients that a program clips.

Both are numbers that the training computes itself, so that a check costs some microseconds. The loss is checked for being finite.
The norm is compared with those of the last steps, as `RobustZ` compares a series, upwards alone: it is read after the backward
pass, so that it shows what happens to gradients between the two, and what clipping hides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from unsilent.detectors.nonfinite import Nonfinite
from unsilent.detectors.robust_z import NORMAL_MAD, RobustZ
from unsilent.detectors.rule import ALARM, Rule
from unsilent.detectors.series import CLIPPED_NORM, LOSS, NUMBER, Series
from unsilent.monitor.rule_streams import Finding
from unsilent.monitor.signals.host_copy import HostCopy

REFRESH = 10
"""Norms after which median, spread and limit are computed anew."""


class StepChecks:
    """Checks numbers as they come, and keeps what it finds until it is taken.

    Between the large operations of a training each line of Python takes ten times as long as in a loop, so that a number that is
    as usual goes through few of them.

    Args:
        rules: Of the monitor: without `Nonfinite` or `RobustZ` among them, their check is not made.

    Attributes:
        found: What was found, and in which steps.
        checks_norms: Whether norms are of use.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._finds_infinite = any(isinstance(rule, Nonfinite) for rule in rules)
        self._robust = next((rule for rule in rules if isinstance(rule, RobustZ)), None)
        self._norms: dict[int, NormSeries] = {}
        self._on_the_way: deque[tuple[int, int, bool, HostCopy]] = deque()
        self._is_bad: set[int] = set()
        self.checks_norms = self._finds_infinite or self._robust is not None
        self.found: list[tuple[int, Finding]] = []

    def add_loss(self, step: int, loss: Tensor, is_scaled: bool) -> None:
        """The loss of a step; one that a loss scaler has multiplied may be infinite by that alone."""
        if loss.is_cuda:
            self._add_later(step, 0, loss, is_scaled)
            return
        value = loss.item()
        if value - value or self._is_bad:  # not finite, now or before
            self._check(step, 0, value, is_scaled)

    def add_norm(self, step: int, count: int, norm: Tensor, is_scaled: bool) -> None:
        """The norm of so many gradients together; after a loss scaler it may be infinite or NaN in steps that it leaves out."""
        if norm.is_cuda:
            self._add_later(step, count, norm, is_scaled)
            return
        value = norm.item()
        if (series := self._norms.get(count)) is None or not 0 < value <= series.highest or self._is_bad:
            self._check(step, count, value, is_scaled)
        else:
            series.add(value)

    def take(self) -> list[tuple[int, Finding]]:
        """What was found since the last time."""
        result, self.found = self.found, []
        return result

    def _add_later(self, step: int, count: int, tensor: Tensor, is_scaled: bool) -> None:
        """A number on a device: it is looked at once it has arrived, for nobody waits."""
        self._on_the_way.append((step, count, is_scaled, HostCopy(tensor.detach())))
        while self._on_the_way and self._on_the_way[0][3].has_arrived:
            step, count, is_scaled, copy = self._on_the_way.popleft()
            self._check(step, count, float(copy.read()), is_scaled)

    def _check(self, step: int, count: int, value: float, is_scaled: bool) -> None:
        """Look at a number closely; ``count``: of how many gradients it is the norm, 0: it is the loss."""
        if not math.isfinite(value):
            if self._finds_infinite and not (is_scaled and (count or math.isinf(value))):
                if count not in self._is_bad:
                    self._find(step, Nonfinite.name, count, value, math.nan, math.inf)
                self._is_bad.add(count)
            return
        self._is_bad.discard(count)
        if not count or self._robust is None:
            return
        series = self._norms.setdefault(count, NormSeries(self._robust))
        if value <= series.highest:
            series.add(value)
        elif series.add_high() == 1:
            self._find(step, self._robust.name, count, value, series.usual, series.score(value))

    def _find(self, step: int, rule: str, count: int, value: float, baseline: float, score: float) -> None:
        series = Series(CLIPPED_NORM if count else LOSS, "", NUMBER)
        self.found.append((step, Finding(rule, -1, series, ALARM, score, value, baseline)))


class NormSeries:
    """The norms of the last steps, and the limit that follows from them; see `unsilent.detectors.robust_z`.

    Attributes:
        highest: The largest norm that is no alarm.
        usual: Median of the norms.
    """

    def __init__(self, rule: RobustZ) -> None:
        self._rule = rule
        self._new: list[float] = []
        self._logs: deque[float] = deque(maxlen=rule.window)
        self._decay = 0.5 ** (1 / rule.half_life)
        self._begin()

    def _begin(self) -> None:
        self._new.clear()
        self._logs.clear()
        self._count = self._run = 0
        self._reach = self._median = 0.0
        self._limit = self.highest = math.inf
        self.usual = math.nan

    def add(self, norm: float) -> None:
        """The next norm, which is no alarm."""
        self._new.append(norm)
        if len(self._new) >= REFRESH or self._run:
            self._learn()

    def add_high(self) -> int:
        """The next norm, which is an alarm: how many there were in a row; after some of them series begin anew."""
        self._run += 1
        result = self._run
        if result >= self._rule.relearn:
            self._begin()
        return result

    def score(self, norm: float) -> float:
        """How unusual a norm is, 1: an alarm."""
        return (math.log(norm) - self._median) / self._limit

    def _learn(self) -> None:
        """Take in the new norms, and find the limit."""
        rule, self._run = self._rule, 0
        for norm in self._new:
            if norm <= 0:
                continue
            log = math.log(norm)
            if self._count >= rule.warm_up:
                self._reach = max(self._reach * self._decay, log - self._median)
            self._logs.append(log)
            self._count += 1
        self._new.clear()
        if self._count < rule.warm_up:
            return
        ordered = sorted(self._logs)
        self._median = ordered[len(ordered) // 2]
        deviations = sorted(abs(one - self._median) for one in ordered)
        spread = max(NORMAL_MAD * deviations[len(deviations) // 2], rule.floor)
        limit = max(min(rule.threshold * spread, math.log(rule.largest_factor)), rule.headroom * self._reach)
        early = min(max(2 - self._count / rule.early, 0.0), 1.0)
        self._limit = limit + early * max(math.log(rule.early_factor) - limit, 0.0)
        self.usual = math.exp(self._median)
        self.highest = math.exp(min(self._median + self._limit, 700.0))
