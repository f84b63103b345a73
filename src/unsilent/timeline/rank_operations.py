"""Converts the events of one rank's trace to operations."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.timeline.host_operations import EVALUATES, Flat, annotated_phase, flatten, is_backward, phases
from unsilent.timeline.job import BACKWARD, COLLECTIVE, COMPUTE, COPY, HOST, OTHER, Gradients, Lane, Parts
from unsilent.timeline.json_stream import Arguments
from unsilent.timeline.matching import RankCollective
from unsilent.timeline.rank_trace import (
    ANNOTATION,
    CPU_OP,
    GRADIENT,
    KERNEL,
    MEMORY,
    RUNTIME,
    Numbering,
    RankTrace,
    item_bytes,
    payload_bytes,
)


def named_parts(trace: RankTrace, names: Sequence[str]) -> Parts:
    """Named parts of the forward pass whose backward passes followed later, with times in microseconds.

    An operation of a forward pass has the number of the node that it creates for the backward pass. Operations inside it that
    create no node, and operations before it in its thread, may have the same number, so the last one with a number counts.
    """
    evaluates = np.array([name.startswith(EVALUATES) for name in names], bool)[trace.event_name]
    has_node = (trace.category == CPU_OP) & (trace.node >= 0)
    backward = np.flatnonzero(has_node & evaluates)
    nodes, place = np.unique(trace.node[backward], return_inverse=True)
    begin, end = np.full(len(nodes), np.inf), np.full(len(nodes), -np.inf)
    np.minimum.at(begin, place, trace.start[backward])
    np.maximum.at(end, place, trace.end[backward])
    forward = np.flatnonzero(has_node & ~evaluates & np.isin(trace.node, nodes))
    place = np.searchsorted(nodes, trace.node[forward])
    forward, place = (events[trace.start[forward] < begin[place]] for events in (forward, place))
    order = np.argsort(trace.start[forward], kind="stable")
    maker = np.full(len(nodes), -1, np.int64)
    maker[place[order]] = forward[order]  # the last one of equal numbers stays
    begin, end, maker = begin[maker >= 0], end[maker >= 0], maker[maker >= 0]
    order = np.argsort(trace.start[maker], kind="stable")
    begin, end, maker = begin[order], end[order], maker[order]
    named = np.flatnonzero(trace.category == ANNOTATION)
    first = np.searchsorted(trace.start[maker], trace.start[named])
    last = np.searchsorted(trace.start[maker], trace.end[named])
    events_with_parts, times = list[int](), list[tuple[float, ...]]()
    for event, low, high in zip(named.tolist(), first.tolist(), last.tolist(), strict=True):
        makers = np.flatnonzero(trace.thread[maker[low:high]] == trace.thread[event]) + low
        if len(makers) and begin[makers].min() >= trace.end[event]:
            events_with_parts.append(event)
            times.append((trace.start[event], trace.end[event], begin[makers].min(), end[makers].max()))
    return Parts(trace.event_name[events_with_parts], np.array(times, float).reshape(-1, 4))


BETWEEN = "(between operations)"
_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")
_LAUNCH, _GLOO = re.compile(r"c10d::_?(\w+?)(?:_base)?_*$"), re.compile(r"gloo:(\w+)")
_SYNCHRONISES = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize")
_SHARDED = re.compile("fsdp::")
"""Copies of FSDP2 between parameters or gradients and the buffers of collectives."""
_NCCL = re.compile(r"(nccl|rccl)(Dev)?Kernel", re.IGNORECASE)
_SCATTERS = re.compile(r"(gloo:|c10d::)_?reduce_?scatter")
_ANNOTATED = re.compile(r"nccl:")
_LAUNCHES_KERNEL = re.compile(r"(cuda|cu|hip)\w*Launch")
_MESSAGE = re.compile(r"send|recv", re.IGNORECASE)
_RANKS = re.compile(r"\[(\d{1,7}(, ?\d{1,7})*)\]")
_LONGEST_GROUP = 4096


@dataclass(frozen=True)
class RankOperations:
    """The operations of one rank.

    Attributes:
        columns: Arrays of `unsilent.timeline.job.Operations` by name, except ``collective``.
        lanes: Threads and streams.
        launches: Launches: pairs of indices of the launching and the launched operation, int32[k, 2].
        taken: Collectives that the rank took part in, without messages between two ranks.
        groups: Ranks of each group that the trace names; ``None`` if unknown.
        gradients: Times at which gradients became ready.
        step_times: Begin and end of each step, seconds since the recording's begin, float64[steps, 2].
        memory: Rows as in `unsilent.timeline.job.Job`; seconds count from the recording's begin.
        parts: Named parts of forward passes, if there are rows of memory.
        notes: Notes for the reader.
    """

    columns: dict[str, NDArray[Any]]
    lanes: list[Lane]
    launches: NDArray[np.int32]
    taken: list[RankCollective]
    groups: dict[str, frozenset[int] | None]
    gradients: Gradients
    step_times: NDArray[np.float64]
    memory: NDArray[np.float64]
    parts: Parts
    notes: tuple[str, ...]


def find_steps(trace: RankTrace, names: Sequence[str]) -> dict[int, int]:
    """The event of each step, by the number of the step."""
    events: dict[int, int] = {}
    numbers = {number: int(match[1]) for number, name in enumerate(names) if (match := _STEP.match(name))}
    for event in np.flatnonzero((trace.category == ANNOTATION) & np.isin(trace.event_name, list(numbers))):
        events.setdefault(numbers[int(trace.event_name[event])], int(event))
    return events


def rank_operations(trace: RankTrace, names: Numbering[Any], steps: Sequence[int], origin: float) -> RankOperations:
    """The operations of one rank, made of the events of its trace.

    Args:
        trace: Trace of the rank.
        names: Names of events; further ones are added.
        steps: Numbers of the steps to include.
        origin: Microseconds on the trace's clock at which the recording begins.
    """
    return _Rank(trace, names, steps, origin).result()


class _Rank:
    """Converts events of one rank to operations, and keeps the event of each operation."""

    def __init__(self, trace: RankTrace, names: Numbering[Any], steps: Sequence[int], origin: float) -> None:
        self._trace, self._names, self._origin = trace, names, origin
        event_of_step = find_steps(trace, names.shown)
        events = np.array([event_of_step[step] for step in steps])
        self._step_start, self._step_end = trace.start[events], trace.end[events]
        self._step_thread = int(trace.thread[events[0]])
        is_device = (trace.category == KERNEL) | (trace.category == MEMORY)
        self._device = np.flatnonzero(is_device)
        uses_device = (trace.category == RUNTIME) & self._is_named(_LAUNCHES_KERNEL) | self._is_named(_ANNOTATED)
        self._works = HOST if len(self._device) or uses_device.any() else COMPUTE
        self._gloo = np.flatnonzero((trace.category == ANNOTATION) & self._is_named(_GLOO))
        self._annotation: dict[int, int] = {}  # for kernels whose arguments name no collective
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._lanes: list[Lane] = []
        self._notes: list[str] = []
        if self._works == HOST and not len(self._device):
            self._notes.append(
                f"rank {trace.rank} used a device, and what ran there was not recorded: record it with ProfilerActivity.CUDA"
            )

    def result(self) -> RankOperations:
        pairs = self._launched_events()
        self._annotate(pairs)
        self._add_host(pairs)
        self._add_lanes(self._gloo, is_device=False)
        self._add_lanes(self._device, is_device=True)
        columns = {key: np.concatenate([part[key] for part in self._parts]) for key in self._parts[0]}
        event = columns["cut"]
        position = np.full(len(self._trace.start) + 1, -1, np.int64)
        position[event[event >= 0]] = np.flatnonzero(event >= 0)
        launches = position[pairs]
        launches = launches[(launches >= 0).all(axis=1)]
        for key in ("step", "phase"):  # a launched operation belongs to the step that launched it
            columns[key][launches[:, 1]] = columns[key][launches[:, 0]]
        order = np.lexsort((columns["duration"], columns["start"]))
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        columns = {key: column[order] for key, column in columns.items()}
        placed, started = place[launches], columns["start"]
        placed = placed[started[placed[:, 0]] <= started[placed[:, 1]]]  # else a time stamp is wrong
        taken, groups = self._collectives(columns)
        del columns["cut"]
        step_times = (np.stack([self._step_start, self._step_end], 1) - self._origin) * 1e-6
        memory = (self._trace.memory - (self._origin, 0, 0, 0)) * (1e-6, 1, 1, 1)
        parts = named_parts(self._trace, self._names.shown) if len(memory) else Parts.none()
        return RankOperations(
            columns,
            self._lanes,
            placed,
            taken,
            groups,
            self._gradients(),
            step_times,
            memory,
            parts._replace(times=(parts.times - self._origin) * 1e-6),
            tuple(self._notes),
        )

    def _is_named(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        return np.array([bool(pattern.match(name)) for name in self._names.shown], bool)[self._trace.event_name]

    def _launched_events(self) -> NDArray[np.int64]:
        """Pairs of a launching event and the launched event."""
        trace = self._trace
        runtime = np.flatnonzero((trace.category == RUNTIME) & (trace.correlation >= 0))
        runtime = runtime[np.argsort(trace.correlation[runtime], kind="stable")]
        keys = trace.correlation[runtime]
        place = np.searchsorted(keys, trace.correlation[self._device])
        is_known = place < len(keys)
        is_known[is_known] = keys[place[is_known]] == trace.correlation[self._device[is_known]]
        pairs = [np.stack((runtime[place[is_known]], self._device[is_known]), axis=1)]
        pairs.append(np.array(self._gloo_launches(), np.int64).reshape(-1, 2))
        return np.concatenate(pairs)

    def _annotate(self, pairs: NDArray[np.int64]) -> None:
        """Find the annotation around the launch of each NCCL kernel whose arguments name no collective.

        Traces of older versions of torch have such kernels. An all-to-all among them is named after messages.
        """
        trace = self._trace
        is_named = np.array(
            [event in trace.details and trace.details[event].collective is not None for event in pairs[:, 1].tolist()]
        )
        calls, kernels = pairs[self._is_named(_NCCL)[pairs[:, 1]] & ~is_named.astype(bool)].T
        annotations = np.flatnonzero((trace.category == ANNOTATION) & self._is_named(_ANNOTATED))
        for thread in np.unique(trace.thread[annotations]):
            of_thread = annotations[trace.thread[annotations] == thread]
            of_thread = of_thread[np.argsort(trace.start[of_thread])]
            around = of_thread[np.searchsorted(trace.start[of_thread], trace.start[calls], "right") - 1]
            is_around = (trace.thread[calls] == thread) & (trace.start[around] <= trace.start[calls])
            is_around &= trace.end[around] >= trace.end[calls]
            self._annotation.update(zip(kernels[is_around].tolist(), around[is_around].tolist(), strict=True))

    def _gloo_launches(self) -> list[tuple[int, int]]:
        """Pairs of a launching event and the gloo collective that it launched.

        Collectives with the same name are carried out in the order of their launches.
        """
        trace, names = self._trace, self._names.shown
        launched: dict[str, list[list[int]]] = defaultdict(lambda: [[], []])
        # gloo reduces everything and then scatters it, under the name of an all-reduce
        aliases = {} if self._is_named(_SCATTERS)[self._gloo].any() else {"reducescatter": "allreduce"}
        calls = np.flatnonzero((trace.category == CPU_OP) & self._is_named(_LAUNCH))
        for events, pattern, side in ((calls, _LAUNCH, 0), (self._gloo, _GLOO, 1)):
            for event in events[np.argsort(trace.start[events], kind="stable")]:
                match = pattern.match(names[trace.event_name[event]])
                assert match
                sort = match[1].replace("_", "")
                launched[aliases.get(sort, sort)][side].append(int(event))
        pairs: list[tuple[int, int]] = []
        for sort, (calls_of_it, carried_out) in launched.items():
            if not carried_out:
                continue
            early = len(carried_out) - len(calls_of_it)
            if early > 0:  # launched before the recording began
                carried_out = carried_out[early:]
            matched = list(zip(calls_of_it, carried_out, strict=False))
            right = [(call, event) for call, event in matched if trace.start[call] <= trace.start[event]]
            if early or len(right) < len(matched):
                self._notes.append(
                    f"rank {trace.rank}: the launch of {len(right):,} of {len(carried_out) + max(early, 0):,} collectives "
                    f"named gloo:{sort} was found"
                )
            pairs += right
        if aliases:
            for call, event in pairs:
                if _SCATTERS.match(names[trace.event_name[call]]):
                    trace.event_name[event] = self._names["gloo:reduce_scatter"]
        return pairs

    def _add_host(self, pairs: NDArray[np.int64]) -> None:
        trace = self._trace
        is_host = ((trace.category == CPU_OP) | (trace.category == RUNTIME)) & ~self._is_in_collective()
        is_cut = np.zeros(len(trace.start), bool)
        is_cut[pairs[:, 0]] = True
        is_cut |= (trace.category == RUNTIME) & self._is_named(_SYNCHRONISES)
        is_cut |= (trace.category == CPU_OP) & self._is_named(_SHARDED)
        until = self._ends_of_waits(np.flatnonzero(is_host), pairs)
        marks = np.flatnonzero((trace.category == ANNOTATION) & ~self._is_named(_GLOO))
        mark_phase = np.array([annotated_phase(name) for name in self._names.shown], np.int8)[trace.event_name[marks]]
        threads = np.unique(np.append(trace.thread[is_host], self._step_thread))
        others = [np.flatnonzero(is_host & (trace.thread == thread)) for thread in threads]
        for thread, events_of_thread in zip(threads, others, strict=True):
            elsewhere = np.sort(
                np.concatenate([trace.end[events] for t, events in zip(threads, others, strict=True) if t != thread]
                               + [trace.end[self._gloo]])
            )  # fmt: skip
            here = trace.thread[marks] == thread
            boundaries = np.empty(0)
            if thread == self._step_thread:
                phased = marks[here & (mark_phase != OTHER)]
                times = (self._step_start, self._step_end, trace.start[phased], trace.end[phased])
                boundaries = np.unique(np.concatenate(times))
            flat = flatten(
                trace.start[events_of_thread],
                trace.end[events_of_thread],
                is_cut[events_of_thread],
                until[events_of_thread],
                elsewhere,
                boundaries,
            )
            self._add_thread(int(thread), events_of_thread, flat, is_cut, marks[here], mark_phase[here])

    def _is_in_collective(self) -> NDArray[np.bool_]:
        """Whether each event began while its thread carried out a collective, and so belongs to it."""
        trace, result = self._trace, np.zeros(len(self._trace.start), bool)
        for thread in np.unique(trace.thread[self._gloo]):
            of_thread = self._gloo[trace.thread[self._gloo] == thread]
            of_thread = of_thread[np.argsort(trace.start[of_thread])]
            events = np.flatnonzero(trace.thread == thread)
            before = np.searchsorted(trace.start[of_thread], trace.start[events], "right") - 1
            result[events] = (before >= 0) & (trace.start[events] < trace.end[of_thread][before])
        return result

    def _ends_of_waits(self, events: NDArray[np.int64], pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        """The time at which the thread of each event continued.

        That is the event's end, or the end of the launched collective if the thread began nothing before.

        This finds waits for synchronous collectives, for example those of FSDP2 over gloo.
        """
        trace, until = self._trace, self._trace.end.copy()
        launch, launched = pairs[np.isin(pairs[:, 1], self._gloo)].T
        for thread in np.unique(trace.thread[launch]):
            of_thread, here = events[trace.thread[events] == thread], trace.thread[launch] == thread
            starts, ends = (np.append(np.sort(times[of_thread]), np.inf) for times in (trace.start, trace.end))
            end, done = trace.end[launch[here]], trace.end[launched[here]]
            following = np.minimum(starts[np.searchsorted(starts, end)], ends[np.searchsorted(ends, end, "right")])
            until[launch[here]] = np.where((end < done) & (done <= following), done, end)
        return until

    def _add_thread(
        self, thread: int, thread_events: NDArray[np.int64], flat: Flat, is_cut: NDArray[np.bool_], marks: NDArray[np.int64],
        mark_phase: NDArray[np.int8],
    ) -> None:  # fmt: skip
        trace = self._trace
        event = np.where(flat.event >= 0, np.append(thread_events, -1)[flat.event], -1)
        outer = np.where(flat.outer >= 0, np.append(thread_events, -1)[flat.outer], -1)
        name = np.where(event >= 0, np.append(trace.event_name, 0)[event], self._names[BETWEEN])
        backward = np.array([is_backward(name) for name in self._names.shown], bool)
        phase = phases(flat.start, trace.start[marks], trace.end[marks], mark_phase)
        phase[(outer >= 0) & backward[np.append(trace.event_name, 0)[outer]]] = BACKWARD
        between = np.flatnonzero((outer < 0) & (phase == OTHER))
        between = between[(between > 0) & (between < len(phase) - 1)]
        phase[between[(phase[between - 1] == BACKWARD) & (phase[between + 1] == BACKWARD)]] = BACKWARD
        cut = np.where((event >= 0) & is_cut[event], event, -1)
        kind = np.where((cut >= 0) | (event < 0), HOST, self._works)
        if self._works == COMPUTE:
            kind[np.append(self._is_named(_SHARDED), False)[cut]] = COPY
        self._add(f"thread {trace.threads[thread]}", False, flat.start, flat.end, name, kind, phase, cut)

    def _add_lanes(self, events: NDArray[np.int64], is_device: bool) -> None:
        """Add an operation for each event of a stream, or of a thread that carries out collectives."""
        trace = self._trace
        is_nccl = self._is_named(_NCCL)
        for lane in np.unique(trace.thread[events]):
            lane_events = events[trace.thread[events] == lane]
            lane_events = lane_events[np.lexsort((trace.end[lane_events], trace.start[lane_events]))]
            latest = np.maximum.accumulate(trace.end[lane_events])
            # Events may overlap by a rounded microsecond.
            start = np.maximum(trace.start[lane_events], np.append(-np.inf, latest[:-1]))
            kind = np.full(len(lane_events), COLLECTIVE)
            if is_device:
                kind = np.where(
                    trace.category[lane_events] == MEMORY, COPY, np.where(is_nccl[lane_events], COLLECTIVE, COMPUTE)
                )
            name = trace.event_name[lane_events].copy()
            size, width = np.full(len(lane_events), -1, np.int64), np.full(len(lane_events), -1, np.int8)
            for at in np.flatnonzero(kind == COLLECTIVE):
                event = int(lane_events[at])
                if (annotation := self._annotation.get(event)) is not None:
                    name[at], event = trace.event_name[annotation], annotation
                arguments = trace.details.get(event, Arguments())
                size[at], width[at] = payload_bytes(arguments), item_bytes(arguments)
                if is_device and isinstance(arguments.collective, str):
                    name[at] = self._names[f"nccl:{arguments.collective}"]
            lane_name = f"{'stream' if is_device else 'gloo thread'} {trace.threads[lane]}"
            phase = np.full(len(lane_events), OTHER)
            self._add(
                lane_name, is_device, start, np.maximum(latest, start), name, kind, phase, lane_events, size, width
            )

    def _add(
        self, lane: str, is_device: bool, start: NDArray[np.float64], end: NDArray[np.float64], name: NDArray[Any],
        kind: NDArray[Any], phase: NDArray[Any], cut: NDArray[np.int64], size: NDArray[np.int64] | None = None,
        item_bytes: NDArray[np.int8] | None = None,
    ) -> None:  # fmt: skip
        count = len(start)
        self._lanes.append(Lane(self._trace.rank, lane, is_device))
        self._parts.append({
            "rank": np.full(count, self._trace.rank, np.int32),
            "lane": np.full(count, len(self._lanes) - 1, np.int32),
            "name": name.astype(np.int32), "kind": kind.astype(np.int8), "phase": phase.astype(np.int8),
            "step": self._step_of(start), "start": (start - self._origin) * 1e-6, "duration": (end - start) * 1e-6,
            "size": np.full(count, -1, np.int64) if size is None else size,
            "item_bytes": np.full(count, -1, np.int8) if item_bytes is None else item_bytes, "cut": cut,
        })  # fmt: skip

    def _step_of(self, times: NDArray[np.float64]) -> NDArray[np.int32]:
        order = np.argsort(self._step_start)
        before = np.searchsorted(self._step_start[order], times, "right") - 1
        step = order[before]
        return np.where((before >= 0) & (times < self._step_end[step]), step, -1).astype(np.int32)

    def _collectives(
        self, columns: dict[str, NDArray[Any]]
    ) -> tuple[list[RankCollective], dict[str, frozenset[int] | None]]:
        taken: list[RankCollective] = []
        groups: dict[str, frozenset[int] | None] = {}
        for at in np.flatnonzero(columns["kind"] == COLLECTIVE):
            name = self._names.shown[columns["name"][at]]
            if _MESSAGE.search(name):
                continue
            arguments = self._trace.details.get(int(columns["cut"][at]), Arguments())
            group = f"{arguments.group} {arguments.group_ranks}"[:_LONGEST_GROUP] if arguments.group is not None else ""
            match = _RANKS.fullmatch(arguments.group_ranks) if isinstance(arguments.group_ranks, str) else None
            groups[group] = frozenset(map(int, match[1].split(","))) if match else None
            numbers = (
                number if type(number) is int else None for number in (arguments.sequence, arguments.communication)
            )
            taken.append(
                RankCollective(
                    int(at), self._trace.rank, group, int(columns["step"][at]), name, int(columns["size"][at]), *numbers
                )
            )
        return taken, groups

    def _gradients(self) -> Gradients:
        trace = self._trace
        gradients = np.flatnonzero((trace.category == CPU_OP) & self._is_named(re.compile(f"{GRADIENT}$")))
        gradients = gradients[np.argsort(trace.end[gradients], kind="stable")]
        sizes = [payload_bytes(trace.details.get(int(gradient), Arguments())) for gradient in gradients]
        return Gradients(
            self._step_of(trace.start[gradients]),
            (trace.end[gradients] - self._origin) * 1e-6,
            np.array(sizes, np.int64),
        )
