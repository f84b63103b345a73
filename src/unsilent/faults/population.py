"""Where elements may be struck: regions, and the slots that a kind of fault finds in them.

A *slot* is one distinct way to strike: an (element, bit) for flips, an element for everything else, a (start,
bit) for runs. Slots are numbered through all regions in order, so that a draw is a set of numbers and no
table of slots exists.

Two sampling laws: ``per-element`` is uniform over the elements of all regions and then over the ways to
strike that element; ``per-tensor`` is uniform over the tensors first (what PyTorchFI does), so elements of
small tensors are struck more often. Regions that cannot be struck (a dtype without the named bits, no
elements) are left out of both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unsilent.errors import UsageError, unknown
from unsilent.faults.codecs import Codec, codec
from unsilent.faults.sampling import Ints, distinct, successive

LAWS: Mapping[str, str] = MappingProxyType(
    {
        "per-element": "uniform over the elements of all tensors, then over the eligible bits",
        "per-tensor": "uniform over the tensors, then over their elements, then over the eligible bits",
    }
)


@dataclass(frozen=True, eq=False)
class Region:
    """Elements that may be struck inside one tensor; two regions are equal only if they are the same object.

    ``elements`` is ``None`` for all elements, else int64[n]: distinct flat C-order indices into ``shape``
    (its order is the order that runs follow). Raises ``UsageError`` for an unknown dtype or indices outside
    the tensor. ``step`` and ``occurrence``: when a fault drawn here acts, where the tensor is there for a
    moment only (see `Fault`).
    """

    site: str
    dtype: str
    shape: tuple[int, ...]
    elements: Ints | None = None
    step: int | None = None
    occurrence: int | None = None

    def __post_init__(self) -> None:
        codec(self.dtype)
        if self.elements is None:
            return
        if np.size(self.elements) and np.asarray(self.elements).dtype.kind not in "iu":
            raise UsageError(f"the selection of {self.site!r} is no list of positions; give whole numbers")
        chosen = np.array(self.elements, dtype=np.int64).reshape(-1)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.numel:
            worst = chosen.max() if chosen.min() >= 0 else chosen.min()
            raise UsageError(f"element {worst} is outside {self.site!r}, which has {self.numel} elements")
        if np.unique(chosen).size != chosen.size:
            raise UsageError(f"the selection of {self.site!r} names an element twice; name each once")
        chosen.setflags(write=False)
        object.__setattr__(self, "elements", chosen)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor, selected or not."""
        return math.prod(self.shape)

    @cached_property
    def size(self) -> int:
        """Elements that may be struck."""
        return self.numel if self.elements is None else int(self.elements.size)

    @property
    def bits(self) -> int:
        """Bits that may be struck: elements times the width of the dtype."""
        return self.size * self.codec.bits

    @property
    def codec(self) -> Codec:
        """How the dtype lays out its bits."""
        return codec(self.dtype)


class Picks(NamedTuple):
    """Slots taken apart, int64[m] each, by region: region number, place in it, way to strike."""

    region: Ints
    place: Ints
    way: Ints


class Slots:
    """Slots numbered through the regions of a population.

    ``places`` int64[R]: elements (or starts of a run) per region; ``ways`` int64[R]: ways to strike each.
    """

    def __init__(self, places: Ints, ways: Ints) -> None:
        self.places = np.where(ways > 0, places, 0)
        self.ways = np.maximum(ways, 1)
        self.counts = self.places * self.ways
        self.ends = np.cumsum(self.counts)
        self.total = int(self.ends[-1]) if self.ends.size else 0

    @cached_property
    def _masses(self) -> Mapping[str, tuple[Ints, npt.NDArray[np.float64], bool]]:
        """Per law: cumulative mass of regions, weight of a slot in each, whether all weigh the same."""
        found = {}
        for law, mass in (("per-element", self.places), ("per-tensor", (self.places > 0).astype(np.int64))):
            share = self.counts // np.maximum(mass, 1)  # slots per unit of mass: divides without remainder
            same = np.unique(share[mass > 0]).size <= 1
            found[law] = (np.cumsum(mass), 1.0 / np.maximum(share, 1), same)
        return found

    def draw(self, k: int, rng: np.random.Generator, law: str) -> Ints:
        """Numbers of ``k`` distinct slots (``k <= total``) under a law, ascending."""
        check_law(law)
        masses, weight, same = self._masses[law]
        if same:
            return distinct(rng, self.total, k)
        if k == 1:
            region = int(np.searchsorted(masses, rng.integers(masses[-1]), side="right"))
            first = self.ends[region] - self.counts[region]
            return np.asarray(first + rng.integers(self.counts[region], size=1))
        taken = successive(rng, self.counts, weight, k)
        firsts = self.ends - self.counts
        parts = [firsts[r] + distinct(rng, int(self.counts[r]), int(taken[r])) for r in np.flatnonzero(taken)]
        return np.concatenate(parts)

    def locate(self, numbers: Ints) -> Picks:
        """Take slot numbers (ascending) apart."""
        region = np.searchsorted(self.ends, numbers, side="right")
        place, way = np.divmod(numbers - (self.ends - self.counts)[region], self.ways[region])
        return Picks(region, place, way)


class Population:
    """Regions, and what was counted in them. Raises ``UsageError`` on a doubled site."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        keys = [(r.site, r.step, r.occurrence) for r in self.regions]
        if len(set(keys)) != len(keys):
            twice = Counter(keys).most_common(1)[0][0]
            raise UsageError(f"{twice[0]!r} is among the regions twice; give each tensor once")
        self._sizes = np.array([r.size for r in self.regions], dtype=np.int64)
        self._slots: dict[tuple[Hashable, int], Slots] = {}

    def slots(self, ways: Callable[[Region], int], key: Hashable, span: int = 1) -> Slots:
        """The slots where one place has ``ways(region)`` ways to be struck and covers ``span`` elements.

        ``key`` identifies ``ways``; results are kept under it.
        """
        found = self._slots.get((key, span))
        if found is None:
            each = np.array([ways(r) for r in self.regions], dtype=np.int64)
            found = self._slots[key, span] = Slots(np.maximum(self._sizes - (span - 1), 0), each)
        return found


@lru_cache(maxsize=16)
def _population(regions: tuple[Region, ...]) -> Population:
    return Population(regions)


def population(regions: Sequence[Region] | Population) -> Population:
    """The population of ``regions``; remembered for a while for the same `Region` objects."""
    return regions if isinstance(regions, Population) else _population(tuple(regions))


def check_law(law: str) -> str:
    """Return ``law`` if it is a sampling law; raises ``UsageError`` otherwise."""
    if law not in LAWS:
        raise unknown("sampling law", law, LAWS)
    return law
