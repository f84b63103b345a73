"""Sentences of the report on a PVF campaign.

Names are in backquotes. The finding claims no more than the intervals support: two targets are called different only if their
joint limits (which hold for all targets at once) do not overlap. The factor between them is then "at least" the lower limit of
the higher over the upper limit of the lower. With plain limits, equal targets would be called different far too often, since the
pair is selected by its estimates.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsilent.campaigns.stored_command import without_options
from unsilent.report.estimates import has_any_interval, has_list_bounds, is_exact, limits_text
from unsilent.report.text import (
    count_text,
    duration_text,
    escape_unprintable,
    estimate_text,
    flips_text,
    listed,
    lower_bound_text,
    rate_text,
)
from unsilent.studies.pvf.analysis import FIT_REQUIREMENT, FitRow, fit_versus_pvf_text
from unsilent.studies.pvf.lost_scores import lost_meaning, lost_numbers
from unsilent.studies.pvf.memory_records import MemoryFitRow
from unsilent.studies.pvf.records import (
    ALL_PARAMETERS,
    EVENTS_COMING_THROUGH,
    PvfCurves,
    PvfResult,
    PvfRow,
    at_level,
    headline_flips,
    is_pooled,
    main_level,
    samples_text,
    vulnerability_key,
)
from unsilent.studies.pvf.spec import FROM_ACCELERATOR, FROM_LIST, PvfBudget

PLACES = {
    ALL_PARAMETERS: "the parameters",
    "op:*": "the outputs of operations",
    "input:*": "the inputs",
    "kv:*": "the key/value cache",
}
"""Descriptions of the addresses that select all sites of a kind."""


def headline(result: PvfResult) -> str:
    """The main finding in one sentence."""
    if result.nothing_reaches:
        return _unmeasured_rate(result.memory_fit[-1])
    if result.memory_fit and result.trials_done:
        return _failure_rate(result.memory_fit[-1])
    level = main_level(result)
    rows = at_level(result.rows, level)
    flips = headline_flips(rows)
    of_flips = [row for row in rows if row.flips == flips and row.estimate is not None]
    tried = sorted(of_flips, key=vulnerability_key, reverse=True)
    if not tried:
        return "No trial has been run yet."
    if level == "model" or len(tried) == 1 or all(r.estimate == 0 for r in tried):
        # There is nothing to compare: use the model row if it has an estimate, else the row itself.
        model = [r for r in at_level(result.rows, "model") if r.flips == flips and r.estimate is not None]
        return f"{_subject(result, (model or tried)[0])}{_probability((model or tried)[0])}."
    # Compare with the target of lowest upper limit: a target with few trials would hide every difference.
    top, bottom = tried[0], min(tried[1:], key=lambda row: row.joint_high)
    start = _subject(result, top) + _probability(top)
    if top.joint_low > bottom.joint_high:
        text = estimate_text(bottom)
        value = f"{text.estimate} %{'' if bottom.estimate == 0 else text.limits_in_sentence}"
        return f"{start} — {_factor(top, bottom)} `{escape_unprintable(bottom.target)}` ({value})."
    if all(map(is_exact, tried)):
        return f"{start}, and the same holds for every {level}."
    if not has_any_interval(tried):
        return f"{start}; which {level} is highest depends on the faults of the list that were not tried."
    return f"{start}; the order of the {level}s is not established (joint intervals overlap): run more trials."


def fit_headline(fits: Sequence[FitRow]) -> str:
    """A sentence on the target with the most FIT; empty if no target has a FIT."""
    parts = [fit for fit in fits if fit.row.level != "model" and fit.estimate]
    model = [fit for fit in fits if fit.row.level == "model" and fit.estimate is not None]
    if not parts:
        return ""
    top = parts[0]
    others = [fit.unmasked_fit * fit.row.joint_high for fit in fits if fit.row.level != "model" and fit is not top]
    is_known = top.unmasked_fit * top.row.joint_low > max(others, default=0.0)
    most = "has the most FIT" if is_known else "has the largest estimate of FIT (the order is not established)"
    whole = f"; the whole model has {model[0].text.in_sentence}" if model else ""
    return f"`{escape_unprintable(top.row.target)}` {most}, {top.text.in_sentence} failures per 10⁹ hours{whole}."


def _failure_rate(model: MemoryFitRow) -> str:
    silent, errors = map(rate_text, (model.silent, model.detectable))
    return (
        f"Events in the memories make a call silently incorrect at {silent.estimate} FIT{silent.limits_in_sentence}, and cause "
        f"detectable errors at {errors.estimate} FIT{errors.limits_in_sentence}."
    )


def _unmeasured_rate(model: MemoryFitRow) -> str:
    """A sentence on FIT for the case that no trial was run."""
    silent, errors = (rate_text(rate).in_sentence for rate in (model.silent, model.detectable))
    why = "the memories have no events at all"
    if model.raw:
        why = "too few faults come through to be tried" if model.silent.high else "no fault reaches the model"
    return (
        f"No trial was run, because {why}. By the description of the accelerator (not measured), silent FIT is {silent}; "
        f"detectable FIT, which counts events that a memory detects but does not correct, is {errors}."
    )


def _subject(result: PvfResult, row: PvfRow) -> str:
    fault, inside = escape_unprintable(result.fault), f"in `{escape_unprintable(row.target)}`"
    if result.spec.get("faults"):
        return f"A fault of the `{fault}`" + ("" if row.level == "model" else f" {inside}")
    where = _everywhere(result) if row.level == "model" else inside
    # Without arguments, any bit may flip. A fault model with arguments is described by its own text.
    if row.flips is not None and result.fault == "bitflip":
        what = "A random single-bit flip" if row.flips == 1 else f"A fault of {row.flips:,} random bit flips"
        return f"{what} {where}"
    return f"A `{fault}` fault{'' if row.flips in (None, 1) else f' of {row.flips:,} places'} {where}"


def _everywhere(result: PvfResult) -> str:
    if result.at in PLACES:
        return f"anywhere in {PLACES[result.at]}"
    return f"in the {'values of' if result.transient else 'parameters'} `{escape_unprintable(result.at)}`"


def _probability(row: PvfRow) -> str:
    batch = row.unit == "batch"
    if row.estimate == 0:
        wrong = "no batch wrong in" if batch else "no output wrong in"
    else:
        wrong = f"{'the output of a batch' if batch else 'an output'} wrong with probability"
    text = estimate_text(row)
    if row.estimate == row.high == 0:
        return f" made {wrong} {count_text(row.n, 'trial')}: all faults that there are"
    if has_list_bounds(row):  # bounds for the whole list
        seen = count_text(row.n, "trial") if row.estimate == 0 else f"{text.estimate} %"
        return f" made {wrong} {seen} (probability over the whole list: {text.low} to {text.high} %)"
    if row.estimate == 0:
        return f" made {wrong} {count_text(row.n, 'trial')}: its probability is below {text.high} %"
    return f" makes {wrong} {text.estimate} %{text.limits_in_sentence}"


def _factor(top: PvfRow, bottom: PvfRow) -> str:
    least = top.joint_low / bottom.joint_high if bottom.joint_high else 0.0  # the lower PVF is known to be 0
    return "more than" if least < 1.1 else f"at least {lower_bound_text(least)} times"


def meaning(result: PvfResult) -> str:
    """A sentence that explains the meaning of the estimates."""
    if result.memories:
        return "failure rates (FIT) of memories"
    if result.transient:
        return f"probability of an incorrect output given a fault, {result.measure}"
    return "parameter vulnerability factor (PVF)"


def measured_on(result: PvfResult) -> str:
    """A sentence on the trials that were run and on how outputs were judged."""
    accuracy = accuracy_text(result.info)
    some = f" that evaluate {samples_text(result.samples_of_trials)} of" if result.samples_of_trials else " on"
    return (
        f"{count_text(result.trials_done, 'trial')}{some} {count_text(result.samples, 'sample')} in "
        f"{count_text(result.batches, 'batch')}{', drawn anew in each trial' if result.samples_of_trials else ''}"
        f"{accuracy and ', '}{accuracy}; {judging_text(result.judge, result.unit, result.law)}, seed {result.seed}"
    )


def judging_text(judge: str, unit: str, law: str) -> str:
    """The judge and the way faults were drawn, like ``judge top1 counts wrong samples; faults drawn per-element``."""
    origins = {FROM_LIST: "faults from a list", FROM_ACCELERATOR: "faults drawn by the memories of the accelerator"}
    wrong = "batches" if unit == "batch" else "samples"
    return f"judge {judge} counts wrong {wrong}; {origins.get(law, f'faults drawn {law}')}"


def dtype_text(result: PvfResult) -> str:
    """The dtype of the model, or the corrupted dtypes if values of a run were corrupted."""
    return result.dtype + (" corrupted" if result.transient else "")


def accuracy_text(info: Mapping[str, Any]) -> str:
    """The accuracy in a workload's info, like ``accuracy 0.95``; empty if there is none."""
    result = info.get("accuracy")
    name, value = "accuracy", result
    if isinstance(result, Mapping):
        name, value = str(result.get("name", name)), result.get("value")
    if value is None:
        return ""
    return escape_unprintable(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")


TRANSIENT = (
    "P(incorrect) is the probability that an output is incorrect, given a fault in a value of one evaluation of one batch: "
    "an output or operand of an operation (`op:`), an input (`input:`) or the key/value cache (`kv:`). All elements of these "
    "tensors, over all batches, are equally likely unless the law says otherwise. All flips of one trial occur in the same "
    "evaluation. Batches that a fault does not corrupt are neither run nor counted."
)
MEMORIES = (
    "P(incorrect) is the probability that the output of a call is incorrect, given an event in a memory that comes through the "
    "protection, weighted by the rates of events. Events that a code corrects or reports are not in it; FIT counts those that a "
    "memory reports as detectable."
)
NOTHING_REACHES = (
    "FIT are computed from the description of the accelerator alone: from the events in bits that the model needs, and from "
    "which of them the error-correcting code of each memory corrects or reports. Nothing was injected, so nothing here is a "
    "measurement."
)
PVF_MEANING = (
    "PVF is the parameter vulnerability factor (arXiv 2405.01741): the probability that an output is incorrect, given a "
    "fault in a parameter. It is not the program vulnerability factor, which has the same acronym."
)
INCORRECT = (
    "An output is incorrect if the judge finds that it differs from the output of the same model for the same input without the "
    "fault. Whether the fault-free output was right does not matter."
)
LOOKUPS = (
    "A fault in an embedding row acts only when that row is looked up. Hot rows are the most used rows that together receive "
    "half of all look-ups of the evaluation. Warm rows are all other rows that are looked up. Cold rows are never looked up."
)
OUTCOME_MEANINGS = (
    "Masked: the output is bit-identical. Benign: the output differs, but the decision does not. Silent: the decision differs, "
    "and every value is finite. Detectable: non-finite values, an exception, a crash or a hang. {} counts silent and detectable "
    "outputs. The number after a name is the number of flips."
)


def curves_lead(result: PvfResult, lines: PvfCurves) -> str:
    """The sentences above the curves."""
    level = main_level(result)
    limits = limits_text(result.rows, result.confidence)
    all_exact = all(map(is_exact, result.rows))
    zeros = any(is_exact(row) and row.estimate == 0 for rows in lines.series.values() for row in rows)
    cause = "an event that comes through the protection" if result.memories else "a fault"
    parts = [
        f"How often an output is wrong, given {cause} in the {level}.",
        f"{limits[:1].upper()}{limits[1:]}." if result.rows and all_exact else f"Bars are {limits}.",
        "" if all_exact else "A hollow triangle is the upper limit of a target where no output was wrong.",
        "A target whose value is exactly 0 has no mark on this scale." if zeros else "",
    ]
    if lines.left_out:
        drawn = f"The {lines.target_count} most vulnerable targets are drawn"
        parts.append(f"{drawn}; {lines.left_out} more are in the table of all rows.")
    if lines.missing:
        parts.append(f"No trial corrupted {listed(lines.missing)}.")
    return " ".join(filter(None, parts))


def heat_map_lead(result: PvfResult, maps: int) -> str:
    """The sentences above the heat maps."""
    trials = count_text(sum(heat_map.total_trials for heat_map in result.heat_maps), "trial")
    few = "Hover for n." if all(map(is_exact, result.rows)) else "Each cell rests on few trials: hover for n."
    several = (
        " Each dtype has its own map, because the meaning of a bit depends on the dtype. The colour scale is the same "
        "in all maps."
    )
    return (
        f"Computed from the {trials} that flipped exactly one bit. The sign bit is on the left. Grey cell: no trial. "
        f"Palest colour: trials, but no wrong output. {few}{several if maps > 1 else ''}"
    )


def all_rows_lead(result: PvfResult) -> str:
    """The sentences above the table of all rows."""
    every = units(result)
    judged = "the judged batches, one for each fault"
    if not _judged_once(result):
        how = " (intervals are computed from faults)" if has_any_interval(result.rows) else ""
        judged = f"the judged {every}, which are not independent{how}"
    events = f"{result.measure} is that of {EVENTS_COMING_THROUGH}. " if result.memories else ""
    return (
        f"{events}n counts faults, which are independent. The columns masked to detectable count {judged}. Click a heading to "
        f"sort. Hover over a row for its elements, bits, {every} and method."
        f"{lost_meaning(result)}"
    )


# -- sentences ---------------------------------------------------------------------------------------------------------


def findings(result: PvfResult, fits: Sequence[FitRow]) -> Iterator[str]:
    """Sentences for the head of the report: incomplete trials, FIT against PVF, and notes of the campaign."""
    if result.trials_done < result.trials_planned:
        yield f"not complete: {result.trials_done:,} of {result.trials_planned:,} planned trials have been run"
    yield from filter(None, (fit_versus_pvf_text(fits), *result.notes))


def notes(result: PvfResult, fit_per_bit: float | None, fits: Sequence[FitRow]) -> Iterator[str]:
    """Notes on how to read the tables."""
    if result.nothing_reaches:
        yield f"nothing was measured; what the memories hold was computed from {count_text(result.batches, 'batch')}"
        return
    yield measured_on(result)
    joint = "; joint intervals, which hold for all targets at once, decide comparisons"
    yield f"{limits_text(result.rows, result.confidence)}; n counts faults{joint if has_any_interval(result.rows) else ''}"
    if any(row.silent_share is not None for row in result.rows):
        wrong = f"of the wrong {units(result)}, those with finite outputs"
        yield f"silent %: {wrong}; due %: of all, those with NaN, infinity or an error"
    if is_pooled(result):
        yield (
            "rows of several targets, like model, add up counts and weight percentages by how likely a fault is in each target"
        )
    if fit_per_bit is not None and not fits and not result.transient:
        yield f"no FIT: {FIT_REQUIREMENT}"
    if without := [f.row.target for f in fits if f.reason]:
        yield f"no FIT for {listed(without)}: {', '.join(dict.fromkeys(f.reason for f in fits if f.reason))}"
    time = f"{duration_text(result.seconds)} ({duration_text(result.cpu_seconds)} CPU)"
    yield f"{time} on {result.device}, {dtype_text(result)}"


def key_numbers(result: PvfResult) -> Iterator[tuple[str, str, str]]:
    """Key numbers for the head of the page: term, value and small text."""
    if result.nothing_reaches:
        for kind in ("silent", "detectable"):
            text = rate_text(getattr(result.memory_fit[-1], kind))
            yield f"{kind} FIT by the description", text.estimate, text.limits
    model = at_level(result.rows, "model")
    for row in [r for r in model if r.flips == headline_flips(model)][:1]:
        text = estimate_text(row)
        name = "whole model" if result.at == ALL_PARAMETERS else "all injected targets together"
        name = "whole list" if result.spec.get("faults") else name
        name = result.measure_text if result.memories else name
        name += "" if row.flips is None else f", {flips_text(row.flips)}"
        yield name, text.estimate + (" %" if row.estimate is not None else ""), text.limits if row.estimate else ""
        yield from lost_numbers(result, row)
    planned = "" if result.trials_done == result.trials_planned else f"of {result.trials_planned:,} planned"
    yield "faults tried", f"{result.trials_done:,}", planned
    yield "evaluation samples", f"{result.samples:,}", ""
    name, _, value = accuracy_text(result.info).rpartition(" ")
    if value:
        yield f"fault-free {name}", value, ""
    yield "time", duration_text(result.seconds), ""


HAS_END = {"--ci", "--rel", "--faults"}
"""Options that determine when a campaign ends."""


def next_commands(result: PvfResult) -> Iterator[tuple[str, str]]:
    """Suggested next steps and their commands; none if the trials were not stored."""
    store, spec = shlex.quote(result.store), result.spec
    if not result.store or not result.command.startswith("unsilent "):
        return
    if result.trials_done < result.trials_planned:
        yield "finish the campaign", f"{result.command} --store {store}"
    elif result.rows and not (spec.get("exhaustive") or HAS_END & set(shlex.split(result.command))):
        yield "run trials until each row is precise", f"{without_options(result.command, PvfBudget)} --rel 20%"
    if result.at == ALL_PARAMETERS and result.fault == "bitflip" and 1 in spec["flips"] and result.trials_done:
        yield "choose which parameters to protect", f"unsilent plan {store} --budget 20%"
    yield "write the main table for a paper", f"unsilent report {store} --table -o table.tex"


def common_facts(result: PvfResult) -> Iterator[tuple[str, str]]:
    """Facts of a campaign, as pairs of term and text."""
    yield "command" if result.command.startswith("unsilent ") else "Python call", result.command
    yield "store", result.store
    yield "campaign", result.campaign
    yield "workload", result.workload
    yield "where", result.at
    yield "trials", f"{result.trials_done:,} of {result.trials_planned:,} planned"
    yield "evaluation", f"{count_text(result.samples, 'sample')} in {count_text(result.batches, 'batch')}"
    yield "seed", str(result.seed)
    yield "device", f"{result.device}, {dtype_text(result)}, {count_text(result.threads, 'thread')}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())


def facts(result: PvfResult) -> Iterator[tuple[str, str]]:
    """Facts on how the result was made, as pairs of term and text."""
    yield from common_facts(result)
    yield "fault model", result.fault
    yield "targets", f"per {result.per}"
    if result.samples_of_trials:
        yield "samples of a trial", f"{samples_text(result.samples_of_trials)}, drawn at random from one batch"
    if result.pilot_trials:
        yield "pilot", f"{count_text(result.pilot_trials, 'trial')}, which are not counted in any estimate"
    if result.graphed_trials:
        yield "by CUDA graphs", f"{100 * result.graphed_trials / result.trials_done:.3g} % of trials"
    yield from ((name, getattr(result, name)) for name in ("law", "unit", "judge"))
    if has_any_interval(result.rows) or not result.rows:
        yield "confidence", f"{100 * result.confidence:g} %"
    yield "time", f"{duration_text(result.seconds)}, {duration_text(result.cpu_seconds)} CPU"
    yield "one fault-free evaluation", duration_text(result.golden_seconds)
    for key, value in result.info.items():
        yield ("fault-free", accuracy_text(result.info)) if key == "accuracy" else (key, info_text(value))


def info_text(value: Any) -> str:
    """A value of a workload's info as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def method(result: PvfResult) -> Iterator[str]:
    """Paragraphs on how to reproduce the result and on what the numbers mean."""
    measure, every, rows = result.measure, units(result), result.rows
    which = "command" if result.command.startswith("unsilent ") else "Python call"
    yield f"With the same data, weights, versions and kind of device, this {which} reproduces these numbers."
    if result.nothing_reaches:
        yield NOTHING_REACHES
        return
    meant = MEMORIES if result.memories else TRANSIENT if result.transient else PVF_MEANING
    yield f"{meant} {INCORRECT}"
    if result.unit == "batch":
        yield (
            f"Unit: each batch counts once and is incorrect if any of its samples is incorrect. {measure} per batch grows with "
            f"the batch size and must not be compared with {measure} per sample."
        )
    else:
        which = " of the batch that was corrupted" if result.transient else ""
        yield (
            f"Unit: each sample{which} counts once; {measure} is the share of samples that one fault makes incorrect, averaged "
            "over faults."
        )
    if has_any_interval(rows):
        once = f"A fault is judged on one batch{', the one that it corrupts' if result.transient else ''}, so n faults are n "
        once += "independent trials, each with one batch that is incorrect or not."
        how = f"many {every}{', those of the batch that it corrupts' if result.transient else ''}"
        many = f"One fault is judged on {f'the {every} of its trial' if result.samples_of_trials else how}, so "
        many += f"intervals are computed from the differences between faults, not from the number of {every}."
        yield (
            f"Intervals: {once if _judged_once(result) else many} Where no output was wrong, the number of faults "
            "excludes probabilities above the upper limit. Two targets are called different only if their joint intervals "
            "do not overlap. Joint intervals hold for all targets of a level and number of flips at once (Bonferroni) and "
            "are wider than the intervals shown."
        )
    elif all(map(is_exact, rows)):
        yield "There are no intervals: every fault was tried, so nothing is left to estimate."
    else:
        yield (
            "Bounds: the faults that were tried are not a random sample, so there is no interval. The limits of a row cover "
            "every possible result of the untried faults of the list: the lower limit assumes that they make no output wrong, "
            "the upper limit that they make every output wrong."
        )


def _judged_once(result: PvfResult) -> bool:
    return result.unit == "batch" and (result.transient or result.batches == 1)


def units(result: PvfResult) -> str:
    """The unit that is counted as correct or incorrect: ``batches`` or ``samples``."""
    return "batches" if result.unit == "batch" else "samples"
