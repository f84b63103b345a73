"""Codes that protect a memory, and their word-by-word effect on an event that flips bits.

A code decodes each of its words. The outcome of flips is ``corrected`` if no flip remains, ``detected`` if the memory reports an
error, ``missed`` if flips remain without a report, and ``miscorrected`` if the code flipped a further bit.

    parity    one check bit: an odd number of flips is detected, an even one is missed
    sec-ded   Hsiao's code (odd columns of least weight): one flip is corrected, two are detected, more may be miscorrected
    on-die    a Hamming code inside the memory device, which reports nothing: two flips often become three
    chipkill  a Reed-Solomon code over symbols of 8 bits (one chip each): a wrong symbol is corrected, two are detected

Assumptions: bit b of element e of a tensor is bit e x width + b of a row of words that begins with the tensor, and check bits are
never corrupted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import combinations
from math import comb, prod
from operator import xor
from typing import Protocol

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults.bitwise import Burst, Flip, MultiBit
from unsilent.faults.models import FaultModel
from unsilent.faults.patterns import Strided
from unsilent.faults.population import Region
from unsilent.faults.record import Fault

PROTECTIONS = ("none", "parity", "sec-ded", "on-die", "chipkill")
OUTCOMES = ("corrected", "detected", "missed", "miscorrected")
ALTERED = ("missed", "miscorrected")
"""Outcomes in which the memory returns wrong bits without a report."""
MOST_CODE_WORD = 4096
SYMBOL, FIELD = 8, 255
"""Number of bits in a symbol, and number of symbols in the longest word of a Reed-Solomon code."""
Flips = frozenset[int]


class Code(Protocol):
    """An error-correcting code for words of ``word`` data bits."""

    @property
    def word(self) -> int: ...
    def __hash__(self) -> int: ...
    def decode(self, flips: Flips) -> Flips | None:
        """The data bits that are wrong after a word with these flips is decoded; None if an error is reported."""


@dataclass(frozen=True)
class BinaryCode:
    """A linear code: the syndrome is the exclusive or of the columns of the flipped bits.

    Attributes:
        columns: Columns of the data bits.
        corrects: Whether the bit whose column equals the syndrome is flipped back.
        reports: Whether a syndrome that does not lead to a correction is reported.
    """

    columns: tuple[int, ...]
    corrects: bool = True
    reports: bool = True

    @property
    def word(self) -> int:
        return len(self.columns)

    def decode(self, flips: Flips) -> Flips | None:
        syndrome = reduce(xor, (self.columns[bit] for bit in flips), 0)
        if syndrome == 0:
            return flips
        if self.corrects and syndrome.bit_count() == 1:  # taken for an error in a check bit
            return flips
        bit = _bit_of_column(self.columns).get(syndrome) if self.corrects else None
        if bit is not None:
            return flips ^ {bit}
        return None if self.reports else flips


@lru_cache(maxsize=64)
def _bit_of_column(columns: tuple[int, ...]) -> Mapping[int, int]:
    return {column: bit for bit, column in enumerate(columns)}


@dataclass(frozen=True)
class SymbolCode:
    """A Reed-Solomon code with three check symbols, over ``word`` bits of data."""

    word: int

    def decode(self, flips: Flips) -> Flips | None:
        errors: dict[int, int] = defaultdict(int)
        for bit in flips:
            errors[bit // SYMBOL] |= 1 << bit % SYMBOL
        powers, logarithms = _field()
        syndromes = [
            reduce(xor, (powers[(logarithms[e] + place * power) % FIELD] for place, e in errors.items()), 0)
            for power in range(3)
        ]
        if not any(syndromes):
            return flips
        if all(syndromes):
            first, second, third = (logarithms[s] for s in syndromes)
            place = (second - first) % FIELD
            if (third - second) % FIELD == place and place < self.word // SYMBOL + 3:
                wrong = syndromes[0] if place < self.word // SYMBOL else 0  # else a check symbol
                return flips ^ frozenset(place * SYMBOL + bit for bit in range(SYMBOL) if wrong >> bit & 1)
        return None


@lru_cache(maxsize=1)
def _field() -> tuple[Sequence[int], Mapping[int, int]]:
    """Powers of a generator of the field of 256 elements, and the logarithms of the elements."""
    powers = [1]
    while len(powers) < FIELD:
        double = powers[-1] << 1
        powers.append(double ^ 0x11D if double > FIELD else double)
    return powers, {power: exponent for exponent, power in enumerate(powers)}


@lru_cache(maxsize=64)
def make_code(protection: str, word: int) -> Code:
    """The code of this name; raises ``UsageError`` for a word size that the code does not support."""
    if protection == "chipkill":
        most = (FIELD - 3) * SYMBOL
        if word % SYMBOL or word > most:
            raise UsageError(f"code_word is {word}; chipkill needs a multiple of {SYMBOL} bits, at most {most}")
        return SymbolCode(word)
    if protection == "parity":
        return BinaryCode((1,) * word, corrects=False)
    odd = protection == "sec-ded"
    return BinaryCode(_lightest_columns(word, odd), reports=odd)


def _lightest_columns(word: int, odd: bool) -> tuple[int, ...]:
    """Check columns of the lowest weights above 1 (only odd weights if ``odd``), balanced over the rows.

    Follows Hsiao's rule (IBM Journal of Research and Development 14, 1970). The rule does not assign columns to bits; the
    order is drawn once for each code.
    """
    weights = range(3, 64, 2) if odd else range(2, 64)
    check = next(r for r in range(3, 64) if sum(comb(r, w) for w in weights if w <= r) >= word)
    chosen: list[int] = []
    for weight in weights:
        alike = [sum(1 << row for row in rows) for rows in combinations(range(check), weight)]
        if len(alike) > word - len(chosen):
            alike = _balanced_columns(alike, word - len(chosen), check)
        chosen += alike
        if len(chosen) == word:
            break
    return tuple(chosen[place] for place in np.random.default_rng(word).permutation(word).tolist())


def _balanced_columns(columns: Sequence[int], number: int, check: int) -> list[int]:
    """Choose ``number`` of the columns so that the rows hold similar numbers of ones."""
    bits = np.array([[column >> row & 1 for row in range(check)] for column in columns], np.int64)
    filled, left, chosen = np.zeros(check, np.int64), np.ones(len(columns), bool), list[int]()
    for _ in range(number):
        load = np.where(left, bits @ filled, np.iinfo(np.int64).max)
        place = int(load.argmin())
        left[place], filled = False, filled + bits[place]
        chosen.append(columns[place])
    return chosen


def flips_bits(model: FaultModel) -> bool:
    """Whether the faults of a model flip bits."""
    return isinstance(model.value, Flip | Burst | MultiBit)


def fitted(model: FaultModel, region: Region) -> FaultModel:
    """The model with its pattern shortened to the size of the region."""
    pattern, size = model.pattern, region.eligible_count
    if isinstance(pattern, Strided) and pattern.span > size:
        return model.with_count(max(1, (size - 1) // pattern.stride + 1))
    return model


def decoded(fault: Fault, code: Code | None) -> tuple[str, Fault]:
    """The outcome of a fault in a memory with this code, and the fault that remains after decoding."""
    if code is None:
        return "missed", fault
    width = fault.codec.bits
    flipped = [
        element * width + bit
        for element, mask in zip(fault.elements.tolist(), fault.operands.tolist(), strict=True)
        for bit in range(width)
        if mask >> bit & 1
    ]
    outcome, left = decoded_bits(flipped, code, prod(fault.shape) * width)
    if outcome in ("corrected", "detected"):
        return outcome, fault
    by_element: dict[int, int] = defaultdict(int)
    for place in left:
        element, bit = divmod(place, width)
        by_element[element] |= 1 << bit
    elements = np.array(sorted(by_element), np.int64)
    masks = np.array([by_element[e] for e in elements.tolist()], fault.codec.word_dtype)
    return outcome, replace(fault, elements=elements, operands=masks)


def decoded_bits(flipped: Sequence[int], code: Code, end: int | None) -> tuple[str, list[int]]:
    """The outcome of flips in a row of ``end`` bits (None: whole words), and the bits still wrong after decoding.

    A miscorrection after the end is ignored.
    """
    words: dict[int, set[int]] = defaultdict(set)
    for bit in flipped:
        word, place = divmod(bit, code.word)
        words[word].add(place)
    left: list[int] = []
    wrong = False
    for word, flips in words.items():
        remaining = code.decode(frozenset(flips))
        if remaining is None:
            return "detected", []
        wrong |= not remaining <= flips
        left += [word * code.word + place for place in remaining if end is None or word * code.word + place < end]
    if not left:
        return "corrected", []
    return "miscorrected" if wrong else "missed", left
