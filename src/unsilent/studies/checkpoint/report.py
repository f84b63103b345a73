"""The report of ``unsilent checkpoint study``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.model import Cell, Column, Report, Section, Table, TableRow, TextCell, estimates_table
from unsilent.report.text import count_text, percent_text, signed, upper_bound_text
from unsilent.statistics.comparing import joint_differences
from unsilent.studies.checkpoint.analysis import ALL_FLIPS, CheckpointResult, Difference, ResumeGroup
from unsilent.studies.checkpoint.spec import SECTIONS, CheckpointTarget, CleanResume

_SHARE: dict[str, Any] = {"kind": "estimate", "unit": "%", "scale": 100.0}
NAMES = ("strategy", "section", "loaded by")
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
    """What is shown of a campaign."""
    spec, baseline = result.spec, result.baseline
    harmful = sum(t.harmful for t in result.trials)
    headline = (
        f"{harmful:,} of {len(result.trials):,} trainings of {baseline.name} that resumed from a corrupted checkpoint ended "
        "harmfully."
    )
    return Report(
        "unsilent/checkpoint-study/1", "checkpoint study", f"Corrupted checkpoints of {baseline.name}", headline,
        _machine_table(result), findings=tuple(_findings(result)), sections=tuple(_sections(result)),
        facts=tuple(_facts(result)), repeat_command=result.command, method=METHOD,
        further_json={
            "command": result.command, "spec": spec.to_json(), "trials": len(result.trials), "seconds": result.seconds,
            "cpu_seconds": result.cpu_seconds, "versions": dict(baseline.versions),
            "pairs": asdict(result.pairs),
            "differences": [_difference_json(d) for d in result.differences],
            "clean": [{"strategy": one.strategy, "ranks": one.ranks, "accuracy": one.accuracy[-1],
                       "checkpoint": one.checkpoint_hash, "final": one.final_hashes[0]} for one in baseline.resumes],
        },
    )  # fmt: skip


def _machine_table(result: CheckpointResult) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in result.groups:
        where = (*_names(group.target), group.flips)
        rows += [(*where, "harmful", group.harmful), (*where, "different", group.different)]
    return estimates_table((*NAMES, "flips", "measure", ""), rows)


def _names(target: CheckpointTarget) -> tuple[str, str, str]:
    return target.strategy, target.section, target.loaded_by


def _where_columns(result: CheckpointResult) -> tuple[Column, ...]:
    """The columns that say which group; who loads the file where that differs."""
    names = NAMES if _ways_differ(result) else NAMES[:2]
    return *(Column(name, left_aligned=True) for name in names), Column("flips", "number")


def _where(group: ResumeGroup, result: CheckpointResult) -> tuple[Cell, ...]:
    names = _names(group.target)
    return *(names if _ways_differ(result) else names[:2]), group.flips


def _ways_differ(result: CheckpointResult) -> bool:
    return any(target.loaded_by != "all" for target in result.baseline.targets)


def _findings(result: CheckpointResult) -> Iterator[str]:
    resumes = result.baseline.resumes
    if len(resumes) > 1:
        yield f"checkpoints with the same bits: {_equal([(one.strategy, one.checkpoint_hash) for one in resumes])}"
        yield f"clean resumes that end with the same bits: {_equal([(one.strategy, one.final_hashes[0]) for one in resumes])}"
    if pairs := result.pairs.count:
        yield (
            f"{result.pairs.same_class:,} of {pairs:,} pairs of trials with the same faults under two strategies ended in the "
            f"same class, {result.pairs.same_bits:,} with the same bits"
        )
    if worst := max(result.groups, key=lambda group: (group.harmful.low, -group.flips), default=None):
        names = [name for name in _names(worst.target) if name != "all"]
        yield (
            f"most harmful: {', '.join(names)}, {count_text(worst.flips, 'flip')}: {worst.harmful_trials:,} of "
            f"{count_text(worst.trials, 'trial')}"
        )
    together = [one for one in result.differences if one.is_paired or ALL_FLIPS in one.name] or result.differences
    shown = [one for one in result.differences if one.is_shown]
    for difference in [one for one in together if one.is_shown] + [one for one in shown if one not in together][:5]:
        yield _sentence(difference)
    if silent := len(result.differences) - len(shown):
        largest = max(one.detectable for one in result.differences if not one.is_shown)
        yield (
            f"{silent:,} of {count_text(len(result.differences), 'comparison')} of harmful shares show no difference; any of "
            f"{upper_bound_text(largest, 100)} points or more would be found four times in five"
        )


def _equal(hashes: Sequence[tuple[str, str]]) -> str:
    """Names with equal hashes, in words."""
    groups: dict[str, list[str]] = {}
    for name, value in hashes:
        groups.setdefault(value, []).append(name)
    return ", ".join(" and ".join(names) for names in groups.values() if len(names) > 1) or "none"


def _sentence(one: Difference) -> str:
    gap = one.difference
    verdict = f"{'the first' if gap.low > 0 else 'the second'} ends harmfully more often"
    shares = " against ".join(f"{percent_text(share.estimate)}" for share in (one.first, one.second))
    limits = signed(gap.estimate, gap.low, gap.high)
    return f"harmful, {one.name}: {shares}, difference {limits.estimate} points{limits.limits_in_sentence}: {verdict}"


def _sections(result: CheckpointResult) -> Iterator[Section]:
    shares = Table(
        (
            *_where_columns(result), Column("trials", "number"), Column("harmful", **_SHARE),
            Column("different", **_SHARE, priority=1), Column("not finite", "number", priority=2),
            Column("extreme", "number", priority=3),
            Column("recovery", "number", unit="steps", digits=".0f", priority=4),
        ),
        tuple(TableRow((*_where(group, result), *_cells(group))) for group in result.groups),
        "Resumes from corrupted checkpoints",
    )  # fmt: skip
    yield Section(
        "Shares",
        "Not finite and extreme: runs whose model had, on any rank, values that are NaN or infinite, or beyond a million. "
        "Recovery: median of the steps after which the training metric stayed within the gap, of runs that recovered.",
        (shares,),
    )
    present = {name for group in result.groups for name in group.counts}
    totals = Counter[str]()
    for group in result.groups:
        totals.update(group.counts)
    kept = {name: number for number, (name, _) in enumerate(totals.most_common())}
    classes = [str(name) for name in TrainingOutcome if str(name) in present]
    outcome = Table(
        (*_where_columns(result), *(Column(name, "number", priority=kept[name]) for name in classes)),
        tuple(TableRow((*_where(g, result), *(g.counts.get(name, 0) for name in classes))) for g in result.groups),
        "Outcome classes",
    )  # fmt: skip
    yield Section("Outcome classes", "How the trainings ended.", (outcome,))
    if result.differences:
        rows = (
            TableRow((
                one.name, one.first, one.second, TextCell(_limits(one), one.difference.estimate),
                f"{100 * one.detectable:.0f}", "shown" if one.is_shown else "none shown",
            )) for one in result.differences
        )  # fmt: skip
        differences = Table(
            (Column("harmful", left_aligned=True), Column("first", **_SHARE), Column("second", **_SHARE),
             Column("difference", unit="points"), Column("detectable", "number", unit="points", priority=1),
             Column("verdict", left_aligned=True, priority=2)),
            tuple(rows), "Differences between harmful shares",
        )  # fmt: skip
        yield Section(
            "Differences",
            "The first named minus the second. Trials of two strategies, or of two ways to load, have the same faults and are "
            "compared in pairs. Detectable: the smallest difference that would be found four times in five.",
            (differences,),
        )
    if any(group.changed.size for group in result.groups):
        yield _propagation(result)


def _limits(one: Difference) -> str:
    shown = signed(one.difference.estimate, one.difference.low, one.difference.high)
    return f"{shown.estimate}{shown.limits_in_sentence}"


def _propagation(result: CheckpointResult) -> Section:
    """Which share of the parameters differs, by rank and by layer."""
    steps = result.baseline.resumes[0].evaluated_at
    shown = [
        Column(f"step {step}", "number", unit="%", scale=100.0, digits=".3g", priority=number)
        for number, step in enumerate(steps)
    ]
    by_rank = Table(
        (*_where_columns(result), Column("rank", "number"), *shown),
        tuple(
            TableRow((*_where(group, result), rank, *_filled(shares, len(steps))))
            for group in result.groups
            for rank, shares in enumerate(group.changed)
        ),
        "Parameters with other bits than in the clean resume, by rank",
    )
    columns = [column for column in _where_columns(result) if column.name != "flips"]
    by_layer = Table(
        (*columns, Column("layer", left_aligned=True), *shown, Column("not finite", "number", priority=len(steps)),
         Column("extreme", "number", priority=len(steps) + 1)),
        tuple(
            TableRow((*_names(one.target)[: len(columns)], one.layer, *_filled(one.changed, len(steps)), one.nonfinite,
                      one.extreme))
            for one in result.layers
        ),
        "Parameters with other bits than in the clean resume, by layer",
        sortable=True,
    )  # fmt: skip
    return Section(
        "Propagation",
        "Mean share over the trials that reached a step; the first is right after the restart. Running statistics are not "
        "parameters and do not count. By layer: over all ranks and numbers of flips. Not finite and extreme: trials in which "
        "the layer had such values.",
        (by_rank, by_layer),
    )


def _filled(shares: Iterable[float], length: int) -> list[float | None]:
    """Shares at all evaluations; None where no trial reached one, and where nothing is known."""
    known = [None if math.isnan(share) else float(share) for share in shares]
    return known + [None] * (length - len(known))


def _cells(group: ResumeGroup) -> tuple[Cell, ...]:
    return (
        group.trials, group.harmful, group.different, group.with_nonfinite, group.with_extreme, group.recovered,
    )  # fmt: skip


def _facts(result: CheckpointResult) -> Iterator[tuple[str, str]]:
    spec, baseline = result.spec, result.baseline
    yield "training", f"{baseline.name}, checkpoint after step {baseline.step} of {baseline.steps}"
    yield "strategies", ", ".join(f"{one.strategy} ({count_text(one.ranks, 'rank')})" for one in baseline.resumes)
    yield "fault model", f"{spec.fault}, {spec.law}"
    if _ways_differ(result):
        yield "loaded by", "; ".join(f"{name}: {LOADED_BY_TEXTS[name]}" for name in spec.loaded_by)
    yield "fault-free held-out accuracy", ", ".join(f"{one.strategy} {_accuracy(one)}" for one in baseline.resumes)
    yield (
        "noise floors",
        f"{len(result.floors.seeds.accuracy)} fault-free runs each; gap {100 * result.options.gap:g} %",
    )
    for section in spec.sections:
        yield section, SECTIONS[section]


def _accuracy(one: CleanResume) -> str:
    return f"{one.accuracy[-1]:.4f}"


def _difference_json(one: Difference) -> dict[str, Any]:
    return {
        "name": one.name, "first": one.first.estimate, "second": one.second.estimate, "estimate": one.difference.estimate,
        "low": one.difference.low, "high": one.difference.high, "confidence": one.difference.confidence,
        "paired": one.is_paired, "smallest_detectable": one.detectable,
    }  # fmt: skip


def comparison_report(one: CheckpointResult, other: CheckpointResult) -> Report:
    """What is shown of two campaigns: harmful resumes of the groups that both have."""
    groups = {(g.target.name, g.flips): g for g in other.groups}
    pairs = [(g, groups[g.target.name, g.flips]) for g in one.groups if (g.target.name, g.flips) in groups]
    gaps = joint_differences(
        [((a.harmful_trials, a.trials), (b.harmful_trials, b.trials)) for a, b in pairs], one.options.confidence
    )
    rows = [(*_names(a.target), a.flips, a.harmful, b.harmful, gap) for (a, b), gap in zip(pairs, gaps, strict=True)]
    heads = (
        *(Column(name, left_aligned=True) for name in NAMES), Column("flips", "number"),
        Column("A", **_SHARE), Column("B", **_SHARE), Column("A minus B", **_SHARE),
    )  # fmt: skip
    shown = sum(not gap.low <= 0 <= gap.high for gap in gaps)
    table = Table(heads, tuple(map(TableRow, rows)), "Harmful resumes")
    machine = estimates_table((*NAMES, "flips", "measure", ""), _machine_rows(rows))
    return Report(
        "unsilent/checkpoint-study-comparison/1", "checkpoint study", "Two campaigns on corrupted checkpoints",
        f"{shown} of {count_text(len(pairs), 'share')} of harmful resumes differ between A and B.", machine,
        sections=(Section("Harmful resumes", "Limits of the differences hold for all rows together.", (table,)),),
        facts=(("A", one.command), ("B", other.command)),
    )  # fmt: skip


def _machine_rows(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Cell, ...]]:
    for *where, first, second, gap in rows:
        for name, value in (("A", first), ("B", second), ("A minus B", gap)):
            yield *where, f"harmful, {name}", value
