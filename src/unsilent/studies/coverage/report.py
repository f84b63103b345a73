"""The report of ``unsilent coverage``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from unsilent.interval import Interval
from unsilent.report.estimates import difference_cell
from unsilent.report.model import Cell, Column, Part, Plot, Report, Section, Table, TableRow, TextCell, estimates_table
from unsilent.report.text import count_text, number_text, p_value_text, percent_text, signed, upper_bound_text
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
from unsilent.studies.coverage.report_parts import SHARE, comparison_columns, roc_figure
from unsilent.studies.coverage.spec import CLASSES, PLACES

PLACE_TEXTS = {
    "operation": "Faults in an operation of a step",
    "memory": "Faults in parameters and optimizer state between two steps",
}
METHOD = (
    "A fault is detected where a rule raises an alarm within the steps that are followed, in a step in which it raises none in "
    "the fault-free run. The severity is the L2 norm of the change of all gradients of the step over that of the fault-free "
    "gradients, before clipping; of a fault in memory, that of the change of all parameters after the step over that of the "
    "fault-free update. Shares hold for faults of their class, as they are drawn, and say nothing of how often a class occurs. "
    "Intervals of shares are those of Clopper and Pearson. Scaling a threshold uses the recorded scores; what a rule has learnt "
    "stays as it is."
)


def report(result: CoverageResult) -> Report:
    """What is shown of a campaign."""
    baseline = result.baseline
    return Report(
        "unsilent/coverage/1", "coverage", f"Detection of faults in {baseline.name}", _headline(result), _machine_table(result),
        findings=tuple(_findings(result)), sections=tuple(_sections(result)), facts=tuple(_facts(result)),
        repeat_command=result.command, method=METHOD,
        further_json={
            "command": result.command, "spec": result.spec.to_json(), "faults": result.faults,
            "clean_steps": result.clean_steps, "clean_runs": result.clean_runs, "ends": dict(result.ends),
            "tests": [{**asdict(one), "difference": asdict(one.difference)} for one in result.tests],
            "false_alarms": [asdict(one) for one in result.false_alarms],
            "cost": [{"rule": rule, "seconds": value} for rule, value in result.seconds_per_step.items()],
            "seconds": result.seconds, "cpu_seconds": result.cpu_seconds, "versions": dict(baseline.versions),
        },
    )  # fmt: skip


def _headline(result: CoverageResult) -> str:
    """How many large finite faults the reference rule detects, and its false alarms; the rule that detects most."""
    name, counts = result.baseline.name, dict[str, tuple[int, int]]()
    for one in result.detections:
        if not one.on and one.level == ALARMS and one.target in LARGE_FINITE:
            detected, faults = counts.get(one.rule, (0, 0))
            counts[one.rule] = (detected + one.detected, faults + one.share.n)
    order = sorted(counts, key=lambda rule: (-counts[rule][0], rule != REFERENCE))
    if not order or not counts[order[0]][1]:
        return f"No finite fault in {name} with a change of the gradients of 1 % or more was judged."
    best, own = order[0], REFERENCE if REFERENCE in counts else order[0]
    detected, faults = counts[own]
    text = (
        f"{own} detects {detected:,} of {count_text(faults, 'finite fault')} in {name} with a change of the gradients of "
        "1 % or more, "
        + (
            "and no rule detects more"
            if counts[best][0] == detected
            else f"most are detected by {best}, {counts[best][0]:,}"
        )
    )
    alarms = (one for one in result.false_alarms if one.rule == own and not one.on and one.level == ALARMS)
    if (events := next((one.events for one in alarms), None)) is None:
        return f"{text}; false alarms were not measured."
    steps, runs = count_text(result.clean_steps, "fault-free step"), count_text(result.clean_runs, "run")
    return f"{text}; {own} raises {count_text(events, 'false alarm')} in {steps} of {runs}."


def _machine_table(result: CoverageResult) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (one.rule, one.on or "default", one.level, one.target, "detected", one.share) for one in result.detections
    ]
    for alarms in result.false_alarms:
        where = (alarms.rule, alarms.on or "default", alarms.level, "clean")
        rows += [(*where, "false alarms per step", alarms.per_step), (*where, "runs with one", alarms.per_run)]
    return estimates_table(("rule", "on", "level", "faults", "measure", ""), rows)


def _findings(result: CoverageResult) -> Iterator[str]:
    own = {(one.rule, one.target): one for one in result.detections if not one.on and one.level == ALARMS}
    for target in (*LARGE_FINITE, "operation:nonfinite"):
        best = max(
            (one for (_, name), one in own.items() if name == target), key=lambda one: one.share.low, default=None
        )
        if best is not None and best.share.n:
            rules = [r for (r, name), one in own.items() if name == target and one.detected == best.detected]
            who = f"most alarms by {', '.join(rules)}" if best.detected else "no alarm"
            yield (
                f"{_class_text(target)}: {who}, {best.detected:,} of {count_text(best.share.n, 'fault')} "
                f"({percent_text(best.share.estimate)})"
            )
    yield from _comparison_findings(result)
    alarms = [one for one in result.false_alarms if not one.on and one.level == ALARMS]
    for one in (one for one in alarms if one.rule == REFERENCE):
        yield (
            f"false alarms of {REFERENCE}: {one.events:,} in {count_text(result.clean_steps, 'step')}, at most "
            f"{upper_bound_text(one.per_step.high)} per step and {upper_bound_text(one.per_run.high, 100)} % of runs (one-sided "
            "limits)"
        )
    wanted = max(map(len, result.severities.values()), default=0)
    if missing := [f"{target} ({len(one):,})" for target, one in result.severities.items() if len(one) < wanted]:
        yield (
            f"fewer than {count_text(wanted, 'fault')} were found of {', '.join(missing)}; raise --tries, or choose another "
            "--large-fault"
        )


def _comparison_findings(result: CoverageResult) -> Iterator[str]:
    """Differences that are not chance."""
    tests = [one for one in result.tests if one.target == ALL_FINITE and one.level != MATCHED]
    clear = [one for one in tests if one.p_value < 1 - result.options.confidence]
    for test in clear:
        gap = signed(test.difference.estimate, test.difference.low, test.difference.high)
        yield (
            f"{REFERENCE} against {test.rule} ({test.level}), finite faults of 1 % or more: difference {gap.estimate} points"
            f"{gap.limits_in_sentence}, p = {p_value_text(test.p_value)}"
        )
    if rest := [f"{one.rule} ({one.level})" for one in tests if one not in clear]:
        yield f"no difference of {REFERENCE} was shown on these faults from {', '.join(rest)}"


def _class_text(target: str) -> str:
    low, _, high = target.partition(":")[2].partition("..")
    if not high:
        return "gradients that are not finite"
    return f"relative change of the gradients of {low}" + (" or more" if high == "inf" else f" to {high}")


def _sections(result: CoverageResult) -> Iterator[Section]:
    rows = [one for one in result.detections if not one.on]
    yield Section(
        "Detection",
        f"Share of faults that a rule detects within {count_text(result.spec.follow, 'step')}, by the relative change of the "
        "gradients or of the update.",
        tuple(
            _by_class(rows, place, PLACE_TEXTS[place])
            for place in PLACES
            if any(one.target.startswith(place) for one in rows)
        ),
    )
    large = [one for one in result.detections if one.target in LARGE_FINITE and one.level == ALARMS]
    if large:
        yield Section("Rules and features", "Each rule on one feature alone: finite faults in operations that change the "
                      "gradients by 1 % or more.", (_by_feature(large),))  # fmt: skip
    if result.false_alarms:
        yield _false_alarms(result)
    if result.tests:
        yield _comparisons(result)
    yield Section(
        "Latency", "Steps after that of the fault until the first alarm.", (_latency(rows, result.spec.follow),)
    )
    cost = Table(
        (Column("rule", left_aligned=True), Column("time of a step", "number", unit="µs", scale=1e6, digits=".3g")),
        tuple(TableRow((rule, value)) for rule, value in result.seconds_per_step.items()),
        "Cost of a rule",
    )
    yield Section("Cost", f"On {count_text(len(result.baseline.series), 'series')}, in this process.", (cost,))


def _names(one: Detection | FalseAlarms) -> tuple[str, str]:
    return one.rule, one.level


def _by_class(rows: Sequence[Detection], place: str, title: str) -> Table:
    shares: dict[tuple[str, str], dict[str, Cell]] = {}
    for one in rows:
        own_place, _, name = one.target.partition(":")
        if own_place == place:
            shares.setdefault(_names(one), {})[name] = one.share if one.share.n else None
    heads = (Column("rule", left_aligned=True), Column("counts as detected", left_aligned=True))
    return Table(
        (*heads, *(Column(name, **SHARE, priority=number) for number, name in enumerate(CLASSES[::-1]))),
        tuple(TableRow((*names, *(cells.get(name) for name in CLASSES[::-1]))) for names, cells in shares.items()),
        title,
    )


def _by_feature(rows: Sequence[Detection]) -> Table:
    features = list(dict.fromkeys(one.on for one in rows))
    counts: dict[str, dict[str, list[int]]] = {}
    for one in rows:
        cell = counts.setdefault(one.rule, {}).setdefault(one.on, [0, 0])
        cell[0] += one.detected
        cell[1] += one.share.n
    return Table(
        (Column("rule", left_aligned=True),
         *(Column(on or "default", "number", unit="%", scale=100.0, digits=".0f", priority=n) for n, on in enumerate(features))),
        tuple(TableRow((rule, *(_quotient(*own.get(on, (0, 0))) for on in features))) for rule, own in counts.items()),
        "Faults that raise an alarm",
    )  # fmt: skip


def _quotient(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _false_alarms(result: CoverageResult) -> Section:
    changes = result.changes
    heads = (
        Column("rule", left_aligned=True), Column("level", left_aligned=True), Column("on", left_aligned=True, priority=3),
        Column("events", "number"), Column("per step, at most"), Column("runs with one, at most", unit="%", priority=1),
        Column("scaled by", "number", digits=".3g", priority=2),
        *(Column(f"after a change of {change}", "number", priority=4) for change in changes),
    )  # fmt: skip

    def table(on_features: bool, title: str) -> Table:
        rows = [one for one in result.false_alarms if bool(one.on) == on_features]
        return Table(heads, tuple(TableRow((
            *_names(one), one.on or "default", one.events, _upper_limit_cell(one.per_step), _upper_limit_cell(one.per_run, 100),
            one.threshold if math.isfinite(one.threshold) else None, *(one.after_changes.get(change) for change in changes),
        )) for one in rows), title, terminal_rows=0 if on_features else 40)  # fmt: skip

    texts = "; ".join(f"{change}: {CHANGE_TEXTS[change]}" for change in changes)
    parts: list[Part] = [table(False, "Fault-free runs"), table(True, "Fault-free runs, on one feature")]
    if any(result.roc.values()):
        parts.insert(
            0, Plot("coverage-roc", "Detected faults against false alarms per step, for each rule", _roc(result))
        )
    return Section(
        "False alarms",
        f"{count_text(result.clean_steps, 'step')} of {count_text(result.clean_runs, 'run')} with other seeds. Consecutive steps "
        "with an alarm are one event; limits are one-sided. Scaled by: the factor of the threshold at which "
        f"{number_text(result.options.rate)} of the steps reach it. After a change: the most events in one run from a planted "
        f"change on, half way ({texts}).",
        tuple(parts),
    )


def _upper_limit_cell(rate: Interval, scale: float = 1.0) -> TextCell:
    return TextCell(upper_bound_text(rate.high, scale), rate.high)


def _roc(result: CoverageResult) -> Figure:
    least = 0.5 / max(result.clean_steps, 1)
    curves = {rule: [(one.false_alarms, one.detected) for one in points] for rule, points in result.roc.items()}
    return roc_figure(
        curves, least, "share of fault-free steps that reach the threshold", "detected finite faults of 1 % or more"
    )


def _comparisons(result: CoverageResult) -> Section:
    heads = comparison_columns(REFERENCE, "rule", "level", "faults")
    rows = [
        (
            one.rule,
            one.level,
            one.target,
            difference_cell(one.difference),
            one.only_reference,
            one.only_other,
            p_value_text(one.p_value),
        )
        for one in result.tests
    ]
    return Section(
        "Comparisons",
        f"The alarms of {REFERENCE} against other rules on the same faults: McNemar's exact test, adjusted by Holm over all "
        "rows. At a scaled threshold both rules have the same rate of false alarms.",
        (Table(heads, tuple(map(TableRow, rows)), "Paired comparisons", terminal_rows=0),),
    )


def _latency(rows: Sequence[Detection], follow: int) -> Table:
    sums: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for one in rows:
        if one.after:
            sums[_names(one)] = sums.get(_names(one), 0) + np.array(one.after)
    heads = (Column("rule", left_aligned=True), Column("counts as detected", left_aligned=True))
    return Table(
        (*heads, *(Column(f"{step} steps" if step else "same step", "number") for step in range(follow))),
        tuple(TableRow((*names, *counts.tolist())) for names, counts in sums.items()),
        "Detected faults of all classes",
    )


def _facts(result: CoverageResult) -> Iterator[tuple[str, str]]:
    spec, baseline = result.spec, result.baseline
    yield (
        "training",
        f"{baseline.name}, {count_text(baseline.steps, 'step')}, {count_text(baseline.parameters, 'parameter')}",
    )
    yield "faults in operations", ", ".join(f"{name}" for name, _ in spec.training_spec(PLACES[0]).faults)
    yield "faults in memory", spec.memory_fault
    yield "faults of severity 1 and more", spec.large_fault
    yield (
        "faults drawn for one of a class",
        "; ".join(f"{target}: {drawn / found:.3g}" for target, (drawn, found) in result.tried.items() if found),
    )
    for target, values in result.severities.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            yield f"severity of {target}", f"median {np.median(finite):.2g} of {count_text(len(values), 'fault')}"
    yield "ends of trials", ", ".join(f"{end} {count:,}" for end, count in result.ends.items())
