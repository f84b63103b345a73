"""Reads the profiler's traces of a job's ranks: the operations of all threads and streams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.report.text import count_text
from unsilent.timeline.job import COLLECTIVE, Edges, Job, Lane, Operations
from unsilent.timeline.matching import RankCollective, match_collectives
from unsilent.timeline.rank_operations import RankOperations, find_steps, rank_operations
from unsilent.timeline.rank_trace import Numbering, RankTrace, make_names, read_rank_trace

_LONGEST_APART = 3600
"""Most seconds between traces of one job, whose clocks may differ."""
_MOST_FILES = 4096
_TRACE = re.compile(r"\.json(\.gz)?$")
_FLIGHT = re.compile(r"flight-rank\d+\.json$")
"""Names of dumps of the flight recorder, which may be in the same folder as traces."""


@dataclass(frozen=True)
class Recording(Job):
    """The recorded operations of a job, each rank on its own clock.

    Seconds count from the earliest begin of a rank's trace.

    Dependencies are not known yet, as they can only be found once all operations are on one clock.

    Attributes:
        launches: Launches: pairs of indices of the launching and the launched operation, int32[k, 2].
        anchors: Rows by rank: seconds, offset of the rank's clock and bound of the offset's error; float64[k, 3].
    """

    launches: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 2), np.int32))
    anchors: dict[int, NDArray[np.float64]] = field(default_factory=dict)


def read_traces(paths: Sequence[str | Path]) -> Recording:
    """The recording in the given trace files or folders.

    Raises ``UsageError`` if they cannot be read or are not of one job.
    """
    files = list(_files(paths))
    names = make_names()
    read = (read_rank_trace(file, names, is_only=len(files) == 1) for file in files)
    traces = sorted((trace for trace in read if trace is not None), key=lambda trace: trace.rank)
    if not traces:
        raise UsageError("no trace of the profiler was found; give .json or .json.gz files, or a folder of them")
    notes = [note for trace in traces for note in trace.notes]
    world_size = _check_same_job(traces, notes)
    steps = _complete_steps(traces, names.shown, notes)
    origin = min(_begin(trace) for trace in traces)
    ranks = [rank_operations(trace, names, steps, (origin - trace.base) / 1000) for trace in traces]
    return _assemble(traces, ranks, names, steps, world_size, origin, notes)


def _files(paths: Sequence[str | Path]) -> Iterable[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        try:
            files = sorted(
                entry for entry in path.iterdir() if _TRACE.search(entry.name) and not _FLIGHT.match(entry.name)
            )
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        if not files or len(files) > _MOST_FILES:
            raise UsageError(
                f"{path} has {count_text(len(files), 'trace')} (.json, .json.gz); expected 1 to {_MOST_FILES:,}"
            )
        yield from files


def _begin(trace: RankTrace) -> int:
    """Time of a trace's first event in Unix nanoseconds."""
    return trace.base + int(1000 * float(trace.start.min(initial=np.inf if len(trace.start) else 0.0)))


def _check_same_job(traces: Sequence[RankTrace], notes: list[str]) -> int:
    """The number of ranks of the job.

    Raises ``UsageError`` if the traces cannot be of one job.
    """
    first = traces[0]
    for trace, following in pairwise(traces):
        if trace.rank == following.rank:
            raise UsageError(
                f"{trace.name} and {following.name} are both of rank {trace.rank}; give one trace of each rank"
            )
    for trace in traces:
        if (trace.world_size, trace.distributed.get("backend")) != (first.world_size, first.distributed.get("backend")):
            raise UsageError(
                f"{first.name} and {trace.name} are of different jobs: {_job_text(first)}, {_job_text(trace)}; "
                "give traces of one job"
            )
        if abs(_begin(trace) - _begin(first)) > _LONGEST_APART * 1e9:
            raise UsageError(f"{first.name} and {trace.name} begin more than an hour apart; give traces of one run")
    last = traces[-1].rank
    if first.world_size and last >= first.world_size:
        raise UsageError(
            f"{traces[-1].name} is of rank {last}, but the job has {count_text(first.world_size, 'rank')}; give traces of one job"
        )
    world_size = first.world_size or last + 1
    if len(traces) < world_size:
        notes.append(f"traces of {len(traces):,} of {count_text(world_size, 'rank')} were read")
    return world_size


def _job_text(trace: RankTrace) -> str:
    backend = escape_unprintable(str(trace.distributed.get("backend", "no backend"))[:20])
    return f"{count_text(trace.world_size, 'rank')} over {backend}"


def _complete_steps(traces: Sequence[RankTrace], names: Sequence[str], notes: list[str]) -> tuple[int, ...]:
    """Numbers of the steps that are complete in all traces."""
    steps_of_traces = [find_steps(trace, names) for trace in traces]
    common = set(steps_of_traces[0]).intersection(*steps_of_traces)
    if not common:
        empty = next((trace.name for trace, steps in zip(traces, steps_of_traces, strict=True) if not steps), None)
        problem = f"{empty} has no complete step" if empty else "the traces have no step in common"
        raise UsageError(
            f"{problem} (ProfilerStep#…); call step() of the profiler after each step, or use unsilent timeline record"
        )
    if len(common) > 2 and any(
        _is_cut(trace, [of[number] for number in sorted(common)])
        for trace, of in zip(traces, steps_of_traces, strict=True)
    ):
        notes.append(f"step {max(common)} was left out: the program ended in it")
        common.remove(max(common))
    elif left := len(set().union(*steps_of_traces)) - len(common):
        verb, them = ("was", "it") if left == 1 else ("were", "them")
        notes.append(f"{count_text(left, 'step')} {verb} left out because some traces do not hold {them}")
    return tuple(sorted(common))


def _is_cut(trace: RankTrace, steps: list[int]) -> bool:
    """Whether the last step was cut off by the end of the program, judged by its length."""
    lengths = (trace.end - trace.start)[steps]
    usual = float(np.median(lengths[:-1]))
    return not usual / 10 <= lengths[-1] <= usual * 10


def _assemble(
    traces: Sequence[RankTrace],
    ranks: Sequence[RankOperations],
    names: Numbering[str],
    steps: tuple[int, ...],
    world_size: int,
    origin: int,
    notes: list[str],
) -> Recording:
    lanes: list[Lane] = []
    parts, launches, taken = [], [np.empty((0, 2), np.int32)], list[RankCollective]()
    before = 0
    # Lanes and operations are numbered from 0 in each rank; here they are numbered over all ranks.
    for of_rank in ranks:
        columns = dict(of_rank.columns)
        columns["lane"] = columns["lane"] + np.int32(len(lanes))
        parts.append(columns)
        lanes += of_rank.lanes
        launches.append(of_rank.launches + np.int32(before))
        taken += [row._replace(operation=row.operation + before) for row in of_rank.taken]
        before += len(columns["start"])
        notes += of_rank.notes
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    groups = {group: known for rank in ranks for group, known in rank.groups.items()}
    members = {
        group: [trace.rank for trace, rank in zip(traces, ranks, strict=True)
                if (trace.rank in known if known is not None else not group or group in rank.groups)]
        for group, known in groups.items()
    }  # fmt: skip
    matching = match_collectives(taken, members)
    collective = np.full(before, -1, np.int32)
    collective[list(matching.numbers)] = list(matching.numbers.values())
    is_collective = (arrays["kind"] == COLLECTIVE) & (arrays["step"] >= 0)
    if messages := int(is_collective.sum()) - sum(row.step >= 0 for row in taken):
        verb = "was" if messages == 1 else "were"
        notes.append(f"{count_text(messages, 'message')} between two ranks {verb} not matched")
    arrays["collective"] = collective
    operations = Operations(
        names=tuple(names.shown),
        **{column.name: arrays[column.name] for column in fields(Operations) if column.name != "names"},
    )
    anchors = {
        trace.rank: trace.anchors - np.array([origin * 1e-9, 0.0, 0.0]) for trace in traces if len(trace.anchors)
    }
    by_rank = {trace.rank: rank for trace, rank in zip(traces, ranks, strict=True)}
    with_memory = {number: rank for number, rank in by_rank.items() if len(rank.memory)}
    return Recording(
        operations, Edges.none(), tuple(lanes), steps, world_size=world_size, notes=(*notes, *matching.notes),
        step_times={number: rank.step_times for number, rank in by_rank.items()},
        gradients={number: rank.gradients for number, rank in by_rank.items()},
        memory={number: rank.memory for number, rank in with_memory.items()},
        parts={number: rank.parts for number, rank in with_memory.items()}, launches=np.concatenate(launches), anchors=anchors,
    )  # fmt: skip
