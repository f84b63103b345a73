"""Computes the failure rates of the memories of an accelerator from the trials of a campaign."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from unsilent.basics.interval import Interval
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tallies import PvfEstimator, StratifiedTrials, Tally
from unsilent.statistics import clopper_pearson
from unsilent.studies.pvf.memory_records import NOTHING_TRIED, MemoryFacts, MemoryFitRow, MemoryPart
from unsilent.studies.pvf.row_scopes import StoredTrials

LEVELS: tuple[tuple[str, Callable[[MemoryPart], str]], ...] = (
    ("memory", lambda part: part.memory),
    ("pattern", lambda part: f"{part.memory}/{part.pattern}"),
    ("component", lambda part: part.component),
    ("layer", lambda part: part.layer),
    ("model", lambda part: "model"),
)


def memory_fit_rows(
    parts: Sequence[MemoryPart], facts: Sequence[MemoryFacts], stored: StoredTrials, question: PvfEstimator
) -> tuple[MemoryFitRow, ...]:
    """The FIT at each level; empty if no accelerator is described."""
    calls = {memory.name: memory.calls_per_fault for memory in facts}
    result = []
    for level, name_of in LEVELS:
        for name in dict.fromkeys(filter(None, map(name_of, parts))):
            mine = [part for part in parts if name_of(part) == name]
            raw, corrected, detected = (
                math.fsum(getattr(part, kind) for part in mine) for kind in ("raw", "corrected", "detected")
            )
            patterns = {part.memory: part.pattern for part in mine}
            # Live bits are equal for all patterns of a memory.
            bits = math.fsum(part.live_bits for part in mine if part.pattern == patterns[part.memory])
            silent, detectable, incorrect = _rates(mine, stored, question)
            wrong = silent.scaled(calls[name]) if level == "memory" else None
            result.append(
                MemoryFitRow(level, name, bits, raw, corrected, detected, silent, detectable, incorrect, wrong)
            )
    return tuple(result)


def _rates(
    parts: Sequence[MemoryPart], stored: StoredTrials, question: PvfEstimator
) -> tuple[Interval, Interval, Interval]:
    """The FIT of silently incorrect calls, of detectable errors, and of all incorrect calls.

    If shares of outcomes were counted from drawn events, limits of the trials and of each share hold together (Bonferroni), and
    the limits of FIT are the lowest and highest values that these limits allow.
    """
    names = {part.target for part in parts}
    targets = [target for target in stored.description.targets if target.name in names]
    counted = sum(part.draws > 0 for part in parts)
    strict = replace(question, confidence=1 - (1 - question.confidence) / 2) if counted else question
    each = 1 - (1 - question.confidence) / (4 * counted) if counted else question.confidence
    through = _through(parts, {target.name for target in targets}, each)

    def rate(trials: StratifiedTrials) -> Interval:
        if not targets:
            return Interval(0.0, 0.0, through.untried, question.confidence, 0, NOTHING_TRIED)
        share = strict.estimate(trials)
        estimate = None if share.estimate is None else through.rate * share.estimate
        low, high = through.limits(share.low, share.high)
        return replace(share, estimate=estimate, low=low, high=high, confidence=question.confidence)

    trials = stored.sample(targets, None)
    silent, errors = map(rate, _by_kind(trials))
    reported = [_limits(part, part.detected, each) for part in parts]
    detected = math.fsum(part.detected for part in parts)
    estimate = None if errors.estimate is None else errors.estimate + detected
    low = math.fsum((errors.low, *(least for least, _ in reported)))
    high = min(math.fsum((errors.high, *(most for _, most in reported))), math.fsum(part.raw for part in parts))
    detectable = replace(errors, estimate=estimate, low=low, high=max(high, estimate or 0.0))
    return silent, detectable, rate(trials)


class _Through(NamedTuple):
    """The rate of events that pass the protection, with the margins of its limits.

    ``less`` and ``more`` are the distances from the rate to its lower and upper limit. ``least`` and ``most`` are the smallest
    ratio of a lower limit to the rate over all parts, and the largest ratio of an upper limit.
    """

    rate: float
    less: float
    more: float
    least: float
    most: float
    untried: float

    def limits(self, low: float, high: float) -> tuple[float, float]:
        """Limits of the rate of incorrect calls, from limits of their share."""
        lower = max(self.rate * low * self.least, self.rate * low - self.less, 0.0)
        upper = min(self.rate * high * self.most, self.rate * high + self.more)
        return lower, upper + self.untried


def _through(parts: Sequence[MemoryPart], tried: Container[str], confidence: float) -> _Through:
    mine = [(part.altered, *_limits(part, part.altered, confidence)) for part in parts if part.target in tried]
    others = [_limits(part, part.altered, confidence)[1] for part in parts if part.target not in tried]
    return _Through(
        math.fsum(rate for rate, _, _ in mine),
        math.fsum(rate - low for rate, low, _ in mine),
        math.fsum(high - rate for rate, _, high in mine),
        min((low / rate for rate, low, _ in mine), default=1.0),
        max((high / rate for rate, _, high in mine), default=1.0),
        math.fsum(others),
    )


def _limits(part: MemoryPart, rate: float, confidence: float) -> tuple[float, float]:
    """Limits of the rate of an outcome; both equal the rate if its share is exact."""
    if not part.draws or not part.raw:
        return rate, rate
    share = clopper_pearson(round(rate / part.raw * part.draws), part.draws, confidence)
    return part.raw * share.low, part.raw * share.high


def _by_kind(trials: StratifiedTrials) -> Iterator[StratifiedTrials]:
    """The trials twice: with only silent outcomes as incorrect, then with only detectable errors."""
    due = [outcome for outcome in Outcome if outcome.due]
    for spared in (due, [Outcome.SDC]):
        strata = []
        for stratum in trials.strata:
            counts = stratum.tally.outcome_counts.copy()
            counts[:, Outcome.BENIGN] += counts[:, spared].sum(1)
            counts[:, spared] = 0
            strata.append(replace(stratum, tally=Tally(counts)))
        yield replace(trials, strata=tuple(strata))
