"""Value models: what a struck element becomes.

One small frozen dataclass each. A value model says how many ways it has to strike an element of a region (0:
this region cannot be struck), and what is done to each struck (element, way). Only bit flips have several
ways, so that a number of flips means that many distinct bits; the others draw the rest after the element.
Several ways need the operation ``xor``: masks that hit one element are merged.

Adding one: a class with a one-line docstring, a row in ``VALUES``, a row in the contract test.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from unsilent.errors import UsageError
from unsilent.faults.codecs import WIDEST, Array, Codec, codec, parse_bits
from unsilent.faults.population import Region
from unsilent.faults.sampling import Ints

Strike = tuple[str, Array]  # the operation and its operands, as in a Fault


class ValueModel(ABC):
    """Base of the value models; immutable and hashable."""

    struck: ClassVar[str] = "elements"  # what a count counts, for messages
    told: ClassVar[tuple[str, ...]] = ()  # parameters that a text always names, for the name does not say them

    @property
    def needs(self) -> str:
        """What a region must have to be struck, for messages."""
        return "a tensor with elements"

    def ways(self, region: Region) -> int:
        """Distinct ways to strike one element of ``region``; 0 leaves the region out of the population."""
        return 1

    @abstractmethod
    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        """The operation, and one operand for each element of ``elements`` [m] struck in the way ``way`` [m].

        ``together``: the elements are one run, so a bit position that is drawn here is drawn once for all of
        them.
        """


@dataclass(frozen=True)
class Flip(ValueModel):
    """Flip bits: each struck bit is inverted; bits=all, a class (sign, exponent, mantissa), 30, or 23-30."""

    bits: str = "all"
    struck: ClassVar[str] = "flips"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", _checked_bits(self.bits))

    @property
    def needs(self) -> str:
        return f"a dtype with bits={self.bits}"

    def ways(self, region: Region) -> int:
        return len(region.codec.matching(self.bits))

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        return "xor", _masks(region.dtype, self.bits, 1)[way]


@dataclass(frozen=True)
class Burst(ValueModel):
    """Flip adjacent bits of one element: length=2 of them, all within bits."""

    length: int = 2
    bits: str = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", _checked_bits(self.bits))
        if not 1 <= self.length <= WIDEST:
            raise UsageError(f"length={self.length}; expected 1 to {WIDEST} adjacent bits")

    @property
    def needs(self) -> str:
        return f"a dtype with {self.length} adjacent bits among bits={self.bits}"

    def ways(self, region: Region) -> int:
        return int(_masks(region.dtype, self.bits, self.length).size > 0)

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        return "xor", _any_of(_masks(region.dtype, self.bits, self.length), elements.size, rng, together)


@dataclass(frozen=True)
class Stuck(ValueModel):
    """Hold one bit of each struck element at=0 or at=1, whatever it was; the bit is drawn from bits."""

    at: int = 1
    bits: str = "all"
    told: ClassVar[tuple[str, ...]] = ("at",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", _checked_bits(self.bits))
        if self.at not in (0, 1):
            raise UsageError(f"at={self.at}; expected 0 or 1, the value that the bit is stuck at")

    @property
    def needs(self) -> str:
        return f"a dtype with bits={self.bits}"

    def ways(self, region: Region) -> int:
        return int(_masks(region.dtype, self.bits, 1).size > 0)

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        masks = _any_of(_masks(region.dtype, self.bits, 1), elements.size, rng, together)
        return ("or", masks) if self.at else ("and", ~masks)


@dataclass(frozen=True)
class Set(ValueModel):
    """Replace by one value: value=0, nan, inf, -1.5, or raw bits such as 0x7f800000.

    Numbers are rounded to the dtype as a cast would; integers saturate. Left out are dtypes without the NaN or
    infinity asked for, and those too narrow for the raw bits.
    """

    value: str = "0"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", str(self.value).strip().lower())
        try:
            _number(self.value)
        except (ValueError, OverflowError):
            expected = "expected a number, nan, inf, or raw bits like 0x7f800000"
            raise UsageError(f"value={self.value[:40]!r}; {expected}") from None

    @property
    def needs(self) -> str:
        return f"a dtype that can hold {self.value}"

    def ways(self, region: Region) -> int:
        return int(_word(self.value, region.dtype) is not None)

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        return "set", np.full(elements.size, _word(self.value, region.dtype), dtype=region.codec.word)


@dataclass(frozen=True)
class Zero(ValueModel):
    """Replace by zero (all bits 0)."""

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        return "set", np.zeros(elements.size, dtype=region.codec.word)


@dataclass(frozen=True)
class Random(ValueModel):
    """Replace by a random finite bit pattern, each one equally likely (the old one too)."""

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        layout, n = region.codec, elements.size
        if layout.kind == "int":
            return "set", rng.integers(0, (1 << layout.bits) - 1, size=n, dtype=layout.word.type, endpoint=True)
        # Finite magnitudes are the numbers below the first that is not, so no pattern has to be redrawn.
        magnitude = rng.integers(0, layout.nonfinite, size=n, dtype=np.uint64)
        sign = rng.integers(0, 2, size=n, dtype=np.uint64) << np.uint64(layout.bits - 1)
        return "set", (magnitude | sign).astype(layout.word)


@dataclass(frozen=True)
class Scale(ValueModel):
    """Multiply by factor=2, in float64, then round to the dtype (integers saturate)."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", float(self.factor))
        if np.isnan(self.factor):
            raise UsageError("factor=nan; expected a number (set:value=nan makes NaN)")

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        return "scale", np.full(elements.size, self.factor)


@dataclass(frozen=True)
class Copy(ValueModel):
    """Replace by another element of the same tensor, drawn uniformly; tensors of one element are left out."""

    @property
    def needs(self) -> str:
        return "a tensor of two elements or more"

    def ways(self, region: Region) -> int:
        return int(region.numel > 1)

    def strike(self, region: Region, elements: Ints, way: Ints, rng: np.random.Generator, together: bool) -> Strike:
        source = rng.integers(region.numel - 1, size=elements.size)
        return "copy_from", np.asarray(source + (source >= elements))  # skips the element itself


VALUES: Mapping[str, type[ValueModel]] = MappingProxyType(
    {
        "bitflip": Flip,
        "burst": Burst,
        "stuck": Stuck,
        "set": Set,
        "zero": Zero,
        "random": Random,
        "scale": Scale,
        "copy": Copy,
    }
)


def _checked_bits(bits: str | int) -> str:
    parse_bits(str(bits))
    return str(bits)


@lru_cache(maxsize=1024)
def _masks(dtype: str, bits: str, length: int) -> Array:
    """Masks of ``length`` adjacent bits that all are among ``bits``, by lowest bit."""
    layout = codec(dtype)
    chosen = set(layout.matching(bits))
    runs = [p for p in sorted(chosen) if all(p + i in chosen for i in range(length))]
    masks = np.array([((1 << length) - 1) << p for p in runs], dtype=layout.word)
    masks.setflags(write=False)
    return masks


def _any_of(masks: Array, n: int, rng: np.random.Generator, together: bool) -> Array:
    return masks[np.repeat(rng.integers(masks.size), n) if together else rng.integers(masks.size, size=n)]


def _number(text: str) -> tuple[int | None, int | None, float]:
    """A value's text as raw bits, as exact integer (each ``None`` if it is not one) and as float."""
    if re.fullmatch(r"0x[0-9a-f]{1,16}", text):
        return int(text, 16), None, 0.0
    exact = int(text) if re.fullmatch(r"[+-]?\d{1,400}", text, re.ASCII) else None
    return None, exact, float(text)


@lru_cache(maxsize=1024)
def _word(value: str, dtype: str) -> int | None:
    layout: Codec = codec(dtype)
    raw, exact, number = _number(value)
    if raw is not None:
        return raw if raw < 1 << layout.bits else None
    if np.isinf(number) and not (layout.kind == "float" and layout.has_inf):
        return None
    if layout.kind == "float":
        return int(layout.encode(number))
    if exact is not None:
        low = -(1 << (layout.bits - 1)) if layout.signed else 0
        return min(max(exact, low), low + (1 << layout.bits) - 1) & ((1 << layout.bits) - 1)
    return None if np.isnan(number) else int(layout.encode(number))
