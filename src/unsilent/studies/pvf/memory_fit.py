"""Failure rates of the memories of an accelerator, from trials of faults that come through their protection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from unsilent.basics.interval import Interval
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tallies import PvfEstimator, StratifiedTrials, Tally
from unsilent.studies.pvf.memory_records import MemoryFacts, MemoryFitRow, MemoryPart
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
    """FIT at each level; empty where no accelerator is described."""
    calls = {one.name: one.calls_per_fault for one in facts}
    result = []
    for level, name_of in LEVELS:
        for name in dict.fromkeys(filter(None, map(name_of, parts))):
            mine = [part for part in parts if name_of(part) == name]
            total = {
                kind: math.fsum(getattr(part, kind) for part in mine)
                for kind in ("live_bits", "raw", "corrected", "detected", "altered")
            }
            patterns = {part.memory: part.pattern for part in mine}
            bits = math.fsum(
                part.live_bits for part in mine if part.pattern == patterns[part.memory]
            )  # the same for each
            silent, errors, incorrect = _rates(mine, total["altered"], stored, question)
            detectable = scaled(errors, 1.0, total["detected"])
            wrong = scaled(silent, calls[name], 0.0) if level == "memory" else None
            faults = (total["raw"], total["corrected"], total["detected"])
            result.append(MemoryFitRow(level, name, bits, *faults, silent, detectable, incorrect, wrong))
    return tuple(result)


def _rates(
    parts: Sequence[MemoryPart], altered: float, stored: StoredTrials, question: PvfEstimator
) -> tuple[Interval, Interval, Interval]:
    """FIT of incorrect calls: silent ones, those that end with an error, and both."""
    names = {part.target for part in parts if part.altered}
    if not names:
        nothing = Interval(0.0, 0.0, 0.0, question.confidence, 0, "nothing comes through")
        return nothing, nothing, nothing
    trials = stored.sample([target for target in stored.description.targets if target.name in names], None)
    silent, errors = _by_kind(trials)
    rates = [scaled(question.estimate(one), altered, 0.0) for one in (silent, errors, trials)]
    return rates[0], rates[1], rates[2]


def _by_kind(trials: StratifiedTrials) -> Iterator[StratifiedTrials]:
    """The trials with silent outcomes alone as incorrect, and with errors alone."""
    due = [outcome for outcome in Outcome if outcome.due]
    for spared in (due, [Outcome.SDC]):
        strata = []
        for stratum in trials.strata:
            counts = stratum.tally.outcome_counts.copy()
            counts[:, Outcome.BENIGN] += counts[:, spared].sum(1)
            counts[:, spared] = 0
            strata.append(replace(stratum, tally=Tally(counts)))
        yield replace(trials, strata=tuple(strata))


def scaled(interval: Interval, factor: float, offset: float) -> Interval:
    """The interval of ``factor x value + offset``."""
    estimate = None if interval.estimate is None else factor * interval.estimate + offset
    return replace(
        interval, estimate=estimate, low=factor * interval.low + offset, high=factor * interval.high + offset
    )
