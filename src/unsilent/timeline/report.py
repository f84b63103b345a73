"""The report of ``unsilent timeline``: slowdown, ranks, stages and operations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unsilent.basics.printable import escape_unprintable
from unsilent.basics.strictjson import fields_by_name
from unsilent.report.estimates import machine_table, measured
from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.text import count_text, duration_text, interval_text, listed, short
from unsilent.timeline.job import EDGE_KINDS
from unsilent.timeline.slowdown import Removal, Slowdown
from unsilent.timeline.step_split import step_bounds

METHOD = (
    "The job is replayed: each operation starts once all that it depends on has ended, and takes its time; a collective ends on "
    "a rank its transfer time after its last member began. In the straggler-free replay each computation takes the mean of its "
    "kind, and each communication the median. The slowdown is the mean step time with recorded durations over the mean "
    "straggler-free one; both replays leave out gaps before operations that no dependency explains. Slowdown by a group: in the "
    "straggler-free replay, only the group takes what it took; by a rank: the smaller one of its data-parallel rank's and its "
    "stage's."
)
ALONE = ": slowdown that each causes alone"
TERMINAL_ROWS = 10
MOST_NAME = 60
"""Most characters shown of an operation's name."""
OVERLAP = 1.1
"""Steps are reported to overlap if they take more than this times as long as the time between the begins of two steps."""


def slowdown_report(result: Slowdown, source: str = "") -> Report:
    """Report on a slowdown; ``source`` names the trace."""
    slowdown, with_gaps = result.slowdown, result.slowdown_with_gaps
    return Report(
        "unsilent/timeline/2", "timeline", f"Timeline of {escape_unprintable(source) or 'a job'}", _headline(result),
        machine_table(measured({}, {"slowdown": slowdown, "slowdown_with_gaps": with_gaps}, "step"), ("measure", "")),
        numbers=(
            ("slowdown", interval_text(slowdown), f"{_quantiles(result)} in single steps"),
            ("slowdown, gaps kept", interval_text(with_gaps), "with recorded gaps in both replays"),
            ("step time", duration_text(result.recorded.mean()),
             f"recorded, from last end to last end, mean of {count_text(len(result.recorded), 'step')}"),
            ("unexplained gaps", f"{100 * result.unexplained_share:.2g} %", "of the time of all ranks"),
        ),
        findings=tuple(_findings(result)),
        sections=tuple(_sections(result)),
        facts=tuple(_facts(result)),
        notes=tuple(_notes(result)),
        method=METHOD,
        further_json={"results": {**fields_by_name(result, "job"), "steps": result.job.steps}},
    )  # fmt: skip


def _notes(result: Slowdown) -> Iterator[str]:
    job = result.job
    yield from map(escape_unprintable, job.notes)
    period = float(np.nanmean([end - begin for begin, end in (step_bounds(job, rank) for rank in job.ranks)]))
    if (recorded := float(result.recorded.mean())) > OVERLAP * period:
        yield (
            f"steps overlap: a step begins every {duration_text(period)} but takes {duration_text(recorded)} (means), because "
            "the first one is counted from its begin to its last end, in the replays as well"
        )
    if len(job.ranks) == 2 and not job.stages:
        yield (
            "with two ranks, the straggler-free duration of a computation is the mean of both ranks: half of what the slower "
            "one takes longer stays in it, so the slowdown is too small"
        )
    yield "intervals assume that steps are independent of each other"
    yield "slowdown_with_gaps keeps the gaps before operations; if gaps are waits that were not recorded, it is too small"
    if len(job.ranks) > 1:
        yield "M_W and M_S: above 100 %, steps would be faster than without stragglers; below 0 %, slower than they were"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _shown_share(share: float) -> float:
    """A share without the rounding errors of times, which are far below a billionth."""
    return round(share, 9)


def _facts(result: Slowdown) -> Iterator[tuple[str, str]]:
    job, errors = result.job, np.abs(result.prediction_errors)
    steps = count_text(len(result.recorded), "step")
    yield "trace", f"{len(job.operations):,} operations of {count_text(len(job.ranks), 'rank')} in {steps}"
    yield "world size", f"{job.world_size:,}"
    left = result.without_gaps.mean() / result.recorded.mean()
    yield "replay without gaps", f"{100 * left:.3g} % of the recorded step time"
    if np.isfinite(errors).all():
        off = f"off by {_percent(errors.mean())} on average, {_percent(errors.max())} at most"
        yield "steps predicted from the other steps", off


def _headline(result: Slowdown) -> str:
    slowdown = result.slowdown.estimate or 0.0
    return (
        f"In a replay without idle gaps, a step takes {slowdown:.3g} times as long as without stragglers: "
        f"{duration_text(result.without_gaps.mean())} instead of {duration_text(result.straggler_free.mean())}."
    )


def _findings(result: Slowdown) -> Iterator[str]:
    removals = [] if len(result.workers) == 1 else [(_ranks(result.slow_workers), "M_W", result.slow_workers)]
    removals += [("the last stage", "M_S", result.last_stage)] if result.last_stage else []
    for name, symbol, removal in removals:
        if removal.share is not None:
            seconds, share = duration_text(removal.seconds), _percent(removal.share)
            yield (
                f"if {name} took straggler-free durations, a step would take {seconds}: {share} of the slowdown would be gone "
                f"({symbol})"
            )
    first = result.classes[0]
    if (slowdown := f"{first.slowdown:.3g}") != "1":
        yield (
            f"the operations that slow a step down most on their own: `{short(first.name, MOST_NAME)}` ({slowdown} times as long "
            "as without stragglers)"
        )


def _ranks(removal: Removal) -> str:
    return f"rank{'s' if len(removal.ranks) > 1 else ''} {listed(map(str, removal.ranks))}"


def _quantiles(result: Slowdown) -> str:
    low, high = np.quantile(result.without_gaps / result.straggler_free, (0.05, 0.95))
    return f"{low:.3g} to {high:.3g} (5 and 95 %)"


def _sections(result: Slowdown) -> Iterator[Section]:
    slowdown = Column("slowdown", "number", digits=".4g", of="slowdown")
    worker_heads = (
        Column("rank", of=lambda worker: str(worker.rank)), slowdown,
        Column("data-parallel rank", of=lambda worker: str(worker.data_rank)),
        *([Column("stage", of=lambda worker: str(worker.stage))] if result.stages else []),
    )  # fmt: skip
    is_job = len(result.workers) > 1
    if is_job:
        yield Section(
            "Workers", "Ranks by the slowdown that they cause alone.",
            (Table.of(result.workers, worker_heads, f"workers{ALONE}", terminal_rows=TERMINAL_ROWS, sortable=True),),
        )  # fmt: skip
    heads = (
        Column.text("group", lambda group: short(group.name, MOST_NAME)), slowdown,
        Column.count("operations", priority=1),
        Column.percent("unexplained gaps", lambda group: _shown_share(group.unexplained_share), digits=".2g"),
    )  # fmt: skip
    data_ranks = result.data_ranks if result.stages else ()  # else they are the workers
    parts = (("operations", result.classes), ("stages", result.stages), ("data-parallel ranks", data_ranks))
    yield Section(
        "Operations and stages", "Slowdown where only this group takes what it took, and gaps that no dependency explains.",
        tuple(
            Table.of(rows, heads, f"{title}{ALONE}", terminal_rows=TERMINAL_ROWS, sortable=True)
            for title, rows in parts
            if rows
        ),
    )  # fmt: skip
    lead = "Gaps that no dependency explains, where one kind of dependencies is ignored."
    yield Section("Dependencies", lead, (_dependencies(result),))
    yield Section("Steps", "Each step; the prediction is made from the other steps.", (_steps(result),))


def _dependencies(result: Slowdown) -> Table:
    counts = np.bincount(result.job.edges.kind, minlength=len(EDGE_KINDS)).tolist()
    rows = [("none", sum(counts), result.unexplained_share)]
    rows += [(kind, counts[EDGE_KINDS.index(kind)], share) for kind, share in result.unexplained_without.items()]
    heads = (
        Column.text("ignored", lambda row: row[0]), Column.count("dependencies", lambda row: row[1]),
        Column.percent("unexplained gaps", lambda row: _shown_share(row[2]), digits=".2g"),
    )  # fmt: skip
    return Table.of(rows, heads, "unexplained gaps if dependencies are ignored", terminal_rows=0)


def _steps(result: Slowdown) -> Table:
    def seconds(name: str, at: int) -> Column:
        return Column(name, "number", digits=duration_text, of=lambda row: row[at])

    heads = (
        Column("step", of=lambda row: str(row[0])), seconds("recorded", 1), seconds("replayed without gaps", 2),
        seconds("straggler-free", 3), Column("slowdown", "number", digits=".4g", of=lambda row: row[2] / row[3]),
        Column.percent("error of prediction", lambda row: row[4], digits="+.2g"),
    )  # fmt: skip
    return Table.of(_step_rows(result), heads, "steps", terminal_rows=0, sortable=True)


def _step_rows(result: Slowdown) -> Iterator[tuple[int, float, float, float, float | None]]:
    """Number, recorded, replayed and straggler-free seconds, and prediction error of each step."""
    columns = (result.recorded, result.without_gaps, result.straggler_free, result.prediction_errors)
    rows = zip(result.job.steps, *(column.tolist() for column in columns), strict=True)
    for step, recorded, replayed, free, error in rows:
        yield step, recorded, replayed, free, error if np.isfinite(error) else None
