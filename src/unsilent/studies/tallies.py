"""How stored trials are read: the question asked of them, and outcomes counted in its unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.spec import TrialRow
from unsilent.errors import UsageError, unknown
from unsilent.outcomes.base import Outcome
from unsilent.statistics import Interval, Method, clustered, combine

UNITS = ("sample", "batch")
INTERVALS = ("wilson", "clopper-pearson")


@dataclass(frozen=True)
class Question:
    """How stored trials are read; the same store answers any of them."""

    unit: str | None = None
    """``sample`` or ``batch``; None: what is usual for the campaign (see `of`)."""
    confidence: float = 0.95
    interval: Method = "wilson"

    def __post_init__(self) -> None:
        if self.unit not in (None, *UNITS):
            raise unknown("--unit", str(self.unit), UNITS)
        if self.interval not in INTERVALS:
            raise unknown("--interval", self.interval, INTERVALS)
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"--confidence is {self.confidence}; expected a value from 0.5 to below 1, like 0.95")

    @classmethod
    def asked(cls, unit: str | None, confidence: float, interval: str) -> Question:
        """From texts; raises ``UsageError`` for what there is not."""
        return cls(unit, confidence, cast(Method, interval))

    def of(self, transient: bool) -> Question:
        """The question put to a campaign: samples are counted where parameters are struck, else the one batch that is."""
        return replace(self, unit=self.unit or ("batch" if transient else "sample"))

    def estimate(self, tally: Tally) -> Interval:
        """PVF with its interval."""
        return clustered(tally.incorrect, tally.sizes, self.confidence, self.interval)

    def combined(self, shares: Sequence[float], tallies: Sequence[Tally]) -> Interval:
        """PVF over several targets, weighted by their share of the law."""
        if len(tallies) == 1:
            return self.estimate(tallies[0])
        weights = [share / sum(shares) for share in shares]
        return combine(weights, [self.estimate(t) for t in tallies], self.confidence, self.interval)

    def jointly(self, rows: int) -> Question:
        """The same at the confidence that makes ``rows`` intervals hold together (Bonferroni)."""
        return replace(self, confidence=1 - (1 - self.confidence) / max(rows, 1))


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
    def silent(self) -> float | None:
        """Share of the incorrect units that are silent; None where none is incorrect."""
        wrong = int(self.incorrect.sum())
        return float(self.classes[:, Outcome.SDC].sum()) / wrong if wrong else None

    def totals(self) -> dict[str, int]:
        """Units by class name over all trials."""
        sums = self.classes.sum(0)
        return {o.name.lower(): int(sums[o]) for o in Outcome}

    @classmethod
    def of(cls, rows: Sequence[TrialRow], samples: Sequence[int], unit: str) -> Tally:
        """Count trials; a batch ends as the worst of its samples (due over sdc over benign over masked)."""
        codes = np.frombuffer(b"".join(r.codes for r in rows), np.uint8).reshape(len(rows), sum(samples))
        if unit == "batch":
            starts = np.concatenate([[0], np.cumsum(samples)[:-1]])
            codes = np.maximum.reduceat(codes, starts, axis=1) if len(rows) else codes[:, : len(samples)]
        return cls(np.stack([(codes == o).sum(1) for o in Outcome], axis=1).astype(np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Tally]) -> Tally:
        """Several tallies as one."""
        return cls(np.concatenate([p.classes for p in parts]))
