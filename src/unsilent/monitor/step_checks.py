"""Checks of the loss and of the norm that `clip_grad_norm_` computes, in every step whatever the sampling.

Both are numbers that the training computes itself, so that a check costs some microseconds. The loss is checked for being finite.
The norm is compared with those of the last steps as `RobustZ` compares a series, but only upwards. It is read after the backward
pass, so it shows changes of gradients after that pass, and changes that clipping hides.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unsilent.detectors.nonfinite import Nonfinite
from unsilent.detectors.robust_z import NORMAL_MAD, RobustZ
from unsilent.detectors.rule import ALARM, Rule
from unsilent.detectors.series import CLIPPED_NORM, LOSS, NUMBER, Series
from unsilent.guard.host_copy import HostCopy
from unsilent.monitor.rule_streams import Finding

Checked = tuple[int, ...]
"""Subject of a number: `LOSSES`, or parameters clipped together (``id`` of the first one with a gradient, and their number)."""
LOSSES: Checked = ()
REFRESH = 10
"""Number of norms after which median, spread and limit are computed anew."""


class StepChecks:
    """Checks the loss and norms of gradients in each step, and collects findings.

    Between the large operations of a training each line of Python takes ten times as long as in a loop, so a normal number passes
    through few lines.

    Args:
        rules: Rules of the monitor. Without `Nonfinite` or `RobustZ` among them, the corresponding check is not made.

    Attributes:
        findings: List of findings, each with its step.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._finds_infinite = any(isinstance(rule, Nonfinite) for rule in rules)
        self._robust = next((rule for rule in rules if isinstance(rule, RobustZ)), None)
        self._norms: dict[Checked, NormSeries] = {}
        self._on_the_way: deque[tuple[int, Checked, bool, HostCopy]] = deque()
        self._last_bad: dict[Checked, int] = {}
        self.findings: list[tuple[int, Finding]] = []

    def add_loss(self, step: int, loss: Tensor, is_scaled: bool) -> None:
        """Check the loss of a step.

        A loss that a loss scaler has multiplied may be infinite for that reason.
        """
        if loss.is_cuda:
            self._add_later(step, LOSSES, loss, is_scaled)
            return
        value = loss.item()
        if value - value or self._last_bad:  # not finite, now or before
            self._check(step, LOSSES, value, is_scaled)

    def add_norm(self, step: int, of: Checked, norm: Tensor, is_scaled: bool) -> None:
        """Check the total norm of some gradients.

        With a loss scaler it may be infinite or NaN in steps that the scaler skips.
        """
        if norm.is_cuda:
            self._add_later(step, of, norm, is_scaled)
            return
        value = norm.item()
        if (series := self._norms.get(of)) is None or not 0 < value <= series.highest or self._last_bad:
            self._check(step, of, value, is_scaled)
        else:
            series.add(value)

    @property
    def state(self) -> Any:
        """State that was learnt so far, which can be restored."""
        return self._norms, self._last_bad

    @state.setter
    def state(self, state: Any) -> None:
        self._norms, self._last_bad = state
        self._on_the_way.clear()
        self.findings = []

    def take(self) -> list[tuple[int, Finding]]:
        """The findings since the last call."""
        result, self.findings = self.findings, []
        return result

    def _add_later(self, step: int, of: Checked, tensor: Tensor, is_scaled: bool) -> None:
        """Check a number on a device once it has arrived on the CPU, without waiting."""
        self._on_the_way.append((step, of, is_scaled, HostCopy(tensor.detach())))
        while self._on_the_way and self._on_the_way[0][3].has_arrived:
            step, of, is_scaled, copy = self._on_the_way.popleft()
            self._check(step, of, float(copy.read()), is_scaled)

    def _check(self, step: int, of: Checked, value: float, is_scaled: bool) -> None:
        """Check whether one number is finite and not unusually large."""
        if not math.isfinite(value):
            if self._finds_infinite and not (is_scaled and (of or math.isinf(value))):
                if of not in self._last_bad:
                    self._find(step, Nonfinite.name, of, value, math.nan, math.inf)
                self._last_bad[of] = step
            return
        if step > self._last_bad.get(of, step) + 1:  # a step may have several losses, the bad one last
            del self._last_bad[of]
        if of == LOSSES or self._robust is None:
            return
        series = self._norms.setdefault(of, NormSeries(self._robust))
        if value <= series.highest:
            series.add(value)
        elif series.add_high() == 1:
            self._find(step, self._robust.name, of, value, series.usual, series.score(value))

    def _find(self, step: int, rule: str, of: Checked, value: float, baseline: float, score: float) -> None:
        series = Series(LOSS if of == LOSSES else CLIPPED_NORM, "", NUMBER)
        self.findings.append((step, Finding(rule, -1, series, ALARM, score, value, baseline)))


class NormSeries:
    """The norms of the last steps, and the limit for the next one; see `unsilent.detectors.robust_z`.

    Attributes:
        highest: Largest norm that raises no alarm; always finite.
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
        self._limit, self.highest = math.inf, sys.float_info.max  # infinity is never added, even while learning
        self.usual = math.nan

    def add(self, norm: float) -> None:
        """Add a norm that is not above the limit."""
        self._new.append(norm)
        if len(self._new) >= REFRESH or self._run:
            self._learn()

    def add_high(self) -> int:
        """Add a norm above the limit, and return how many there were in a row.

        After several in a row the series begins anew.
        """
        self._run += 1
        result = self._run
        if result >= self._rule.relearn:
            self._begin()
        return result

    def score(self, norm: float) -> float:
        """Score of how unusual a norm is; above 1 is an alarm."""
        return (math.log(norm) - self._median) / self._limit

    def _learn(self) -> None:
        """Compute the median and the limit anew, with the new norms."""
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
        deviations = sorted(abs(log - self._median) for log in ordered)
        spread = max(NORMAL_MAD * deviations[len(deviations) // 2], rule.floor)
        limit = max(min(rule.threshold * spread, math.log(rule.largest_factor)), rule.headroom * self._reach)
        early = min(max(2 - self._count / rule.early, 0.0), 1.0)
        self._limit = limit + early * max(math.log(rule.early_factor) - limit, 0.0)
        self.usual = math.exp(self._median)
        self.highest = math.exp(min(self._median + self._limit, 700.0))
