"""Sentences of the report of parameter vulnerability: leads of its sections, findings, notes, facts, method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsilent.report.estimates import is_drawn, is_exact, limits_text
from unsilent.report.text import counted, flips_text, listed, seconds, shown
from unsilent.studies.pvf.records import PvfResult
from unsilent.studies.pvf.report.figures import Curves
from unsilent.studies.pvf.report.fit import NEEDS, FitRow, surprise
from unsilent.studies.pvf.report.rows import EVERYTHING, at_level, first_flips, main_level, pooled
from unsilent.studies.pvf.report.sentences import accuracy_text, dtype_text, measured_on

TRANSIENT = (
    "P(incorrect) is the probability that an output is incorrect, given a fault in what one evaluation of one batch computes: "
    "the outputs or operands of operations (`op:`), its inputs (`input:`) or its key/value cache (`kv:`). Elements of all these "
    "tensors, over all batches, are equally likely unless the law says otherwise; several flips fall into one evaluation. "
    "Batches that a fault does not strike are not run and not counted."
)
MEMORY = (
    "PVF is the parameter vulnerability factor: the probability that an output is incorrect, given a corruption of that "
    "parameter (arXiv 2405.01741). It is not the program vulnerability factor, which has the same acronym."
)
INCORRECT = (
    "Incorrect means: other than the output of the same model on the same input without the fault, by the rule of the judge; "
    "whether that output was right does not matter."
)
LOOKUPS = (
    "A fault in an embedding row acts only when that row is looked up. Hot: the busiest rows that take half of all look-ups of "
    "this evaluation; warm: the other rows looked up; cold: never looked up."
)
ENDED = (
    "Masked: the output is bit-identical. Benign: it differs, the decision does not. Silent: the decision differs and every "
    "value is finite. Detectable: non-finite values, an exception, a crash or a hang. {} counts the last two. The number "
    "after a name is the number of flips."
)


def curves_lead(result: PvfResult, lines: Curves) -> str:
    level = main_level(result)
    limits = limits_text(result.rows, result.confidence)
    all_exact = all(map(is_exact, result.rows))
    zeros = any(is_exact(row) and row.estimate == 0 for rows in lines.series.values() for row in rows)
    parts = [
        f"How often an output is wrong, given a fault in that {level}.",
        f"{limits[:1].upper()}{limits[1:]}." if result.rows and all_exact else f"Bars are {limits}.",
        "" if all_exact else "A hollow triangle is the upper limit of a target where no output was wrong.",
        "A target of exactly 0 has no mark on this scale." if zeros else "",
        f"The {lines.drawn} most vulnerable are drawn; {lines.left_out} more are in the table of all rows."
        if lines.left_out
        else "",
        f"No trial struck {listed(lines.missing)}." if lines.missing else "",
    ]
    return " ".join(filter(None, parts))


def heat_lead(result: PvfResult, maps: int) -> str:
    trials = counted(sum(one.trials for one in result.heat_maps), "trial")
    few = "Hover for n." if all(map(is_exact, result.rows)) else "Cells rest on few trials: hover for n."
    several = (
        " Every dtype has a map of its own, for its bits mean something else; colours mean the same in all of them."
    )
    return (
        f"From the {trials} that flipped exactly one bit. The sign bit is on the left, as a number is written. Grey: no trial "
        f"fell there; palest: trials, and no wrong output. {few}{several if maps > 1 else ''}"
    )


def all_lead(result: PvfResult) -> str:
    every = units(result)
    judged = "the batches they were judged on, one for each fault"
    if not _judged_once(result):
        judged = f"{every} judged, which are not" + (
            ": intervals are made from faults" if is_drawn(result.rows) else ""
        )
    return (
        f"n counts faults, which are independent; masked to detectable count {judged}. Click a heading to sort; point at a row "
        f"for its elements, bits, {every} and method."
    )


# -- sentences ---------------------------------------------------------------------------------------------------------


def findings(result: PvfResult, fits: Sequence[FitRow]) -> Iterator[str]:
    if result.trials_done < result.trials_planned:
        yield f"not complete: {result.trials_done:,} trials of {result.trials_planned:,} planned"
    yield from filter(None, (surprise(fits), *result.notes))


def notes(result: PvfResult, fit_per_bit: float | None, fits: Sequence[FitRow]) -> Iterator[str]:
    yield measured_on(result)
    joint = ", differences rest on joint intervals" if is_drawn(result.rows) else ""
    yield f"{limits_text(result.rows, result.confidence)}, n counts faults{joint}"
    if pooled(result):
        yield (
            f"in rows over several targets counts of outcomes are plain sums, {result.measure} and the shares silent and due "
            "weigh every target by its share of the law"
        )
    if fit_per_bit is not None and not fits and not result.transient:
        yield f"no FIT: {NEEDS}"
    if without := [f.row.target for f in fits if f.reason]:
        yield f"no FIT for {listed(without)}: {', '.join(dict.fromkeys(f.reason for f in fits if f.reason))}"
    time = f"{seconds(result.seconds)} ({seconds(result.cpu_seconds)} CPU)"
    yield f"{time} on {result.device}, {dtype_text(result)}"


def numbers(result: PvfResult) -> Iterator[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    model = at_level(result.rows, "model")
    for row in [r for r in model if r.flips == first_flips(model)][:1]:
        text = shown(row.estimate, row.low, row.high)
        name = "whole model" if result.at == EVERYTHING else "all that was struck"
        name = "whole list" if result.spec.get("faults") else name
        name += "" if row.flips is None else f", {flips_text(row.flips)}"
        yield name, text.estimate + (" %" if row.estimate is not None else ""), text.limits if row.estimate else ""
    planned = "" if result.trials_done == result.trials_planned else f"of {result.trials_planned:,} planned"
    yield "faults tried", f"{result.trials_done:,}", planned
    yield "evaluation samples", f"{result.samples:,}", ""
    name, _, value = accuracy_text(result.info).rpartition(" ")
    if value:
        yield f"fault-free {name}", value, ""
    yield "time", seconds(result.seconds), ""


def common_facts(result: PvfResult) -> Iterator[tuple[str, str]]:
    """What a campaign is, as pairs of term and text."""
    yield "command" if result.command.startswith("unsilent ") else "Python call", result.command
    yield "store", result.store
    yield "campaign", result.campaign
    yield "workload", result.workload
    yield "where", result.at
    yield "trials", f"{result.trials_done:,} of {result.trials_planned:,} planned"
    yield "evaluation", f"{counted(result.samples, 'sample')} in {counted(result.batches, 'batch')}"
    yield "seed", str(result.seed)
    yield "device", f"{result.device}, {dtype_text(result)}, {counted(result.threads, 'thread')}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())


def facts(result: PvfResult) -> Iterator[tuple[str, str]]:
    """How this was made."""
    yield from common_facts(result)
    yield "fault model", result.fault
    yield "targets", f"per {result.per}"
    yield from ((name, getattr(result, name)) for name in ("law", "unit", "judge"))
    if is_drawn(result.rows) or not result.rows:
        yield "confidence", f"{100 * result.confidence:g} %"
    yield "time", f"{seconds(result.seconds)}, {seconds(result.cpu_seconds)} CPU"
    yield "one fault-free evaluation", seconds(result.golden_seconds)
    yield from ((key, accuracy_text(result.info) if key == "accuracy" else _text(v)) for key, v in result.info.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def method(result: PvfResult) -> Iterator[str]:
    """How to make it again and what the numbers mean, a paragraph each."""
    measure, every, rows = result.measure, units(result), result.rows
    which = "command" if result.command.startswith("unsilent ") else "Python call"
    yield f"With the same data, weights, versions and kind of device, this {which} makes the same numbers again."
    yield f"{TRANSIENT if result.transient else MEMORY} {INCORRECT}"
    if result.unit == "batch":
        yield (
            f"Unit: one batch counts once; it is incorrect when any sample in it is. {measure} per batch grows with the batch "
            f"size and must not be compared with {measure} per sample."
        )
    else:
        which = " of the batch that was struck" if result.transient else ""
        yield (
            f"Unit: each sample{which} counts once; {measure} is the share of samples that one fault makes incorrect, averaged "
            "over faults."
        )
    if is_drawn(rows):
        once = f"A fault is judged on one batch{', the one that it strikes' if result.transient else ''}, so n faults are n "
        once += "independent trials, each with one batch that is incorrect or not."
        many = f"One fault is judged on many {every}{', those of the batch that it strikes' if result.transient else ''}, so "
        many += f"intervals are made from the spread between faults, not from the number of {every}."
        yield (
            f"Intervals: {once if _judged_once(result) else many} Where nothing went wrong the upper limit still tells what the "
            "number of faults can exclude. That two targets differ is said only where their joint intervals separate, which hold "
            "for all targets of a level and number of flips at once (Bonferroni) and are wider than those shown."
        )
    elif all(map(is_exact, rows)):
        yield "There are no intervals: every fault was tried, nothing is left to estimate."
    else:
        yield (
            "Bounds: nobody drew the faults that were tried, so no interval is given: a row has the limits that all other faults "
            "of the list could give it, by doing nothing or by making every output wrong."
        )


def _judged_once(result: PvfResult) -> bool:
    return result.unit == "batch" and (result.transient or result.batches == 1)


def units(result: PvfResult) -> str:
    return "batches" if result.unit == "batch" else "samples"
