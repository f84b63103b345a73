"""Predicted steps of a training under FSDP2 with one setting changed.

Forms: ``reshard_after_forward=no``, ``reduce_dtype=bf16``, ``fsdp wrap=N`` (every N neighbouring units become one) and
``fsdp prefetch=N`` (parameters are gathered N units ahead in backward passes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.basics.sizes import parse_whole_number
from unsilent.timeline.change import Change
from unsilent.timeline.ddp.model import LinkCost, fit_link_cost
from unsilent.timeline.ddp.what_if import SIXTEEN_BITS, beyond_fit, sixteen_bit_notes, sixteen_bit_share
from unsilent.timeline.job import BACKWARD, CHAIN, COLLECTIVE, HOST, Edges, Job
from unsilent.timeline.replay import Indices, Replay
from unsilent.timeline.step_split import Floats

FORMS = ("reshard_after_forward=no", "reduce_dtype=bf16", "reduce_dtype=fp16", "fsdp wrap=2", "fsdp prefetch=2")
MOST_UNITS = 1024
"""Most units that are wrapped as one, or gathered ahead; larger numbers are rejected as typing errors."""
_GATHERS = re.compile(r"\w+::?_?all_?gather|fsdp::split_with_sizes_copy")
"""Names of collectives, of operations that launch them, and of copies to and from their buffers."""
_SCATTERS = re.compile(r"\w+::?_?reduce_?scatter")


def sharded_change(text: str, replay: Replay, gaps: Floats) -> Change:
    """The change to a replay that a what-if question on FSDP2 asks for.

    Raises ``UsageError`` if the question is unknown or the job has no such collectives.
    """
    word, _, value = text.partition("=")
    if word.startswith("fsdp "):
        least, change = (2, _change_of_wrapping) if word == "fsdp wrap" else (1, _change_of_prefetching)
        count = parse_whole_number(value) or 0
        if not least <= count <= MOST_UNITS:
            raise wrong_value_error(f"--what-if {word}", value, f"a whole number from {least} to {MOST_UNITS:,}")
        return change(replay, gaps, count)
    known = ("no",) if word == "reshard_after_forward" else SIXTEEN_BITS
    if value not in known:
        raise unknown_name_error(word, value, known)
    job, operations, changed = replay.job, replay.job.operations, replay.durations.copy()
    if word == "reshard_after_forward":
        return _without_second_gather(replay, gaps)
    scatters = (
        _matches_pattern(job, _SCATTERS) & (operations.kind == COLLECTIVE) & (operations.size > 0) & (changed > 0)
    )
    _expect(scatters, "reduce-scatter with a known size")
    sizes = operations.size[scatters].astype(np.float64)
    cost = fit_link_cost(sizes, changed[scatters])
    item_bytes = operations.item_bytes[scatters]
    smaller = sizes * sixteen_bit_share(item_bytes, word)
    changed[scatters] *= cost(smaller) / cost(sizes)
    notes = (*sixteen_bit_notes(item_bytes), *_fit_notes(cost, smaller))
    return Change(replay, changed, gaps, notes, not cost.covers(smaller))


def _fit_notes(cost: LinkCost, sizes: Floats) -> Iterator[str]:
    """Notes on a fitted cost that is used outside the sizes of its fit."""
    if not cost.grows:
        yield "in the traces, larger collectives do not take longer, so what they cost is not known"
    elif not cost.covers(sizes):
        yield beyond_fit(cost, sizes)


def _without_second_gather(replay: Replay, gaps: Floats) -> Change:
    """The change in which all-gathers of backward passes, with their launches and copies, take no time."""
    job, operations = replay.job, replay.job.operations
    of_gathers = _matches_pattern(job, _GATHERS) & (operations.phase == BACKWARD)
    again = of_gathers & (operations.kind == COLLECTIVE)
    if not again.any() and (_matches_pattern(job, _GATHERS) & (operations.kind == COLLECTIVE)).any():
        raise UsageError(
            "--what-if reshard_after_forward=no: the traces show all-gathers in forward passes alone; the job seems to have the "
            "setting already"
        )
    _expect(again, "all-gather in a backward pass")
    collective = np.where(again, np.int32(-1), operations.collective)
    changed = Replay(replace(job, operations=replace(operations, collective=collective)))
    note = "what FSDP2 does on the host before and after its copies, and kernels that copy, stay as they were recorded"
    return Change(changed, np.where(of_gathers, 0.0, replay.durations), np.where(again, 0.0, gaps), (note,), False)


def _change_of_wrapping(replay: Replay, gaps: Floats, count: int) -> Change:
    """The change in which each group of ``count`` units shares one all-gather and one reduce-scatter.

    The all-gather takes place when the first unit of a group needs it, the reduce-scatter with the last one.
    """
    job, operations = replay.job, replay.job.operations
    durations, gaps, collective = replay.durations.copy(), gaps.copy(), operations.collective.copy()
    groups, notes, is_extrapolated = _groups(job, count), list[str](), False
    for pattern in (_GATHERS, _SCATTERS):
        groups_of_pattern = [group for group in groups if group.pattern is pattern]
        every = np.concatenate([group.members for group in groups_of_pattern] or [np.empty(0, np.int64)])
        if not len(every):
            continue
        cost = fit_link_cost(operations.size[every].astype(np.float64), replay.durations[every])
        whole = np.array([float(operations.size[group.members].sum()) for group in groups_of_pattern])
        for group, seconds in zip(groups_of_pattern, cost(whole), strict=True):
            apart = cost(operations.size[group.members].astype(np.float64)).sum()
            left_out = np.delete(group.members, group.kept_place)
            durations[left_out] = durations[group.launches] = gaps[left_out] = 0
            collective[left_out] = -1
            durations[group.members[group.kept_place]] = replay.durations[group.members].sum() * seconds / apart
        notes += _fit_notes(cost, whole)
        is_extrapolated |= not cost.covers(whole)
    changed = Replay(replace(job, operations=replace(operations, collective=collective)))
    notes.append("what FSDP2 does on the host for each unit, and copies, stay as they were recorded")
    return Change(changed, durations, gaps, tuple(dict.fromkeys(notes)), is_extrapolated)


class _Group(NamedTuple):
    """Collectives that are replaced by one.

    Attributes:
        members: Members in order of time.
        kept_place: Index in ``members`` of the collective that replaces all of them.
        launches: Operations that launched the others, as far as they were found.
        pattern: Pattern of their names.
    """

    members: Indices
    kept_place: int
    launches: Indices
    pattern: re.Pattern[str]


def _groups(job: Job, count: int) -> list[_Group]:
    """Groups of collectives that belong to ``count`` neighbouring units; the last group may be smaller.

    Raises ``UsageError`` if the units cannot be found.
    """
    operations = job.operations
    is_backward = operations.phase == BACKWARD
    sorts = []
    for pattern, of_phase in ((_GATHERS, ~is_backward), (_GATHERS, is_backward), (_SCATTERS, is_backward)):
        which = _matches_pattern(job, pattern) & of_phase
        is_sent = (operations.kind == COLLECTIVE) & (operations.size > 0)
        launches = _by_step(job, which & (operations.kind == HOST))
        sorts.append((_by_step(job, which & is_sent), launches, pattern))
    (forward, _, _), (again, _, _), (scatters, _, _) = sorts
    nothing, result = np.empty(0, np.int64), list[_Group]()
    for key, scattered in scatters.items():
        first, second = forward.get(key, nothing), again.get(key, nothing)
        sizes, sizes_again = operations.size[first], operations.size[second][::-1]
        units, alone = len(scattered), len(first) - len(second) if len(second) else 0
        is_told = len(first) == units and alone in (0, 1)
        if not is_told or (len(second) > 0 and (sizes[alone:] != sizes_again).any()):
            raise UsageError(
                f"--what-if fsdp wrap: units cannot be told apart in step {job.steps[key[1]]} of rank {key[0]}, which has "
                f"{units:,} reduce-scatters, and {len(first):,} and {len(second):,} all-gathers in its forward and backward "
                "pass; expected one of each for every unit (the first one may keep its parameters)"
            )
        group = np.where(np.arange(units) < alone, -1, (np.arange(units) - alone) // count)
        for (sent, launches, pattern), numbers in zip(sorts, (group, group[alone:][::-1], group[::-1]), strict=True):
            members, calls = sent.get(key, nothing), launches.get(key, nothing)
            kept_place = -1 if pattern is _SCATTERS else 0
            for number in np.unique(numbers[numbers >= 0]) if len(members) else ():
                places = np.flatnonzero(numbers == number)
                known = calls[np.delete(places, kept_place)] if len(calls) == len(members) else nothing
                result.append(_Group(members[places], kept_place, known, pattern))
    if not any(len(group.members) > 1 for group in result):
        raise UsageError("--what-if fsdp wrap: the traces show no two units of FSDP2 that could be wrapped as one")
    return result


def _by_step(job: Job, which: NDArray[np.bool_]) -> dict[tuple[int, int], Indices]:
    """Indices of the selected operations in the order of time, by rank and step."""
    operations, result = job.operations, dict[tuple[int, int], list[int]]()
    for operation in np.flatnonzero(which & (operations.step >= 0)).tolist():
        result.setdefault((int(operations.rank[operation]), int(operations.step[operation])), []).append(operation)
    return {key: np.array(indices, np.int64) for key, indices in result.items()}


def _change_of_prefetching(replay: Replay, gaps: Floats, count: int) -> Change:
    """The change in which all-gathers of backward passes are launched ``count - 1`` units earlier.

    Only all-gathers on streams of a device change.
    """
    job, operations, edges = replay.job, replay.job.operations, replay.job.edges
    gathers = _matches_pattern(job, _GATHERS) & (operations.kind == COLLECTIVE) & (operations.phase == BACKWARD)
    _expect(gathers, "all-gather in a backward pass")
    is_on_device = np.array([lane.is_device for lane in job.lanes], bool)[operations.lane]
    if not (gathers & is_on_device).any():
        note = "over gloo, FSDP2 waits for each all-gather right after its launch, so an earlier launch would hide none"
        return Change(replay, replay.durations, gaps, (note,), False)
    is_launch = gathers[edges.target] & (edges.kind != CHAIN)
    awaited = dict[int, list[int]]()  # by all-gather: edges
    for edge in np.flatnonzero(is_launch).tolist():
        awaited.setdefault(int(edges.target[edge]), []).append(edge)
    taken, targets, dropped = list[int](), list[int](), list[int]()
    for gathers_of_step in _by_step(job, gathers & is_on_device).values():
        for place, gather in enumerate(gathers_of_step.tolist()):
            earlier = awaited.get(int(gathers_of_step[max(place - count + 1, 0)]), [])
            if earlier:
                dropped += awaited.get(gather, [])
                taken += earlier
                targets += [gather] * len(earlier)
    other_edges = np.delete(np.arange(len(edges.source)), dropped)
    changed = Edges(
        np.append(edges.source[other_edges], edges.source[taken]),
        np.append(edges.target[other_edges], np.array(targets, np.int32)),
        np.append(edges.kind[other_edges], edges.kind[taken]),
    )
    note = (
        "the recording is assumed to gather one unit ahead, as FSDP2 does by default; only all-gathers of backward passes are "
        "launched earlier, and the memory that this needs is not counted"
    )
    return Change(Replay(replace(job, edges=changed)), replay.durations, gaps, (note,), False)


def _matches_pattern(job: Job, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Whether the name of each operation matches a pattern, bool[n]."""
    return np.array([bool(pattern.match(name)) for name in job.operations.names], bool)[job.operations.name]


def _expect(which: NDArray[np.bool_], name: str) -> None:
    if not which.any():
        raise UsageError(f"the traces show no {name}; record a training under FSDP2 that has one")
