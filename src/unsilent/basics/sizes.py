"""Conversion between text and whole numbers, shares, and numbers of bytes.

Prefixes as in IEC 80000-13; a letter alone counts in powers of 1024.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from numbers import Integral

from unsilent.basics.errors import UsageError

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _FACTORS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_TEXT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(%?)\s*")
LARGEST = 1 << 62
"""Most bytes; larger numbers are treated as typing errors."""


def parse_whole_number(text: str) -> int | None:
    """Parse a whole number of 0 or more from decimal digits; None for anything else or too many digits."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 18 else None


def parse_share(option: str, text: str, like: str) -> float:
    """Parse a share strictly between 0 and 1, like ``1%`` or ``0.01``; raises ``UsageError``.

    >>> parse_share("--ci", "0.5%", "1%"), parse_share("--ci", "0.005", "1%")
    (0.005, 0.005)
    """
    match = _SHARE.fullmatch(text)
    try:
        value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UsageError(f"{option} is {text!r}; expected a share between 0 and 1, like {like}")
    return value


def parse_bytes(text: str) -> int:
    """Parse a number of bytes; raises ``UsageError``.

    >>> parse_bytes("2GiB"), parse_bytes("2G"), parse_bytes("500MB"), parse_bytes("1e9")
    (2147483648, 2147483648, 500000000, 1000000000)
    """
    match = _TEXT.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"cannot read {text!r} as a number of bytes; expected a size like 2GiB, 500MB or 1e9")
    value = float(match[1]) * factor
    if not 0 <= value <= LARGEST:
        raise UsageError(f"{text!r} is not a valid number of bytes; expected 0 or more, like 2GiB")
    return int(value)


def as_byte_count(value: float | str | None, name: str = "memory") -> int | None:
    """A number of bytes from a number or a text; None stays None.

    Raises ``UsageError`` for any other value; ``name`` is the name of the argument in the message.

    >>> as_byte_count("2GiB"), as_byte_count(2e9), as_byte_count(None)
    (2147483648, 2000000000, None)
    """
    if value is None:
        return None
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} is {value!r}; expected a whole number of bytes or a string like '2GiB'")
    if not 0 <= int(value) <= LARGEST:
        raise UsageError(
            f"{name} is {value!r}, which is not a valid number of bytes; expected 0 or more, or a string like '2GiB'"
        )
    return int(value)


def human_bytes(number: int, rounding: Callable[[float], int] = round) -> str:
    """A number of bytes with three digits and a unit, rounded by ``rounding``.

    >>> import math
    >>> human_bytes(1536), human_bytes(12), human_bytes(1025, math.ceil), human_bytes(1033, math.floor)
    ('1.5 KiB', '12 B', '1.01 KiB', '1 KiB')
    """
    if number < 1024:
        return f"{number} B"
    power = min((number.bit_length() - 1) // 10, len(_UNITS))
    value = number / 1024**power
    if rounding(value) >= 1024 and power < len(_UNITS):
        power, value = power + 1, value / 1024
    scale = 10.0 ** max(0, 3 - len(str(int(value))))
    rounded = rounding(value * scale) / scale
    return f"{rounded:g} {_UNITS[power - 1]}"


def rough_duration_text(seconds: float) -> str:
    """A duration in words with at most two digits: ``40 s``, ``3 min``, ``2.5 h``, ``12 days``."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size or (unit == "h" and seconds >= size):
            return f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{float(f'{seconds:.2g}'):g} s"  # not 1e+02
