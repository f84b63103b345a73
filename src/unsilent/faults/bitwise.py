"""Value models that change some bits of a value (flips, bursts, stuck bits), and the base class of all value models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults.codecs import WIDEST, Array, codec, parse_bits
from unsilent.faults.population import Region
from unsilent.faults.sampling import Ints

Corruption = tuple[str, Array]  # the operation and its operands, as in a Fault


class Corrupted(NamedTuple):
    """The corrupted elements of a region, ``elements`` [m], and how each is corrupted, ``way`` [m].

    ``single_event``: one event corrupts all the elements, so a random bit position is drawn once for all of them.
    """

    region: Region
    elements: Ints
    way: Ints
    single_event: bool

    @property
    def size(self) -> int:
        return self.elements.size


class ValueModel(ABC):
    """Base of the value models; immutable and hashable."""

    counted_noun: ClassVar[str] = "elements"  # noun of counted slots, for messages
    always_in_text: ClassVar[tuple[str, ...]] = ()  # parameters that are in the text even at their default

    function: str | None = None
    """Name and hash, in the form that a `Fault` has, of the user's function that computes new words from the old ones."""

    @property
    def region_requirement(self) -> str:
        """Requirement on a region to be corrupted, for messages."""
        return "a tensor with elements"

    def ways(self, region: Region) -> int:
        """Number of distinct ways to corrupt one element of a region; 0 excludes the region."""
        return 1

    @abstractmethod
    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        """The operation, and one operand for each corrupted element."""


class BitValueModel(ValueModel):
    """Base of the value models that choose among ``bits``: all, a class of them, one, or a range."""

    bits: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", str(self.bits))
        parse_bits(self.bits)

    @property
    def region_requirement(self) -> str:
        return f"a dtype with bits={self.bits}"


@dataclass(frozen=True)
class Flip(BitValueModel):
    """Flip a bit, drawn from bits: all, a class (sign, exponent, mantissa), a range like 23-30, or the one bit 30."""

    bits: str = "all"
    counted_noun: ClassVar[str] = "flips"

    def ways(self, region: Region) -> int:
        return len(region.codec.selected_bits(self.bits))

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        return "xor", _masks(corrupted.region.dtype, self.bits, 1)[corrupted.way]


@dataclass(frozen=True)
class Burst(BitValueModel):
    """Flip length=2 adjacent bits of one element, all of them among bits."""

    length: int = 2
    bits: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.length <= WIDEST:
            raise UsageError(f"length={self.length}; expected 1 to {WIDEST} adjacent bits")

    @property
    def region_requirement(self) -> str:
        return f"a dtype with {self.length} adjacent bits among bits={self.bits}"

    def ways(self, region: Region) -> int:
        return int(_masks(region.dtype, self.bits, self.length).size > 0)

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        return "xor", _any_of(_masks(corrupted.region.dtype, self.bits, self.length), corrupted, rng)


@dataclass(frozen=True)
class MultiBit(BitValueModel):
    """Flip flips=2 different bits of one element, drawn from bits; they can be adjacent, and all sets are equally likely."""

    flips: int = 2
    bits: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.flips <= WIDEST:
            raise UsageError(f"flips={self.flips}; expected 1 to {WIDEST} bits")

    @property
    def region_requirement(self) -> str:
        return f"a dtype with {self.flips} bits among bits={self.bits}"

    def ways(self, region: Region) -> int:
        return int(_masks(region.dtype, self.bits, 1).size >= self.flips)

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        single = _masks(corrupted.region.dtype, self.bits, 1)
        chosen = np.zeros(1 if corrupted.single_event else corrupted.size, dtype=single.dtype)
        # Floyd's algorithm for a random subset, for all elements at once
        for last in range(single.size - self.flips, single.size):
            drawn = single[rng.integers(last + 1, size=chosen.size)]
            chosen |= np.where(chosen & drawn, single[last], drawn)
        return "xor", np.repeat(chosen, corrupted.size) if corrupted.single_event else chosen


@dataclass(frozen=True)
class Stuck(BitValueModel):
    """Set one bit of each corrupted element to 0 (at=0) or to 1 (at=1), even if it is so already; it is drawn from bits."""

    at: int = 1
    bits: str = "all"
    always_in_text: ClassVar[tuple[str, ...]] = ("at",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at not in (0, 1):
            raise UsageError(f"at={self.at}; expected 0 or 1, the value that the bit is stuck at")

    def ways(self, region: Region) -> int:
        return int(_masks(region.dtype, self.bits, 1).size > 0)

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        masks = _any_of(_masks(corrupted.region.dtype, self.bits, 1), corrupted, rng)
        return ("or", masks) if self.at else ("and", ~masks)


@lru_cache(maxsize=1024)
def _masks(dtype: str, bits: str, length: int) -> Array:
    """Bit masks of ``length`` adjacent bits that are all among ``bits``, sorted by their lowest bit."""
    layout = codec(dtype)
    chosen = set(layout.selected_bits(bits))
    runs = [p for p in sorted(chosen) if all(p + i in chosen for i in range(length))]
    masks = np.array([((1 << length) - 1) << p for p in runs], dtype=layout.word_dtype)
    masks.setflags(write=False)
    return masks


def _any_of(masks: Array, corrupted: Corrupted, rng: np.random.Generator) -> Array:
    if corrupted.single_event:
        return masks[np.repeat(rng.integers(masks.size), corrupted.size)]
    return masks[rng.integers(masks.size, size=corrupted.size)]
