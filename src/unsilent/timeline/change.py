"""The changes that a what-if question makes to a replay, and the predicted answer."""

from __future__ import annotations

from dataclasses import dataclass

from unsilent.basics.interval import Interval
from unsilent.timeline.replay import Replay
from unsilent.timeline.step_split import Floats


@dataclass(frozen=True)
class Change:
    """Changes that a what-if question makes to a replay.

    Attributes:
        replay: Replay of the job, with changed dependencies if the question changes them.
        durations, gaps: Seconds of each operation, and of the gap before it, float64[n] each.
        notes: Assumptions, one sentence each.
        is_extrapolated: Whether a collective is outside the sizes that its cost was fitted to.
        longest: ``durations`` and ``gaps`` if all unknown times are as long as possible; ``None`` if all are known.
        peak: Most bytes that a rank has allocated, as recorded and with the change; None: not predicted.
    """

    replay: Replay
    durations: Floats
    gaps: Floats
    notes: tuple[str, ...] = ()
    is_extrapolated: bool = False
    longest: tuple[Floats, Floats] | None = None
    peak: tuple[int, int] | None = None


@dataclass(frozen=True)
class Answer:
    """The predicted step times for one what-if question.

    Attributes:
        text: The question.
        recorded, predicted: Seconds of each step in replays without and with the change, float64[steps].
        notes: Assumptions, one sentence each.
        is_extrapolated: Whether a collective is outside the sizes that its cost was fitted to.
        of_model: Mean step time predicted by the model of DDP divided by the recorded mean, with limits; ``None`` for a replay.
        doubt: Reason why the prediction cannot be trusted; empty if it can.
        longest: Seconds of each step if all unknown times are as long as possible, float64[steps]; ``None``: equal to
            ``predicted``.
        peak: Most bytes that a rank has allocated, as recorded and with the change; None: not predicted.
    """

    text: str
    recorded: Floats
    predicted: Floats
    notes: tuple[str, ...] = ()
    is_extrapolated: bool = False
    of_model: Interval | None = None
    doubt: str = ""
    longest: Floats | None = None
    peak: tuple[int, int] | None = None

    @property
    def ratios(self) -> Floats:
        """Predicted time of each step divided by its recorded time, float64[steps]."""
        return self.predicted / self.recorded
