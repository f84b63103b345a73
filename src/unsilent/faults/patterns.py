"""Patterns: the choice of the slots that a fault corrupts.

Each pattern is a small frozen dataclass. ``draw_slots`` draws the corrupted places as `LocatedSlots`, ordered by region, from
`Slots` that were counted with the pattern's ``count_placements``. Patterns of aligned blocks are in `blocks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults.population import LocatedSlots, Region, Slots, check_law
from unsilent.faults.sampling import draw_distinct


class Pattern(ABC):
    """Base of the patterns; immutable and hashable."""

    single_event: ClassVar[bool] = False  # one physical event: a bit position is drawn once for all elements

    @property
    def count(self) -> int | None:
        """Number of corrupted slots; ``None`` if the number is drawn."""
        return None

    @property
    def span(self) -> int:
        """Number of elements from the first to the last of one placement."""
        return 1

    @property
    def region_requirement(self) -> str:
        """Requirement on a tensor besides its number of elements, for messages; empty if there is none."""
        return ""

    @property
    def placement_cache_key(self) -> Hashable:
        """Cache key of the pattern's placements: everything that ``places`` depends on besides the region."""
        return self.span

    @property
    def slots_needed(self) -> int:
        """Least number of distinct slots that the pattern needs."""
        return 1

    def count_placements(self, region: Region) -> int:
        """Number of placements in a region."""
        return max(0, region.eligible_count - (self.span - 1))

    def check_whole(self, region: Region) -> None:
        """Raise ``UsageError`` if the region is only a part of its tensor."""
        if region.elements is not None:
            raise UsageError(
                f"{self.text} needs a whole tensor, but only some elements of {region.site!r} are selected; leave out the "
                "selection"
            )

    @property
    @abstractmethod
    def text(self) -> str:
        """The parameters that re-create the pattern, such as ``count=8``."""

    @abstractmethod
    def draw_slots(self, slots: Slots, regions: Sequence[Region], rng: np.random.Generator, law: str) -> LocatedSlots:
        """Draw the slots to corrupt from ``slots`` of ``regions``."""

    @abstractmethod
    def with_count(self, k: int) -> Pattern:
        """The pattern with ``k`` corruptions; raises ``UsageError`` for a pattern that draws its number."""


@dataclass(frozen=True)
class Count(Pattern):
    """``k`` distinct slots, drawn from all regions."""

    k: int

    def __post_init__(self) -> None:
        check_at_least_one("count", self.k)

    @property
    def count(self) -> int:
        return self.k

    @property
    def slots_needed(self) -> int:
        return self.k

    @property
    def text(self) -> str:
        return f"count={self.k}"

    def draw_slots(self, slots: Slots, regions: Sequence[Region], rng: np.random.Generator, law: str) -> LocatedSlots:
        return slots.locate(slots.draw(self.k, rng, law))

    def with_count(self, k: int) -> Pattern:
        return Count(k)


@dataclass(frozen=True)
class One(Count):
    """A single slot, the default when no number is given."""

    k: int = 1

    @property
    def text(self) -> str:
        return ""


@dataclass(frozen=True)
class Rate(Pattern):
    """An independent draw of every slot with probability ``p``, which is the bit error rate for flips."""

    p: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:  # also refuses NaN
            raise UsageError(f"rate={self.p}; expected a probability from 0 to 1")

    @property
    def text(self) -> str:
        return f"rate={self.p!r}"

    def draw_slots(self, slots: Slots, regions: Sequence[Region], rng: np.random.Generator, law: str) -> LocatedSlots:
        if check_law(law) != "per-element":
            raise UsageError(
                f"{self.text} corrupts each element or bit with the same probability, so the law {law} does not apply; use "
                "per-element, or a count"
            )
        # A uniform set of binomial size has the same distribution as a separate decision for each slot.
        return slots.locate(draw_distinct(rng, slots.total, int(rng.binomial(slots.total, self.p))))

    def with_count(self, k: int) -> Pattern:
        raise UsageError(f"{self.text} draws the number of corrupted elements; leave it out to corrupt {k}")


@dataclass(frozen=True)
class Strided(Pattern):
    """``n`` elements of one tensor, ``stride`` apart in flat order (or along the selection)."""

    n: int
    stride: int
    single_event: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least_one("count", self.n)
        check_at_least_one("stride", self.stride)

    @property
    def count(self) -> int:
        return self.n

    @property
    def span(self) -> int:
        return (self.n - 1) * self.stride + 1

    @property
    def text(self) -> str:
        return f"count={self.n},stride={self.stride}"

    def draw_slots(self, slots: Slots, regions: Sequence[Region], rng: np.random.Generator, law: str) -> LocatedSlots:
        region, place, way = slots.locate(slots.draw(1, rng, law))
        steps = np.arange(self.n, dtype=np.int64) * self.stride
        return LocatedSlots(np.repeat(region, self.n), place + steps, np.repeat(way, self.n))

    def with_count(self, k: int) -> Pattern:
        return Strided(k, self.stride)


@dataclass(frozen=True)
class Run(Strided):
    """``n`` consecutive elements of one tensor."""

    stride: int = 1

    def __post_init__(self) -> None:
        check_at_least_one("run", self.n)

    @property
    def text(self) -> str:
        return f"run={self.n}"

    def with_count(self, k: int) -> Pattern:
        return Run(k)


def check_at_least_one(name: str, value: int) -> None:
    """Raise ``UsageError`` for a number below 1."""
    if value < 1:
        raise UsageError(f"{name}={value}; expected 1 or more")
