"""Predicted steps and memory peaks of a training that keeps fewer activations.

Forms: ``recompute=GLOB`` (activations of named parts of the model are dropped after their forward pass and computed again before
their backward pass) and ``accumulate=N`` (a batch is divided into N, whose gradients are accumulated). Both need memory events.
"""

from __future__ import annotations

import fnmatch

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.basics.sizes import parse_whole_number
from unsilent.timeline.change import Change
from unsilent.timeline.edges import ROUNDING
from unsilent.timeline.host_operations import EVALUATES
from unsilent.timeline.job import BACKWARD, COLLECTIVE, LAUNCH, LOADER, OPTIMIZER, Job
from unsilent.timeline.memory import blocks, memory_peaks, steps_of_events
from unsilent.timeline.rank_trace import GRADIENT
from unsilent.timeline.replay import Replay
from unsilent.timeline.step_split import Floats

FORMS = ("recompute=GLOB", "accumulate=2")
MOST_PARTS_OF_A_BATCH = 2**20
"""Larger numbers are rejected as typing errors."""


def memory_change(text: str, replay: Replay, gaps: Floats) -> Change:
    """The change to a replay that a what-if question on memory asks for.

    Raises ``UsageError`` if the question is unknown or the traces have no memory events.
    """
    word, _, value = text.partition("=")
    job = replay.job
    recorded = max((memory_peak.bytes for memory_peak in memory_peaks(job)), default=0)
    if not any(rows[:, 3].any() and (steps_of_events(job, rank) >= 0).any() for rank, rows in job.memory.items()):
        raise UsageError(
            f"--what-if {word}: the traces have no memory events with addresses in steps; record with profile_memory=True"
        )
    if word == "recompute":
        return _change_of_recomputation(value, replay, gaps, recorded)
    count = parse_whole_number(value) or 0
    if not 2 <= count <= MOST_PARTS_OF_A_BATCH:
        raise wrong_value_error("--what-if accumulate", value, f"a whole number from 2 to {MOST_PARTS_OF_A_BATCH:,}")
    return _change_of_accumulation(count, replay, gaps, recorded)


def _change_of_recomputation(glob: str, replay: Replay, gaps: Floats, recorded: int) -> Change:
    job, durations, peak = replay.job, replay.durations.copy(), 0.0
    names = {job.operations.names[name] for parts in job.parts.values() for name in parts.name}
    if not names:
        raise UsageError(
            "--what-if recompute: the traces name no part of a forward pass; name some with torch.profiler.record_function, or "
            "record with with_stack=True"
        )
    chosen = {rank: _chosen(glob, job, rank) for rank in job.parts}
    if not any(map(len, chosen.values())):
        raise unknown_name_error("part of a forward pass", glob, names)
    for rank, times in chosen.items():
        peak = max(peak, _peak_without(job, rank, times))
        _compute_again(replay, rank, times, durations)
    note = (
        "what a part computes last is kept, as the next one needs it; its whole forward pass is computed again, which "
        "torch.utils.checkpoint may end earlier"
    )
    return Change(replay, durations, gaps, (note,), peak=(recorded, round(peak)))


def _chosen(glob: str, job: Job, rank: int) -> Floats:
    """Times of a rank's parts whose names match a pattern, without nested ones, as rows of `Parts.times`."""
    parts, result = job.parts[rank], list[Floats]()
    starts = job.operations.start[(job.operations.rank == rank) & (job.operations.step >= 0)]
    matching = np.array([fnmatch.fnmatchcase(job.operations.names[name], glob) for name in parts.name], bool)
    matching &= (parts.times[:, 0] >= starts.min(initial=np.inf)) & (parts.times[:, 0] <= starts.max(initial=-np.inf))
    times = parts.times[matching]
    for row in times[np.lexsort((-times[:, 1], times[:, 0]))]:
        if not result or row[0] >= result[-1][1]:
            result.append(row)
    return np.array(result).reshape(-1, 4)


def _peak_without(job: Job, rank: int, parts: Floats) -> float:
    """The predicted memory peak of a rank if activations of the given parts are recomputed.

    The activations are absent from the end of a part to the begin of its backward pass.
    """
    events, allocated = job.memory[rank], blocks(job.memory[rank])
    times, dropped = events[:, 0], np.zeros(len(parts))
    for number, (begin, end, back, back_end) in enumerate(parts):
        part_blocks = allocated[np.searchsorted(allocated[:, 0], begin) : np.searchsorted(allocated[:, 0], end)]
        held = part_blocks[part_blocks[:, 1] >= end][:-1]  # the last one is the output of the part
        dropped[number] = held[(held[:, 1] >= back) & (held[:, 1] <= back_end + ROUNDING), 2].sum()
    less = np.zeros(len(events) + 1)
    np.add.at(less, np.searchsorted(times, parts[:, 1]), dropped)
    np.add.at(less, np.searchsorted(times, parts[:, 2]), -dropped)
    peak = float((events[:, 1] - np.cumsum(less)[:-1])[steps_of_events(job, rank) >= 0].max(initial=0))
    for begin, end, back, _ in parts:  # a recomputed part needs as much as in its forward pass
        first, last = np.searchsorted(times, (begin, end))
        if first == last:
            continue
        rise = (events[first:last, 1] - (events[first, 1] - events[first, 2])).max()
        is_gone = (parts[:, 1] <= back) & (parts[:, 2] >= back)
        peak = max(peak, float(events[np.searchsorted(times, back) - 1, 1] - dropped[is_gone].sum() + rise))
    return peak


def _compute_again(replay: Replay, rank: int, parts: Floats, durations: Floats) -> None:
    """Add the time of recomputing parts to the first operations of their backward passes, in place.

    Both the thread and the streams of a device take longer.
    """
    job, operations, edges = replay.job, replay.job.operations, replay.job.edges
    of_rank = np.flatnonzero((operations.rank == rank) & (operations.kind != COLLECTIVE))
    is_device = np.array([lane.is_device for lane in job.lanes], bool)[operations.lane]
    host = of_rank[~is_device[of_rank]]
    launches = np.isin(edges.target, of_rank[is_device[of_rank]]) & (edges.kind == LAUNCH)
    start, end, lane = operations.start[host], operations.end[host], operations.lane
    entered = start - replay.gaps[host].clip(0)  # the work of a thread between operations belongs to them
    launched = operations.start[edges.source[launches]], edges.target[launches]
    for begin, until, back, _ in parts:
        within = (np.minimum(end, until) - np.maximum(entered, begin)).clip(0)
        first = np.flatnonzero((start >= back - ROUNDING) & (operations.phase[host] == BACKWARD))
        if len(first) and within.any():
            durations[host[first[0]]] += np.bincount(lane[host], within).max()  # a part runs in one thread
        again = np.unique(launched[1][(launched[0] >= begin - ROUNDING) & (launched[0] < until)])
        after = np.unique(launched[1][launched[0] >= back - ROUNDING])
        for thread_or_stream in np.unique(lane[again]):
            target = after[lane[after] == thread_or_stream]
            if len(target):
                durations[target[0]] += operations.duration[again[lane[again] == thread_or_stream]].sum()


def _change_of_accumulation(count: int, replay: Replay, gaps: Floats, recorded: int) -> Change:
    job, operations = replay.job, replay.job.operations
    if any(name.startswith("fsdp::") for name in operations.names):
        raise UsageError(
            "--what-if accumulate: traces of FSDP2 do not tell activations from gathered parameters, which do not shrink with a "
            "batch; ask it of a training without FSDP2"
        )
    peak = max(_peak_accumulated(job, rank, count) for rank in job.memory)
    repeated = (operations.step >= 0) & (operations.kind != COLLECTIVE) & (operations.collective < 0)
    repeated &= ~np.isin(operations.phase, (LOADER, OPTIMIZER))
    durations = np.where(repeated, count * replay.durations, replay.durations)
    longest = durations, np.where(repeated & (gaps > 0), count * gaps, gaps)
    notes = (
        "one recording does not show how computing time depends on the batch's size: the first time holds if all parts together "
        "take as long as the whole batch, the second if each part takes as long as the whole batch; collectives run once",
        "what is allocated in a step and freed by the end of its backward pass is assumed to shrink with the batch, except for "
        "gradients of parameters, which are all there from the second part on",
    )
    return Change(replay, replay.durations, gaps, notes, longest=longest, peak=(recorded, round(peak)))


def _peak_accumulated(job: Job, rank: int, count: int) -> float:
    """The predicted memory peak of a rank if each batch is divided into ``count`` parts."""
    operations, events, rank_blocks = job.operations, job.memory[rank], blocks(job.memory[rank])
    steps, peak = steps_of_events(job, rank), 0.0
    names = np.array([name.startswith(f"{EVALUATES}: {GRADIENT}") for name in operations.names], bool)
    sums = np.flatnonzero((operations.rank == rank) & names[operations.name])
    for step in np.unique(steps[steps >= 0]):
        inside, backward = np.flatnonzero(steps == step), _backward_pass(job, rank, int(step))
        now = events[inside]
        if backward is None:
            peak = max(peak, float(now[:, 1].max()))
            continue
        step_blocks = rank_blocks[(rank_blocks[:, 0] >= now[0, 0]) & (rank_blocks[:, 0] <= backward[1])]
        before = np.searchsorted(operations.start[sums], step_blocks[:, 1], "right") - 1
        is_summed = (before >= 0) & (step_blocks[:, 1] <= np.append(operations.end[sums], -np.inf)[before] + ROUNDING)
        is_summed &= step_blocks[:, 0] >= backward[0]
        batch = step_blocks[(step_blocks[:, 1] <= backward[1] + ROUNDING) & ~is_summed]
        held, summed = (_bytes_held_at_times(of, now[:, 0]) for of in (batch, step_blocks[is_summed]))
        in_passes = (now[:, 0] >= batch[:, 0].min(initial=np.inf)) & (now[:, 0] <= backward[1])
        rest = now[:, 1] - held - summed
        after = rest[in_passes][-1] if in_passes.any() else 0.0
        is_gradient = (
            (now[:, 2] > 0)
            & (now[:, 0] >= backward[0])
            & ~np.isin(now[:, 0], step_blocks[step_blocks[:, 1] <= backward[1], 0])
        )
        added = np.maximum(rest, after) + summed + held / count + np.where(is_gradient, now[:, 2], 0)
        peak = max(peak, float(np.where(in_passes, added, now[:, 1]).max()))
    return peak


def _backward_pass(job: Job, rank: int, step: int) -> tuple[float, float] | None:
    """Begin and end of a step's backward pass on the host, or None if there is none."""
    operations = job.operations
    is_host = np.array([not lane.is_device for lane in job.lanes], bool)[operations.lane]
    is_backward = (operations.rank == rank) & (operations.step == step) & (operations.phase == BACKWARD) & is_host
    is_backward &= operations.kind != COLLECTIVE
    return (
        (float(operations.start[is_backward].min()), float(operations.end[is_backward].max()))
        if is_backward.any()
        else None
    )


def _bytes_held_at_times(blocks_: Floats, times: NDArray[np.float64]) -> Floats:
    """Total bytes of the blocks that are allocated at each time.

    An allocation or a freeing at exactly that time is included.
    """
    allocated = np.append(0.0, np.cumsum(blocks_[:, 2]))
    by_end = blocks_[np.argsort(blocks_[:, 1], kind="stable")]
    gone = np.append(0.0, np.cumsum(by_end[:, 2]))
    begun, ended = np.searchsorted(blocks_[:, 0], times, "right"), np.searchsorted(by_end[:, 1], times, "right")
    return np.asarray(allocated[begun] - gone[ended])
