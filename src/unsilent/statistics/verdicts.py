"""The words of the floor test: what is said of one measure, and of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unsilent.statistics.nulls import Compared, Measure, Null

Word = Literal["identical", "harmful", "improved", "detectable", "masked", "undecided"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One measure of one run.

    Attributes:
        effect: observed less the median of the clean values; infinite for what is not finite. p: corrected for the measures of
        this run; None where nothing was tested. corrected: for all runs too. beyond: noise is no explanation. worse: the effect
        goes the way that is harm. distance: it is of a distance.
    """

    name: str
    observed: float
    effect: float
    margin: float
    p: float | None
    corrected: float | None
    beyond: bool
    worse: bool
    distance: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one run.

    Attributes:
        p, corrected: of being beyond noise, all measures of the run together, and over all runs; None where nothing was tested.
        equivalence: p of being off by a margin or more, over all runs. n: clean comparisons. tests: runs that are corrected for.
        method: "rank", "fitted (…)" or "bits", and the correction. sentence: the same in words.
    """

    run: str
    word: Word
    p: float | None
    corrected: float | None
    equivalence: float | None
    n: int
    tests: int
    level: float
    method: str
    findings: tuple[Finding, ...]
    sentence: str


def finding(
    observed: Compared,
    null: Null,
    measure: Measure,
    beyond: bool,
    p: float | None = None,
    corrected: float | None = None,
) -> Finding:
    """What one measure shows."""
    x = observed.values[measure.name]
    sign = 1.0 if measure.worse == "more" else -1.0
    centre = float(np.median([c.values[measure.name] for c in null.compared]))
    effect = x - centre if math.isfinite(x) else sign * math.inf  # not finite is the worst there is, NaN too
    return Finding(measure.name, x, effect, measure.margin, p, corrected, beyond, effect * sign > 0, measure.distance)


def word_for(findings: Sequence[Finding], equivalent: bool) -> Word:
    """The word for a run of other bits than its twin's; ``equivalent``: all measures are proven to be within their margins."""
    beyond = [f for f in findings if f.beyond]
    if any(f.worse and abs(f.effect) >= f.margin for f in beyond):
        return "harmful"
    # A better model is another model: that it is at a distance does not speak against it.
    if any(not f.worse for f in beyond if not f.distance) and all(f.distance or not f.worse for f in beyond):
        return "improved"
    if beyond:
        return "detectable"
    return "masked" if equivalent else "undecided"


def sentence(word: Word, findings: Sequence[Finding], equivalence: float | None = None) -> str:
    """What was found, without how."""
    if word == "identical":
        return "identical: the bits are those of the clean twin"
    if word == "masked":
        return f"masked: every measure is within its margin (equivalence p {equivalence:.3g})"
    if word == "undecided":
        return f"undecided: not beyond noise, nor proven to be within the margins (equivalence p {equivalence:.3g})"
    value = {"harmful": "beyond noise and the margin", "improved": "better, beyond noise"}.get(
        word, "beyond noise, not harmful"
    )
    parts = [f"{f.name} {f.effect:+.3g} (margin {f.margin:g})" for f in findings if f.beyond]
    return f"{word}: {value}: {', '.join(parts) or 'bits alone'}"
