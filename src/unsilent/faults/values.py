"""Value models that replace the whole value of a corrupted element.

Each value model is a small frozen dataclass. It returns the number of ways to corrupt an element of a region (0:
the region cannot be corrupted), and the operation for each corrupted (element, way). Only bit flips have several
ways, so that ``n`` flips are ``n`` distinct bits; the other models draw their values after the element.
A model with several ways must use the operation ``xor``, because masks for one element are merged.

To add a value model: a class with a one-line docstring, a row in ``VALUES``, a row in the contract test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults.bitwise import Burst, Corrupted, Corruption, Flip, MultiBit, Stuck, ValueModel
from unsilent.faults.codecs import Codec, codec
from unsilent.faults.population import Region


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
    def region_requirement(self) -> str:
        return f"a dtype that can hold {self.value}"

    def ways(self, region: Region) -> int:
        return int(_word(self.value, region.dtype) is not None)

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        region = corrupted.region
        return "set", np.full(corrupted.size, _word(self.value, region.dtype), dtype=region.codec.word_dtype)


@dataclass(frozen=True)
class Zero(ValueModel):
    """Replace by zero (all bits 0)."""

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        return "set", np.zeros(corrupted.size, dtype=corrupted.region.codec.word_dtype)


@dataclass(frozen=True)
class Random(ValueModel):
    """Replace by a random finite bit pattern, each one equally likely, the old one included."""

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        layout, n = corrupted.region.codec, corrupted.size
        if layout.kind == "int":
            return "set", rng.integers(0, (1 << layout.bits) - 1, size=n, dtype=layout.word_dtype.type, endpoint=True)
        # Finite magnitudes are exactly the words below the first non-finite one, so no word has to be redrawn.
        magnitude = rng.integers(0, layout.smallest_nonfinite_word, size=n, dtype=np.uint64)
        sign = rng.integers(0, 2, size=n, dtype=np.uint64) << np.uint64(layout.bits - 1)
        return "set", (magnitude | sign).astype(layout.word_dtype)


@dataclass(frozen=True)
class Uniform(ValueModel):
    """Replace by a random number between low and high, uniformly; sign=minus negates it, sign=random half of them.

    Each element gets its own. Numbers are rounded to the dtype as a cast would (infinity beyond its range);
    integers saturate.
    """

    low: float = 0.0
    high: float = 1.0
    sign: str = "plus"
    always_in_text: ClassVar[tuple[str, ...]] = ("low", "high")

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))
        if not -np.inf < self.low <= self.high < np.inf:  # also refuses NaN
            raise UsageError(f"low={self.low},high={self.high}; expected two finite numbers, low not above high")
        if self.sign not in SIGNS:
            raise unknown_name_error("sign", str(self.sign)[:40], SIGNS)

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        share = rng.random(corrupted.size)
        numbers = np.clip(self.low * (1.0 - share) + self.high * share, self.low, self.high)  # high - low may overflow
        if self.sign != "plus":
            minus = self.sign == "minus" or rng.random(corrupted.size) < 0.5
            numbers = np.where(minus, -numbers, numbers)
        return "set", corrupted.region.codec.encode(numbers)


@dataclass(frozen=True)
class Scale(ValueModel):
    """Multiply by factor=2, in float64, then round to the dtype (integers saturate)."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", float(self.factor))
        if np.isnan(self.factor):
            raise UsageError("factor=nan; expected a number (set:value=nan makes NaN)")

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        return "scale", np.full(corrupted.size, self.factor)


@dataclass(frozen=True)
class Copy(ValueModel):
    """Replace by another element of the same tensor, drawn uniformly; a tensor with a single element is left out."""

    @property
    def region_requirement(self) -> str:
        return "a tensor of two elements or more"

    def ways(self, region: Region) -> int:
        return int(region.numel > 1)

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        source = rng.integers(corrupted.region.numel - 1, size=corrupted.size)
        return "copy_from", np.asarray(source + (source >= corrupted.elements))  # skips the element itself


SIGNS = ("plus", "minus", "random")

VALUES: Mapping[str, type[ValueModel]] = MappingProxyType(
    {
        "bitflip": Flip,
        "burst": Burst,
        "multibit": MultiBit,
        "stuck": Stuck,
        "set": Set,
        "zero": Zero,
        "random": Random,
        "uniform": Uniform,
        "scale": Scale,
        "copy": Copy,
    }
)


def _number(text: str) -> tuple[int | None, int | None, float]:
    """Parse a value as raw bits, as an exact integer (``None`` if the text is neither) and as a float."""
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
