"""A what-if's changes of a replay."""

from __future__ import annotations

from dataclasses import dataclass

from unsilent.timeline.replay import Replay
from unsilent.timeline.step_split import Floats


@dataclass(frozen=True)
class Change:
    """Changes that a what-if makes to a replay.

    Attributes:
        replay: Replay of the job, with other dependencies where they change.
        durations, gaps: Seconds of each operation and before it, float64[n] both.
        notes: Assumptions, one sentence each.
        is_extrapolated: Whether a collective is outside the sizes that its cost was fitted to.
        longest: ``durations`` and ``gaps`` where what is not known takes as long as it can; None: all is known.
        peak: Most bytes that a rank has allocated, as recorded and with the change; None: not predicted.
    """

    replay: Replay
    durations: Floats
    gaps: Floats
    notes: tuple[str, ...] = ()
    is_extrapolated: bool = False
    longest: tuple[Floats, Floats] | None = None
    peak: tuple[int, int] | None = None
