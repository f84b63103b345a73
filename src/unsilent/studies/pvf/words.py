"""Sentences of the report of parameter vulnerability: the finding, leads of sections, findings, notes, facts, method.

Names stand in backquotes. The finding claims no more than the intervals carry: two targets are called different only
where their joint limits (which hold for all of them at once) do not overlap; the factor between them is then "at least"
the lower limit of the one over the upper limit of the other. Plain limits would call some pair of equal targets different
far too often: the pair is chosen after looking.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsilent.report.estimates import is_bounded, is_drawn, is_exact, limits_text
from unsilent.report.text import clean, counted, flips_text, listed, seconds, shown
from unsilent.studies.pvf.analysis import NEEDS, FitRow, surprise
from unsilent.studies.pvf.records import EVERYTHING, PvfResult, PvfRow, at_level, first_flips, main_level, pooled, rank

if TYPE_CHECKING:
    from unsilent.studies.pvf.report import Curves

PLACES = {
    EVERYTHING: "the parameters",
    "op:*": "the outputs of operations",
    "input:*": "the inputs",
    "kv:*": "the key/value cache",
}
"""Addresses that select all of a kind, in words."""


def headline(result: PvfResult) -> str:
    """The finding in one sentence."""
    level = main_level(result)
    rows = at_level(result.rows, level)
    flips = first_flips(rows)
    tried = sorted((r for r in rows if r.flips == flips and r.estimate is not None), key=rank, reverse=True)
    if not tried:
        return "No trial has been run yet."
    if level == "model" or len(tried) == 1 or all(r.estimate == 0 for r in tried):
        # Nothing to compare: the model row if it has an estimate, else the row itself.
        model = [r for r in at_level(result.rows, "model") if r.flips == flips and r.estimate is not None]
        return f"{_subject(result, (model or tried)[0])}{_probability((model or tried)[0])}."
    # Compared with the one that is surely lowest, if any: a part with few trials would hide every difference.
    top, bottom = tried[0], min(tried[1:], key=lambda row: row.joint_high)
    start = _subject(result, top) + _probability(top)
    if top.joint_low > bottom.joint_high:
        text = shown(bottom.estimate, bottom.low, bottom.high)
        value = f"{text.estimate} %{'' if bottom.estimate == 0 else text.behind}"
        return f"{start} — {_factor(top, bottom)} `{clean(bottom.target)}` ({value})."
    if all(map(is_exact, tried)):
        return f"{start}, and so it is in every {level}."
    if not is_drawn(tried):
        return f"{start}; the rest of the list decides which {level} is highest."
    return f"{start}; intervals that hold for all {level}s at once overlap: ranking them needs more trials."


def _subject(result: PvfResult, row: PvfRow) -> str:
    fault, inside = clean(result.fault), f"in `{clean(row.target)}`"
    if result.spec.get("faults"):
        return f"A fault of the `{fault}`" + ("" if row.level == "model" else f" {inside}")
    where = _everywhere(result) if row.level == "model" else inside
    # Without parameters: any bit may flip. With them the text of the fault model says what is meant.
    if row.flips is not None and result.fault == "bitflip":
        return (
            f"{'A random single-bit flip' if row.flips == 1 else f'A fault of {row.flips:,} random bit flips'} {where}"
        )
    return f"A `{fault}` fault{'' if row.flips in (None, 1) else f' of {row.flips:,} places'} {where}"


def _everywhere(result: PvfResult) -> str:
    if result.at in PLACES:
        return f"anywhere in {PLACES[result.at]}"
    return f"in the {'values of' if result.transient else 'parameters'} `{clean(result.at)}`"


def _probability(row: PvfRow) -> str:
    batch = row.unit == "batch"
    if row.estimate == 0:
        wrong = "no batch wrong in" if batch else "no output wrong in"
    else:
        wrong = f"{'the output of a batch' if batch else 'an output'} wrong with probability"
    text = shown(row.estimate, row.low, row.high)
    if row.estimate == row.high == 0:
        return f" made {wrong} {row.n:,} trials, and there are no others"
    if is_bounded(row):  # what is known of the list
        seen = f"{row.n:,} trials" if row.estimate == 0 else f"{text.estimate} %"
        return f" made {wrong} {seen}, {text.low} to {text.high} % once all faults of the list are tried"
    if row.estimate == 0:
        return f" made {wrong} {row.n:,} trials: its probability is below {text.high} %"
    return f" makes {wrong} {text.estimate} %{text.behind}"


def _factor(top: PvfRow, bottom: PvfRow) -> str:
    least = math.floor(10 * top.joint_low / bottom.joint_high) / 10 if bottom.joint_high else 0.0  # it is known to be 0
    if least < 1.1:
        return "more than"
    power = max(math.floor(math.log10(least)) - 1, 0)
    text = f"{least:g}" if least < 10 else f"{math.floor(least / 10**power) * 10**power:,}"  # two digits, rounded down
    return f"at least {text} times"


def meaning(result: PvfResult) -> str:
    """What the estimates are, spelled out."""
    if result.transient:
        return f"probability of an incorrect output given a fault, {result.measure}"
    return "parameter vulnerability factor (PVF)"


def measured_on(result: PvfResult) -> str:
    """What was run and how outputs were judged."""
    accuracy = accuracy_text(result.info)
    return (
        f"{result.trials_done:,} trials on {counted(result.samples, 'sample')} in {counted(result.batches, 'batch')}"
        f"{accuracy and ', '}{accuracy}; unit {result.unit}, judge {result.judge}, law {result.law}, seed {result.seed}"
    )


def dtype_text(result: PvfResult) -> str:
    """The dtype of the model's numbers, or what was corrupted among the values of a run."""
    return result.dtype + (" corrupted" if result.transient else "")


def accuracy_text(info: Mapping[str, Any]) -> str:
    """``accuracy 0.95``, where the workload states it as a number or as ``{"name": …, "value": …}``."""
    result = info.get("accuracy")
    name, value = "accuracy", result
    if isinstance(result, Mapping):
        name, value = str(result.get("name", name)), result.get("value")
    if value is None:
        return ""
    return clean(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")


TRANSIENT = (
    "P(incorrect) is the probability that an output is incorrect, given a fault in what one evaluation of one batch computes: "
    "the outputs or operands of operations (`op:`), its inputs (`input:`) or its key/value cache (`kv:`). Elements of all these "
    "tensors, over all batches, are equally likely unless the law says otherwise; several flips fall into one evaluation. "
    "Batches that a fault does not corrupt are not run and not counted."
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
        f"No trial corrupted {listed(lines.missing)}." if lines.missing else "",
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
        name = "whole model" if result.at == EVERYTHING else "everything faults were injected into"
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
        which = " of the batch that was corrupted" if result.transient else ""
        yield (
            f"Unit: each sample{which} counts once; {measure} is the share of samples that one fault makes incorrect, averaged "
            "over faults."
        )
    if is_drawn(rows):
        once = f"A fault is judged on one batch{', the one that it corrupts' if result.transient else ''}, so n faults are n "
        once += "independent trials, each with one batch that is incorrect or not."
        many = f"One fault is judged on many {every}{', those of the batch that it corrupts' if result.transient else ''}, so "
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
