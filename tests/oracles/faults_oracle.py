"""Slow, obvious twin of the fault arithmetic: Python integers, loops, fractions and the struct module.

Shares nothing with the package. A word is a Python int; a number is a float, an int, or an exact Fraction.
"""

import bisect
import functools
import math
import struct
from fractions import Fraction

# name: (width, exponent bits, mantissa bits, has infinity); integers: (width, signed)
FLOATS = {
    "float64": (64, 11, 52, True),
    "float32": (32, 8, 23, True),
    "float16": (16, 5, 10, True),
    "bfloat16": (16, 8, 7, True),
    "float8_e4m3fn": (8, 4, 3, False),
    "float8_e5m2": (8, 5, 2, True),
}
INTEGERS = {"int8": (8, True), "uint8": (8, False), "int16": (16, True), "int32": (32, True), "int64": (64, True)}
NATIVE = {"float64": "<d", "float32": "<f", "float16": "<e"}


def width(dtype):
    return (FLOATS.get(dtype) or INTEGERS[dtype])[0]


def fields(dtype):
    """Bit position -> field name."""
    if dtype in INTEGERS:
        bits, signed = INTEGERS[dtype]
        return ["mantissa"] * (bits - signed) + ["sign"] * signed
    _, exponent, mantissa, _ = FLOATS[dtype]
    return ["mantissa"] * mantissa + ["exponent"] * exponent + ["sign"]


def named_bits(dtype, text):
    """The positions that a bit selection names, as a set."""
    found = set()
    names = fields(dtype)
    for term in text.split("+"):
        if term == "all":
            found |= set(range(width(dtype)))
        elif term == "exponent_msb":
            found |= {max(i for i, n in enumerate(names) if n == "exponent")} if "exponent" in names else set()
        elif term[0].isdigit():
            low, _, high = term.partition("-")
            found |= {i for i in range(int(low), int(high or low) + 1) if i < width(dtype)}
        else:
            found |= {i for i, n in enumerate(names) if n == term}
    return found


def decode(dtype, word):
    """The number of a word."""
    if dtype in INTEGERS:
        bits, signed = INTEGERS[dtype]
        return word - (1 << bits) if signed and word >> (bits - 1) else word
    bits, exponent, mantissa, has_inf = FLOATS[dtype]
    if dtype in NATIVE:
        return struct.unpack(NATIVE[dtype], word.to_bytes(bits // 8, "little"))[0]
    sign = -1.0 if word >> (bits - 1) else 1.0
    power = (word >> mantissa) & ((1 << exponent) - 1)
    fraction = word & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    if has_inf and power == (1 << exponent) - 1:
        return math.nan if fraction else sign * math.inf
    if not has_inf and word & ((1 << (bits - 1)) - 1) == (1 << (bits - 1)) - 1:
        return math.nan
    if power == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / 2**mantissa) * 2.0 ** (power - bias)


@functools.cache
def finite_magnitudes(dtype):
    """Magnitude word -> exact value, ascending, for the narrow floats."""
    words = range(1 << (width(dtype) - 1))
    return [Fraction(v) for v in (decode(dtype, w) for w in words) if math.isfinite(v)]


@functools.cache
def _ladder(dtype):
    """The finite magnitudes, and the number beyond the largest of them, were the format to go on."""
    table = finite_magnitudes(dtype)
    return [*table, 2 * table[-1] - table[-2]]


def encode(dtype, value):
    """The word nearest to a number, ties to even."""
    bits = width(dtype)
    if dtype in INTEGERS:
        low = -(1 << (bits - 1)) if INTEGERS[dtype][1] else 0
        high = low + (1 << bits) - 1
        if math.isnan(value):
            value = 0
        elif math.isinf(value):
            value = high if value > 0 else low
        return min(max(round(value), low), high) % (1 << bits)
    sign = int(math.copysign(1, value) < 0) << (bits - 1)
    if dtype in NATIVE:
        code = NATIVE[dtype]
        try:
            return int.from_bytes(struct.pack(code, float(value)), "little")
        except OverflowError:
            return sign | int.from_bytes(struct.pack(code, math.inf), "little")
    table, ladder = finite_magnitudes(dtype), _ladder(dtype)
    has_inf = FLOATS[dtype][3]
    overflow = len(table) if has_inf else len(table) - 1
    if math.isnan(value):
        return sign | (len(table) + (1 << (FLOATS[dtype][2] - 1)) if has_inf else len(table))
    if math.isinf(value) or abs(Fraction(value)) >= ladder[-1]:
        return sign | overflow
    exact = abs(Fraction(value))
    below = bisect.bisect_right(ladder, exact) - 1
    to_below, to_above = exact - ladder[below], ladder[below + 1] - exact
    nearest = below + (to_above < to_below or (to_above == to_below and below % 2 == 1))
    return sign | min(nearest, overflow)


def apply(dtype, operation, before, operand, source=None):
    """One word after a fault."""
    if operation == "xor":
        return before ^ operand
    if operation == "and":
        return before & operand
    if operation == "or":
        return before | operand
    if operation == "set":
        return operand
    if operation == "copy_from":
        return source
    product = decode(dtype, before) * operand
    return encode(dtype, product)


def is_nan(dtype, word):
    return dtype in FLOATS and math.isnan(decode(dtype, word))
