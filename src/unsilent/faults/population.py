"""Regions of elements that may be corrupted, and the numbered slots in them.

A *slot* is one distinct way to corrupt: an (element, bit) for flips, an element for everything else, a (start,
bit) for runs, a (block, bit) for blocks. Slots are numbered consecutively through all regions, so a draw is a
set of numbers and needs no table of slots; a different order of axes is arithmetic on these numbers.

Two sampling laws: ``per-element`` is uniform over the elements of all regions and then over the ways to
corrupt that element; ``per-tensor`` is uniform over the tensors first (what PyTorchFI does), so elements of
small tensors are corrupted more often. Both laws leave out regions that cannot be corrupted (a dtype without
the selected bits, or no elements).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults.codecs import Codec, codec
from unsilent.faults.sampling import Ints, draw_distinct, successive_sample_counts

SAMPLING_LAWS: Mapping[str, str] = MappingProxyType(
    {
        "per-element": "uniform over the elements of all tensors, then over the eligible bits",
        "per-tensor": "uniform over the tensors, then over their elements, then over the eligible bits",
    }
)


def _renumbered_positions(flat: Ints, shape: Sequence[int], read: Sequence[int], write: Sequence[int]) -> Ints:
    """Convert flat positions from one order of the axes to another."""
    strides, step = {}, 1
    for axis in reversed(write):
        strides[axis] = step
        step *= shape[axis]
    result = np.zeros_like(flat)
    for axis in reversed(read):
        flat, digit = np.divmod(flat, max(shape[axis], 1))
        result += digit * strides[axis]
    return result


Ways = Callable[["Region"], int]
"""Function that counts something in a region."""


@dataclass(frozen=True, eq=False)
class Region:
    """Elements that may be corrupted inside one tensor; a region is equal only to itself.

    ``elements`` is ``None`` for all elements, else int64[n]: distinct flat C-order indices into ``shape``, in
    the order that runs follow. ``axes``: all axes of the tensor in the order that runs follow, slowest first
    (``None``: C order); ``elements`` are sorted by this order. ``step`` and ``occurrence``: when a fault drawn
    here acts, if the tensor is transient (see `Fault`). Raises ``UsageError`` for an unknown dtype, indices
    outside the tensor, repeated indices, or axes that are not all axes of the tensor.
    """

    site: str
    dtype: str
    shape: tuple[int, ...]
    elements: Ints | None = None
    step: int | None = None
    occurrence: int | None = None
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        codec(self.dtype)
        if self.axes is not None and sorted(self.axes) != [*range(len(self.shape))]:
            raise UsageError(
                f"axes {tuple(self.axes)} of {self.site!r}; expected each of its {len(self.shape)} axes once, slowest first"
            )
        if self.elements is None:
            return
        if np.size(self.elements) and np.asarray(self.elements).dtype.kind not in "iu":
            raise UsageError(f"the selection of {self.site!r} is not a list of positions; give whole numbers")
        chosen = np.array(self.elements, dtype=np.int64).reshape(-1)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.numel:
            worst = chosen.max() if chosen.min() >= 0 else chosen.min()
            raise UsageError(f"element {worst} is outside {self.site!r}, which has {self.numel} elements")
        if np.unique(chosen).size != chosen.size:
            raise UsageError(f"the selection of {self.site!r} names an element twice; name each element once")
        if self.axes is not None:
            chosen = chosen[np.argsort(_renumbered_positions(chosen, self.shape, range(len(self.shape)), self.axes))]
        chosen.setflags(write=False)
        object.__setattr__(self, "elements", chosen)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def eligible_count(self) -> int:
        """Number of elements that may be corrupted."""
        return self.numel if self.elements is None else int(self.elements.size)

    @property
    def fastest_axis_length(self) -> int:
        """Length of the fastest axis in the order that runs follow; 1 for a scalar."""
        return self.shape[-1 if self.axes is None else self.axes[-1]] if self.shape else 1

    def to_flat_indices(self, places: Ints) -> Ints:
        """Convert places in the order that runs follow to flat C-order indices, both int64[m]."""
        if self.elements is not None:
            return np.asarray(self.elements[places])
        return (
            places
            if self.axes is None
            else _renumbered_positions(places, self.shape, self.axes, range(len(self.shape)))
        )

    @property
    def eligible_bit_count(self) -> int:
        """Number of bits that may be corrupted: elements times the width of the dtype."""
        return self.eligible_count * self.codec.bits

    @property
    def codec(self) -> Codec:
        """The bit layout of the region's dtype."""
        return codec(self.dtype)


class LocatedSlots(NamedTuple):
    """Slots as three int64[m] arrays: region number, place in the region, way to corrupt."""

    region: Ints
    place: Ints
    way: Ints


class Slots:
    """Numbered slots of all regions of a population.

    ``places`` int64[R]: number of elements (or starts of a run, or blocks) in each region; ``ways`` int64[R]: number of
    ways to corrupt each of them.
    """

    def __init__(self, places: Ints, ways: Ints) -> None:
        self.places = np.where(ways > 0, places, 0)
        self.ways = np.maximum(ways, 1)
        self.counts = self.places * self.ways
        self.ends = np.cumsum(self.counts)
        self.total = int(self.ends[-1]) if self.ends.size else 0

    @cached_property
    def _masses(self) -> Mapping[str, tuple[Ints, npt.NDArray[np.float64], bool]]:
        """Cumulative mass of the regions, weight of a slot, and whether all slots weigh the same, for each law."""
        result = {}
        for law, mass in (("per-element", self.places), ("per-tensor", (self.places > 0).astype(np.int64))):
            share = self.counts // np.maximum(mass, 1)  # slots per unit of mass, without remainder
            same = np.unique(share[mass > 0]).size <= 1
            result[law] = (np.cumsum(mass), 1.0 / np.maximum(share, 1), same)
        return result

    def draw(self, k: int, rng: np.random.Generator, law: str) -> Ints:
        """Draw the numbers of ``k`` distinct slots (``k <= total``) under a law, in ascending order."""
        check_law(law)
        masses, weight, same = self._masses[law]
        if same:
            return draw_distinct(rng, self.total, k)
        if k == 1:
            region = int(np.searchsorted(masses, rng.integers(masses[-1]), side="right"))
            first = self.ends[region] - self.counts[region]
            return np.asarray(first + rng.integers(self.counts[region], size=1))
        taken = successive_sample_counts(rng, self.counts, weight, k)
        firsts = self.ends - self.counts
        parts = [firsts[r] + draw_distinct(rng, int(self.counts[r]), int(taken[r])) for r in np.flatnonzero(taken)]
        return np.concatenate(parts)

    def locate(self, numbers: Ints) -> LocatedSlots:
        """The region, place and way of each slot number (ascending)."""
        region = np.searchsorted(self.ends, numbers, side="right")
        place, way = np.divmod(numbers - (self.ends - self.counts)[region], self.ways[region])
        return LocatedSlots(region, place, way)


class Population:
    """Regions and their counted slots; raises ``UsageError`` if a site occurs twice."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        keys = [(r.site, r.step, r.occurrence) for r in self.regions]
        if len(set(keys)) != len(keys):
            twice = Counter(keys).most_common(1)[0][0]
            raise UsageError(f"{twice[0]!r} appears twice in the regions; give each tensor once")
        self._slots: dict[tuple[Hashable, Hashable], Slots] = {}

    def slots(
        self, ways: Ways, key: Hashable, places: Ways = attrgetter("eligible_count"), grid: Hashable = 1
    ) -> Slots:
        """The slots of all regions: ``places(region)`` places with ``ways(region)`` ways to corrupt each.

        ``key`` identifies ``ways`` and ``grid`` identifies ``places``; results are kept under both.
        """
        result = self._slots.get((key, grid))
        if result is None:
            counts = [np.array([count(r) for r in self.regions], dtype=np.int64) for count in (places, ways)]
            result = self._slots[key, grid] = Slots(*counts)
        return result


@lru_cache(maxsize=16)
def _population(regions: tuple[Region, ...]) -> Population:
    return Population(regions)


def as_population(regions: Sequence[Region] | Population) -> Population:
    """The population of ``regions``, cached for the same `Region` objects."""
    return regions if isinstance(regions, Population) else _population(tuple(regions))


def check_law(law: str) -> str:
    """Return ``law`` if it is a sampling law; raises ``UsageError`` otherwise."""
    if law not in SAMPLING_LAWS:
        raise unknown_name_error("sampling law", law, SAMPLING_LAWS)
    return law
