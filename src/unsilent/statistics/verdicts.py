"""Verdict words and sentences of the noise floor test, for one measure and for one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unsilent.statistics.null_distribution import Measure, NullDistribution, RunComparison

VerdictWord = Literal["identical", "harmful", "improved", "detectable", "masked", "undecided"]


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """Result of one measure of one run.

    Attributes:
        effect: Observed value minus the median of the clean values; infinite if the observed value is not finite.
        p: P value corrected for the measures of this run; ``None`` if nothing was tested.
        corrected_p: P value corrected for all runs too; ``None`` if nothing was tested.
        beyond_noise: Whether the effect is beyond noise.
        is_worse: Whether the effect is in the worse direction.
        is_distance: Whether the measure is a distance.
    """

    name: str
    observed: float
    effect: float
    margin: float
    p: float | None
    corrected_p: float | None
    beyond_noise: bool
    is_worse: bool
    is_distance: bool


@dataclass(frozen=True, slots=True)
class NoiseVerdict:
    """Verdict on one run: a word, p values and results of its measures.

    Attributes:
        p: P value for being beyond noise, over all measures of the run; ``None`` if nothing was tested.
        corrected_p: ``p`` corrected for all runs.
        equivalence: P value, corrected for all runs, of the hypothesis that a measure is off by its margin or more.
        n: Number of clean comparisons.
        tests: Number of runs that the p values are corrected for.
        method: "rank", "fitted (…)" or "bits", and the correction.
        sentence: Verdict in words.
    """

    run: str
    word: VerdictWord
    p: float | None
    corrected_p: float | None
    equivalence: float | None
    n: int
    tests: int
    level: float
    method: str
    findings: tuple[MeasureResult, ...]
    sentence: str


def measure_result(
    observed: RunComparison,
    null: NullDistribution,
    measure: Measure,
    beyond: bool,
    p: float | None = None,
    corrected: float | None = None,
) -> MeasureResult:
    """The result of one measure of one run."""
    x = observed.values[measure.name]
    sign = 1.0 if measure.worse_direction == "more" else -1.0
    centre = float(np.median([c.values[measure.name] for c in null.clean_comparisons]))
    effect = x - centre if math.isfinite(x) else sign * math.inf  # not finite, NaN included, is the worst
    return MeasureResult(
        measure.name, x, effect, measure.margin, p, corrected, beyond, effect * sign > 0, measure.is_distance
    )


def verdict_word(findings: Sequence[MeasureResult], equivalent: bool) -> VerdictWord:
    """The verdict word for a run whose bits differ from its twin's.

    ``equivalent``: whether all measures are shown to be within their margins.
    """
    beyond = [f for f in findings if f.beyond_noise]
    if any(f.is_worse and abs(f.effect) >= f.margin for f in beyond):
        return "harmful"
    # A better model differs from the clean one, so a distance beyond noise does not count against it.
    if any(not f.is_worse for f in beyond if not f.is_distance) and all(
        f.is_distance or not f.is_worse for f in beyond
    ):
        return "improved"
    if beyond:
        return "detectable"
    return "masked" if equivalent else "undecided"


def verdict_sentence(word: VerdictWord, findings: Sequence[MeasureResult], equivalence: float | None = None) -> str:
    """The verdict in one sentence with its word and result, without the method."""
    if word == "identical":
        return "identical: the bits equal those of the clean twin"
    if word == "masked":
        return f"masked: every measure is within its margin (equivalence p {equivalence:.3g})"
    if word == "undecided":
        return f"undecided: neither a change beyond noise nor equivalence was shown (equivalence p {equivalence:.3g})"
    value = {"harmful": "beyond noise and the margin", "improved": "better, beyond noise"}.get(
        word, "beyond noise, not harmful"
    )
    parts = [f"{f.name} {f.effect:+.3g} (margin {f.margin:g})" for f in findings if f.beyond_noise]
    return f"{word}: {value}: {', '.join(parts) or 'only the bits differ'}"
