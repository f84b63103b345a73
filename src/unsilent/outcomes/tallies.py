"""How the outcomes of trials are read: the question asked of them, and outcomes counted in its unit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unsilent.interval import PART
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.question import UNITS as UNITS
from unsilent.outcomes.question import PvfReading
from unsilent.statistics import Interval, Stratum, stratified, wilson
from unsilent.statistics.interim import confidence_at

AT_ONCE = 2**24
"""Outcomes that are counted in one go."""
WILSON_FROM = 20
"""Trials with and without an incorrect output that Wilson's interval needs: it covers .94 or more then, .84 without (at 95 %)."""


@dataclass(frozen=True)
class Question(PvfReading):
    """How stored trials are read, and estimates made of them."""

    def of(self, transient: bool) -> Question:
        """The question put to a campaign: samples are counted where parameters are corrupted, else the one batch that is."""
        return replace(self, unit=self.unit or ("batch" if transient else "sample"))

    def estimate(self, sample: Sample) -> Interval:
        """PVF over strata with their shares of the law, which are taken relative to their sum.

        Of a campaign that may stop at any of its looks the interval holds over all of them.
        """
        strata, look = sample.strata, sample.look
        total = sum(s.share for s in strata)
        parts = [Stratum.of(s.tally.shares, s.share / total, s.centre) for s in strata]
        if sample.complete:
            exact = math.fsum(p.weight * p.mean for p in parts)
            return Interval(exact, exact, exact, self.confidence, sum(p.n for p in parts), sample.complete)
        if sample.left:
            return _part_of_list(parts, sample.left, self.confidence)
        if look is not None:
            interval = stratified(parts, confidence_at(look, self.confidence))
            return replace(interval, confidence=self.confidence, method=f"{interval.method}, look {look + 1}")
        if self.interval == "wilson" and len(parts) == 1:
            (part,) = parts
            wrong, right = (float(part.counts[part.values == v].sum()) for v in (1.0, 0.0))
            if wrong + right == part.n and min(wrong, right) >= WILSON_FROM:
                return wilson(wrong, part.n, self.confidence)
        return stratified(parts, self.confidence)

    def jointly(self, rows: int) -> Question:
        """The same at the confidence that makes ``rows`` intervals hold together (Bonferroni)."""
        return replace(self, confidence=1 - (1 - self.confidence) / max(rows, 1))


@dataclass(frozen=True)
class Sample:
    """The trials behind one row. ``look``: at which look they count, None where a campaign was planned at once.

    ``complete``: says what they are all of, so that nothing is estimated; empty where they are not all. ``left``: by stratum,
    faults of a list that were not run yet; empty where trials are drawn.
    """

    strata: tuple[Weighed, ...]
    look: int | None = None
    complete: str = ""
    left: tuple[int, ...] = ()


def _part_of_list(parts: Sequence[Stratum], left: Sequence[int], confidence: float) -> Interval:
    """The mean over a list that was run in part: nobody drew that part, so the rest may all be right or all be wrong."""
    each = [p.weight / max(p.n + rest, 1) for p, rest in zip(parts, left, strict=True)]
    wrong = math.fsum(w * p.n * p.mean for w, p in zip(each, parts, strict=True) if p.n)
    seen = math.fsum(w * p.n for w, p in zip(each, parts, strict=True))
    high = min(1.0, wrong + math.fsum(w * rest for w, rest in zip(each, left, strict=True)))
    n = sum(p.n for p in parts)
    return Interval(wrong / seen if n else None, wrong, high, confidence, n, PART)


@dataclass(frozen=True)
class Weighed:
    """A stratum of a row: its share of the law, its trials, and what their mean was expected to be before they were run."""

    share: float
    tally: Tally
    centre: float = 0.0


@dataclass(frozen=True)
class Tally:
    """Outcomes of some trials in one unit: ``classes[i, o]`` units of trial i ended as `Outcome` o; int64[trials, 8]."""

    classes: NDArray[np.int64]

    @property
    def incorrect(self) -> NDArray[np.int64]:
        """Incorrect units a trial."""
        wrong: NDArray[np.int64] = self.classes[:, Outcome.SDC : Outcome.SPARED].sum(1)
        return wrong

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Units a trial, without those it spared."""
        units: NDArray[np.int64] = self.classes[:, : Outcome.SPARED].sum(1)
        return units

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of the units of each trial that are incorrect; trials that judged none are left out."""
        sizes = self.sizes
        some = sizes > 0
        return self.incorrect[some] / sizes[some]

    @property
    def silent(self) -> float | None:
        """Share of the incorrect units that are silent; None where none is incorrect."""
        wrong = int(self.incorrect.sum())
        return float(self.classes[:, Outcome.SDC].sum()) / wrong if wrong else None

    def totals(self) -> dict[str, int]:
        """Units by class name over all trials."""
        sums = self.classes.sum(0)
        return {o.name.lower(): int(sums[o]) for o in Outcome}

    @classmethod
    def of(cls, trials: Sequence[bytes], samples: Sequence[int], unit: str) -> Tally:
        """Count trials, each given as an `Outcome` byte a sample.

        A batch ends as the worst of its samples (due over sdc over benign over masked).
        """
        distinct: dict[bytes, int] = {}
        places = [distinct.setdefault(codes, len(distinct)) for codes in trials]
        all_codes, whole = list(distinct), sum(samples)
        step = max(1, AT_ONCE // whole)
        parts = [_counted(all_codes[i : i + step], samples, unit) for i in range(0, len(distinct), step)]
        return cls(np.concatenate(parts)[places] if parts else np.zeros((0, len(Outcome)), np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Tally]) -> Tally:
        """Several tallies as one."""
        return cls(np.concatenate([p.classes for p in parts]))


def _counted(all_codes: Sequence[bytes], samples: Sequence[int], unit: str) -> NDArray[np.int64]:
    codes = np.frombuffer(b"".join(all_codes), np.uint8).reshape(len(all_codes), sum(samples))
    if unit == "batch":
        starts = np.concatenate([[0], np.cumsum(samples)[:-1]])
        codes = np.maximum.reduceat(codes, starts, axis=1)
    return np.stack([(codes == o).sum(1) for o in Outcome], axis=1).astype(np.int64)
