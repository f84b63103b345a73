"""The diagnosis of a recorded job, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from unsilent.basics.interval import Interval
from unsilent.basics.sizes import human_bytes
from unsilent.report.estimates import machine_table, measured
from unsilent.report.model import Column, Plot, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text, duration_text, escape_unprintable, short
from unsilent.report.theme import INK, SERIES_COLOURS, Figure, figure, label
from unsilent.timeline.change import Answer
from unsilent.timeline.job import COLLECTIVE, KINDS, Job
from unsilent.timeline.memory import MemoryPeak, memory_peaks
from unsilent.timeline.replay import Replay
from unsilent.timeline.report import MOST_NAME
from unsilent.timeline.slowdown import Slowdown, measure_slowdown
from unsilent.timeline.step_split import StepSplit, latest_entries, split_steps
from unsilent.timeline.stragglers import PARTS, Excess, excesses
from unsilent.timeline.what_if import answer, answer_interval


class Link(NamedTuple):
    """An operation on a critical path, with the seconds that it adds.

    Attributes:
        operation: Index of the operation.
        seconds: Seconds that the operation adds: its duration, or for a collective the time after its last rank entered it.
        gap: Seconds between the end of the operation that it waited for and its start.
    """

    operation: int
    seconds: float
    gap: float


def critical_path(job: Job, step: int) -> list[Link]:
    """The critical path of a step in the order of time, or nothing if the step has no operation.

    ``step`` is an index of `Job.steps`.
    """
    operations = job.operations
    of_step = np.flatnonzero(operations.step == step)
    if not len(of_step):
        return []
    order = np.argsort(job.edges.target, kind="stable")
    sources, targets = job.edges.source[order], job.edges.target[order]
    entered, last = latest_entries(job)
    now, result = int(of_step[np.argmax(operations.end[of_step])]), []
    while True:
        begin = float(operations.start[now])
        if operations.kind[now] == COLLECTIVE and (number := int(operations.collective[now])) >= 0:
            end, begin, now = float(operations.end[now]), float(entered[number]), int(last[number])
        else:
            end = float(operations.end[now])
        first, stop = np.searchsorted(targets, [now, now + 1])
        before = sources[first:stop]
        before = before[(operations.step[before] == step) & (operations.start[before] < operations.start[now])]
        latest = int(before[np.argmax(operations.end[before])]) if len(before) else -1
        gap = max(round(begin - float(operations.end[latest]), 9), 0.0) if latest >= 0 else 0.0
        result.append(Link(now, max(end - begin, 0.0), gap))
        if latest < 0:
            return result[::-1]
        now = latest


MOST_UNEXPLAINED, MOST_LONGER = 0.5, 1.1
"""Replays are not trusted if unexplained gaps have at least this share of the time of all ranks, or if the replay without gaps
takes this many times as long as the recorded steps."""
NOT_EXPLAINED = (
    "The dependencies that the traces show do not explain when operations ran; replays are not to be trusted."
)
BEYOND = " (beyond the sizes that the cost was fitted to)"
MOST_BARS = 4000
"""Most operations in the figure of a step; if there are more, the longest are drawn."""


@dataclass(frozen=True, repr=False, eq=False)
class Timeline(Shown):
    """The diagnosis of a recorded job: where its time went.

    Attributes:
        job: The recorded job, on one clock.
        slowdown: Slowdown by stragglers, by replay.
        split: Seconds of each rank's steps by how they were spent.
        excesses: Delay of each rank in each part of a step, the clearest first; empty if ranks cannot be compared.
        step: Index of the step with the median time.
        path: Critical path of the step.
        answers: Answers to what-if questions.
    """

    job: Job
    slowdown: Slowdown
    split: StepSplit
    excesses: list[Excess]
    step: int
    path: list[Link]
    answers: list[Answer]

    def report(self, source: str = "") -> Report:
        """Report on the diagnosis; ``source`` names the traces."""
        base = self.slowdown.report(source)
        headline = [*_lateness(self), *([base.headline] if self.is_explained and len(self.split.ranks) > 1 else [])]
        headline += [] if self.is_explained else [NOT_EXPLAINED]
        base_findings = base.findings if self.is_explained else ()
        return replace(
            base,
            headline=" ".join(headline),
            estimates=_estimates(self),
            findings=(*_split_findings(self), *_answer_findings(self), *base_findings),
            sections=(*_sections(self), *base.sections),
            notes=(*base.notes, *_answer_notes(self.answers), *_memory_notes(self)),
            further_json={"results": {**base.further_json["results"], **_json(self)}},
        )

    @cached_property
    def memory_peaks(self) -> list[MemoryPeak]:
        """Peaks of allocated memory by rank; empty if the traces have no memory events."""
        return memory_peaks(self.job)

    @property
    def verdict(self) -> str:
        """Result of the comparison of ranks as one word.

        ``straggler``: a rank is late by more than noise; ``not_separable``: no rank is, in any part of the steps;
        ``not_compared``: not all parts, ranks or steps could be compared.
        """
        if self.excesses and self.excesses[0].is_separable:
            return "straggler"
        return "not_separable" if {excess.part for excess in self.excesses} == set(PARTS) else "not_compared"

    @property
    def is_explained(self) -> bool:
        """Whether the dependencies explain when operations ran, so that replays can be trusted."""
        ratio = float(self.slowdown.without_gaps.mean() / self.slowdown.recorded.mean())
        return self.slowdown.unexplained_share < MOST_UNEXPLAINED and ratio < MOST_LONGER


def diagnose(job: Job, questions: Sequence[str] = (), system: str | None = None) -> Timeline:
    """The diagnosis of a job, with answers to what-if questions (see `answer`).

    Raises ``UsageError`` for an unknown question.
    """
    slowdown = measure_slowdown(job)
    step = int(np.argsort(slowdown.recorded, kind="stable")[(len(slowdown.recorded) - 1) // 2])
    answers = answer(Replay(job), questions, system) if questions or system is not None else []
    split = split_steps(job)
    return Timeline(job, slowdown, split, excesses(job, split), step, critical_path(job, step), answers)


def _lateness(result: Timeline) -> Iterator[str]:
    """Sentences on late ranks: in which part of the step, or else for which rank the others waited."""
    excesses, split = result.excesses, result.split
    if len(split.ranks) == 1:
        period, steps = split.end - split.begin, len(result.job.steps)
        yield (
            f"Only the trace of rank {split.ranks[0]} was read, so late ranks cannot be seen. A step takes "
            f"{duration_text(float(np.nanmean(period)))}, from its begin to the begin of the next one (mean of "
            f"{count_text(steps, 'step')})."
        )
    elif result.verdict == "straggler":
        first = excesses[0]
        yield (
            f"Rank {first.rank} takes {duration_text(first.seconds)} longer than the others in its {first.part} "
            f"(noise floor {duration_text(first.floor)})."
        )
    elif result.verdict == "not_separable":
        floors = {part: max(excess.floor for excess in excesses if excess.part == part) for part in PARTS}
        parts = ", ".join(f"{part} {duration_text(floors[part])}" for part in PARTS)
        yield f"No rank is late by more than the noise floor of any part of the step ({parts})."
    elif not result.job.stages:
        waiting = np.nanmedian(split.waiting_for.sum(0), 1)
        last = int(waiting.argmax())
        yield "Not all parts of steps were compared."
        if not (result.job.operations.collective >= 0).any():
            yield "No collective was found on two ranks: which rank waited for which is not known."
        elif waiting[last] > 0:
            yield (
                f"The rank that other ranks wait for longest is rank {split.ranks[last]}: together they wait "
                f"{duration_text(float(waiting[last]))} per step for it (median)."
            )
        else:
            yield "No rank waited for another one in a collective, in the median step."


def _split_findings(result: Timeline) -> Iterator[str]:
    split, job = result.split, result.job
    unseen = 0 if job.stages else job.world_size - len(job.ranks)
    is_matched = job.operations.collective[job.operations.kind == COLLECTIVE] >= 0
    transfers = "in exposed transfers"
    if unseen > 0:
        verb = "was" if unseen == 1 else "were"
        transfers += f", or waiting for {count_text(unseen, 'rank')} that {verb} not recorded"
    elif not is_matched.all():
        transfers += ", or waiting in collectives whose other ranks were not found"
    whole = np.nansum(split.end - split.begin)
    parts = [("computing", split.compute), (transfers, split.transfer)]
    if len(split.ranks) > 1 and is_matched.any():
        parts.append(("waiting for late ranks", split.waiting))
    parts.append(("in none of these (host gap)", split.gap))
    recorded = f"the {len(split.ranks):,} ranks that were read" if unseen > 0 else "all ranks"
    whose = f"rank {split.ranks[0]}" if len(split.ranks) == 1 else recorded
    shares = ", ".join(f"{100 * np.nansum(part) / whole:.3g} % {name}" for name, part in parts)
    yield f"time of {whose}: {shares}"


def _doubt(result: Timeline, what_if: Answer) -> str:
    """Why the answer to a question is not to be trusted, or an empty text if it may be trusted.

    The criteria depend on whether the model of DDP or replays computed the answer.
    """
    return what_if.doubt if what_if.of_model or result.is_explained else "replays are not to be trusted"


def _answer_findings(result: Timeline) -> Iterator[str]:
    for what_if in result.answers:
        question = escape_unprintable(what_if.text)
        if doubt := _doubt(result, what_if):
            yield f"{question}: not predicted, as {doubt}"
            continue
        most = f" to {duration_text(float(what_if.longest.mean()))}" if what_if.longest is not None else ""
        predicted, recorded = (duration_text(float(times.mean())) for times in (what_if.predicted, what_if.recorded))
        means = f"{predicted}{most} instead of {recorded}"
        by = f"by {_model_text(what_if.of_model)}" if what_if.of_model else "by replay"
        yield f"{question}: a step would take {means}, {by}{BEYOND if what_if.is_extrapolated else ''}{_peak_text(what_if)}"


def _peak_text(what_if: Answer) -> str:
    """Text on the predicted peak of memory, or an empty text if none was predicted."""
    if what_if.peak is None:
        return ""
    recorded, predicted = map(human_bytes, what_if.peak)
    return f"; the peak of memory would be {predicted} instead of {recorded}, by the memory events"


def _model_text(ratio: Interval) -> str:
    """Text that names the model of DDP and the uncertainty of its prediction."""
    if not ratio.low <= ratio.high:
        return "the model of DDP"
    limits = f"{ratio.low:.3g} to {ratio.high:.3g} times as long with {100 * ratio.confidence:g} % confidence"
    unclear = ": whether it is faster or slower is not established" if ratio.low <= 1 <= ratio.high else ""
    return f"the model of DDP ({limits}{unclear})"


def _answer_notes(answers: Sequence[Answer]) -> Iterator[str]:
    """Each note on the answers once, after the questions that it applies to."""
    for note in dict.fromkeys(note for what_if in answers for note in what_if.notes):
        yield f"{escape_unprintable(', '.join(what_if.text for what_if in answers if note in what_if.notes))}: {note}"


def _counts_from_begin(job: Job, peaks: Sequence[MemoryPeak]) -> bool:
    """Whether some memory peaks belong to ranks without a device.

    The profiler counts their memory from the begin of the recording.
    """
    with_device = {lane.rank for lane in job.lanes if lane.is_device}
    return any(peak.rank not in with_device for peak in peaks)


def _memory_notes(result: Timeline) -> Iterator[str]:
    if _counts_from_begin(result.job, result.memory_peaks):
        yield (
            "peaks of memory on a CPU count from the recording's begin: what was allocated before, such as parameters, is not in "
            "them"
        )


def _estimates(result: Timeline) -> Table:
    values = {"slowdown": result.slowdown.slowdown, "slowdown_with_gaps": result.slowdown.slowdown_with_gaps}
    values |= {what_if.text: answer_interval(what_if) for what_if in result.answers if not _doubt(result, what_if)}
    return machine_table(measured({}, values, "step"), ("measure", ""))


def _sections(result: Timeline) -> Iterator[Section]:
    yield Section(
        "One step", f"Step {result.job.steps[result.step]}, of median length; operations on the critical path are framed.",
        (Plot("step", "Operations of a step, by rank and time", step_figure(result)), _path_table(result)),
    )  # fmt: skip
    introduction = "Means of the steps, by rank; a step lasts until the next one begins."
    yield Section("Where the time went", introduction, (_split_table(result.split),))
    if peaks := result.memory_peaks:
        yield Section(
            "Memory", "Most bytes allocated in recorded steps, as the trace counts them: on a CPU from the recording's begin on.",
            (_memory_table(peaks, _counts_from_begin(result.job, peaks)),),
        )  # fmt: skip
    if result.excesses:
        heads = (
            Column("rank", of=lambda row: str(row.rank)), Column.text("part of the step", "part"),
            Column("longer than others", "number", digits=duration_text, of="seconds"),
            Column("noise floor", "number", digits=duration_text, of="floor"),
            Column("clearly late", of=lambda row: "yes" if row.is_separable else "no"),
        )  # fmt: skip
        rows = sorted(result.excesses, key=lambda excess: (-excess.is_separable, -excess.seconds))
        yield Section(
            "Late ranks", "How much longer a part of a step takes than on the median of the other ranks, median over steps.",
            (Table.of(rows, heads, "lateness", is_emphasised=lambda excess: excess.is_separable, terminal_rows=5),),
        )  # fmt: skip


def _split_table(split: StepSplit) -> Table:
    def seconds(name: str, values: Any) -> Column:
        return Column(name, "number", digits=duration_text, of=lambda row: float(np.nanmean(values[row])))

    def awaited(row: int) -> str:
        waited = np.nansum(split.waiting_for[row], 1)
        return f"rank {split.ranks[int(waited.argmax())]}" if waited.max(initial=0) > 0 else "–"

    heads = (
        Column("rank", of=lambda row: str(split.ranks[row])), seconds("step", split.end - split.begin),
        seconds("compute", split.compute), seconds("exposed transfer", split.transfer), seconds("waiting", split.waiting),
        seconds("host gap", split.gap), Column.text("waits most for", awaited),
    )  # fmt: skip
    return Table.of(range(len(split.ranks)), heads, "parts of a step", terminal_rows=10)


def _memory_table(peaks: Sequence[MemoryPeak], from_begin: bool) -> Table:
    heads = (
        Column("rank", of=lambda row: str(row.rank)),
        Column("peak", "number", digits=lambda size: human_bytes(round(size)), of="bytes"),
        Column("step", of=lambda row: str(row.step)), Column.text("phase"),
    )  # fmt: skip
    title = "peak of memory allocated since the recording began" if from_begin else "peak of allocated memory"
    return Table.of(peaks, heads, title, terminal_rows=10)


def _path_table(result: Timeline) -> Table:
    operations, totals = result.job.operations, dict[tuple[int, str], tuple[int, float, float]]()
    for link in result.path:
        key = (int(operations.rank[link.operation]), operations.names[operations.name[link.operation]])
        times, seconds, gaps = totals.get(key, (0, 0.0, 0.0))
        totals[key] = times + 1, seconds + link.seconds, gaps + link.gap
    heads = (
        Column("rank", of=lambda row: str(row[0][0])),
        Column.text("operation", lambda row: short(escape_unprintable(row[0][1]), MOST_NAME)),
        Column.count("count", lambda row: row[1][0]),
        Column("time", "number", digits=duration_text, of=lambda row: row[1][1]),
        Column("gaps before", "number", digits=duration_text, of=lambda row: row[1][2]),
    )  # fmt: skip
    rows = sorted(totals.items(), key=lambda row: -row[1][1])
    return Table.of(rows, heads, "critical path", terminal_rows=8, sortable=True)


def step_figure(result: Timeline) -> Figure:
    """Bar chart of the operations of the median step by rank, with the critical path framed."""
    operations, critical = result.job.operations, {link.operation for link in result.path}
    drawn = np.flatnonzero(operations.step == result.step)
    if len(drawn) > MOST_BARS:
        drawn = np.sort(drawn[np.argsort(-operations.duration[drawn])[:MOST_BARS]])
    begin = float(operations.start[drawn].min())
    rows = {rank: number for number, rank in enumerate(result.job.ranks)}
    traces = []
    for kind, name in enumerate(KINDS):
        of_kind = drawn[operations.kind[drawn] == kind]
        if not len(of_kind):
            continue
        below = 0.22 if kind == COLLECTIVE else -0.22  # collectives run beside computation
        names = [label(operations.names[name], 60) for name in operations.name[of_kind]]
        seconds = [duration_text(float(duration)) for duration in operations.duration[of_kind]]
        places = zip(names, operations.rank[of_kind], seconds, strict=True)
        texts = [f"{name}<br>rank {rank}, {duration}" for name, rank, duration in places]
        frames = [1.5 if operation in critical else 0 for operation in of_kind.tolist()]
        traces.append({
            "type": "bar", "orientation": "h", "name": name, "hoverinfo": "text", "hovertext": texts, "width": 0.4,
            "base": (1e3 * (operations.start[of_kind] - begin)).tolist(), "x": (1e3 * operations.duration[of_kind]).tolist(),
            "y": [rows[int(rank)] + below for rank in operations.rank[of_kind]],
            "marker": {"color": SERIES_COLOURS[kind], "line": {"color": INK, "width": frames}},
        })  # fmt: skip
    ranks = [f"rank {rank}" for rank in rows]
    yaxis = {"tickvals": list(rows.values()), "ticktext": ranks, "range": [len(rows) - 0.4, -0.6]}
    xaxis = {"title": {"text": "ms since the step began"}}
    return figure(traces, 120 + 44 * len(rows), xaxis=xaxis, yaxis=yaxis, barmode="overlay", showlegend=True)


def _json(result: Timeline) -> dict[str, Any]:
    split = result.split
    means = {name: np.nanmean(getattr(split, name), 1).tolist() for name in ("compute", "transfer", "waiting", "gap")}
    return {
        "verdict": result.verdict,
        "ranks": [{"rank": rank} | {name: of[n] for name, of in means.items()} for n, rank in enumerate(split.ranks)],
        "memory": [vars(peak) for peak in result.memory_peaks],
        "late": [{**vars(excess), "is_separable": excess.is_separable} for excess in result.excesses],
        "what_if": [_answer_json(result, what_if) for what_if in result.answers],
    }


def _answer_json(result: Timeline, what_if: Answer) -> dict[str, Any]:
    limits = answer_interval(what_if)
    return {
        **{name: getattr(what_if, name) for name in ("text", "recorded", "predicted", "is_extrapolated")},
        "is_trusted": not _doubt(result, what_if),
        "peak_bytes": what_if.peak,
        "limits": [limits.low, limits.high],
        "notes": what_if.notes,
    }
