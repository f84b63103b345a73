"""The items that a plan assigns to memory, and the trials of a PVF campaign by the item that each fault hit.

An item is one tensor, a block of its rows, or one class of its bits. The rate that remains under a plan is the mean over trials
of outcome x share of the faults that remain where the fault hit, weighted by strata of the campaign. It is unbiased for every
plan that these trials did not choose, whatever the strata are. So the trials of each stratum are split into two halves by their
number: those with even numbers select what is protected, those with odd numbers predict. Where a campaign tried every fault, both
halves are all trials, and nothing is estimated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np

from unsilent.errors import StoreError, UsageError
from unsilent.faults import codec
from unsilent.faults.naming import parse_site
from unsilent.interval import Interval
from unsilent.outcomes.tallies import Tally
from unsilent.statistics import Stratum, stratified
from unsilent.statistics.interim import confidence_at
from unsilent.statistics.planning import expected_interval
from unsilent.studies.plan.assignment import Floats, Ints
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.row_scopes import StoredTrials, single_element_trials
from unsilent.studies.pvf.spec import PvfBaseline, PvfTrialRow, TargetInfo, TensorInfo

MOST_ROW_BLOCKS = 8
"""Blocks of rows that a tensor is divided into at most."""
_MOST_FACTOR_STEPS = 40


@dataclass(frozen=True, slots=True)
class Item:
    """A part of the parameters that is protected as a whole.

    Attributes:
        name: Of the tensor, or with its rows or class of bits: ``fc.weight[0:16]``, ``fc.weight/exponent-top``.
        tensor: Site and dtype.
        rows: First one and end; None: all of them.
        bits: Bit positions of each element; None: all of them.
        size: In bits.
        share: Probability under the sampling law that a fault hits it.
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
        share: Of the sampling law.
        reachable: Items that its faults can hit, int64[m].
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
        """Some of the trials."""
        return replace(self, hit_items=self.hit_items[numbers], outcomes=self.outcomes[numbers])


@dataclass(frozen=True)
class ItemTrials:
    """Trials by strata.

    Attributes:
        look: At which look they count; None where the campaign was planned at once.
        exact: What they are all of, as `Interval.method` says it; empty where trials are a sample.
    """

    strata: tuple[StratumTrials, ...]
    look: int | None = None
    exact: str = ""

    @property
    def n(self) -> int:
        """Number of trials."""
        return sum(len(s.outcomes) for s in self.strata)

    def item_rates(self, items: int) -> Floats:
        """Failure rate of each item: the probability that a fault hits it and makes an output incorrect, float64[items]."""
        sums = [
            s.share / len(s.outcomes) * np.bincount(s.hit_items, s.outcomes, items)
            for s in self.strata
            if len(s.outcomes)
        ]
        return np.asarray(np.sum([np.zeros(items), *sums], axis=0), dtype=np.float64)

    def rate(self, weights: Floats, confidence: float) -> Interval:
        """``sum weights x failure rate of each item``; weights may be negative, float64[items]."""
        scale, offset, parts = self._parts(weights)
        if self.exact:
            value = offset + scale * math.fsum(p.weight * p.mean for p in parts)
            return Interval(value, value, value, confidence, self.n, self.exact)
        if not parts:
            return Interval(0.0, 0.0, 0.0, confidence, 0, "nothing unprotected")
        level = confidence if self.look is None else confidence_at(self.look, confidence)
        found = stratified(parts, level)
        low, high = offset + scale * found.low, offset + scale * found.high
        estimate = (
            None if found.estimate is None else min(max(float(weights @ self.item_rates(weights.size)), low), high)
        )
        return replace(found, estimate=estimate, low=low, high=high, confidence=confidence)

    def trials_factor(self, weights: Floats, confidence: float, relative: float) -> float | None:
        """By which factor more trials would estimate `rate` to within this part of it; None where that cannot be foreseen."""
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
        """Strata with outcomes in [0, 1] and weights that sum to 1; `rate` is offset + scale x their mean.

        A term of a stratum lies between the lowest and the highest weight of its reachable items, and 0; a stratum with nothing
        but weights of 0 is left out.
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
        """Bits of each item, int64[items]."""
        return np.array([item.size for item in self.items], np.int64)

    def selection_rates(self) -> Floats:
        """Failure rate of each item by the selecting half, float64[items].

        Means are shrunk towards that of all parameters, as if one more trial of each item had shown it: no event in a few trials
        is not taken for 0. Any rule may select, since other trials predict.
        """
        rates = self.selection.item_rates(len(self.items))
        if self.selection.exact:
            return rates
        hits = np.sum([np.bincount(s.hit_items, minlength=rates.size) for s in self.selection.strata], axis=0)
        mean = rates.sum() / (math.fsum(s.share for s in self.selection.strata if len(s.outcomes)) or 1.0)
        shares = np.array([item.share for item in self.items])
        return np.asarray((hits * rates + mean * shares) / (hits + 1), dtype=np.float64)

    def pooled_rates(self) -> Floats:
        """Failure rate of each item by all trials, float64[items]; 0 without trials."""
        if self.selection.exact:
            return self.selection.item_rates(len(self.items))
        halves = zip(self.selection.strata, self.prediction.strata, strict=True)
        pooled = [
            replace(
                one,
                hit_items=np.concatenate([one.hit_items, two.hit_items]),
                outcomes=np.concatenate([one.outcomes, two.outcomes]),
            )
            for one, two in halves
        ]
        return ItemTrials(tuple(pooled)).item_rates(len(self.items))


# -- read from a store ----------------------------------------------------------------------------------------------------


def check_plannable(store: PvfStore, granularity: str) -> None:
    """Raise ``UsageError`` for a campaign whose trials do not say which tensors to protect, with the command that does."""
    spec = store.spec
    fitting = f"run unsilent pvf {spec.workload} --per tensor --strata bits --trials 500"
    if spec.is_transient:
        raise UsageError(f"{store.path} has faults at {' '.join(spec.at)}, which no memory holds; {fitting}")
    if spec.faults is not None or 1 not in spec.flips:
        found = "faults of a list" if spec.faults is not None else f"flips {spec.flips} in a trial"
        raise UsageError(f"{store.path} has {found}; a plan needs trials with one drawn fault each: {fitting}")
    if spec.fault != "bitflip" and (granularity == "tensor-bits" or spec.per != "tensor"):
        needed = "--granularity tensor-bits needs" if spec.per == "tensor" else f"one row per {spec.per} needs"
        raise UsageError(f"{store.path} has the fault model {spec.fault}; {needed} bitflip: {fitting}")


def read_items(store: PvfStore, granularity: str, unit: str) -> ParameterItems:
    """The items of a campaign; raises ``UsageError`` for one that cannot be planned with."""
    check_plannable(store, granularity)
    items = make_items(store.baseline, store.spec.law, granularity)
    trials = read_trials(store, items, unit)
    if store.spec.is_enumerated and not trials.exact:
        raise UsageError(f"{store.path} is an unfinished exhaustive campaign; run its command again to finish it")
    if trials.exact:
        return ParameterItems(items, trials, trials)
    halves = [replace(trials, strata=tuple(s.half(slice(n, None, 2)) for s in trials.strata)) for n in (0, 1)]
    return ParameterItems(items, *halves)


def make_items(description: PvfBaseline, law: str, granularity: str) -> tuple[Item, ...]:
    """All items of the parameters of a campaign, tensors in their order."""
    shares = defaultdict[tuple[str, str], float](float)
    for target in description.targets:
        tensors = _tensors_of(target, description)
        mass = [_mass(tensor, target, law) for tensor in tensors]
        for tensor, own in zip(tensors, mass, strict=True):
            shares[tensor.site, tensor.dtype] += target.share * own / math.fsum(mass)
    return tuple(
        item
        for tensor in description.tensors
        if (share := shares[tensor.site, tensor.dtype])
        for item in _divided(tensor, share, granularity)
    )


def _mass(tensor: TensorInfo, target: TargetInfo, law: str) -> float:
    """In proportion to the probability that a fault of the target hits the tensor."""
    if target.elements_by_site:
        return float(target.elements_by_site.get(tensor.site, 0))
    return float(tensor.elements) if law == "per-element" else 1.0


def _tensors_of(target: TargetInfo, description: PvfBaseline) -> list[TensorInfo]:
    def owner(tensor: TensorInfo) -> str:
        level = {"component": tensor.component, "tensor": parse_site(tensor.site).label}
        return level.get(target.level, tensor.layer)

    own = {"component": target.component, "tensor": target.group}.get(target.level, target.layer)
    return [t for t in description.tensors if owner(t) == own and target.dtype in ("", t.dtype)]


def _divided(tensor: TensorInfo, share: float, granularity: str) -> list[Item]:
    """The items of a tensor."""
    label, key = parse_site(tensor.site).label, (tensor.site, tensor.dtype)
    size = tensor.elements * tensor.width
    if granularity == "tensor-bits":
        return [
            Item(f"{label}/{name}", key, None, bits, size * len(bits) // tensor.width, share * len(bits) / tensor.width)
            for name, bits in codec(tensor.dtype).bit_strata.items()
        ]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    if granularity == "tensor" or rows == 1 or prod(tensor.shape) != tensor.elements:  # a selection has no known rows
        return [Item(label, key, None, None, size, share)]
    blocks = min(rows, MOST_ROW_BLOCKS)
    ends = [n * rows // blocks for n in range(blocks + 1)]
    return [
        Item(f"{label}[{a}:{b}]", key, (a, b), None, size * (b - a) // rows, share * (b - a) / rows)
        for a, b in pairwise(ends)
    ]


def read_trials(store: PvfStore, items: Sequence[Item], unit: str) -> ItemTrials:
    """The trials of a campaign that count, each with the item that its fault hit."""
    stored = StoredTrials(store, unit)
    targets = stored.description.targets
    sample = stored.sample(targets, 1)
    try:
        strata = [
            _stratum(target, stored.counted_rows(target, 1, sample.look_number), stored, items, part.expected_mean)
            for target, part in zip(targets, sample.strata, strict=True)
        ]
    except (KeyError, StopIteration, ZeroDivisionError) as error:
        raise StoreError(f"the store is damaged: its contents are inconsistent ({error}); use a backup copy") from error
    total = math.fsum(s.share for s in strata)
    return ItemTrials(
        tuple(replace(s, share=s.share / total) for s in strata), sample.look_number, sample.exhaustive_of
    )


def _stratum(
    target: TargetInfo, rows: Sequence[PvfTrialRow], stored: StoredTrials, items: Sequence[Item], expected_mean: float
) -> StratumTrials:
    tensors = {(t.site, t.dtype) for t in _tensors_of(target, stored.description)}
    bits = None if target.bits is None else set(target.bits)
    reachable = [
        n
        for n, item in enumerate(items)
        if item.tensor in tensors and (bits is None or item.bits is None or bits & set(item.bits))
    ]
    tally = Tally.of([row.outcome_codes for row in rows], stored.description.samples, stored.unit)
    if len(reachable) == 1:
        hit_items = np.full(len(rows), reachable[0], np.int64)
    else:
        hits = single_element_trials(rows, stored.description)
        if len(hits) != len(rows):
            raise UsageError(
                f"the campaign has trials with several faults ({stored.spec.fault}); a plan needs one fault in a trial"
            )
        shapes = {(t.site, t.dtype): t.shape for t in stored.description.tensors}
        places = [
            (
                hit.tensor.site,
                hit.tensor.dtype,
                hit.element // prod(shapes[hit.tensor.site, hit.tensor.dtype][1:]),
                hit.bit,
            )
            for hit in hits
        ]
        found = {place: _item_at(place, items, reachable) for place in set(places)}
        hit_items = np.array([found[place] for place in places], np.int64)
    judged = tally.units_per_trial > 0
    outcomes = tally.incorrect_share_per_trial
    return StratumTrials(target.share, np.array(reachable, np.int64), hit_items[judged], outcomes, expected_mean)


def _item_at(place: tuple[str, str, int, int | None], items: Sequence[Item], among: Sequence[int]) -> int:
    """The item that has this row and bit of a tensor."""
    site, dtype, row, bit = place
    return next(
        n
        for n in among
        if items[n].tensor == (site, dtype)
        and ((rows := items[n].rows) is None or rows[0] <= row < rows[1])
        and ((bits := items[n].bits) is None or bit in bits)
    )
