"""How much of a training is read in each step, so that the monitor stays within its budget."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unsilent.monitor.settings import MonitorSettings
from unsilent.monitor.sinks import LOGGER

LOOKS = (4, 10, 20, 40)
"""Steps after which the costs are looked at first; later every 50 steps."""
FURTHER_LOOKS = 50
GRADIENT_SHARE, VALUE_SHARE = 0.7, 0.5
"""Of what the budget leaves, the part of gradients, and then of values: a fault in one can be seen in its own step alone."""
AIM = 0.9
"""Share of the budget that intervals are chosen for: costs vary between two looks."""
LONGEST = 16
"""Interval that no budget makes longer: where steps are so short that a monitor exceeds its budget whatever it reads, reading
still less would save little, and rules that learn from some values of a tensor would judge later by this factor."""
PARTS_OF_STATE = 4
"""A part of the state is read at once, this fraction or more: an interval of 8 steps is that of a quarter every second step."""
LEARNT = 20
"""Values of a series that rules such as robust-z learn before they judge it; for the warning alone."""
TOLERANCE = 0.25
"""An interval changes when it is that much too short, or could be that much shorter."""


class Costs(NamedTuple):
    """Seconds since the last look.

    Attributes:
        steps: How many steps.
        step: Of all steps, with the monitor.
        gradients: Of reading gradients of parameters, and the loss.
        values: Of reading gradients of norm layers' inputs, and values that the user named.
        state: Of reading updates and fingerprints.
        fixed: Of all else that the monitor does.
    """

    steps: int
    step: float
    gradients: float
    values: float
    state: float
    fixed: float

    @property
    def own(self) -> float:
        """Seconds that the monitor took."""
        return self.gradients + self.values + self.state + self.fixed

    @property
    def share(self) -> float:
        """Share of the time that the monitor took."""
        return self.own / self.step if self.step else 0.0


@dataclass(frozen=True)
class SampleIntervals:
    """Steps after which every tensor was read: of gradients, of values inside the model, and of updates and fingerprints."""

    gradients: int = 1
    values: int = 2
    state: int = 4

    @property
    def longest(self) -> int:
        """The longest of all."""
        return max(self.gradients, self.values, self.state)


class CostMeter:
    """Adds up what a monitor takes.

    Attributes:
        begun: When it was made.
        fixed: Seconds of all but reading signals, so far.
    """

    def __init__(self, read_seconds: Mapping[str, float]) -> None:
        self.begun = self._looked = time.perf_counter()
        self.fixed = 0.0
        self._read = read_seconds
        self._before = (0, 0.0, 0.0, 0.0, 0.0)

    def since_last_look(self, steps: int) -> Costs:
        """The costs since this was asked last; ``steps`` so far."""
        now = time.perf_counter()
        totals = (steps, self._read["gradients"], self._read["values"], self._read["state"], self.fixed)
        count, *parts = (one - before for one, before in zip(totals, self._before, strict=True))
        result = Costs(int(count), now - self._looked, *parts)
        self._looked, self._before = now, totals
        return result

    def seconds(self) -> float:
        """That the monitor has taken so far."""
        return sum(self._read.values()) + self.fixed

    def share(self) -> float:
        """Of the time so far."""
        return self.seconds() / max(1e-9, time.perf_counter() - self.begun)


def is_look(step: int) -> bool:
    """Whether the costs are looked at after a step."""
    return step in LOOKS or (step > LOOKS[-1] and step % FURTHER_LOOKS == 0)


def fitting_intervals(now: SampleIntervals, costs: Costs, budget: float) -> SampleIntervals:
    """The shortest intervals that a budget (percent of a step without the monitor) allows, given what the present ones cost.

    Gradients come first, then values. Intervals stay as they are where they fit and could not be much shorter.
    """
    room = (costs.step - costs.own) * AIM * budget / 100 - costs.fixed
    if room <= 0:
        return SampleIntervals(LONGEST, LONGEST, LONGEST)
    least_values, least_state = costs.values * now.values / LONGEST, costs.state * now.state / LONGEST
    gradients = _shortest(now.gradients, costs.gradients, min(GRADIENT_SHARE * room, room - least_values - least_state))
    room -= costs.gradients * now.gradients / gradients
    values = _shortest(now.values, costs.values, min(VALUE_SHARE * room, room - least_state))
    room -= costs.values * now.values / values
    state = _shortest(now.state, costs.state, room)
    if state > PARTS_OF_STATE:
        state += -state % PARTS_OF_STATE
    return SampleIntervals(gradients, values, state)


def _shortest(now: int, cost: float, room: float) -> int:
    if room <= 0:
        return LONGEST
    wanted = cost * now / room
    if cost <= room and wanted > now * (1 - TOLERANCE):
        return now
    return min(LONGEST, max(1, math.ceil(wanted)))


def share_at(longest: int, now: SampleIntervals, costs: Costs) -> float:
    """Share of a step that the monitor would take if every interval were as long, given what the present ones cost."""
    read = costs.gradients * now.gradients + costs.values * now.values + costs.state * now.state
    own = costs.fixed + read / longest
    return own / (costs.step - costs.own + own)


class SamplingControl:
    """The intervals of one rank: what it needs to stay within its budget, and what all ranks have agreed on.

    Attributes:
        intervals: In use, the same in all ranks.
        wanted: What this rank needs.
        longest_wait: Steps until every tensor was read, the longest so far.
    """

    def __init__(self, settings: MonitorSettings, costs: CostMeter) -> None:
        fixed = settings.sampling_interval
        self.intervals = self.wanted = SampleIntervals() if fixed is None else SampleIntervals(fixed, fixed, fixed)
        self.longest_wait = self.intervals.longest
        self._is_fixed, self._budget, self._costs = fixed is not None, settings.budget, costs
        self._has_warned = False

    def look(self, step: int) -> None:
        """After a step: find what this rank needs, now and then; a warning where nothing fits."""
        if self._is_fixed or not is_look(step):
            return
        costs = self._costs.since_last_look(step)
        if costs.steps <= 0:  # the training went back
            return
        self.wanted = fitting_intervals(self.intervals, costs, self._budget)
        share = 100 * share_at(LONGEST, self.intervals, costs)
        if self.wanted.longest == LONGEST and share > self._budget and step > LOOKS[0] and not self._has_warned:
            self._has_warned = True
            logging.getLogger(LOGGER).warning(
                "steps take %.2g ms, of which the monitor takes %.2g %% (budget %g %%) although it reads each tensor only every "
                "%d steps; rules that learn from %d values judge after %d steps; --sampling fixed:1 reads everything",
                1000 * costs.step / costs.steps, share, self._budget, LONGEST, LEARNT, LONGEST * LEARNT,
            )  # fmt: skip

    def agree(self, agreed: SampleIntervals) -> str | None:
        """Use what all ranks agreed on; the change in words, None where there is none."""
        if agreed == self.intervals:
            return None
        self.intervals = self.wanted = agreed
        self.longest_wait = max(self.longest_wait, agreed.longest)
        return (
            f"gradients are read every {agreed.gradients} steps, values inside the model every {agreed.values}, updates and "
            f"fingerprints every {agreed.state}, to stay within {self._budget:g} % of the time"
        )
