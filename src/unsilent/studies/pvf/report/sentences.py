"""What is said of a result in words: the finding in one sentence, what was measured, what it was measured with.

Names stand in backquotes. The finding claims no more than the intervals carry: two targets are called different only
where their joint limits (which hold for all of them at once) do not overlap; the factor between them is then "at least"
the lower limit of the one over the upper limit of the other. Plain limits would call some pair of equal targets different
far too often: the pair is chosen after looking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unsilent.report.estimates import is_bounded, is_drawn, is_exact
from unsilent.report.text import clean, counted, shown
from unsilent.studies.pvf.records import PvfResult, PvfRow
from unsilent.studies.pvf.report.rows import EVERYTHING, at_level, first_flips, main_level, rank

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
        return "No trial has been run yet: nothing can be said."
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
    told = f"{least:g}" if least < 10 else f"{math.floor(least / 10**power) * 10**power:,}"  # two digits, rounded down
    return f"at least {told} times"


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
    """The dtype of the model's numbers, or what was struck among the values of a run."""
    return result.dtype + (" struck" if result.transient else "")


def accuracy_text(info: Mapping[str, Any]) -> str:
    """``accuracy 0.95``, where the workload states it as a number or as ``{"name": …, "value": …}``."""
    found = info.get("accuracy")
    name, value = "accuracy", found
    if isinstance(found, Mapping):
        name, value = str(found.get("name", name)), found.get("value")
    if value is None:
        return ""
    return clean(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
