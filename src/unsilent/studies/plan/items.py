"""The items that a plan assigns to memory, and the stored trials by the item that each fault hit.

An item is one tensor, a block of its rows, or one class of its bits. The rate that remains under a plan is the mean over trials
of outcome x share of the faults that remain where the fault hit, weighted by strata of the campaign. It is unbiased for every
plan that these trials did not choose, whatever the strata are. So the trials of each stratum are split into two halves by their
number: those with even numbers select what is protected, those with odd numbers predict. If a campaign tried every fault, both
halves are all trials, and nothing is estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from unsilent.basics.interval import Interval
from unsilent.statistics import Stratum, stratified
from unsilent.statistics.interim import confidence_at
from unsilent.statistics.planning import expected_interval
from unsilent.studies.plan.assignment import Floats, Ints

_MOST_FACTOR_STEPS = 40


@dataclass(frozen=True, slots=True)
class Item:
    """A part of the parameters that is protected as a whole.

    Attributes:
        name: Name of the tensor, with rows or class of bits if it is a part: ``fc.weight[0:16]``, ``fc.weight/exponent-top``.
        tensor: Site and dtype of the tensor.
        rows: First row and end of the rows; None for all rows.
        bits: Bit positions of each element; None for all bits.
        size: Size in bits.
        share: Probability under the sampling law that a fault hits the item.
    """

    name: str
    tensor: tuple[str, str]
    rows: tuple[int, int] | None
    bits: tuple[int, ...] | None
    size: int
    share: float


@dataclass(frozen=True, slots=True)
class StratumTrials:
    """Trials of one stratum of a campaign.

    Attributes:
        share: Share of the sampling law.
        reachable: Items that faults of the stratum can hit, int64[m].
        hit_items: Item that each fault hit, int64[n].
        outcomes: Share of outputs that each fault made incorrect, float64[n].
        expected_mean: See `Stratum`.
    """

    share: float
    reachable: Ints
    hit_items: Ints
    outcomes: Floats
    expected_mean: float = 0.0

    def half(self, numbers: slice) -> StratumTrials:
        """The trials that a slice selects."""
        return replace(self, hit_items=self.hit_items[numbers], outcomes=self.outcomes[numbers])


@dataclass(frozen=True)
class ItemTrials:
    """The trials of a campaign by stratum, with the item that each fault hit.

    Attributes:
        look: Interim look up to which trials count; None if the campaign has no interim looks.
        exact: `Interval.method` of results from all possible faults; empty if trials are a sample.
    """

    strata: tuple[StratumTrials, ...]
    look: int | None = None
    exact: str = ""

    @property
    def n(self) -> int:
        """The number of trials."""
        return sum(len(s.outcomes) for s in self.strata)

    def item_rates(self, items: int) -> Floats:
        """The probability that a fault hits an item and makes an output incorrect, float64[items]."""
        sums = [
            s.share / len(s.outcomes) * np.bincount(s.hit_items, s.outcomes, items)
            for s in self.strata
            if len(s.outcomes)
        ]
        return np.asarray(np.sum([np.zeros(items), *sums], axis=0), dtype=np.float64)

    def rate(self, weights: Floats, confidence: float) -> Interval:
        """The interval of the weighted sum of the failure rates of items; weights may be negative."""
        scale, offset, parts = self._parts(weights)
        if self.exact:
            value = offset + scale * math.fsum(p.weight * p.mean for p in parts)
            return Interval(value, value, value, confidence, self.n, self.exact)
        if not parts:
            return Interval(0.0, 0.0, 0.0, confidence, 0, "nothing unprotected")
        level = confidence if self.look is None else confidence_at(self.look, confidence)
        mean = stratified(parts, level)
        low, high = offset + scale * mean.low, offset + scale * mean.high
        estimate = (
            None if mean.estimate is None else min(max(float(weights @ self.item_rates(weights.size)), low), high)
        )
        return replace(mean, estimate=estimate, low=low, high=high, confidence=confidence)

    def trials_factor(self, weights: Floats, confidence: float, relative: float) -> float | None:
        """How many times more trials would estimate `rate` with a given relative half-width.

        None if that cannot be predicted.
        """
        _, _, parts = self._parts(weights)
        if self.exact or any(not p.n for p in parts):
            return None
        estimate = math.fsum(p.weight * p.mean for p in parts)
        for step in range(_MOST_FACTOR_STEPS if estimate else 0):
            factor = 2 ** (step / 2)
            sizes = [math.ceil(p.n * factor) for p in parts]
            if expected_interval(parts, sizes, confidence).half_width <= relative * estimate:
                return factor
        return None

    def _parts(self, weights: Floats) -> tuple[float, float, list[Stratum]]:
        """The scale, the offset and the strata from which `rate` is computed as offset + scale x mean.

        The strata have outcomes in [0, 1] and weights that sum to 1.

        Terms of a stratum lie in the range of 0 and the weights of its reachable items. A stratum with only weights of 0 is left
        out.
        """
        limits = [(min(0.0, weights[s.reachable].min()), max(0.0, weights[s.reachable].max())) for s in self.strata]
        scale = math.fsum(s.share * (high - low) for s, (low, high) in zip(self.strata, limits, strict=True))
        offset = math.fsum(s.share * low for s, (low, _) in zip(self.strata, limits, strict=True))
        parts = []
        for s, (low, high) in zip(self.strata, limits, strict=True):
            if high > low and s.share:
                terms = np.clip((s.outcomes * weights[s.hit_items] - low) / (high - low), 0, 1)
                centre = (s.expected_mean * (low + high) - low) / (high - low)
                parts.append(Stratum.of(terms, s.share * (high - low) / scale, centre))
        return scale, offset, parts


@dataclass(frozen=True)
class ParameterItems:
    """All items of a campaign, and the two halves of its trials."""

    items: tuple[Item, ...]
    selection: ItemTrials
    prediction: ItemTrials

    @property
    def sizes(self) -> Ints:
        """The bits of each item, int64[items]."""
        return np.array([item.size for item in self.items], np.int64)

    def selection_rates(self) -> Floats:
        """The failure rate of each item, from the half of the trials that is used to select, float64[items].

        Means are shrunk towards that of all parameters, as if each item had one more trial with that mean, so that few trials
        without an event do not give a rate of 0. Any rule may select, since other trials predict.
        """
        rates = self.selection.item_rates(len(self.items))
        if self.selection.exact:
            return rates
        hits = np.sum([np.bincount(s.hit_items, minlength=rates.size) for s in self.selection.strata], axis=0)
        mean = rates.sum() / (math.fsum(s.share for s in self.selection.strata if len(s.outcomes)) or 1.0)
        shares = np.array([item.share for item in self.items])
        return np.asarray((hits * rates + mean * shares) / (hits + 1), dtype=np.float64)

    def pooled(self) -> ItemTrials:
        """Both halves of the trials together."""
        if self.selection.exact:
            return self.selection
        halves = zip(self.selection.strata, self.prediction.strata, strict=True)
        pooled = [
            replace(
                selecting,
                hit_items=np.concatenate([selecting.hit_items, predicting.hit_items]),
                outcomes=np.concatenate([selecting.outcomes, predicting.outcomes]),
            )
            for selecting, predicting in halves
        ]
        return replace(self.prediction, strata=tuple(pooled))

    def pooled_rates(self) -> Floats:
        """The failure rate of each item, from all trials, float64[items]; 0 without trials."""
        return self.pooled().item_rates(len(self.items))
