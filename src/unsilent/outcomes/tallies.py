"""Counts of the outcomes of trials, and PVF estimates from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.interval import PART_OF_LIST
from unsilent.outcomes.base import Outcome, incorrect
from unsilent.outcomes.pvf_options import UNITS as UNITS
from unsilent.outcomes.pvf_options import PvfAnalysisOptions
from unsilent.statistics import Interval, Stratum, stratified
from unsilent.statistics.interim import confidence_at

AT_ONCE = 2**24
"""Number of outcomes that are counted in one go."""


@dataclass(frozen=True)
class PvfEstimator(PvfAnalysisOptions):
    """Options of a PVF analysis, and the estimates from stored trials under these options."""

    def with_default_unit(self, transient: bool) -> PvfEstimator:
        """The estimator with the campaign's default unit: batches for transient faults, else samples."""
        return replace(self, unit=self.unit or ("batch" if transient else "sample"))

    def estimate(self, sample: StratifiedTrials) -> Interval:
        """The PVF over strata, weighted by their shares of the sampling law.

        If a campaign may stop at any of its looks, the confidence of the interval holds over all looks together.
        """
        strata, look = sample.strata, sample.look_number
        total = sum(s.share for s in strata)
        parts = [Stratum.of(s.tally.incorrect_share_per_trial, s.share / total, s.expected_mean) for s in strata]
        if sample.exhaustive_of:
            exact = math.fsum(p.weight * p.mean for p in parts)
            return Interval(exact, exact, exact, self.confidence, sum(p.n for p in parts), sample.exhaustive_of)
        if sample.not_run_counts:
            return _part_of_list(parts, sample.not_run_counts, self.confidence)
        if look is not None:
            interval = stratified(parts, confidence_at(look, self.confidence))
            return replace(interval, confidence=self.confidence, method=f"{interval.method}, look {look + 1}")
        return stratified(parts, self.confidence)

    def with_joint_confidence(self, rows: int) -> PvfEstimator:
        """The estimator with a higher confidence, at which ``rows`` intervals hold together (Bonferroni)."""
        return replace(self, confidence=1 - (1 - self.confidence) / max(rows, 1))


@dataclass(frozen=True)
class StratifiedTrials:
    """The trials behind one row of a result.

    ``look_number``: number of the interim look, or None if the campaign has no looks.

    ``exhaustive_of``: name of the complete set that the trials cover, so that nothing is estimated; empty if they are a
    sample.
    ``not_run_counts``: for each stratum, number of listed faults that were not run yet; empty if trials are drawn.
    """

    strata: tuple[StratumTally, ...]
    look_number: int | None = None
    exhaustive_of: str = ""
    not_run_counts: tuple[int, ...] = ()


def _part_of_list(parts: Sequence[Stratum], left: Sequence[int], confidence: float) -> Interval:
    """The interval for the mean over a list of which a part was run; the rest may be all right or all wrong."""
    each = [p.weight / max(p.n + rest, 1) for p, rest in zip(parts, left, strict=True)]
    wrong = math.fsum(w * p.n * p.mean for w, p in zip(each, parts, strict=True) if p.n)
    seen = math.fsum(w * p.n for w, p in zip(each, parts, strict=True))
    high = min(1.0, wrong + math.fsum(w * rest for w, rest in zip(each, left, strict=True)))
    n = sum(p.n for p in parts)
    return Interval(wrong / seen if n else None, wrong, high, confidence, n, PART_OF_LIST)


@dataclass(frozen=True)
class StratumTally:
    """A stratum of a row: its share of the sampling law, its trials, and their expected mean from planning."""

    share: float
    tally: Tally
    expected_mean: float = 0.0


@dataclass(frozen=True)
class Tally:
    """Outcome counts of trials, int64[trials, 8]: units of each trial that ended with each `Outcome`."""

    outcome_counts: NDArray[np.int64]

    @property
    def incorrect_per_trial(self) -> NDArray[np.int64]:
        """Number of incorrect units in each trial."""
        wrong: NDArray[np.int64] = self.outcome_counts[:, Outcome.SDC : Outcome.SPARED].sum(1)
        return wrong

    @property
    def units_per_trial(self) -> NDArray[np.int64]:
        """Number of evaluated units in each trial."""
        units: NDArray[np.int64] = self.outcome_counts[:, : Outcome.SPARED].sum(1)
        return units

    @property
    def incorrect_share_per_trial(self) -> NDArray[np.float64]:
        """Share of incorrect units in each trial that evaluated any."""
        sizes = self.units_per_trial
        some = sizes > 0
        return self.incorrect_per_trial[some] / sizes[some]

    @property
    def silent_share(self) -> float | None:
        """Share of the incorrect units that are silent; None if no unit is incorrect."""
        wrong = int(self.incorrect_per_trial.sum())
        return float(self.outcome_counts[:, Outcome.SDC].sum()) / wrong if wrong else None

    def totals(self) -> dict[str, int]:
        """Number of units over all trials, by outcome name."""
        sums = self.outcome_counts.sum(0)
        return {o.name.lower(): int(sums[o]) for o in Outcome}

    @classmethod
    def of(cls, trials: Sequence[bytes], samples: Sequence[int], unit: str, counted: str = "") -> Tally:
        """Count the outcomes of trials, each given as one `Outcome` byte per sample.

        A batch ends as the worst of its samples (due over sdc over benign over masked).

        Args:
            counted: For each sample, 1 if an incorrect outcome counts and 0 if it is taken as benign. Empty if all
                count.
        """
        if counted:
            trials = [_without_uncounted(codes, counted) for codes in trials]
        distinct: dict[bytes, int] = {}
        places = [distinct.setdefault(codes, len(distinct)) for codes in trials]
        all_codes, whole = list(distinct), sum(samples)
        step = max(1, AT_ONCE // whole)
        parts = [_counts_by_outcome(all_codes[i : i + step], samples, unit) for i in range(0, len(distinct), step)]
        return cls(np.concatenate(parts)[places] if parts else np.zeros((0, len(Outcome)), np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Tally]) -> Tally:
        """Join several tallies into one."""
        return cls(np.concatenate([p.outcome_counts for p in parts]))


@dataclass(frozen=True)
class ScoreTally(Tally):
    """A tally that averages the lost score of each trial, as a share of the score's range.

    ``shares``: float64[m], one for each trial that evaluated a sample.
    """

    shares: NDArray[np.float64]

    @property
    def incorrect_share_per_trial(self) -> NDArray[np.float64]:
        """The lost score of each trial, ``shares``."""
        return self.shares


def _without_uncounted(codes: bytes, counted: str) -> bytes:
    """The outcome codes, with incorrect ones set to benign for samples that do not count."""
    values = np.frombuffer(codes, np.uint8)
    spared = (np.frombuffer(counted.encode(), np.uint8) == ord("0")) & incorrect(values)
    return np.where(spared, np.uint8(Outcome.BENIGN), values).tobytes()


def _counts_by_outcome(all_codes: Sequence[bytes], samples: Sequence[int], unit: str) -> NDArray[np.int64]:
    codes = np.frombuffer(b"".join(all_codes), np.uint8).reshape(len(all_codes), sum(samples))
    if unit == "batch":
        starts = np.concatenate([[0], np.cumsum(samples)[:-1]])
        codes = np.maximum.reduceat(codes, starts, axis=1)
    return np.stack([(codes == o).sum(1) for o in Outcome], axis=1).astype(np.int64)
