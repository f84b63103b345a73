"""Bit codecs: how each dtype lays a number out in a machine word.

Sources: IEEE 754-2019 (float16/32/64); bfloat16 is the upper half of a float32; the two 8-bit formats come
from OFP8 of the Open Compute Project (``e4m3fn`` has no infinity, and only magnitude 0x7f is NaN).
Integers are two's complement.

Invariants: bit 0 is the least significant bit; ``decode`` is exact; ``encode`` rounds once, from float64, to
nearest with ties to even; ``encode(decode(w)) == w`` for every word that is not a NaN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from unsilent.basics.errors import UsageError, unknown_name_error

BIT_CLASSES = ("all", "sign", "exponent", "exponent_msb", "mantissa")
WIDEST = 64

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Codec:
    """Field widths of one dtype, and the conversion between words and numbers.

    ``exponent_bits`` and ``mantissa_bits`` are field widths in bits. An integer has no exponent; its value bits count
    as mantissa and, if signed, its top bit as sign. ``numpy_dtype`` is the numpy dtype with this layout, if numpy has
    one.
    """

    name: str
    bits: int
    word_dtype: np.dtype[Any]
    kind: str
    exponent_bits: int
    mantissa_bits: int
    signed: bool
    numpy_dtype: np.dtype[Any] | None
    has_inf: bool = True

    def field_of_bit(self, position: int) -> str:
        """The field that bit ``position`` belongs to: ``"sign"``, ``"exponent"`` or ``"mantissa"``."""
        if not 0 <= position < self.bits:
            raise UsageError(f"bit {position} is outside {self.name}; give one of 0-{self.bits - 1}")
        if position < self.mantissa_bits:
            return "mantissa"
        return "exponent" if position < self.mantissa_bits + self.exponent_bits else "sign"

    def selected_bits(self, bits: str | int) -> tuple[int, ...]:
        """The bits of this dtype that ``bits`` selects, in ascending order; empty if the dtype has none of them.

        ``bits`` is a class (``all``, ``sign``, ``exponent``, ``exponent_msb``, ``mantissa``), a position
        (``30``) or a range (``23-30``), or several joined by ``+``. Raises ``UsageError`` for any other text.
        """
        return _matching(self.name, str(bits))

    @property
    def bit_strata(self) -> dict[str, tuple[int, ...]]:
        """All bits of the dtype, grouped by the expected effect of a flip, as strata for sampling.

        A flip of the top exponent bit makes a weight huge, a flip of the next ones mostly makes it zero, and a flip of the
        low ones changes its size; few mantissa bits change a weight by more than an eighth. The value bits of an integer are
        split into two halves.
        """
        top = self.mantissa_bits + self.exponent_bits
        cuts = {"sign": (top, self.bits if self.signed else top)}
        if self.exponent_bits:
            middle = self.mantissa_bits + (self.exponent_bits - 1) // 2
            cuts |= {"exponent-top": (top - 1, top), "exponent-high": (middle, top - 1)}
            cuts |= {"exponent-low": (self.mantissa_bits, middle)}
            fine = max(0, self.mantissa_bits - 3)
            cuts |= {"mantissa-high": (fine, self.mantissa_bits), "mantissa-low": (0, fine)}
        else:
            cuts |= {
                "value-high": (self.mantissa_bits // 2, self.mantissa_bits),
                "value-low": (0, self.mantissa_bits // 2),
            }
        return {name: tuple(range(low, high)) for name, (low, high) in cuts.items() if high > low}

    @property
    def smallest_nonfinite_word(self) -> int:
        """The smallest magnitude (word without sign) that is not a finite number; 2^bits for an integer."""
        if self.kind == "int":
            return 1 << self.bits
        if not self.has_inf:
            return (1 << (self.bits - 1)) - 1
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    def decode(self, words: npt.ArrayLike) -> Array:
        """The exact numbers that ``words`` represent, as float64 (int64 for integers) of the same shape."""
        array = np.ascontiguousarray(words, dtype=self.word_dtype).reshape(np.shape(words))
        if self.numpy_dtype is None:
            return self._decode_fields(array)
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes quiet, which needs no warning
            return array.view(self.numpy_dtype).astype(np.float64 if self.kind == "float" else np.int64)

    def encode(self, values: npt.ArrayLike) -> Array:
        """The words nearest to ``values`` (float64; ties to even), in the same shape.

        A number that would round to more than the largest finite one becomes infinity. A dtype without infinity
        saturates, also for infinity, like casts of torch from version 2.12 on (NaN stays NaN). An integer dtype saturates
        as well and converts NaN to 0; integer arrays are converted to it exactly.
        """
        if self.kind == "int":
            return self._saturate(np.asarray(values))
        numbers = np.asarray(values, dtype=np.float64)
        if self.numpy_dtype is None:
            return self._encode_fields(numbers)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return np.asarray(numbers.astype(self.numpy_dtype)).view(self.word_dtype)

    @property
    def _emin(self) -> int:
        return 2 - (1 << (self.exponent_bits - 1))  # exponent of the smallest normal number

    def _decode_fields(self, words: Array) -> Array:
        whole = words.astype(np.int64)
        magnitude = whole & ((1 << (self.bits - 1)) - 1)
        power, fraction = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        significand = np.where(power == 0, fraction, fraction + (1 << self.mantissa_bits)).astype(np.float64)
        value = np.ldexp(significand, np.maximum(power, 1) - 1 + self._emin - self.mantissa_bits)
        if self.has_inf:
            value = np.where(magnitude == self.smallest_nonfinite_word, np.inf, value)
        value = np.where(magnitude >= self.smallest_nonfinite_word + int(self.has_inf), np.nan, value)
        return np.asarray(np.where(whole >> (self.bits - 1), -value, value))

    def _encode_fields(self, numbers: Array) -> Array:
        finite = np.isfinite(numbers)
        magnitude = np.where(finite, np.abs(numbers), 0.0)
        # frexp returns significands in [0.5, 1). Below the smallest normal number the step between neighbours is
        # constant.
        power = np.where(magnitude == 0, self._emin, np.frexp(magnitude)[1] - 1)
        power = np.maximum(power, self._emin).astype(np.int64)
        steps = np.rint(np.ldexp(magnitude, self.mantissa_bits - power)).astype(np.int64)
        # ``steps`` includes the implicit leading one, so a carry from rounding goes into the exponent without
        # further work. The clamp prevents an overflow of the sum for numbers far outside the format.
        raised = np.minimum(power - self._emin, 1 << self.exponent_bits)
        overflow = self.smallest_nonfinite_word - (not self.has_inf)
        word = np.minimum(steps + (raised << self.mantissa_bits), overflow)
        nan = self.smallest_nonfinite_word | (self.has_inf << (self.mantissa_bits - 1))  # the quiet one
        word = np.where(finite, word, np.where(np.isnan(numbers), nan, overflow))
        return np.asarray(word | (np.signbit(numbers).astype(np.int64) << (self.bits - 1))).astype(self.word_dtype)

    def _saturate(self, values: Array) -> Array:
        low = -(1 << (self.bits - 1)) if self.signed else 0
        high = low + (1 << self.bits) - 1
        if values.dtype.kind in "iub":
            held = np.iinfo(np.uint8 if values.dtype.kind == "b" else values.dtype)
            exact = np.clip(values, max(low, held.min), min(high, held.max))
            return np.asarray(exact.astype(self.numpy_dtype)).view(self.word_dtype)
        numbers = np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
        inside = (numbers > low) & (numbers < high)
        ends = np.where(numbers > 0, np.int64(high), np.int64(low))
        # Only numbers in range are cast: the cast of a float outside the integer's range has no defined result.
        whole = np.where(inside, np.where(inside, numbers, 0.0).astype(np.int64), ends)
        return np.asarray(whole.astype(self.numpy_dtype)).view(self.word_dtype)


def _float(name: str, exponent: int, mantissa: int, native: str | None, has_inf: bool = True) -> Codec:
    bits = 1 + exponent + mantissa
    native_dtype = np.dtype(native) if native else None
    return Codec(name, bits, np.dtype(f"u{bits // 8}"), "float", exponent, mantissa, True, native_dtype, has_inf)


def _int(name: str, bits: int, signed: bool) -> Codec:
    native = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    return Codec(name, bits, np.dtype(f"u{bits // 8}"), "int", 0, bits - int(signed), signed, native)


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        c.name: c
        for c in (
            _float("float64", 11, 52, "f8"),
            _float("float32", 8, 23, "f4"),
            _float("float16", 5, 10, "f2"),
            _float("bfloat16", 8, 7, None),
            _float("float8_e4m3fn", 4, 3, None, has_inf=False),
            _float("float8_e5m2", 5, 2, None),
            _int("int8", 8, True),
            _int("uint8", 8, False),
            _int("int16", 16, True),
            _int("int32", 32, True),
            _int("int64", 64, True),
        )
    }
)


def codec(name: str) -> Codec:
    """The codec of a dtype by its torch name; raises ``UsageError`` if the dtype has no codec."""
    value = CODECS.get(name)
    if value is None:
        raise unknown_name_error("dtype", name, CODECS)
    return value


@lru_cache(maxsize=1024)
def parse_bits(text: str) -> tuple[str | tuple[int, int], ...]:
    """Read a bit selection as classes and inclusive ranges; raises ``UsageError``."""
    terms: list[str | tuple[int, int]] = []
    for term in text.split("+"):
        number = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", term.strip(), re.ASCII)
        if number is None:
            if term.strip() not in BIT_CLASSES:
                raise unknown_name_error(
                    "bit class", term.strip(), [*BIT_CLASSES, "a position like 30", "a range like 23-30"]
                )
            terms.append(term.strip())
            continue
        low, high = int(number[1]), int(number[2] or number[1])
        if low > high or high >= WIDEST:
            raise UsageError(f"bits={text!r} has {term.strip()!r}; expected low-high within 0-{WIDEST - 1}")
        terms.append((low, high))
    return tuple(terms)


@lru_cache(maxsize=4096)
def _matching(name: str, text: str) -> tuple[int, ...]:
    layout = codec(name)
    chosen: set[int] = set()
    for term in parse_bits(text):
        if not isinstance(term, str):
            chosen.update(range(term[0], min(term[1] + 1, layout.bits)))
        elif term == "all":
            chosen.update(range(layout.bits))
        elif term == "exponent_msb":
            chosen.update({layout.mantissa_bits + layout.exponent_bits - 1} if layout.exponent_bits else ())
        else:
            chosen.update(p for p in range(layout.bits) if layout.field_of_bit(p) == term)
    return tuple(sorted(chosen))
