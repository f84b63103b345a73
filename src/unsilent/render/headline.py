"""The finding in one sentence, claiming no more than the intervals carry.

Two components are called different only where their joint limits (which hold for all of them at once) do not
overlap; the factor between them is then "at least" the lower limit of the one over the upper limit of the
other. Plain limits would call some pair of equal components different far too often: the pair is chosen
after looking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unsilent.render.info import PLACES, first_flips, is_bounded, is_drawn, is_exact, main_level, rank, rows_of
from unsilent.report.text import clean, shown
from unsilent.studies.pvf.records import PvfResult, PvfRow


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the sentence; ``name`` marks text that comes from outside."""

    text: str
    name: bool = False


def headline(result: PvfResult) -> tuple[Part, ...]:
    """The sentence as pieces, so that a renderer can set names apart."""
    level = main_level(result)
    rows = rows_of(result, level)
    flips = first_flips(rows)
    tried = sorted((r for r in rows if r.flips == flips and r.estimate is not None), key=rank, reverse=True)
    if not tried:
        return (Part("No trial has been run yet: nothing can be said."),)
    if level == "model" or len(tried) == 1 or all(r.estimate == 0 for r in tried):
        return _alone(result, tried[0], flips)
    # Compared with the one that is surely lowest, if any: a part with few trials would hide every difference.
    top, bottom = tried[0], min(tried[1:], key=lambda row: row.joint_high)
    start = (*_subject(result, top, flips), *_probability(result, top))
    if top.joint_low <= bottom.joint_high:
        if all(map(is_exact, tried)):
            return (*start, Part(f", and so it is in every {level}."))
        if not is_drawn(tried):
            return (*start, Part(f"; the rest of the list decides which {level} is highest."))
        return (
            *start,
            Part(f"; intervals that hold for all {level}s at once overlap: ranking them needs more trials."),
        )
    return (*start, Part(f" — {_factor(top, bottom)} "), Part(clean(bottom.target), True), *_versus(bottom))


def sentence(result: PvfResult) -> str:
    """The headline as plain text, names in backquotes."""
    return "".join(f"`{part.text}`" if part.name else part.text for part in headline(result))


def _alone(result: PvfResult, row: PvfRow, flips: int | None) -> tuple[Part, ...]:
    """Where there is nothing to compare: the model row if it has an estimate, else the row itself."""
    model = [r for r in rows_of(result, "model") if r.flips == flips and r.estimate is not None]
    row = model[0] if model else row
    return (*_subject(result, row, flips), *_probability(result, row), Part("."))


def _subject(result: PvfResult, row: PvfRow, flips: int | None) -> tuple[Part, ...]:
    if result.spec.get("faults"):
        place = () if row.level == "model" else (Part(" in "), Part(clean(row.target), True))
        return Part("A fault of the "), Part(clean(result.fault), True), *place
    where = _everywhere(result) if row.level == "model" else (Part("in "), Part(clean(row.target), True))
    # Without parameters: any bit may flip. With them the text of the fault model says what is meant.
    if flips is not None and result.fault == "bitflip":
        count = "A random single-bit flip " if flips == 1 else f"A fault of {flips:,} random bit flips "
        return Part(count), *where
    places = "" if flips in (None, 1) else f" of {flips:,} places"
    return Part("A "), Part(clean(result.fault), True), Part(f" fault{places} "), *where


def _everywhere(result: PvfResult) -> tuple[Part, ...]:
    if result.at in PLACES:
        return (Part(f"anywhere in {PLACES[result.at]}"),)
    return Part("in the values of " if result.transient else "in the parameters "), Part(clean(result.at), True)


def _probability(result: PvfResult, row: PvfRow) -> tuple[Part, ...]:
    made = "no output wrong in" if row.estimate == 0 else "an output wrong with probability"
    if row.unit == "batch":
        made = "no batch wrong in" if row.estimate == 0 else "the output of a batch wrong with probability"
    text = shown(row.estimate, row.low, row.high)
    if row.estimate == row.high == 0:
        return (Part(f" made {made} {row.n:,} trials, and there are no others"),)
    if is_bounded(row):  # what is known of the list
        seen = f"{row.n:,} trials" if row.estimate == 0 else f"{text.estimate} %"
        return (Part(f" made {made} {seen}, {text.low} to {text.high} % once all faults of the list are tried"),)
    if row.estimate == 0:
        return (Part(f" made {made} {row.n:,} trials: its probability is below {text.high} %"),)
    return (Part(f" makes {made} {text.estimate} %{text.behind}"),)


def _factor(top: PvfRow, bottom: PvfRow) -> str:
    least = math.floor(10 * top.joint_low / bottom.joint_high) / 10 if bottom.joint_high else 0.0  # it is known to be 0
    if least < 1.1:
        return "more than"
    return f"at least {least:g} times" if least < 10 else f"at least {_two_digits(least)} times"


def _versus(bottom: PvfRow) -> tuple[Part, ...]:
    text = shown(bottom.estimate, bottom.low, bottom.high)
    return (Part(f" ({text.estimate} %{'' if bottom.estimate == 0 else text.behind})."),)


def _two_digits(value: float) -> str:
    """Two leading digits, rounded down, thousands separated."""
    power = math.floor(math.log10(value)) - 1
    return f"{math.floor(value / 10**power) * 10**power:,}"
