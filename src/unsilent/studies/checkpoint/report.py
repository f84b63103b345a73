"""The report of ``unsilent checkpoint study``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.estimates import Estimate, machine_table, measured, rows_across
from unsilent.report.model import Cell, Column, Report, Section, Table
from unsilent.report.text import count_text, difference_text, percent_text, upper_bound_text
from unsilent.statistics.comparing import joint_differences
from unsilent.studies.checkpoint.analysis import ALL_FLIPS, CheckpointResult, Difference, Floats, ResumeGroup
from unsilent.studies.checkpoint.kind import CheckpointStore
from unsilent.studies.checkpoint.spec import SECTIONS, CheckpointTarget, CleanResume

NAMES = ("strategy", "section", "loaded by")
MACHINE_NAMES = (*NAMES, "flips", "measure", "")
LOADED_BY_TEXTS = {
    "all": "all ranks",
    "one-after": "the last rank, into the wrapped model; the others load the clean file",
    "one-before": "the last rank, before the model is wrapped",
    "one-after-broadcast": "as one-after, then rank 0's optimizer state is sent to all",
    "one-before-broadcast": "as one-before, then rank 0's optimizer state is sent to all",
}
METHOD = (
    "A resume is different where it ends beyond the noise of the implementation, and harmful where it is worse than the clean "
    "resume by more than the gap and beyond the noise of seeds as well, or where it raised an error, crashed or hung. Intervals "
    "of shares are those of Clopper and Pearson. Both noise floors are measured on the training in one process."
)


def report(result: CheckpointResult) -> Report:
    """The report on a checkpoint study."""
    spec, baseline = result.spec, result.baseline
    harmful = sum(t.harmful for t in result.trials)
    headline = (
        f"{harmful:,} of {len(result.trials):,} trainings of {baseline.name} that resumed from a corrupted checkpoint ended "
        f"harmfully (error, crash, hang, or worse than the clean resume by more than {100 * result.options.gap:g} % and beyond "
        "noise)."
    )
    return Report(
        "unsilent/checkpoint-study/2", "checkpoint study", f"Corrupted checkpoints of {baseline.name}", headline,
        machine_table(estimates(result), MACHINE_NAMES), findings=tuple(_findings(result)), sections=tuple(_sections(result)),
        facts=tuple(_facts(result)), repeat_command=result.command, method=METHOD,
        further_json={
            "spec": spec.to_json(), "trials": len(result.trials), "seconds": result.seconds, "cpu_seconds": result.cpu_seconds,
            "versions": baseline.versions, "pairs": result.pairs, "differences": result.differences, "clean": baseline.resumes,
        },
    )  # fmt: skip


def estimates(result: CheckpointResult) -> list[Estimate]:
    """The shares of harmful and of different resumes in each group."""
    groups = (measured(_keys(g), {"harmful": g.harmful, "different": g.different}) for g in result.groups)
    return list(chain.from_iterable(groups))


def _names(target: CheckpointTarget) -> dict[str, Cell]:
    return dict(zip(NAMES, (target.strategy, target.section, target.loaded_by), strict=True))


def _keys(group: ResumeGroup) -> dict[str, Cell]:
    return {**_names(group.target), "flips": group.flips}


def _name_columns(result: CheckpointResult) -> list[Column]:
    """The columns that name the target of a row."""
    return [Column.text(name) for name in (NAMES if _ways_differ(result) else NAMES[:2])]


def _ways_differ(result: CheckpointResult) -> bool:
    return any(target.loaded_by != "all" for target in result.baseline.targets)


def _findings(result: CheckpointResult) -> Iterator[str]:
    resumes = result.baseline.resumes
    if len(resumes) > 1:
        checkpoints = _equal([(resume.strategy, resume.checkpoint_hash) for resume in resumes])
        yield f"strategies whose clean checkpoints have the same bits: {checkpoints}"
        ends = _equal([(resume.strategy, resume.final_hashes[0]) for resume in resumes])
        yield f"strategies whose clean resumes end with the same bits: {ends}"
    if pairs := result.pairs.count:
        yield (
            f"{result.pairs.same_class:,} of {pairs:,} pairs of trials with the same faults under two strategies ended in the "
            f"same class, {result.pairs.same_bits:,} with the same bits"
        )
    worst = max(result.groups, key=lambda group: (group.harmful.low, -group.flips), default=None)
    if worst and worst.harmful_trials:
        names = [str(name) for name in _names(worst.target).values() if name != "all"]
        yield (
            f"largest share of harmful ends (by its lower limit): {', '.join(names)}, {count_text(worst.flips, 'flip')}: "
            f"{worst.harmful_trials:,} of {count_text(worst.trials, 'trial')}"
        )
    together = [row for row in result.differences if row.is_paired or ALL_FLIPS in row.name] or result.differences
    shown = [row for row in result.differences if row.is_shown]
    for difference in [row for row in together if row.is_shown] + [row for row in shown if row not in together][:5]:
        yield _sentence(difference)
    if silent := len(result.differences) - len(shown):
        largest = max(row.detectable for row in result.differences if not row.is_shown)
        yield (
            f"{silent:,} of {count_text(len(result.differences), 'comparison')} of harmful shares show no difference; each would "
            f"find a difference of {upper_bound_text(largest, 100)} points or more with a probability of about 80 %"
        )


def _equal(hashes: Sequence[tuple[str, str]]) -> str:
    """The names with equal hashes, as text."""
    groups: dict[str, list[str]] = {}
    for name, value in hashes:
        groups.setdefault(value, []).append(name)
    return ", ".join(" and ".join(names) for names in groups.values() if len(names) > 1) or "none"


def _sentence(row: Difference) -> str:
    gap = row.difference
    verdict = f"{'the first' if gap.low > 0 else 'the second'} ends harmfully more often"
    shares = " against ".join(f"{percent_text(share.estimate)}" for share in (row.first, row.second))
    return f"harmful, {row.name}: {shares}, difference {difference_text(gap, ' points')}: {verdict}"


def _sections(result: CheckpointResult) -> Iterator[Section]:
    names = [*_name_columns(result), Column.count("flips")]
    shares = (
        *names, Column.count("trials"), Column.share("harmful"), Column.share("different", priority=1),
        Column.count("not finite", priority=2), Column.count("extreme", priority=3),
        Column("recovery", "number", "steps", digits=".0f", priority=4),
    )  # fmt: skip
    rows = [
        {**row, "trials": group.trials, "not finite": group.with_nonfinite, "extreme": group.with_extreme,
         "recovery": group.recovered}
        for row, group in zip(rows_across(estimates(result), "measure"), result.groups, strict=True)
    ]  # fmt: skip
    yield Section(
        "Shares",
        "Not finite and extreme: runs whose model had, on any rank, values that are NaN or infinite, or beyond a million. "
        "Recovery: median of the steps after which the training metric stayed within the gap, of runs that recovered.",
        (Table.of(rows, shares, "Resumes from corrupted checkpoints"),),
    )
    totals = sum((Counter(group.counts) for group in result.groups), Counter[str]())
    priorities = {name: number for number, (name, _) in enumerate(totals.most_common())}
    classes = [
        Column.count(name, priority=priorities[name]) for name in map(str, TrainingOutcome) if name in priorities
    ]
    rows = [{**_keys(group), **dict.fromkeys(priorities, 0), **group.counts} for group in result.groups]
    yield Section(
        "Outcome classes", "How the trainings ended.", (Table.of(rows, [*names, *classes], "Outcome classes"),)
    )
    if result.differences:
        differences = (
            Column.text("harmful", "name"), Column.share("first"), Column.share("second"), Column.points("difference"),
            Column("detectable", "number", "points", 100.0, ".0f", 1, of="detectable"),
            Column.text("verdict", lambda row: "shown" if row.is_shown else "none shown", priority=2),
        )  # fmt: skip
        yield Section(
            "Differences",
            "The first named minus the second. Trials of two strategies, or of two ways to load, have the same faults and are "
            "compared in pairs. Detectable: the smallest difference that would be found with a probability of about 80 %.",
            (Table.of(result.differences, differences, "Differences between harmful shares"),),
        )
    if any(group.changed.size for group in result.groups):
        yield _propagation(result)


def _propagation(result: CheckpointResult) -> Section:
    """The section on the share of parameters that differ, by rank and by layer."""
    names = _name_columns(result)
    steps = [f"step {step}" for step in result.baseline.resumes[0].evaluated_at]
    shares = [Column.percent(step, priority=number) for number, step in enumerate(steps)]
    by_rank = [
        {**_keys(group), "rank": rank, **_known_shares(steps, changed)}
        for group in result.groups
        for rank, changed in enumerate(group.changed)
    ]
    by_layer = [
        {**_names(row.target), "layer": row.layer, **_known_shares(steps, row.changed), "not finite": row.nonfinite,
         "extreme": row.extreme}
        for row in result.layers
    ]  # fmt: skip
    values = [Column.count(name, priority=len(steps) + number) for number, name in enumerate(("not finite", "extreme"))]
    title = "Parameters with other bits than in the clean resume, by "
    return Section(
        "Propagation",
        "Mean share over the trials that reached a step; the first is right after the restart. Running statistics are not "
        "parameters and do not count. By layer: over all ranks and numbers of flips. Not finite and extreme: trials in which "
        "the layer had such values.",
        (
            Table.of(by_rank, [*names, Column.count("flips"), Column.count("rank"), *shares], f"{title}rank"),
            Table.of(by_layer, [*names, Column.text("layer"), *shares, *values], f"{title}layer", sortable=True),
        ),
    )


def _known_shares(steps: Sequence[str], shares: Floats) -> dict[str, Cell]:
    """Shares by evaluation step, without those that are NaN."""
    return {step: float(value) for step, value in zip(steps, shares, strict=False) if not math.isnan(value)}


def _facts(result: CheckpointResult) -> Iterator[tuple[str, str]]:
    spec, baseline = result.spec, result.baseline
    yield "training", f"{baseline.name}, checkpoint after step {baseline.step} of {baseline.steps}"
    strategies = (f"{resume.strategy} ({count_text(resume.ranks, 'rank')})" for resume in baseline.resumes)
    yield "strategies", ", ".join(strategies)
    yield "fault model", f"{spec.fault}, {spec.law}"
    if _ways_differ(result):
        yield "loaded by", "; ".join(f"{name}: {LOADED_BY_TEXTS[name]}" for name in spec.loaded_by)
    accuracies = (f"{resume.strategy} {_accuracy(resume)}" for resume in baseline.resumes)
    yield "fault-free held-out accuracy", ", ".join(accuracies)
    runs = len(result.floors.seeds.accuracy)
    yield "noise floors", f"{runs} fault-free runs each; gap {100 * result.options.gap:g} %"
    for section in spec.sections:
        yield section, SECTIONS[section]


def _accuracy(resume: CleanResume) -> str:
    return f"{resume.accuracy[-1]:.4f}"


def compare_stores(store_a: CheckpointStore, store_b: CheckpointStore, **choices: Any) -> Report:
    """The report that compares two stores; ``choices`` are fields of `CheckpointAnalysisOptions`."""
    return comparison_report(store_a.analyse(**choices), store_b.analyse(**choices))


def comparison_report(result_a: CheckpointResult, result_b: CheckpointResult) -> Report:
    """The report that compares the shares of harmful resumes of two campaigns."""
    groups = {(g.target.name, g.flips): g for g in result_b.groups}
    pairs = [(g, groups[g.target.name, g.flips]) for g in result_a.groups if (g.target.name, g.flips) in groups]
    gaps = joint_differences(
        [((a.harmful_trials, a.trials), (b.harmful_trials, b.trials)) for a, b in pairs], result_a.options.confidence
    )
    rows: list[Estimate] = []
    for (a, b), gap in zip(pairs, gaps, strict=True):
        rows += measured(_keys(a), {"harmful, A": a.harmful, "harmful, B": b.harmful, "harmful, A minus B": gap})
    shares = (*map(Column.share, ("harmful, A", "harmful, B")), Column.points("harmful, A minus B"))
    columns = (*map(Column.text, NAMES), Column.count("flips"), *shares)
    shown = sum(not gap.low <= 0 <= gap.high for gap in gaps)
    harmful = Table.of(rows_across(rows, "measure"), columns, "Harmful resumes")
    return Report(
        "unsilent/checkpoint-study-comparison/1", "checkpoint study", "Two campaigns on corrupted checkpoints",
        f"A difference between A and B is shown in {shown} of {count_text(len(pairs), 'share')} of harmful resumes.",
        machine_table(rows, MACHINE_NAMES),
        sections=(Section("Harmful resumes", "Limits of the differences hold for all rows together.", (harmful,)),),
        facts=(("A", result_a.command), ("B", result_b.command)),
    )  # fmt: skip
