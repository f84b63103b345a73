"""The report of ``unsilent inference-coverage``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from unsilent.basics.interval import Interval
from unsilent.report.dots import hover_text
from unsilent.report.estimates import Estimate, machine_table, measured, rows_across
from unsilent.report.model import Column, Part, Plot, Report, Section, Table
from unsilent.report.text import count_text, number_text, share_with_limits_text, upper_bound_text
from unsilent.report.theme import Figure, figure, label, marker_series, series_colour
from unsilent.statistics.conformal import promised_rate
from unsilent.studies.coverage.inference.analysis import ALL, LADDER, Detection, InferenceCoverageResult
from unsilent.studies.coverage.inference.spec import CALIBRATION, ERROR_MODELS, SHIFTED, TEST, TIMED_BATCHES
from unsilent.studies.coverage.report_parts import comparison_table, roc_figure

COST_TITLE = "CPU time with a detector, and memory of the detector, in percent of those of the model alone"
DUPLICATION = "duplication"
"""Name of the detector that runs the whole model twice."""


def cost_section(result: InferenceCoverageResult) -> Section:
    """The section on the CPU time and memory of each detector."""
    times = [f"CPU time at batch {size}" for size in TIMED_BATCHES]
    columns = (Column.text("detector"), *map(Column.percent, (*times, "memory")))
    rows = ({"detector": cost.detector, **_finite(times, cost.ratios), "memory": cost.memory} for cost in result.costs)
    return Section(
        "Cost", "A CPU time of 100 % is that of a pass without the detector. Memory is that of what the detector stores.",
        (Table.of(rows, columns, COST_TITLE),),
    )  # fmt: skip


def _finite(names: Sequence[str], ratios: Sequence[float]) -> dict[str, float]:
    return {name: ratio for name, ratio in zip(names, ratios, strict=True) if math.isfinite(ratio)}


def duplication_is_cheaper(result: InferenceCoverageResult) -> Iterator[str]:
    """A sentence if running the model twice took less CPU time than other detectors, else nothing."""
    ratios = {cost.detector: cost.ratios[0] for cost in result.costs if math.isfinite(cost.ratios[0])}
    twice = ratios.pop(DUPLICATION, math.nan)
    dearer = [name for name, ratio in ratios.items() if ratio > twice]
    dearer.sort(key=lambda name: name != result.reference)
    if dearer:
        named = f"{dearer[0]} ({number_text(ratios[dearer[0]])} times)"
        others = f" and {count_text(len(dearer) - 1, 'other detector')}" if len(dearer) > 1 else ""
        yield (
            f"with {count_text(TIMED_BATCHES[0], 'sample')} in a batch, running the model twice and comparing the answers "
            f"({DUPLICATION}) took {number_text(twice)} times the CPU time of the model alone, less than {named}{others}"
        )


ERROR_TEXTS = {
    "weight-flip": "one flipped bit of a parameter or buffer",
    "weight-rate": "flipped bits of parameters and buffers",
    "output-flip": "one flipped bit of an operation's output",
    "output-burst": "random values or a burst in an operation's output",
    ALL: "all error models",
}
FURTHER = (
    "reference", "clean", "originals", "tries", "comparisons", "false_alarms", "costs", "seconds", "cpu_seconds",
)  # fmt: skip
"""Fields of the result that JSON contains in addition to estimates."""
BY_ANSWER, BY_FAULT = "Detected changed answers", "Detected share of the answers that a fault changed, mean over faults"
"""Titles of the two tables of detection."""
LEAST_FAULTS, MOST_OF_ONE_ANSWER = 10, 0.2
"""Minimum number of faults, and of the share of them that change only the same answer, for a note in the report."""
METHOD = (
    "Each trial draws a batch of clean test samples, and independent faults of its error model until one changes the answer of "
    "a sample; estimates hold for such faults. A changed answer is detected where the margin of a layer is above the threshold, "
    "which is taken from other clean samples (split conformal prediction). Shares of changed answers: detected "
    "answers over all changed answers. Shares of faults, and all other shares: the mean over faults of the share of the answers "
    "that a fault changed. Intervals "
    "are Gaffke's, by fault. False alarms are counted on all test samples without faults; their intervals are by original, as "
    "samples that are copies of one original are not independent. Limits of changed answers are wider than those of faults: "
    "the next fault could change all answers of its batch."
)


def report(result: InferenceCoverageResult) -> Report:
    """The report on an inference coverage campaign."""
    baseline = result.baseline
    return Report(
        "unsilent/inference-coverage/2", "coverage", f"Detection of changed answers of {baseline.name}", _headline(result),
        machine_table(estimates(result), ("detector", "errors", "rate", "measure", "")),
        findings=tuple(_findings(result)), sections=tuple(_sections(result)),
        facts=tuple(_facts(result)), notes=tuple(baseline.notes), repeat_command=result.command, method=METHOD,
        further_json={
            "spec": result.spec.to_json(), "versions": baseline.versions, "clean_samples_needed": result.unreported,
            **{name: getattr(result, name) for name in FURTHER},
        },
    )  # fmt: skip


def _headline(result: InferenceCoverageResult) -> str:
    """A sentence on the share of faults that the reference detector finds, and on the best detector."""
    faults, answers = (sum(getattr(row, key) for row in result.tries) for key in ("found", "answers"))
    rows = [row for row in _at_rate(result) if row.errors == ALL]
    if not faults or not rows:
        trials = count_text(sum(row.trials for row in result.tries), "trial")
        return f"No fault that changes an answer of {result.baseline.name} was found in {trials}."
    mine, best = _reference_and_best(rows, result)
    alarms = {row.detector: row.share for row in result.false_alarms if row.rate == result.options.rate}
    share = alarms.get(mine.detector)
    raised = "" if share is None else f" ({share_with_limits_text(share)} measured)"
    most = (
        "no detector detects more"
        if best is mine
        else f"{best.detector} detects the most, {share_with_limits_text(best.answers)}"
    )
    return (
        f"{mine.detector} detects {share_with_limits_text(mine.answers)} of {count_text(answers, 'answer')} of "
        f"{result.baseline.name} that {count_text(faults, 'fault')} changed, at a threshold for "
        f"{rate_text(result.options.rate)} false alarms{raised}; {most}."
    )


def _reference_and_best(rows: Sequence[Detection], result: InferenceCoverageResult) -> tuple[Detection, Detection]:
    """The rows of the reference detector and of the detector that finds most answers."""
    mine = next(row for row in rows if row.detector == result.reference)
    return mine, max([mine, *rows], key=lambda row: row.answers.estimate or 0.0)


def estimates(result: InferenceCoverageResult) -> list[Estimate]:
    """Estimates of detection, false alarms and restored answers, at each rate of false alarms."""
    fault, answer = "fault", "changed answer"
    rows: list[Estimate] = []
    for detection in result.detections:
        keys = {"detector": detection.detector, "errors": detection.errors, "rate": f"{detection.rate:g}"}
        rows += measured(keys, {"detected, of changed answers": detection.answers}, answer)
        shares = {"detected, of faults": detection.share, "layers run": detection.layers, "flops run": detection.flops}
        rows += measured(keys, shares, fault)
    for alarms in result.false_alarms:
        keys = {"detector": alarms.detector, "errors": "none", "rate": f"{alarms.rate:g}"}
        rows += measured(keys, {"false alarms": alarms.share, "alarms on shifted": alarms.shifted}, "clean sample")
    for back in result.restored:
        keys = {"detector": back.rung, "errors": back.errors, "rate": f"{result.options.rate:g}"}
        rows += measured(keys, {"restored, of changed answers": back.answers}, answer)
        rows += measured(keys, {"restored, of faults": back.share}, fault)
        rows += measured(keys, {"restored, of detected answers": back.detected_answers}, answer)
        rows += measured(keys, {"restored, of detected faults": back.detected_share}, fault)
    return rows


def _at_rate(result: InferenceCoverageResult, rate: float | None = None) -> list[Detection]:
    return [row for row in result.detections if row.rate == (result.options.rate if rate is None else rate)]


def _findings(result: InferenceCoverageResult) -> Iterator[str]:
    rate = rate_text(result.options.rate)
    for errors in (*ERROR_MODELS, ALL):
        rows = [row for row in _at_rate(result) if row.errors == errors and row.share.n]
        if rows:
            mine, best = _reference_and_best(rows, result)
            both = _both_shares(mine.answers, mine.share)
            yield f"{ERROR_TEXTS[errors]}: {result.reference} detects {both} at {rate} false alarms; " + (
                "no detector detects more answers"
                if best is mine
                else f"{best.detector} detects the most answers: {_both_shares(best.answers, best.share)}"
            )
    for row in (row for row in result.restored if row.rung == LADDER and row.errors == ALL and row.detected_share.n):
        answers, faults = map(share_with_limits_text, (row.detected_answers, row.detected_share))
        yield (
            f"the recovery ladder restores the fault-free answer for {answers} of the changed answers that {result.reference} "
            f"detects (mean over faults: {faults})"
        )
    for alarms in result.false_alarms:
        high = alarms.expected[1] if alarms.expected else alarms.count
        if alarms.rate == result.options.rate and alarms.count > high:
            yield (
                f"false alarms of {alarms.detector}: {alarms.count:,}; at most {high:,} would be expected if the originals of "
                "calibration and test were alike"
            )
    at_rate = [row for row in result.false_alarms if row.rate == result.options.rate]
    if shifted := [f"{a.detector} {share_with_limits_text(a.shifted)}" for a in at_rate if a.shifted.low > a.rate]:
        yield (
            f"of {count_text(result.clean[SHIFTED], 'shifted sample')}, which are unusual but correct, more than {rate} raise an "
            f"alarm: {'; '.join(shifted)}"
        )
    thresholds, alarms_of = (result.originals[part] for part in (CALIBRATION, TEST))
    if thresholds < result.clean[CALIBRATION] and result.has_equal_originals:
        yield (
            f"clean samples are copies of originals: {thresholds:,} for thresholds, {alarms_of:,} for false alarms; a new "
            f"original is only promised at most {upper_bound_text(promised_rate(result.options.rate, thresholds), 100)} % false "
            "alarms"
        )
    for needed, count in result.unreported.items():
        yield f"detection at {rate_text(needed)} false alarms is not reported: it needs a campaign with --clean-samples {count}"
    yield from duplication_is_cheaper(result)
    for tries in result.tries:
        if tries.found >= LEAST_FAULTS and tries.same_answer >= MOST_OF_ONE_ANSWER * tries.found:
            yield (
                f"{tries.errors}: {tries.same_answer:,} of {count_text(tries.found, 'fault')} changed one and the same answer "
                "and no other; shares of faults depend on how that one sample is judged, and intervals do not include this: a "
                "campaign with more --clean-samples has more answers to change"
            )
    for tries in (row for row in result.tries if row.found < row.trials):
        yield (
            f"{tries.errors}: in {count_text(tries.trials - tries.found, 'trial')} of {tries.trials:,} no fault changed an answer"
            "; raise --tries"
        )


def _both_shares(answers: Interval, faults: Interval) -> str:
    return f"{share_with_limits_text(answers)} of changed answers and {share_with_limits_text(faults)} of faults"


def rate_text(rate: float) -> str:
    """A rate of false alarms as text."""
    return f"{100 * rate:g} %"


def _sections(result: InferenceCoverageResult) -> Iterator[Section]:
    groups = [row.errors for row in result.tries if row.found]
    if groups:
        yield Section(
            "Detection", "Thresholds give each detector the same share of false alarms. In the table of changed answers, a fault "
            "that changes many answers counts as often; in the mean over faults, each fault counts once.",
            tuple(
                _detection_table(_at_rate(result, rate), [*groups, ALL], rate, result, by_fault)
                for rate in result.rates for by_fault in (False, True)
            ),
        )  # fmt: skip
        curves = Plot("coverage-roc", "Detected answers against false alarms, for each detector", _roc(result))
        yield Section("Trade-offs", "Over all error models.", (curves, *_cost_plot(result)))
        yield Section(
            "How early", "Share of the layers and of the FLOPs of a pass that have run when a detector raises its first alarm.",
            (_depth_table(_at_rate(result)),),
        )  # fmt: skip
    yield _false_alarms(result)
    if result.restored:
        yield _recovery_section(result)
    if result.comparisons:
        yield _comparisons(result)
    yield cost_section(result)
    yield _tries(result)


def _detection_table(
    rows: Sequence[Detection], groups: list[str], rate: float, result: InferenceCoverageResult, by_fault: bool
) -> Table:
    shares = ((row, row.share if by_fault else row.answers) for row in rows)
    cells = [Estimate({"detector": row.detector, "errors": row.errors}, share) for row, share in shares]
    return Table.of(
        rows_across(cells, "errors"),
        [Column.text("detector"), *(Column.share(name, priority=n) for n, name in enumerate(groups))],
        f"{BY_FAULT if by_fault else BY_ANSWER}, at {rate_text(rate)} false alarms",
        lambda row: row["detector"] == result.reference,
        terminal_rows=40 if rate == result.options.rate else 0,
    )


def _depth_table(rows: Sequence[Detection]) -> Table:
    columns = (Column.text("detector"), Column.share("layers"), Column.share("FLOPs", "flops"))
    return Table.of(
        [row for row in rows if row.errors == ALL],
        columns,
        "Layers and FLOPs that had run at the first alarm, for detected answers",
    )


def _roc(result: InferenceCoverageResult) -> Figure:
    least = 0.5 / max(result.clean[TEST], 1)
    most = max(result.rates, default=result.options.rate)
    return roc_figure(result.roc, least, most, "share of clean samples with an alarm", "detected answers")


def _cost_plot(result: InferenceCoverageResult) -> Iterator[Part]:
    """The plot of detection against CPU time, for batches of 32."""
    shares = {row.detector: row.answers for row in _at_rate(result) if row.errors == ALL}
    costs = [cost for cost in result.costs if math.isfinite(cost.ratios[-1])]
    if not costs:
        return
    traces = [
        marker_series(
            label(cost.detector), [100 * (cost.ratios[-1] - 1)], [shares[cost.detector].estimate],
            [hover_text(shares[cost.detector], cost.detector)], {"color": series_colour(number), "size": 11},
        )
        for number, cost in enumerate(costs)
    ]  # fmt: skip
    shown = figure(
        traces, 420, xaxis={"title": {"text": f"further CPU time of a batch of {TIMED_BATCHES[-1]}, %"}},
        yaxis={"range": [0, 1.02], "title": {"text": f"detected at {rate_text(result.options.rate)} false alarms"}},
    )  # fmt: skip
    yield Plot("coverage-cost", "Detected answers against the CPU time of each detector", shown)


def _false_alarms(result: InferenceCoverageResult) -> Section:
    columns = (
        Column.text("detector"), Column.percent("asked", "rate"), Column.share("on clean samples", "share"),
        Column.count("alarms", "count"),
        Column("expected", priority=1, of=lambda row: row.expected and f"{row.expected[0]:,} to {row.expected[1]:,}"),
        Column.share("on shifted samples", "shifted", 2),
    )  # fmt: skip
    few = result.originals
    return Section(
        "False alarms",
        f"Thresholds are taken from {count_text(result.clean[CALIBRATION], 'clean sample')} of {few[CALIBRATION]:,} originals; "
        f"alarms are counted on {count_text(result.clean[TEST], 'other sample')} of {few[TEST]:,} originals, on which faults "
        f"are tried as well, and on {result.clean[SHIFTED]:,} of {few[SHIFTED]:,} that are unusual but correct. Intervals "
        "are by original. Expected: the limits of the number of alarms if originals were exchanged at random between the samples "
        "for thresholds and the others that faults are tried on.",
        (Table.of(result.false_alarms, columns, "Clean samples", terminal_rows=0),),
    )


def _recovery_section(result: InferenceCoverageResult) -> Section:
    columns = (
        Column.text("rung"), Column.text("error model", "errors"), Column.share("of changed answers", "answers"),
        Column.share("of faults", "share"),
        Column.share(f"of answers that {result.reference} finds", lambda row: row.detected_answers, 1),
        Column.share(f"of faults that {result.reference} finds", lambda row: row.detected_share, 1),
        Column("CPU time", "number", "ms", 1e3, ".3g", 2, of="seconds"),
    )  # fmt: skip
    return Section(
        "Restored answers",
        "Share of answers that a rung of the recovery ladder brings back to the fault-free ones, each rung tried alone. rerun is "
        "the call again, in which a fault in an operation is gone and one in weights is not; repair "
        "uses checksums and parity, golden a copy of weights; clamp and zero limit the values of layers in a second call, as "
        "protect does, clamp-in-run and zero-in-run in the faulty run itself; layer runs the layer of "
        f"{result.reference}'s first alarm again. The ladder is layer, rerun, repair and clamp after an alarm.",
        (Table.of(result.restored, columns, "Restored answers", terminal_rows=0),),
    )


def _comparisons(result: InferenceCoverageResult) -> Section:
    pairs = ((row, row.paired) for row in result.comparisons)
    rows = ((row.detector, row.errors, p.difference, p.only_one, p.only_other, p.p_value) for row, p in pairs)
    return Section(
        "Comparisons",
        f"{result.reference} against others on the same faults, at {rate_text(result.options.rate)} false alarms: McNemar's "
        "exact test of the faults of which one detects more, adjusted by Holm over all rows.",
        (comparison_table(result.reference, ("detector", "errors"), rows),),
    )


def _tries(result: InferenceCoverageResult) -> Section:
    columns = (
        Column.text("error model", "errors"), Column.count("drawn"), Column.count("masked", priority=1),
        Column.count("benign", priority=1), Column.count("not finite or raised", "due"),
        Column.count("changed an answer", "found"), Column.count("answers changed", "answers"),
        Column.count("different samples", "different_answers"),
    )  # fmt: skip
    return Section(
        "Faults", "Faults that end in values that are not finite or in an error are counted separately, because they are noticed "
        "without a detector.", (Table.of(result.tries, columns, "Faults that were drawn, and how they ended"),),
    )  # fmt: skip


def _facts(result: InferenceCoverageResult) -> Iterator[tuple[str, Any]]:
    spec, baseline = result.spec, result.baseline
    yield "workload", f"{baseline.name}, {count_text(baseline.parameters, 'parameter')}"
    yield "an answer changed by", baseline.judge
    yield "rate of weight-rate", f"{spec.flip_rate:g} of all bits"
    yield "faults of output-flip", spec.output_flip
    yield "faults of output-burst", ", ".join(spec.bursts)
    yield "checksums and parity", f"{baseline.parity_bytes / baseline.model_bytes:.2%} of the memory of the model"
