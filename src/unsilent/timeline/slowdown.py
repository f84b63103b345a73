"""Measures how much slow operations lengthen a job's steps, by rank, stage and class of operations.

The definition is that of Lin et al. (Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI 2025). In
the straggler-free replay each computation takes the mean of its kind, and each communication the median. The slowdown is the
step time with recorded durations divided by the straggler-free one, both without the gaps that no dependency explains. The
slowdown by a group of operations is that of the straggler-free replay in which only this group has its recorded durations.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval, known_value
from unsilent.basics.printable import escape_unprintable
from unsilent.report.shown import Shown
from unsilent.timeline.job import COLLECTIVE, EDGE_KINDS, KINDS, PHASES, Job
from unsilent.timeline.replay import Floats, Indices, Replay, leave_one_step_out, same_place, unexplained_gaps

CONFIDENCE = 0.95
CLOCK_FAULT = -0.01
"""Seconds: a transfer time or gap below this is a clock error, and counts as 0."""
SLOW_SHARE = 3
"""Percentage of the workers (at least one) that count as the few slowest."""
MOST_CLASSES = 24
"""Most names; if there are more, operations are grouped by phase and kind."""
MOST_VALUES = 2**23
"""Most values in one array of replays that are computed at once."""


@dataclass(frozen=True)
class GroupSlowdown:
    """The slowdown that a group of operations causes.

    Attributes:
        name: Name of the group.
        slowdown: Step time divided by the straggler-free one if only this group has its recorded durations.
        operations: Number of operations in the group.
        unexplained_share: Gaps before them that no dependency explains, as a share of the time of all ranks.
    """

    name: str
    slowdown: float
    operations: int
    unexplained_share: float


@dataclass(frozen=True)
class Worker:
    """A rank, its place in the job, and its slowdown.

    The slowdown is the smaller one of its data-parallel rank's and its stage's.
    """

    rank: int
    data_rank: int
    stage: int | None
    slowdown: float


@dataclass(frozen=True)
class Removal:
    """The slowdown that remains if some ranks are made free of stragglers.

    Attributes:
        ranks: Ranks that are made free of stragglers.
        seconds: Mean step time without their stragglers.
        share: Share of the difference to the straggler-free step time that is removed; ``None`` if there is no difference.
    """

    ranks: tuple[int, ...]
    seconds: float
    share: float | None


@dataclass(frozen=True, repr=False, eq=False)
class Slowdown(Shown):
    """The slowdown of a job and its causes.

    Attributes:
        job: The recorded job.
        recorded: Recorded seconds of each step, float64[steps]; the next three arrays have the same shape.
        without_gaps: Step times of the replay with the recorded durations.
        straggler_free: Step times of the straggler-free replay.
        prediction_errors: Step time predicted from the other steps divided by the recorded one, minus 1; NaN with one step.
        slowdown: Mean of ``without_gaps`` over mean of ``straggler_free``, with an interval over steps.
        slowdown_with_gaps: Slowdown between two replays with the recorded gaps.
        classes, stages, data_ranks: Slowdown by operations with a name or kind, by stage, and by data-parallel rank, the
            largest first. Without stages, each rank is a data-parallel rank.
        workers: Ranks, the largest slowdown first.
        slow_workers: Removal of the slowest few workers (M_W).
        last_stage: Removal of the last stage (M_S); ``None`` without stages.
        unexplained_without: Gaps that no dependency explains if a kind of dependencies is ignored, as a share of the time of all
            ranks.
    """

    REPORT = "unsilent.timeline.report:slowdown_report"
    job: Job
    recorded: Floats
    without_gaps: Floats
    straggler_free: Floats
    prediction_errors: Floats
    slowdown: Interval
    slowdown_with_gaps: Interval
    classes: tuple[GroupSlowdown, ...]
    stages: tuple[GroupSlowdown, ...]
    data_ranks: tuple[GroupSlowdown, ...]
    workers: tuple[Worker, ...]
    slow_workers: Removal
    last_stage: Removal | None
    unexplained_without: dict[str, float]

    @property
    def unexplained_share(self) -> float:
        """Gaps that no dependency explains, as a share of the time of all ranks."""
        return math.fsum(group.unexplained_share for group in self.classes)


def measure_slowdown(job: Job) -> Slowdown:
    """The slowdown of a job and its causes.

    Raises ``UsageError`` if its operations take no time or wait for each other.
    """
    analysis = _Analysis(job)
    replay, operations = analysis.replay, job.operations
    gaps = np.where(replay.gaps <= CLOCK_FAULT, 0.0, replay.gaps)
    seconds_with_gaps = replay.step_seconds(*replay.run(np.stack([analysis.own, analysis.free], axis=1), gaps))
    ranks, place = np.unique(operations.rank, return_inverse=True)
    stage_of, data_rank_of = _grid(job, ranks)
    stage_names = [f"stage {at}" for at in range(stage_of.max() + 1)] if job.stages else []
    stages = analysis.groups(stage_names, stage_of[place])
    data_ranks = analysis.groups(
        [f"data-parallel rank {at}" for at in range(data_rank_of.max() + 1)], data_rank_of[place]
    )
    workers = []
    for rank, stage, data_rank in zip(ranks.tolist(), stage_of.tolist(), data_rank_of.tolist(), strict=True):
        slowed = data_ranks[data_rank].slowdown
        slowed = min(slowed, stages[stage].slowdown) if stages else slowed
        workers.append(Worker(rank, data_rank, stage if stages else None, slowed))
    workers.sort(key=lambda worker: (-worker.slowdown, worker.rank))
    few = [worker.rank for worker in workers[: math.ceil(len(workers) * SLOW_SHARE / 100)]]
    last = [worker.rank for worker in workers if worker.stage == len(stages) - 1]
    kinds = np.unique(job.edges.kind).tolist()
    return Slowdown(
        job, analysis.recorded, analysis.without_gaps, analysis.straggler_free, leave_one_step_out(replay),
        mean_ratio(analysis.without_gaps, analysis.straggler_free), mean_ratio(seconds_with_gaps[:, 0], seconds_with_gaps[:, 1]),
        _largest_first(analysis.groups(*_classes(job))), _largest_first(stages), _largest_first(data_ranks), tuple(workers),
        analysis.removal(few), analysis.removal(sorted(last)) if stages else None,
        {EDGE_KINDS[kind]: float(analysis.unexplained((kind,)).sum()) for kind in kinds},
    )  # fmt: skip


class _Analysis:
    """Replays of a job without gaps, with recorded and straggler-free durations."""

    def __init__(self, job: Job) -> None:
        self.job, self.replay = job, Replay(job)
        self.own = np.where(self.replay.durations <= CLOCK_FAULT, 0.0, self.replay.durations)
        self.free = straggler_free_durations(job, self.own)
        if not (job.operations.step >= 0).any():
            raise UsageError("the trace has no complete step; expected one at least")
        self.recorded = self.replay.step_seconds(job.operations.start, job.operations.end)
        self.without_gaps, self.straggler_free = self._seconds([self.own, self.free])
        if min(self.recorded.min(), self.straggler_free.min()) <= 0:
            raise UsageError("the operations of a step take no time; expected durations in seconds")

    def _seconds(self, durations: Iterable[Floats]) -> list[Floats]:
        """Step times of replays, one for each array of durations.

        Several replays are computed at once.
        """
        n = len(self.own)
        left, gaps, seconds = iter(durations), np.zeros(n), []
        while part := list(islice(left, max(1, MOST_VALUES // n))):
            seconds += list(self.replay.step_seconds(*self.replay.run(np.stack(part, axis=1), gaps)).T)
        return seconds

    def unexplained(self, left_out: tuple[int, ...] = ()) -> Floats:
        """The unexplained gap before each operation of a step, as a share of the time of all ranks, float64[n]."""
        gaps = unexplained_gaps(self.job, left_out) * (self.job.operations.step >= 0)
        return np.asarray(gaps / (self.recorded.sum() * len(self.job.ranks)))

    def groups(self, names: Sequence[str], of: Indices) -> list[GroupSlowdown]:
        """The slowdown of each named group of operations.

        ``of`` is the index of each operation's group, int64[n].
        """
        if not names:
            return []
        seconds = self._seconds(np.where(of == at, self.own, self.free) for at in range(len(names)))
        slowed = [float(steps.mean() / self.straggler_free.mean()) for steps in seconds]
        counts, shares = np.bincount(of, minlength=len(names)), np.bincount(of, self.unexplained(), len(names))
        return [GroupSlowdown(*values) for values in zip(names, slowed, counts.tolist(), shares.tolist(), strict=True)]

    def removal(self, ranks: Sequence[int]) -> Removal:
        """The slowdown that remains if the given ranks are made free of stragglers."""
        [seconds] = self._seconds([np.where(np.isin(self.job.operations.rank, ranks), self.free, self.own)])
        usual, least = float(self.without_gaps.mean()), float(self.straggler_free.mean())
        left = float(seconds.mean())
        share = (usual - left) / (usual - least) if abs(usual - least) > 1e-9 * least else None
        return Removal(tuple(ranks), left, share)


def _largest_first(groups: list[GroupSlowdown]) -> tuple[GroupSlowdown, ...]:
    return tuple(sorted(groups, key=lambda group: -group.slowdown))


def straggler_free_durations(job: Job, durations: Floats) -> Floats:
    """Durations of operations without stragglers, in seconds, float64[n].

    A computation takes the mean of its kind, and communication the median.

    With stages, which are meant to take the same time, operations with the same name are of one kind. Otherwise they must also
    have the same lane in their rank and the same place in the step.
    """
    operations = job.operations
    seen: Counter[int] = Counter()
    lane_of_rank = []
    for lane in job.lanes:
        lane_of_rank.append(seen[lane.rank])
        seen[lane.rank] += 1
    alike = operations.name if job.stages else same_place(operations, np.array(lane_of_rank, np.int32)[operations.lane])
    order = np.argsort(alike, kind="stable")
    result = np.empty_like(durations)
    for members in np.split(order, np.flatnonzero(np.diff(alike[order])) + 1):
        is_communication = operations.kind[members[0]] == COLLECTIVE
        result[members] = np.median(durations[members]) if is_communication else np.mean(durations[members])
    return result


def _classes(job: Job) -> tuple[list[str], Indices]:
    """Names of the classes of operations, and the index of each operation's class.

    A send and its receive are in one class.
    """
    operations = job.operations
    names: Sequence[str] = operations.names
    of = operations.name.astype(np.int64)
    if len(np.unique(of)) > MOST_CLASSES:
        names = [f"{phase} {kind}" for phase in PHASES for kind in KINDS]
        of = operations.phase.astype(np.int64) * len(KINDS) + operations.kind
    classes = [escape_unprintable(re.sub(r"-(send|recv)$", "-message", name)) for name in names]
    present, of_class = np.unique(np.array(classes)[of], return_inverse=True)
    return present.tolist(), of_class


def _grid(job: Job, ranks: NDArray[np.int32]) -> tuple[Indices, Indices]:
    """Stage and data-parallel rank of each rank.

    Without stages, the stage is 0 and each rank is a data-parallel rank.
    """
    stages = np.array([job.stages.get(rank, 0) for rank in ranks.tolist()])
    data_ranks = np.zeros(len(ranks), np.int64)
    for stage in np.unique(stages):
        data_ranks[stages == stage] = np.arange((stages == stage).sum())
    return stages, data_ranks


def mean_ratio(slow: Floats, fast: Floats) -> Interval:
    """Ratio of two mean step times, with a t interval over steps by linearisation.

    There is no interval with one step.
    """
    estimate, n = float(slow.mean() / fast.mean()), len(slow)
    if n < 2:
        return known_value(estimate, n)
    from scipy.special import stdtrit

    error = float((slow - estimate * fast).std(ddof=1) / math.sqrt(n) / fast.mean())
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error
    return Interval(estimate, max(0.0, estimate - half), estimate + half, CONFIDENCE, n, "t over steps, ratio of means")
