"""Patterns of aligned elements: blocks along the order of runs, and tiles of a matrix.

Hardware moves values in groups that begin at multiples of their size: the outputs of one cycle, a line of a buffer, the tile of
one matrix instruction. A placement is one such group. All groups are equally likely, including a shorter one at the end of a
tensor. A group is one physical event: as with runs, a random bit position is drawn once for all its elements, while a value
(``random``, ``copy``, ``uniform``) is drawn for each of them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults.patterns import Pattern, check_at_least_one
from unsilent.faults.population import LocatedSlots, Region, Slots
from unsilent.faults.sampling import Ints


class Aligned(Pattern):
    """Base of the patterns that choose blocks, tiles and whole slices."""

    single_event: ClassVar[bool] = True

    @abstractmethod
    def places(self, region: Region, number: int, rng: np.random.Generator) -> Ints:
        """The elements of the placement with this number, in ascending order."""

    def draw_slots(self, slots: Slots, regions: Sequence[Region], rng: np.random.Generator, law: str) -> LocatedSlots:
        region, number, way = slots.locate(slots.draw(1, rng, law))
        places = self.places(regions[region[0]], int(number[0]), rng)
        return LocatedSlots(np.repeat(region, places.size), places, np.repeat(way, places.size))

    def with_count(self, k: int) -> Pattern:
        raise UsageError(f"{self.text} already chooses the elements; leave it out to corrupt {k}")


@dataclass(frozen=True)
class Block(Aligned):
    """``n`` consecutive elements that start at a multiple of ``n``; the last block of a tensor may be shorter.

    ``cycles``: number of consecutive blocks, cut at the end of the tensor; ``None``: a uniformly drawn number, from one block up
    to all blocks until the end of the tensor.
    """

    n: int
    cycles: int | None = 1

    def __post_init__(self) -> None:
        check_at_least_one("block", self.n)
        if self.cycles is not None:
            check_at_least_one("cycles", self.cycles)

    @property
    def placement_cache_key(self) -> Hashable:
        return "block", self.n

    @property
    def text(self) -> str:
        several = "" if self.cycles == 1 else f",cycles={'any' if self.cycles is None else self.cycles}"
        return f"block={self.n}{several}"

    def count_placements(self, region: Region) -> int:
        return -(-region.eligible_count // self.n)

    def places(self, region: Region, number: int, rng: np.random.Generator) -> Ints:
        left = self.count_placements(region) - number
        cycles = int(rng.integers(left)) + 1 if self.cycles is None else self.cycles
        return np.arange(number * self.n, min(region.eligible_count, (number + cycles) * self.n), dtype=np.int64)


@dataclass(frozen=True)
class Tile(Aligned):
    """An aligned tile of ``rows`` x ``columns``; a tile at the edge of the matrix may be smaller.

    The columns of the matrix are the fastest axis in the order that runs follow, its rows are all other axes.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_at_least_one("rows of the tile", self.rows)
        check_at_least_one("columns of the tile", self.columns)

    @property
    def placement_cache_key(self) -> Hashable:
        return "tile", self.rows, self.columns

    @property
    def text(self) -> str:
        return f"tile={self.rows}x{self.columns}"

    def count_placements(self, region: Region) -> int:
        self.check_whole(region)
        return -(-region.eligible_count // (max(region.fastest_axis_length, 1) * self.rows)) * -(
            -region.fastest_axis_length // self.columns
        )

    def places(self, region: Region, number: int, rng: np.random.Generator) -> Ints:
        width = region.fastest_axis_length
        height = region.eligible_count // width
        down, right = divmod(number, -(-width // self.columns))
        rows = np.arange(down * self.rows, min(height, (down + 1) * self.rows), dtype=np.int64)
        columns = np.arange(right * self.columns, min(width, (right + 1) * self.columns), dtype=np.int64)
        return (rows[:, None] * width + columns).reshape(-1)


def parse_tile(text: str) -> Tile:
    """Parse a tile size such as ``16x8``; raises ``UsageError``."""
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"tile={text[:40]!r}; expected ROWSxCOLUMNS, like 16x8")
    return Tile(int(match[1]), int(match[2]))
