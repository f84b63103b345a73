"""The items that a plan assigns to memory: parts of the parameters of a stored PVF campaign, with the trials that hit them.

An item is one tensor, or one class of bits of one tensor. The trials of each stratum are split into two halves by their number:
those with even numbers select what is protected, those with odd numbers predict the failure rate that remains. Trials of a
stratum are independent draws, so the prediction does not know which trials made the selection. Where a campaign tried every
fault, both halves are all trials, and nothing is estimated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from unsilent.studies.pvf.spec import TargetInfo

_MOST_FACTOR_STEPS = 40


@dataclass(frozen=True)
class Item:
    """A part of the parameters that is protected as a whole.

    Attributes:
        name: Of the tensor, or tensor and class of bits, like ``fc.weight/exponent-top``.
        bits: Bit positions of each element; None: all of them.
        size: In bits.
        share: Probability under the sampling law that a fault hits it.
        selection, prediction: The two halves of its trials, by strata; their weights sum to ``share``.
    """

    name: str
    tensor: str
    component: str
    bits: tuple[int, ...] | None
    size: int
    share: float
    selection: tuple[Stratum, ...]
    prediction: tuple[Stratum, ...]


@dataclass(frozen=True)
class ParameterItems:
    """All items of a campaign.

    Attributes:
        look: At which look its trials count; None where the campaign was planned at once.
        exact: What its trials are all of, as `Interval.method` says it; empty where trials are a sample.
    """

    items: tuple[Item, ...]
    look: int | None = None
    exact: str = ""

    @property
    def sizes(self) -> Ints:
        """Bits of each item, int64[items]."""
        return np.array([item.size for item in self.items], np.int64)

    def selection_rates(self) -> Floats:
        """Failure rate of each item by the selecting half, float64[items].

        Means are shrunk towards that of all parameters, as if one more trial of each stratum had shown it: no event in a few
        trials is not taken for 0. Any rule may select, since other trials predict.
        """
        if self.exact:
            return self.pooled_rates()
        known = [s for item in self.items for s in item.selection if s.n]
        mean = math.fsum(s.weight * s.mean for s in known) / (math.fsum(s.weight for s in known) or 1.0)
        return np.array([math.fsum(s.weight * _shrunk_mean(s, mean) for s in item.selection) for item in self.items])

    def pooled_rates(self) -> Floats:
        """Failure rate of each item by all trials, float64[items]; 0 without trials."""
        halves = [(item.selection, item.prediction) for item in self.items]
        return np.array([math.fsum(map(_pooled_rate, one, two)) for one, two in halves])

    def rate(self, weights: Floats, confidence: float) -> Interval:
        """``sum weights x failure rate of each item`` from the predicting half; weights may be negative, float64[items]."""
        strata = [(s, w) for item, w in zip(self.items, weights.tolist(), strict=True) for s in item.prediction]
        if self.exact:
            value = math.fsum(w * s.weight * s.mean for s, w in strata)
            return Interval(value, value, value, confidence, sum(s.n for s, _ in strata), self.exact)
        level = confidence if self.look is None else confidence_at(self.look, confidence)
        return replace(weighted_sum(strata, level), confidence=confidence)

    def trials_factor(self, weights: Floats, confidence: float, relative: float) -> float | None:
        """By which factor more trials would estimate `rate` to within this part of it; None where that cannot be foreseen."""
        strata = [(s, w) for item, w in zip(self.items, weights.tolist(), strict=True) for s in item.prediction]
        if self.exact or any(w and not s.n for s, w in strata):
            return None
        scale = math.fsum(abs(w) * s.weight for s, w in strata)
        parts = [replace(s, weight=abs(w) * s.weight / scale) for s, w in strata if w]
        estimate = math.fsum(p.weight * p.mean for p in parts)
        for step in range(_MOST_FACTOR_STEPS if estimate else 0):
            factor = 2 ** (step / 2)
            sizes = [math.ceil(p.n * factor) for p in parts]
            if expected_interval(parts, sizes, confidence).half_width <= relative * estimate:
                return factor
        return None


def weighted_sum(strata: Sequence[tuple[Stratum, float]], confidence: float) -> Interval:
    """``sum w x weight x mean`` over strata with factors w of any sign, with limits; exactly 0 where all factors are 0.

    A negative term counts as ``1 - outcome`` with the opposite sign, so that all weights are positive.
    """
    scale = math.fsum(abs(w) * s.weight for s, w in strata)
    if not scale:
        return Interval(0.0, 0.0, 0.0, confidence, 0, "nothing unprotected")
    offset = math.fsum(w * s.weight for s, w in strata if w < 0)
    parts = [_mirrored(s, w < 0, abs(w) * s.weight / scale) for s, w in strata if w]
    found = stratified(parts, confidence)
    estimate = None if found.estimate is None else math.fsum(w * s.weight * s.mean for s, w in strata if w)
    return replace(found, estimate=estimate, low=offset + scale * found.low, high=offset + scale * found.high)


def _mirrored(stratum: Stratum, mirrored: bool, weight: float) -> Stratum:
    if not mirrored:
        return replace(stratum, weight=weight)
    return Stratum(weight, 1 - stratum.values[::-1], stratum.counts[::-1], 1 - stratum.expected_mean)


def _shrunk_mean(stratum: Stratum, towards: float) -> float:
    return (float(stratum.counts @ stratum.values) + towards) / (stratum.n + 1)


def _pooled_rate(one: Stratum, two: Stratum) -> float:
    n = one.n + two.n
    return one.weight * float(one.counts @ one.values + two.counts @ two.values) / n if n else 0.0


# -- items of a store -----------------------------------------------------------------------------------------------------


def check_plannable(store: PvfStore, granularity: str) -> None:
    """Raise ``UsageError`` for a campaign whose trials do not say which tensors to protect, with the command that does."""
    spec = store.spec
    fitting = f"run unsilent pvf {spec.workload} --per tensor --strata bits --trials 500"
    if spec.is_transient:
        raise UsageError(f"{store.path} has faults at {' '.join(spec.at)}, which no memory holds; {fitting}")
    if spec.per != "tensor":
        raise UsageError(f"{store.path} has one row per {spec.per}; a plan needs one per tensor: {fitting}")
    if spec.faults is not None or 1 not in spec.flips:
        found = "faults of a list" if spec.faults is not None else f"flips {spec.flips} in a trial"
        raise UsageError(f"{store.path} has {found}; a plan needs trials with one drawn fault each: {fitting}")
    if granularity == "tensor-bits" and spec.fault != "bitflip":
        raise UsageError(
            f"{store.path} has the fault model {spec.fault}; --granularity tensor-bits needs bitflip: {fitting}"
        )


def read_items(store: PvfStore, granularity: str, unit: str) -> ParameterItems:
    """The items of a campaign; raises ``UsageError`` for one that cannot be planned with."""
    check_plannable(store, granularity)
    stored = StoredTrials(store, unit)
    targets = store.baseline.targets
    whole = stored.sample(targets, 1)
    if store.spec.is_enumerated and not whole.exhaustive_of:
        raise UsageError(f"{store.path} is an unfinished exhaustive campaign; run its command again to finish it")
    try:
        grouped: dict[tuple[str, tuple[int, ...] | None], list[_Piece]] = defaultdict(list)
        for target in targets:
            for piece in _pieces(target, stored, granularity):
                grouped[target.group, piece.bits if granularity == "tensor-bits" else None].append(piece)
    except (KeyError, StopIteration, ZeroDivisionError) as error:
        raise StoreError(f"the store is damaged: its contents are inconsistent ({error}); use a backup copy") from error
    return ParameterItems(
        tuple(_item(tensor, bits, pieces, bool(whole.exhaustive_of)) for (tensor, bits), pieces in grouped.items()),
        whole.look_number,
        whole.exhaustive_of,
    )


@dataclass(frozen=True)
class _Piece:
    """Some bits of a stratum of the campaign, and the outcomes of the trials that hit them in order of their numbers."""

    target: TargetInfo
    label: str
    bits: tuple[int, ...] | None
    size: int
    share: float
    outcomes: tuple[Floats, Floats]
    expected_mean: float


def _pieces(target: TargetInfo, stored: StoredTrials, granularity: str) -> list[_Piece]:
    """A stratum as it is, or by classes of bits where the campaign did not draw within these."""
    (tally,) = stored.sample([target], 1).strata
    size = sum(bits for _, bits in target.bits_by_width)
    if granularity == "tensor" or target.bits is not None:
        shares = tally.tally.incorrect_share_per_trial
        label = target.name.removeprefix(target.group).strip("/")
        return [
            _Piece(target, label, target.bits, size, target.share, (shares[::2], shares[1::2]), tally.expected_mean)
        ]
    info = next(t for t in stored.description.tensors if parse_site(t.site).label == target.group)
    rows = [row for row in stored.rows.get((target.name, 1), []) if stored.is_counted(row)]
    outcomes: dict[int, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
    for hit in single_element_trials(rows, stored.description):
        assert hit.bit is not None
        outcomes[hit.bit][hit.row.trial.k % 2].append(hit.row.outcome_codes)
    result = []
    for label, bits in codec(info.dtype).bit_strata.items():
        halves = [[codes for bit in bits for codes in outcomes[bit][half]] for half in (0, 1)]
        one, two = (
            Tally.of(codes, stored.description.samples, stored.unit).incorrect_share_per_trial for codes in halves
        )
        part = len(bits) / info.width
        result.append(_Piece(target, label, bits, round(size * part), target.share * part, (one, two), 0.0))
    return result


def _item(tensor: str, bits: tuple[int, ...] | None, pieces: Sequence[_Piece], exact: bool) -> Item:
    def half(number: int) -> tuple[Stratum, ...]:
        return tuple(
            Stratum.of(np.concatenate(p.outcomes) if exact else p.outcomes[number], p.share, p.expected_mean)
            for p in pieces
        )

    name = tensor if bits is None else f"{tensor}/{pieces[0].label}"
    return Item(
        name, tensor, pieces[0].target.component, bits, sum(p.size for p in pieces), math.fsum(p.share for p in pieces),
        half(0), half(1),
    )  # fmt: skip
