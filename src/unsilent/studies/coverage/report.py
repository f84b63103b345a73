"""The report of ``unsilent coverage``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unsilent.report.estimates import Estimate, machine_table, measured, rows_across
from unsilent.report.model import Cell, Column, Getter, Part, Plot, Report, Section, Table, TableRow
from unsilent.report.text import count_text, difference_text, number_text, p_value_text, percent_text, upper_bound_text
from unsilent.report.theme import Figure
from unsilent.studies.coverage.analysis import (
    ALARMS,
    ALL_FINITE,
    LARGE_FINITE,
    MATCHED,
    REFERENCE,
    CoverageResult,
    Detection,
    FalseAlarms,
)
from unsilent.studies.coverage.planted_changes import CHANGE_TEXTS
from unsilent.studies.coverage.report_parts import comparison_table, roc_figure
from unsilent.studies.coverage.spec import CLASSES, PLACES

FURTHER = ("faults", "clean_steps", "clean_runs", "ends", "tests", "false_alarms", "seconds", "cpu_seconds")
"""Fields of the result that JSON contains in addition to estimates."""
PLACE_TEXTS = {
    "operation": "Faults in an operation of a step, by relative change of the gradients: share detected within {follow} steps",
    "memory": "Faults in parameters and optimizer state between two steps, by relative change of the update: share detected "
    "within {follow} steps",
}
LARGE_TEXT = "finite faults in operations that change the gradients by 1 % or more"
"""Name of the faults in `LARGE_FINITE`."""
METHOD = (
    "A rule detects a fault if it raises an alarm in the step of the fault or one of the next steps that are followed, and none "
    "in the same step of the fault-free run. The severity is the L2 norm of the change of all gradients of the step, divided by "
    "the norm of the fault-free gradients, before clipping; for a fault in memory, the norm of the change of all parameters "
    "after the step, divided by the norm of the fault-free update. Shares hold for faults of their class, as they are drawn, and "
    "do not show how often a class occurs. Intervals of shares are those of Clopper and Pearson. Scaling a threshold uses the "
    "recorded scores; what a rule has learnt stays as it is."
)


def report(result: CoverageResult) -> Report:
    """The report on a coverage campaign."""
    baseline = result.baseline
    return Report(
        "unsilent/coverage/2", "coverage", f"Detection of faults in {baseline.name}", _headline(result),
        machine_table(estimates(result), ("rule", "on", "level", "faults", "measure", "")),
        findings=tuple(_findings(result)), sections=tuple(_sections(result)), facts=tuple(_facts(result)),
        repeat_command=result.command, method=METHOD,
        further_json={
            "spec": result.spec.to_json(), "versions": baseline.versions, "cost": result.seconds_per_step,
            **{name: getattr(result, name) for name in FURTHER},
        },
    )  # fmt: skip


def _headline(result: CoverageResult) -> str:
    """A sentence on how many large finite faults the reference rule detects, and on its false alarms."""
    name = result.baseline.name
    large = [detection for detection in result.detections if detection.target in LARGE_FINITE]
    counts = {rule: sums for (rule, on), sums in _sums(large).items() if not on}
    order = sorted(counts, key=lambda rule: (-counts[rule][0], rule != REFERENCE))
    if not order or not counts[order[0]][1]:
        return f"No finite fault in {name} with a change of the gradients of 1 % or more was judged."
    best, reference = order[0], REFERENCE if REFERENCE in counts else order[0]
    detected, faults = counts[reference]
    most = "; no rule detects more"
    if counts[best][0] > detected:
        most = f"; the most by any rule are {counts[best][0]:,} ({best})"
    text = (
        f"{reference} detects {detected:,} of {count_text(faults, 'finite fault')} in {name} with a change of the "
        f"gradients of 1 % or more{most}"
    )
    alarms = (row for row in result.false_alarms if row.rule == reference and not row.on and row.level == ALARMS)
    if (events := next((row.events for row in alarms), None)) is None:
        return f"{text}; false alarms were not measured."
    steps, runs = count_text(result.clean_steps, "fault-free step"), count_text(result.clean_runs, "run")
    return f"{text}; {reference} raises {count_text(events, 'false alarm')} in {steps} of {runs}."


def estimates(result: CoverageResult) -> list[Estimate]:
    """Shares of detected faults by class, and rates of false alarms."""
    rows: list[Estimate] = []
    for detection in result.detections:
        rows += measured(_keys(detection, detection.target), {"detected": detection.share})
    for alarms in result.false_alarms:
        rates = {"false alarms per step": alarms.per_step, "runs with one": alarms.per_run}
        rows += measured(_keys(alarms, "clean"), rates)
    return rows


def _keys(row: Detection | FalseAlarms, faults: str) -> dict[str, Cell]:
    return {"rule": row.rule, "on": row.on or "default", "level": row.level, "faults": faults}


def _findings(result: CoverageResult) -> Iterator[str]:
    detections = {(row.rule, row.target): row for row in result.detections if not row.on and row.level == ALARMS}
    for target in (*LARGE_FINITE, "operation:nonfinite"):
        of_target = [row for (_, name), row in detections.items() if name == target]
        best = max(of_target, key=lambda row: row.share.low, default=None)
        if best is not None and best.share.n:
            rules = [row.rule for row in of_target if row.detected == best.detected]
            many, share = count_text(best.share.n, "fault"), percent_text(best.share.estimate)
            who = f"{'each of ' * (len(rules) > 1)}{', '.join(rules)}"
            found = f"{best.detected:,} of {many} ({share}) detected by {who}; fewer by every other rule"
            if len(rules) == len(of_target):
                found = f"each rule detects {best.detected:,} of {many} ({share})"
            yield f"{_class_text(target)}: {found if best.detected else f'no rule detects any of {many}'}"
    yield from _comparison_findings(result)
    alarms = [row for row in result.false_alarms if not row.on and row.level == ALARMS]
    for row in (row for row in alarms if row.rule == REFERENCE):
        yield (
            f"false alarms of {REFERENCE}: {row.events:,} in {count_text(result.clean_steps, 'fault-free step')}; one-sided "
            f"upper limits: {upper_bound_text(row.per_step.high)} per step, and {upper_bound_text(row.per_run.high, 100)} % of "
            "runs with an alarm"
        )
    wanted = max(map(len, result.severities.values()), default=0)
    counts = {target: len(values) for target, values in result.severities.items()}
    if missing := [f"{target} ({faults:,})" for target, faults in counts.items() if faults < wanted]:
        yield (
            f"fewer than {count_text(wanted, 'fault')} were found in these classes: {', '.join(missing)}; raise --tries, or "
            "choose another --large-fault"
        )


def _comparison_findings(result: CoverageResult) -> Iterator[str]:
    """Sentences on the significant differences between the reference rule and the others."""
    tests = [test for test in result.tests if test.target == ALL_FINITE and test.level != MATCHED]
    clear = [test for test in tests if test.p_value < 1 - result.options.confidence]
    for test in clear:
        yield (
            f"{LARGE_TEXT}: share that {REFERENCE} detects minus share that {test.rule} detects ({test.level}): "
            f"{difference_text(test.difference, ' points')}, p = {p_value_text(test.p_value)}"
        )
    if rest := [f"{test.rule} ({test.level})" for test in tests if test not in clear]:
        yield f"{LARGE_TEXT}: no difference was shown between {REFERENCE} and {', '.join(rest)}"


def _class_text(target: str) -> str:
    low, _, high = target.partition(":")[2].partition("..")
    if not high:
        return "faults that make gradients not finite"
    until = "times their norm or more" if high == "inf" else f"to {high} times their norm"
    return f"faults that change the gradients by {low} {until}"


def _sections(result: CoverageResult) -> Iterator[Section]:
    rows = [row for row in result.detections if not row.on]
    places = [place for place in PLACES if any(row.target.startswith(place) for row in rows)]
    yield Section(
        "Detection",
        f"Share of faults that a rule detects within {count_text(result.spec.follow, 'step')}, by the relative change of the "
        "gradients or of the update.",
        tuple(_by_class(rows, place, PLACE_TEXTS[place].format(follow=result.spec.follow)) for place in places),
    )
    large = [row for row in result.detections if row.target in LARGE_FINITE and row.level == ALARMS]
    if large:
        yield Section("Rules and features", "Each rule on one feature alone: finite faults in operations that change the "
                      "gradients by 1 % or more.", (_by_feature(large),))  # fmt: skip
    if result.false_alarms:
        yield _false_alarms(result)
    if result.tests:
        yield _comparisons(result)
    lead = "Number of steps from the step of the fault to the first alarm, for detected faults of all classes."
    yield Section("Latency", lead, (_latency(rows, result.spec.follow),))
    time = Column("time per step", "number", "µs", 1e6, ".3g", of=lambda row: row[1])
    columns = (Column.text("rule", lambda row: row[0]), time)
    cost = Table.of(result.seconds_per_step.items(), columns, "Time that a rule takes to judge a step")
    lead = f"Each rule judges {count_text(len(result.baseline.series), 'series')} of numbers in each step, in this process."
    yield Section("Cost", lead, (cost,))


def _by_class(rows: Sequence[Detection], place: str, title: str) -> Table:
    of_place = [row for row in rows if row.target.startswith(f"{place}:")]
    names = ("rule", "detected by", "class")
    keys = (dict(zip(names, (row.rule, row.level, row.target.partition(":")[2]), strict=True)) for row in of_place)
    cells = [Estimate(key, row.share) for key, row in zip(keys, of_place, strict=True)]
    classes = (Column.share(name, priority=number) for number, name in enumerate(CLASSES[::-1]))
    return Table.of(rows_across(cells, "class"), [*map(Column.text, names[:2]), *classes], title)


def _by_feature(rows: Sequence[Detection]) -> Table:
    features = dict.fromkeys(row.on for row in rows)
    columns = (Column.percent(on or "default features", priority=n, digits=".0f") for n, on in enumerate(features))
    shares: dict[str, dict[str, Cell]] = {}
    for (rule, on), (detected, faults) in _sums(rows).items():
        row = shares.setdefault(rule, {"rule": rule})
        if faults:
            row[on or "default features"] = detected / faults
    title = f"{LARGE_TEXT[0].upper()}{LARGE_TEXT[1:]}: share that raise an alarm, by the feature that a rule reads"
    return Table.of(shares.values(), [Column.text("rule"), *columns], title)


def _sums(rows: Sequence[Detection]) -> dict[tuple[str, str], tuple[int, int]]:
    """Counts of detected faults and of all faults, by rule and feature."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        if row.level == ALARMS:
            detected, faults = sums.get((row.rule, row.on), (0, 0))
            sums[row.rule, row.on] = detected + row.detected, faults + row.share.n
    return sums


def _false_alarms(result: CoverageResult) -> Section:
    changes = result.changes
    columns = (
        Column.text("rule"), Column.text("level"), Column.text("feature", lambda row: row.on or "default", 3),
        Column.count("false alarms", "events"),
        Column("per step, at most", "number", digits=upper_bound_text, of="per_step.high"),
        Column("runs with an alarm, at most", "number", "%", 100.0, upper_bound_text, 1, of="per_run.high"),
        Column("threshold scaled by", "number", digits=".3g", priority=2,
               of=lambda row: row.threshold if math.isfinite(row.threshold) else None),
        *(Column.count(f"after a change of {change}", _events_after(change), 4) for change in changes),
    )  # fmt: skip
    plain, on_feature = ([row for row in result.false_alarms if bool(row.on) == on] for on in (False, True))
    texts = "; ".join(f"{change}: {CHANGE_TEXTS[change]}" for change in changes)
    parts: list[Part] = [
        Table.of(plain, columns, "False alarms in fault-free runs"),
        Table.of(
            on_feature, columns, "False alarms in fault-free runs, each rule on one feature alone", terminal_rows=0
        ),
    ]
    if any(result.roc.values()):
        alt_text = "Detected faults against false alarms per step, for each rule"
        parts.insert(0, Plot("coverage-roc", alt_text, _roc(result)))
    return Section(
        "False alarms",
        f"{count_text(result.clean_steps, 'step')} of {count_text(result.clean_runs, 'run')} with other seeds. Consecutive steps "
        "with an alarm count as one false alarm; limits are one-sided. Threshold scaled by: with the threshold multiplied by "
        f"this factor, scores reach it in {number_text(result.options.rate)} of the steps. After a change: the most alarms in "
        f"one run after a change that was made on purpose half way ({texts}).",
        tuple(parts),
    )


def _events_after(change: str) -> Getter:
    return lambda row: row.after_changes.get(change)


def _roc(result: CoverageResult) -> Figure:
    least = 0.5 / max(result.clean_steps, 1)
    # Points go from the highest threshold to the lowest, so that steps between two shares of false alarms have the lower height.
    curves = {
        rule: [(point.false_alarms, point.detected) for point in points[::-1]] for rule, points in result.roc.items()
    }
    steps = "share of fault-free steps that reach the threshold"
    return roc_figure(curves, least, result.options.rate, steps, "detected finite faults of 1 % or more")


def _comparisons(result: CoverageResult) -> Section:
    rows = (
        (test.rule, test.level, test.target, test.difference, test.only_reference, test.only_other, test.p_value)
        for test in result.tests
    )
    return Section(
        "Comparisons",
        f"The alarms of {REFERENCE} against other rules on the same faults: McNemar's exact test, adjusted by Holm over all "
        "rows. At a scaled threshold both rules have the same rate of false alarms.",
        (comparison_table(REFERENCE, ("rule", "level", "faults"), rows),),
    )


def _latency(rows: Sequence[Detection], follow: int) -> Table:
    sums: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for row in rows:
        if row.after:
            sums[row.rule, row.level] = sums.get((row.rule, row.level), 0) + np.array(row.after)
    steps = (Column.count(count_text(step, "step") if step else "same step") for step in range(follow))
    columns = (Column.text("rule"), Column.text("detected by"), *steps)
    cells = tuple(TableRow((*names, *counts.tolist())) for names, counts in sums.items())
    return Table(columns, cells, "Number of detected faults, by steps from the fault to the first alarm")


def _facts(result: CoverageResult) -> Iterator[tuple[str, str]]:
    spec, baseline = result.spec, result.baseline
    sizes = f"{count_text(baseline.steps, 'step')}, {count_text(baseline.parameters, 'parameter')}"
    yield "training", f"{baseline.name}, {sizes}"
    yield "faults in operations", ", ".join(f"{name}" for name, _ in spec.training_spec(PLACES[0]).faults)
    yield "faults in memory", spec.memory_fault
    yield "faults of severity 1 and more", spec.large_fault
    drawn = (f"{target}: {tries / faults:.3g}" for target, (tries, faults) in result.tried.items() if faults)
    yield "faults drawn until one was of the class, on average", "; ".join(drawn)
    for target, values in result.severities.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            yield f"severity of {target}", f"median {np.median(finite):.2g} ({count_text(len(finite), 'fault')})"
    yield "ends of trials", ", ".join(f"{end} {count:,}" for end, count in result.ends.items())
