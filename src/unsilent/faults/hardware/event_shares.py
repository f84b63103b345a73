"""Shares of memory error events that the memory's code corrects, reports or misses, exact or sampled.

The outcome of an event is periodic along a tensor: the period is the number of elements after which the beginnings of a code word
and an element coincide again. So only the events in one period, weighted by the number of equivalent places, and those at the end
of the tensor are decoded. This requires a pattern whose start determines its elements (one element, a run, a stride, a block)
and at most `MOST_CASES` cases. Otherwise events are sampled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

from unsilent.faults.bitwise import Burst, Flip, MultiBit, ValueModel
from unsilent.faults.blocks import Block
from unsilent.faults.hardware.memories import OUTCOMES, Code, decoded, decoded_bits, fitted
from unsilent.faults.models import FaultModel
from unsilent.faults.patterns import Count, Pattern, Strided
from unsilent.faults.population import Region

DRAWS = 4096
"""Number of sampled events if there are too many to decode all."""
MOST_CASES = 100_000


class EventShares(NamedTuple):
    """Shares of events by outcome; ``draws`` is the number of sampled events, 0 if the shares are exact."""

    shares: Mapping[str, float]
    draws: int = 0


def outcome_shares(
    model: FaultModel, regions: Sequence[Region], code: Code | None, weights: Sequence[float] = (1.0,)
) -> EventShares:
    """Shares of the outcomes of a model's events; each region receives events in proportion to its weight.

    Sampled events are the same in every call.
    """
    if code is None:
        return EventShares({"missed": 1.0})
    total = math.fsum(weights)
    shares = dict.fromkeys(OUTCOMES, 0.0)
    for region, weight in zip(regions, weights, strict=True):
        counts = _counts(model, region, code)
        if counts is None:
            return _drawn(model, regions, code, np.array(weights) / total)
        events = sum(counts.values())
        for name, count in counts.items():
            shares[name] += weight * count / (total * events)
    whole = math.fsum(shares.values())  # 1 except for rounding
    return EventShares({name: share / whole for name, share in shares.items() if share})


def _drawn(model: FaultModel, regions: Sequence[Region], code: Code, shares: np.ndarray) -> EventShares:
    rng, counts = np.random.default_rng(0), Counter[str]()
    for number in rng.choice(len(regions), DRAWS, p=shares).tolist():
        (fault,) = fitted(model, regions[number]).draw((regions[number],), rng)
        counts[decoded(fault, code)[0]] += 1
    return EventShares({name: counts[name] / DRAWS for name in OUTCOMES if counts[name]}, DRAWS)


def _counts(model: FaultModel, region: Region, code: Code) -> Mapping[str, int] | None:
    """Numbers of equally likely events in a region by outcome; None if they are too many to enumerate."""
    model = fitted(model, region)
    if not isinstance(model.value, Flip | Burst | MultiBit):
        return None
    places = _places(model.pattern, region.eligible_count)
    if places is None:
        return None
    if region.elements is None and region.axes is None:
        return _counts_of_tensor(model, places, region.dtype, region.eligible_count, code)
    if places.number * _flip_set_count(model.value, region) > MOST_CASES:
        return None
    flat = region.to_flat_indices(np.arange(region.eligible_count)).tolist()
    elements = (tuple(flat[place] for place in places.at(index)) for index in range(places.number))
    end = region.numel * region.codec.bits
    return _sum((1, _counts_at(place, model.value, region.dtype, code, end)) for place in elements)


def _counts_of_tensor(
    model: FaultModel, places: _Places, dtype: str, size: int, code: Code
) -> Mapping[str, int] | None:
    """Numbers of events in a whole tensor by outcome; equivalent places are decoded only once."""
    region = Region("param:any", dtype, (size,))
    width = region.codec.bits
    period = math.lcm(places.step * width, code.word) // (places.step * width)
    in_whole_words = size * width // code.word * code.word // width
    inside = max(0, (in_whole_words - places.reach) // places.step + 1)
    alike = min(period, inside)
    if (alike + places.number - inside) * _flip_set_count(model.value, region) > MOST_CASES:
        return None
    value, end = model.value, size * width
    repeated = (
        (len(range(index, inside, period)), _counts_at(places.at(index), value, dtype, code, None))
        for index in range(alike)
    )
    last = ((1, _counts_at(places.at(index), value, dtype, code, end)) for index in range(inside, places.number))
    return _sum(chain(repeated, last))


def _sum(parts: Iterable[tuple[int, Mapping[str, int]]]) -> Mapping[str, int]:
    counts = Counter[str]()
    for weight, part in parts:
        counts.update({name: weight * count for name, count in part.items()})
    return counts


@lru_cache(maxsize=8192)
def _counts_at(
    elements: range | tuple[int, ...], value: ValueModel, dtype: str, code: Code, end: int | None
) -> Mapping[str, int]:
    """Outcomes of all sets of flips in these elements of a row of ``end`` bits (None: a row of whole words)."""
    region = Region("param:any", dtype, (1,))
    counts, width = Counter[str](), region.codec.bits
    for flips in _flip_sets(value, region):
        bits = [element * width + bit for element in elements for bit in flips]
        counts[decoded_bits(bits, code, end)[0]] += 1
    return counts


# -- places and bits of an event -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Places where a pattern can lie in a tensor of ``size`` elements: ``number`` places, ``step`` elements apart."""

    number: int
    step: int
    stride: int
    reach: int
    """Number of elements from the first to the last one, inclusive."""
    size: int

    def at(self, index: int) -> range:
        """The elements of one place; a place at the end of the tensor may be cut."""
        start = index * self.step
        return range(start, min(start + self.reach, self.size), self.stride)


def _places(pattern: Pattern, size: int) -> _Places | None:
    """The places of a pattern in a tensor; None if the start does not determine the pattern's elements."""
    if isinstance(pattern, Strided):
        return _Places(size - pattern.span + 1, 1, pattern.stride, pattern.span, size)
    if isinstance(pattern, Count) and pattern.k == 1:
        return _Places(size, 1, 1, 1, size)
    if isinstance(pattern, Block) and pattern.cycles == 1:
        return _Places(-(-size // pattern.n), pattern.n, 1, pattern.n, size)
    return None


def _flip_sets(value: ValueModel, region: Region) -> Iterator[tuple[int, ...]]:
    """The equally likely sets of bits that an event can flip in an element."""
    assert isinstance(value, Flip | Burst | MultiBit)
    chosen = sorted(region.codec.selected_bits(value.bits))
    if isinstance(value, Burst):
        runs = (tuple(range(first, first + value.length)) for first in chosen)
        return (run for run in runs if set(run) <= set(chosen))
    return combinations(chosen, value.flips if isinstance(value, MultiBit) else 1)


def _flip_set_count(value: ValueModel, region: Region) -> int:
    """Upper limit of the number of sets of flips."""
    assert isinstance(value, Flip | Burst | MultiBit)
    return math.comb(len(region.codec.selected_bits(value.bits)), value.flips if isinstance(value, MultiBit) else 1)
