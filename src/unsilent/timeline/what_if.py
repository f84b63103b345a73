"""Predicted steps of a job under a change, such as a faster rank or network, by replaying every step.

Forms: ``scale:GLOB=FACTOR`` (operations by name, or all of a kind or phase), ``rank:R=+20ms`` (a rank begins each step later;
``-20ms``: its own operations become faster, by so much in each step), ``rank:R=0.9`` (its computations take this share of their
time), ``network=infinite`` (collectives take no time once all ranks have entered them), ``straggler=none`` (every operation
takes its straggler-free duration, see `slowdown`), those of `ddp_what_if` and `fsdp_what_if` for trainings under DDP and FSDP2,
and those of `memory_what_if` if traces have memory events.

Gaps before operations stay as recorded. For operation tables they are left out, as they contain waits that the table does not
explain.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.basics.interval import Interval
from unsilent.basics.printable import escape_unprintable
from unsilent.report.text import duration_text, listed
from unsilent.timeline.change import Answer, Change
from unsilent.timeline.ddp.what_if import FORMS as DDP_FORMS
from unsilent.timeline.ddp.what_if import DdpQuestions
from unsilent.timeline.fsdp_what_if import FORMS as FSDP_FORMS
from unsilent.timeline.fsdp_what_if import sharded_change
from unsilent.timeline.job import COLLECTIVE, COMPUTE, KINDS, PHASES, PIPELINE, Job
from unsilent.timeline.memory_what_if import FORMS as MEMORY_FORMS
from unsilent.timeline.memory_what_if import memory_change
from unsilent.timeline.replay import Indices, Replay
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
    *MEMORY_FORMS,
)
DDP_WORDS, FSDP_WORDS, MEMORY_WORDS = (
    tuple(dict.fromkeys(form.partition("=")[0] for form in forms)) for forms in (DDP_FORMS, FSDP_FORMS, MEMORY_FORMS)
)
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
LARGEST_FACTOR = 1e3
_DELAY = re.compile(r"([+-])(\d{1,9}(?:\.\d{1,9})?)(s|ms|us|µs)")


def answer_interval(answer: Answer) -> Interval:
    """Predicted step time divided by the recorded one, with an interval or bounds."""
    if answer.longest is not None:
        recorded = float(answer.recorded.mean())
        low, high = float(answer.predicted.mean()) / recorded, float(answer.longest.mean()) / recorded
        return Interval(low, low, high, 1.0, len(answer.recorded), "bounds of what is not known")
    return answer.of_model or mean_ratio(answer.predicted, answer.recorded)


def answer(replay: Replay, questions: Sequence[str], system: str | None = None) -> list[Answer]:
    """The answer to each what-if question.

    Raises ``UsageError`` if a question names nothing in the job.

    ``system`` describes the cost of collectives, for questions on DDP; with ``None``, it is fitted to the traces.
    """
    if system == "":
        raise wrong_value_error("--system", system, "a file or a preset")
    of_ddp = DdpQuestions(replay.job, system or "")
    if system and not any(map(is_of_ddp, questions)):
        raise UsageError(
            f"--system {system} is used only by --what-if {', '.join(DDP_WORDS)}; ask one of these, or leave out --system"
        )
    recorded = replay.step_seconds(*replay.run(replay.durations, kept_gaps(replay)))
    result = []
    for text in questions:
        if is_of_ddp(text):
            result.append(of_ddp.answer(text))
        else:
            change = parse_change(text, replay)
            seconds = replay.step_seconds(*change.replay.run(change.durations, change.gaps))
            bound = change.longest and change.replay.step_seconds(*change.replay.run(*change.longest))
            result.append(Answer(
                text, recorded, seconds, change.notes, change.is_extrapolated, longest=bound, peak=change.peak
            ))  # fmt: skip
    return result


def is_of_ddp(text: str) -> bool:
    """Whether `DdpQuestions` answers a question."""
    word, _, value = text.partition("=")
    return bool(value) and word in DDP_WORDS


def kept_gaps(replay: Replay) -> Floats:
    """The gaps before operations that every replay keeps, in seconds, float64[n]."""
    is_table = (replay.job.edges.kind == PIPELINE).any()
    return np.zeros_like(replay.gaps) if is_table else replay.gaps.copy()


def parse_change(text: str, replay: Replay) -> Change:
    """The change to a replay that a question asks for.

    Raises ``UsageError`` if the question names nothing in the job.
    """
    question, _, value = text.partition("=")
    if not value:
        raise UsageError(f"--what-if {text[:60]!r} is not a question that is known; expected one of {', '.join(FORMS)}")
    word, _, name = question.partition(":")
    durations, gaps, notes = replay.durations.copy(), kept_gaps(replay), tuple[str, ...]()
    if word == "scale":
        durations[_matches_name(name, replay.job)] *= _factor(value, text)
    elif word == "rank":
        notes = _change_rank(replay, _rank(name, replay.job), value, text, durations, gaps)
    elif question == "network":
        _expect(value, "infinite", question)
        notes = _network_notes(replay.job)
        durations[replay.job.operations.kind == COLLECTIVE] = 0
    elif question == "straggler":
        _expect(value, "none", question)
        durations = straggler_free_durations(replay.job, replay.durations)
    elif question in FSDP_WORDS:
        return sharded_change(text, replay, gaps)
    elif question in MEMORY_WORDS:
        return memory_change(text, replay, gaps)
    else:
        raise unknown_name_error("what-if", question, dict.fromkeys(form.partition("=")[0] for form in FORMS))
    return Change(replay, durations, gaps, notes)


def _expect(value: str, known: str, name: str) -> None:
    if value != known:
        raise wrong_value_error(f"--what-if {name}", value, known)


def _network_notes(job: Job) -> tuple[str, ...]:
    """Notes on collectives that were found on one rank alone.

    Raises ``UsageError`` if all collectives were found on one rank alone.
    """
    operations = job.operations
    is_member = operations.collective >= 0
    pairs = np.unique(np.stack([operations.collective[is_member], operations.rank[is_member]]), axis=1)
    is_shared = is_member & np.isin(operations.collective, np.flatnonzero(np.bincount(pairs[0]) > 1))
    if not is_shared.any():
        raise UsageError(
            "--what-if network=infinite: the traces show no collective on two ranks, so that waiting cannot be told from "
            "transferring; give the traces of all ranks"
        )
    transfers = operations.kind == COLLECTIVE
    alone = int((transfers & ~is_shared).sum())
    note = (
        f"{alone:,} of {int(transfers.sum()):,} collectives (counted on each rank) were found on no other rank; they take no "
        "time either, though they may have waited for other ranks"
    )
    return (note,) if alone else ()


def _matches_name(name: str, job: Job) -> np.ndarray:
    """Whether each operation has the given kind or phase, or a name that matches, bool[n].

    Raises ``UsageError`` if no such operation belongs to a step.
    """
    operations = job.operations
    computes = operations.kind == COMPUTE
    if name in KINDS:
        noun, which = "kind", operations.kind == KINDS.index(name)
        present = [kind for number, kind in enumerate(KINDS) if (operations.kind == number).any()]
    elif name in PHASES:
        noun, which = "phase", computes & (operations.phase == PHASES.index(name))
        present = [phase for number, phase in enumerate(PHASES) if (computes & (operations.phase == number)).any()]
    else:
        matching = [
            number
            for number, operation_name in enumerate(operations.names)
            if fnmatch.fnmatchcase(operation_name, name)
        ]
        if not matching:
            raise unknown_name_error("operation", name, [*KINDS, *PHASES, *operations.names])
        noun, which, present = "name", np.isin(operations.name, matching), ["such operations between steps alone"]
    if not (which & (operations.step >= 0)).any():
        raise UsageError(
            f"--what-if scale: the traces have no operation of the {noun} {escape_unprintable(name)[:60]} in a step; they have "
            f"{', '.join(present)}"
        )
    return np.asarray(which)


def _ranks_text(job: Job) -> str:
    return f"rank{'s' if len(job.ranks) > 1 else ''} {listed(map(str, job.ranks))}"


def _rank(name: str, job: Job) -> int:
    if not name.isascii() or not name.isdigit() or int(name[:9]) not in job.ranks:
        raise UsageError(f"--what-if names rank {name[:20]!r}; the traces have {_ranks_text(job)}")
    return int(name[:9])


def _factor(value: str, text: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = -1.0
    if not 0 <= factor <= LARGEST_FACTOR:
        raise UsageError(f"--what-if {text[:60]!r}: expected a factor from 0 to {LARGEST_FACTOR:g} after =")
    return factor


def _change_rank(replay: Replay, rank: int, value: str, text: str, durations: Floats, gaps: Floats) -> tuple[str, ...]:
    """Delay a rank, speed it up or scale its computations, in place, and return notes."""
    operations = replay.job.operations
    of_rank = operations.rank == rank
    if delay := _DELAY.fullmatch(value):
        sign, number, unit = delay.groups()
        seconds = float(f"{sign}{number}") * UNITS[unit]
        by_step = [np.flatnonzero(of_rank & (operations.step == step)) for step in range(len(replay.job.steps))]
        steps = [indices for indices in by_step if len(indices)]
        if seconds >= 0:
            gaps[[indices[np.argmin(operations.start[indices])] for indices in steps]] += seconds
            return ()
        return _speed_up(replay, rank, -seconds, steps, durations, gaps)
    if value[0] in "+-":
        raise UsageError(f"--what-if {text[:60]!r}: expected a delay like +20ms after =, with the unit s, ms or us")
    computes = of_rank & (operations.kind == COMPUTE)
    factor = _factor(value, text)
    if not (computes & (operations.step >= 0)).any():
        raise UsageError(
            f"--what-if {text[:60]!r}: by the traces, rank {rank} computes nothing in a step; expected a rank that does"
        )
    durations[computes] *= factor
    return ()


def _speed_up(
    replay: Replay, rank: int, seconds: float, steps: Sequence[Indices], durations: Floats, gaps: Floats
) -> tuple[str, ...]:
    """Shorten the operations of a rank itself by ``seconds`` per step, in place.

    Each step has one factor. Returns a note if the operations of a step take less than ``seconds``.
    """
    spent = []
    for step_operations in steps:
        own_operations = step_operations[replay.job.operations.collective[step_operations] < 0]
        taken = float(durations[own_operations].sum() + np.maximum(gaps[own_operations], 0).sum())
        spent.append(taken)
        factor = max(1 - seconds / taken, 0.0) if taken > 0 else 1.0
        durations[own_operations] *= factor
        gaps[own_operations] *= np.where(gaps[own_operations] > 0, factor, 1.0)
    short = [taken for taken in spent if taken < seconds]
    if not short:
        return ()
    return (
        f"rank {rank} itself takes {duration_text(float(np.mean(spent)))} of a step (mean), less than it is to be faster by"
        f"{'' if len(short) == len(spent) else f' in {len(short):,} of {len(spent):,} steps'}: the answer is that of a rank that "
        "takes no time" + ("" if len(short) == len(spent) else " there"),
    )
