"""Plan of a guard: the delay until a fault is noticed, and the numbers of states and batches kept to undo it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.basics.options import check_count
from unsilent.basics.sizes import human_bytes
from unsilent.report.text import count_text

SNAPSHOT_INTERVAL, SNAPSHOT_INTERVAL_ON_CUDA = 4, 16
"""Number of steps from one kept state to the next."""
SPREAD, SPREAD_ON_CUDA = 1, 8
"""Number of parts that the watched tensors are divided into; each step checks one part."""


@dataclass(frozen=True)
class GuardPlan:
    """Intervals at which a guard checks tensors and keeps states.

    Attributes:
        interval: Number of steps from one kept state to the next.
        spread: Number of steps in which every watched tensor is checked once.
        late: Whether a check is read one step later.
        states: Number of states that are kept.
    """

    interval: int
    spread: int
    late: bool
    states: int

    @property
    def latency(self) -> int:
        """The largest number of further steps that end before a fault is noticed."""
        return self.spread - 1 + int(self.late)

    @property
    def batches(self) -> int:
        """The largest number of steps that can be repeated after an alarm, because their batches are kept."""
        return self.interval * self.states

    def sentence(self, live: Iterable[Tensor], where: str) -> str:
        """A sentence that describes the plan, with the memory that it needs.

        ``live``: the tensors of a state that exist so far.
        """
        tensors = list(live)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        is_staged = where == "host" and any(tensor.is_cuda for tensor in tensors)
        staged = ", by way of one more on the device" if is_staged else ""
        return (
            f"a large value is noticed at most {count_text(self.latency, 'step')} after the step of the fault; "
            f"{self.states} states of at least {human_bytes(size, math.floor)} each are kept ({where}{staged}), and the batches "
            f"of up to {count_text(self.batches, 'step')}"
        )


def make_plan(
    interval: int | None, spread: int | None, late: bool | None, states: int | None, on_cuda: bool
) -> GuardPlan:
    """A plan with the given numbers, and the defaults of the device for those that are None.

    Raises:
        UsageError: a number is not a whole number of at least 1, or there are too few states to undo every noticed fault.
    """
    late = on_cuda if late is None else late
    interval = (SNAPSHOT_INTERVAL_ON_CUDA if on_cuda else SNAPSHOT_INTERVAL) if interval is None else interval
    spread = (SPREAD_ON_CUDA if on_cuda else SPREAD) if spread is None else spread
    check_count("snapshot_interval", interval, 1)
    check_count("spread", spread, 1)
    least = states_needed(interval, spread, late)
    if states is not None and check_count("snapshot_count", states, 1) < least:
        raise UsageError(
            f"snapshot_count is {states}; expected {least} or more, because with snapshot_interval={interval}, spread={spread} "
            f"and delayed_check={late} a fault is noticed up to {spread + int(late)} steps after it"
        )
    return GuardPlan(interval, spread, late, least if states is None else states)


def states_needed(interval: int, spread: int, late: bool) -> int:
    """Number of states to keep so that one from before the fault remains when the fault is noticed.

    In the worst case a fault happens after the check of step s. The tensor is checked again in one of the steps s + 1 to
    s + spread, and with a late check the verdict is known at the end of step s + spread + 1. Let m = spread + late. States are
    kept before steps 0, interval, 2 interval …; the newest state is the one before the largest multiple of the interval up to s +
    m, and the oldest state lies (states - 1) intervals before it. This one must be from step s or before. The newest one can lie
    m steps after s (if s + m is a multiple), so (states - 1) * interval >= m is needed, and is enough.
    """
    return 1 + math.ceil((spread + int(late)) / interval)
