"""Records of faults in the memories of an accelerator, and of their failure rates.

FIT is the number of failures in 1e9 device hours. A failure is an event in a memory that makes an inference call incorrect,
judged on one call. A call is one batch of the workload, and calls follow each other without a pause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from unsilent.basics.interval import Interval

NOTHING_TRIED = "by the description, without trials"
"""Method of a FIT without trials, because no faults come through the protection or too few to be tried."""
Rate = Annotated[float, Ge(0), Lt(math.inf)]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The rates of events of one pattern in one reported part of a memory, before the model masks any.

    Attributes:
        target: Target of the trials; it has no trials if nothing comes through the protection.
        group, component, layer: Group, component and layer of the target.
        live_bits: Bits x share of the time in which a fault in them is read.
        raw: Rate of all events: the sum of ``corrected``, ``detected`` and ``altered`` (the memory returns other bits and reports
            nothing).
        draws: Number of drawn events from which these three were counted; 0 if they are exact.
    """

    target: str
    memory: str
    pattern: str
    group: str
    component: str
    layer: str
    live_bits: Rate
    raw: Rate
    corrected: Rate
    detected: Rate
    altered: Rate
    draws: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Facts about a memory: its size, the bytes it holds, and the calls that a fault in it affects.

    ``evidence``: grade of each number of its description. ``unmatched``: addresses at which the workload has nothing.
    """

    name: str
    size: int
    held: int
    calls_per_fault: Rate
    evidence: str
    unmatched: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryFitRow:
    """The FIT of a memory, an error pattern, a component, a layer or the model.

    Attributes:
        raw, corrected, detected: Rates of all events, of those that a code corrects, and of those that it reports.
        silent: Incorrect calls without any error.
        detectable: Errors that a memory reports, and calls that end with an error or a number that is not finite.
        incorrect: All incorrect calls, silent or with an error; errors that a memory reports are not included.
        wrong_calls: Silently incorrect calls in 1e9 device hours; None if the row is not a memory.
    """

    level: str
    name: str
    live_bits: float
    raw: float
    corrected: float
    detected: float
    silent: Interval
    detectable: Interval
    incorrect: Interval
    wrong_calls: Interval | None
