"""What the steps of a job would take if something were different: each question is a text, answered by a replay of every step.

Forms: ``scale:GLOB=FACTOR`` (operations by name, or all of a kind or phase), ``rank:R=+20ms`` (a rank begins each step later;
``-20ms``: does all that it does itself faster, by so much in a step), ``rank:R=0.9`` (computes in so much of the time),
``network=infinite`` (collectives take no time once all ranks are there), ``straggler=none`` (every operation takes its
straggler-free duration, see `slowdown`), and those of `ddp_what_if` and `fsdp_what_if` for trainings under DDP
and FSDP2.

Gaps before operations stay as recorded; in an operation table they hold waits that it does not explain, and are left out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unsilent.errors import UsageError, unknown_name_error
from unsilent.interval import Interval
from unsilent.timeline.ddp_what_if import FORMS as DDP_FORMS
from unsilent.timeline.ddp_what_if import WORDS as DDP_WORDS
from unsilent.timeline.ddp_what_if import DdpQuestions
from unsilent.timeline.fsdp_what_if import FORMS as FSDP_FORMS
from unsilent.timeline.fsdp_what_if import WORDS as FSDP_WORDS
from unsilent.timeline.fsdp_what_if import sharded_change
from unsilent.timeline.job import COLLECTIVE, COMPUTE, KINDS, PHASES, PIPELINE, Job
from unsilent.timeline.replay import Replay
from unsilent.timeline.slowdown import mean_ratio, straggler_free_durations
from unsilent.timeline.step_split import Floats

FORMS = (
    "scale:GLOB=FACTOR",
    "rank:R=+20ms",
    "rank:R=0.9",
    "network=infinite",
    "straggler=none",
    *DDP_FORMS,
    *FSDP_FORMS,
)
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
LARGEST_FACTOR = 1e3
_DELAY = re.compile(r"([+-])(\d{1,9}(?:\.\d{1,9})?)(s|ms|us|µs)")


@dataclass(frozen=True)
class Change:
    """What is different: the replay, seconds of each operation and before it, float64[n] both; notes as in `Answer`."""

    replay: Replay
    durations: Floats
    gaps: Floats
    notes: tuple[str, ...] = ()
    is_extrapolated: bool = False


@dataclass(frozen=True)
class Answer:
    """What steps would take.

    Attributes:
        text: The question.
        recorded, predicted: Seconds of each step, replayed as recorded and with the change, float64[steps].
        notes: What was assumed, one sentence each.
        is_extrapolated: Whether a collective is outside the sizes that its cost was fitted to.
        of_model: Mean predicted over mean recorded step by the model of DDP, with limits; None: a replay.
        doubt: Why the prediction is not to be believed; empty: it may be.
    """

    text: str
    recorded: Floats
    predicted: Floats
    notes: tuple[str, ...] = ()
    is_extrapolated: bool = False
    of_model: Interval | None = None
    doubt: str = ""

    @property
    def ratios(self) -> Floats:
        """Predicted time of each step, in multiples of the recorded one, float64[steps]."""
        return self.predicted / self.recorded


def answer_interval(one: Answer) -> Interval:
    """Predicted time of a step in multiples of the recorded one, with an interval over steps."""
    return one.of_model or mean_ratio(one.predicted, one.recorded)


def answer(replay: Replay, questions: Sequence[str], system: str = "") -> list[Answer]:
    """An answer to each question; raises ``UsageError`` for one that names nothing.

    ``system``: what collectives cost, for questions on DDP; empty: as fitted to the traces.
    """
    of_ddp = DdpQuestions(replay.job, system)
    if system and not any(map(is_of_ddp, questions)):
        raise UsageError(
            f"--system {system} is of use for --what-if {', '.join(DDP_WORDS)}; ask one of these, or leave it out"
        )
    recorded = replay.step_seconds(*replay.run(replay.durations, kept_gaps(replay)))
    result = []
    for text in questions:
        if is_of_ddp(text):
            result.append(Answer(text, *of_ddp.answer(text)))
        else:
            change = parse_change(text, replay)
            seconds = replay.step_seconds(*change.replay.run(change.durations, change.gaps))
            result.append(Answer(text, recorded, seconds, change.notes, change.is_extrapolated))
    return result


def is_of_ddp(text: str) -> bool:
    """Whether a question is for `DdpQuestions`."""
    word, _, value = text.partition("=")
    return bool(value) and word in DDP_WORDS


def kept_gaps(replay: Replay) -> Floats:
    """Seconds before each operation that no change shortens, float64[n]."""
    is_table = (replay.job.edges.kind == PIPELINE).any()
    return np.zeros_like(replay.gaps) if is_table else replay.gaps.copy()


def parse_change(text: str, replay: Replay) -> Change:
    """What a question asks to change; raises ``UsageError`` where it names nothing of the job."""
    what, _, value = text.partition("=")
    if not value:
        raise UsageError(f"--what-if {text[:60]!r} asks for nothing; expected one of {', '.join(FORMS)}")
    word, _, name = what.partition(":")
    durations, gaps = replay.durations.copy(), kept_gaps(replay)
    if word == "scale":
        durations[_named(name, replay.job)] *= _factor(value, text)
    elif word == "rank":
        _change_rank(replay, _rank(name, replay.job), value, text, durations, gaps)
    elif text == "network=infinite":
        durations[replay.job.operations.kind == COLLECTIVE] = 0
    elif text == "straggler=none":
        durations = straggler_free_durations(replay.job, replay.durations)
    elif what in FSDP_WORDS:
        return Change(*sharded_change(text, replay, gaps))
    else:
        raise unknown_name_error("what-if", what, dict.fromkeys(form.partition("=")[0] for form in FORMS))
    return Change(replay, durations, gaps)


def _named(name: str, job: Job) -> np.ndarray:
    """The operations of a kind, of a phase, or with names that match a glob, bool[n]."""
    operations = job.operations
    if name in KINDS:
        return np.asarray(operations.kind == KINDS.index(name))
    if name in PHASES:
        return np.asarray((operations.phase == PHASES.index(name)) & (operations.kind == COMPUTE))
    matching = [number for number, one in enumerate(operations.names) if fnmatch.fnmatchcase(one, name)]
    if not matching:
        raise unknown_name_error("operation", name, [*KINDS, *PHASES, *operations.names])
    return np.isin(operations.name, matching)


def _rank(name: str, job: Job) -> int:
    if not name.isascii() or not name.isdigit() or int(name[:9]) not in job.ranks:
        raise UsageError(f"--what-if names rank {name[:20]!r}; the trace has ranks {job.ranks[0]} to {job.ranks[-1]}")
    return int(name[:9])


def _factor(value: str, text: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = -1.0
    if not 0 <= factor <= LARGEST_FACTOR:
        raise UsageError(f"--what-if {text[:60]!r}: expected a factor from 0 to {LARGEST_FACTOR:g} after =")
    return factor


def _change_rank(replay: Replay, rank: int, value: str, text: str, durations: Floats, gaps: Floats) -> None:
    """Delay the first operation of a rank's steps, or scale what it computes."""
    operations = replay.job.operations
    of_rank = operations.rank == rank
    if delay := _DELAY.fullmatch(value):
        sign, number, unit = delay.groups()
        seconds = float(f"{sign}{number}") * UNITS[unit]
        firsts = [np.flatnonzero(of_rank & (operations.step == step)) for step in range(len(replay.job.steps))]
        if seconds >= 0:
            gaps[[one[np.argmin(operations.start[one])] for one in firsts if len(one)]] += seconds
            return
        for one in firsts:  # all that the rank does itself becomes faster, by the same factor
            own = one[operations.collective[one] < 0]
            taken = float(durations[own].sum() + np.maximum(gaps[own], 0).sum())
            factor = max(1 + seconds / taken, 0.0) if taken > 0 else 1.0
            durations[own] *= factor
            gaps[own] *= np.where(gaps[own] > 0, factor, 1.0)
        return
    if value[0] in "+-":
        raise UsageError(f"--what-if {text[:60]!r}: expected a delay like +20ms after =, with the unit s, ms or us")
    durations[of_rank & (operations.kind == COMPUTE)] *= _factor(value, text)
