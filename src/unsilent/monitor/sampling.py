"""Sampling of a training: how many tensors are read in each step to stay within the budget of the monitor."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unsilent.events.event_kinds import LOGGER
from unsilent.monitor.settings import EXECUTE_AGAIN, MonitorSettings
from unsilent.report.text import count_text

LOOKS = (4, 10, 20, 40)
"""Steps after which costs are first checked; later they are checked every 50 steps."""
FURTHER_LOOKS = 50
GRADIENT_SHARE, VALUE_SHARE = 0.7, 0.5
"""Shares of the remaining budget for gradients, and then for values: a fault in these shows only in its own step."""
AIM = 0.9
"""Share of the budget that intervals are chosen for, as costs vary between two checks."""
LONGEST = 16
"""Longest interval, whatever the budget. If steps are so short that a monitor exceeds its budget whatever it reads, reading still
less would save little, and rules that learn from some values of a tensor would judge later by this factor."""
PARTS_OF_STATE = 4
"""Most parts that the state is read in: with four, an interval of 8 steps means a quarter every second step."""
LEARNT = 20
"""Number of values that rules such as robust-z learn from before they judge a series; used only for the log."""
MOST_ROWS, MOST_ROWS_OF_RANKS = 999, 33
"""One step is read in at most so many; fewer with several ranks, as parameters are compared between ranks only in these steps."""
FIRST_STEPS, FIRST_BUDGET = 100, 2.0
"""Number of steps at the start in which the budget is at least this many percent, so that the cost of reading is soon known."""
FIRST_COST, FIRST_COST_EACH = 1e-2, 1e-4
"""Estimated seconds of reading for the first step that is read: a fixed part, and a part for each parameter."""
READING_SHARE = 0.25
"""Share of the budget that reading may always take, however much the checks of every step take."""
KEPT = 0.8
"""Share of the budget that reading every step must fit in before every step is read again, to avoid frequent changes."""
READING_UNSEEN = 1.15
"""Cost of reading a step, in multiples of the time that the monitor's functions measure. The rest is torch's way to these
functions, and processor caches that hold less of the training's data afterwards. Measured for short steps by
``benchmarks.monitor_cost``, which compares whole steps with and without a monitor. Checks in other steps cost no more than their
functions measure."""
TOLERANCE = 0.25
"""An interval changes if it is too short by this share, or could be shorter by this share."""


class Costs(NamedTuple):
    """Times of the training and of the monitor since the costs were last checked.

    Attributes:
        steps: Number of steps.
        rows: Number of them that were read.
        step: Seconds of all steps, including the monitor.
        gradients: Seconds of reading gradients of parameters, and the loss.
        values: Seconds of reading gradients of norm layers' inputs, and values that the user named.
        state: Seconds of reading updates and fingerprints.
        fixed: Seconds of everything else that the monitor does.
        checks: Seconds of the checks in steps that are not read.
    """

    steps: int
    rows: int
    step: float
    gradients: float
    values: float
    state: float
    fixed: float
    checks: float = 0.0

    @property
    def monitor_seconds(self) -> float:
        """Seconds that the monitor took."""
        return self.gradients + self.values + self.state + self.fixed + self.checks

    @property
    def bare(self) -> float:
        """Seconds of one step without the monitor."""
        return max(0.0, self.step - self.monitor_seconds) / self.steps

    @property
    def of_read_steps(self) -> Costs:
        """The costs of the steps that were read, without all other steps."""
        read = self.monitor_seconds - self.checks
        return self._replace(steps=self.rows, step=self.rows * self.bare + read, checks=0.0)

    @property
    def share(self) -> float:
        """Share of the run time that the monitor took."""
        return self.monitor_seconds / self.step if self.step else 0.0


@dataclass(frozen=True)
class SampleIntervals:
    """Numbers of steps within which every tensor is read.

    There is one for gradients, one for values inside the model, and one for updates and fingerprints.

    ``rows``: one step in so many is read at all; the other intervals count only steps that are read.
    """

    gradients: int = 1
    values: int = 2
    state: int = 4
    rows: int = 1

    @property
    def longest(self) -> int:
        """Number of steps within which every tensor is read."""
        return self.rows * max(self.gradients, self.values, self.state)

    @classmethod
    def of_rows(cls, rows: int) -> SampleIntervals:
        """Intervals for reading one step in ``rows``, which is rounded up to an odd number.

        The number is odd so that all parts of the state are read in turn.

        If steps are so short that only one in many is read, the whole state is read at once: it is small then.
        """
        return cls(1, 1, 1 if rows > LONGEST else PARTS_OF_STATE, min(rows + (rows + 1) % 2, MOST_ROWS))


class CostMeter:
    """Adds up the time that a monitor costs.

    The measured time of its functions is multiplied by `READING_UNSEEN`.

    Attributes:
        begun: Time of its creation, moved later by the time that was not part of the training.
        fixed: Seconds of everything but reading signals, so far.
    """

    def __init__(self, read_seconds: Mapping[str, float]) -> None:
        self.begun = self._looked = time.perf_counter()
        self.fixed = 0.0
        self._read = read_seconds
        self._before: tuple[float, ...] = (0,) * 7

    def since_last_look(self, steps: int, rows: int) -> Costs:
        """The costs since the last call.

        ``steps``: number of steps so far, of which ``rows`` were read.
        """
        now, totals = time.perf_counter(), (steps, rows, *self._parts())
        count, read_count, *parts = (total - before for total, before in zip(totals, self._before, strict=True))
        result = Costs(int(count), int(read_count), now - self._looked, *parts)
        self._looked, self._before = now, totals
        return result

    def _parts(self) -> list[float]:
        """Seconds so far, in the order of the fields of `Costs`."""
        read = [self._read["gradients"], self._read["values"], self._read["state"], self.fixed]
        return [*(READING_UNSEEN * seconds for seconds in read), self._read["checks"]]

    def seconds(self) -> float:
        """Seconds that the monitor has cost so far."""
        return sum(self._parts())

    def share(self) -> float:
        """Share of the run time so far that the monitor has cost."""
        return self.seconds() / max(1e-9, time.perf_counter() - self.begun)


def fitting_rows(now: SampleIntervals, costs: Costs, budget: float) -> int:
    """Smallest N for which reading one step in N stays within the budget.

    ``budget`` in percent of a step without the monitor.

    Checks of every step come first, but reading always has `READING_SHARE` of the budget.
    """
    state = costs.state * now.state / (1 if now.rows > LONGEST else PARTS_OF_STATE)
    read = costs.gradients * now.gradients + costs.values * now.values + state
    room = costs.bare * AIM * budget / 100
    room = max(room - costs.checks / costs.steps, READING_SHARE * room)
    row = (read + costs.fixed) / costs.rows
    return MOST_ROWS if row >= MOST_ROWS * room else max(1, math.ceil(row / room))


def is_look(step: int) -> bool:
    """Whether the costs of the monitor are checked after this step."""
    return step in LOOKS or (step > LOOKS[-1] and step % FURTHER_LOOKS == 0)


def fitting_intervals(now: SampleIntervals, costs: Costs, budget: float) -> SampleIntervals:
    """The shortest intervals that a budget allows, estimated from the costs of the present intervals.

    ``budget`` in percent of a step without the monitor.

    Gradients come first, then values. Intervals do not change if they fit and could not be much shorter.
    """
    room = (costs.step - costs.monitor_seconds) * AIM * budget / 100 - costs.fixed
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


def share_at_longest(now: SampleIntervals, costs: Costs) -> float:
    """Estimated share of the time that the monitor would take if every interval were `LONGEST`."""
    read = costs.gradients * now.gradients + costs.values * now.values + costs.state * now.state
    monitor_seconds = costs.fixed + read / LONGEST
    return monitor_seconds / (costs.step - costs.monitor_seconds + monitor_seconds)


class SamplingControl:
    """Chooses the sampling intervals of one rank, and keeps those that all ranks agreed on.

    Args:
        settings: Settings of the monitor.
        costs: Costs of this rank.
        parameters: Number of parameters that are trained.

    Attributes:
        intervals: Intervals in use, the same in all ranks.
        wanted: Intervals that this rank needs.
        most_rows: Largest N such that one step in N is read.
        longest_wait: Largest number of steps until every tensor was read, so far.
        reads_all: Whether every step is read whatever the costs: intervals are given, all bits are to be compared, or an action
            follows an alarm before the next step.
    """

    def __init__(self, settings: MonitorSettings, costs: CostMeter, parameters: int = 0) -> None:
        fixed = settings.sampling_interval
        asks = settings.mode == "strict" or settings.on_alarm in EXECUTE_AGAIN or settings.fingerprint == "full"
        self.reads_all = asks or fixed is not None
        first = SampleIntervals() if self.reads_all else SampleIntervals.of_rows(MOST_ROWS)
        self.intervals = self.wanted = first if fixed is None else SampleIntervals(fixed, fixed, fixed)
        self.longest_wait = self.intervals.longest if self.reads_all else 0
        self._is_fixed, self._budget, self._costs = fixed is not None, settings.budget, costs
        self._first_cost = FIRST_COST + FIRST_COST_EACH * parameters
        self._has_warned = False
        self._rows = 0
        self.most_rows = MOST_ROWS

    @property
    def at_start(self) -> tuple[int, str]:
        """The first interval in steps, 0 if it is not known yet, and a description."""
        if self._is_fixed:
            return self.intervals.longest, f"fixed:{self.intervals.gradients}"
        if self.reads_all:
            return self.intervals.longest, "at the start"
        return 0, (
            "a loss that is not finite, and the norm of gradients that clip_grad_norm_ computes, are noticed in every step; how "
            "often tensors are read, and when rules begin to judge them, follows from the length of steps"
        )

    def may_begin(self) -> bool:
        """Whether the job has run long enough that a first step may be read within the budget."""
        elapsed = time.perf_counter() - self._costs.begun
        return elapsed * FIRST_BUDGET / 100 >= self._first_cost

    def look(self, step: int) -> None:
        """Choose the intervals that this rank needs, from time to time after a step that was read.

        Warns if no interval fits the budget.
        """
        self._rows += 1
        if self._is_fixed or (self.intervals.rows == 1 and not is_look(step)):
            return
        costs = self._costs.since_last_look(step, self._rows)
        if costs.steps <= 0 or costs.rows <= 0:  # the training went back
            return
        budget = max(self._budget, FIRST_BUDGET) if step < FIRST_STEPS and not self.reads_all else self._budget
        now, read = self.intervals, costs.of_read_steps
        share = 100 * share_at_longest(now, read)
        if self.reads_all or share <= (budget if now.rows == 1 else KEPT * budget):
            self.wanted = fitting_intervals(now, read, budget)
        else:
            self.wanted = self._of_rows(costs, budget)
            if step + self.wanted.rows >= FIRST_STEPS:  # steps after the first ones keep to the normal budget
                self.wanted = self._of_rows(costs, self._budget)
        if self.wanted.longest >= LONGEST and share > budget and step > LOOKS[0]:
            self._warn(costs, share)

    def _of_rows(self, costs: Costs, budget: float) -> SampleIntervals:
        """The intervals that the budget allows if not every step is read.

        The present number of steps stays unless it is too small or much too large.
        """
        now, rows = self.intervals.rows, min(fitting_rows(self.intervals, costs, budget), self.most_rows)
        return SampleIntervals.of_rows(now if rows <= now <= rows * (1 + TOLERANCE) else rows)

    def _warn(self, costs: Costs, share: float) -> None:
        if not self._has_warned and self.reads_all:
            self._has_warned = True
            logging.getLogger(LOGGER).warning(
                "steps take %.2g ms, of which the monitor takes %.2g %% (budget %g %%), although it reads each tensor only once "
                "in %d steps; rules that learn from %d values begin to judge after %d steps; --sampling fixed:1 reads each "
                "tensor in every step",
                1000 * costs.step / costs.steps, share, self._budget, LONGEST, LEARNT, LONGEST * LEARNT,
            )  # fmt: skip

    def agree(self, agreed: SampleIntervals, step: int) -> str | None:
        """Use the intervals that all ranks agreed on; return the change in words, or None without a change."""
        if agreed.rows > 1:
            agreed = SampleIntervals.of_rows(agreed.rows)
        if agreed == self.intervals:
            return None
        self.intervals = self.wanted = agreed
        if agreed.rows == 1:
            self.longest_wait = max(self.longest_wait, agreed.longest)
        else:  # their waits are measured when they are read
            parts = f", updates and fingerprints in {agreed.state} parts" if agreed.state > 1 else ""
            reason = (
                f"one step in {agreed.rows} is read{parts}; rules that learn from {LEARNT} values judge from about step "
                f"{step + agreed.rows * LEARNT:,} on; in the steps between, only a loss that is not finite and the norm of "
                "gradients that clip_grad_norm_ computes are noticed"
            )
            if not self._has_warned and step >= FIRST_STEPS:
                self._has_warned = True
                logging.getLogger(LOGGER).warning("to stay within %g %% of the time, %s", self._budget, reason)
            return reason
        return (
            f"gradients are read every {count_text(agreed.gradients, 'step')}, values inside the model every {agreed.values}, "
            f"updates and fingerprints every {agreed.state}, to stay within {self._budget:g} % of the time"
        )
