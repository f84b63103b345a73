"""Updating the CRC-32 of a zip entry after a change of a few bytes, without reading all of it.

CRC-32 (ISO 3309, as in zip and zlib) is linear over GF(2) except for constants that cancel: for two contents of equal length
``crc(a) ^ crc(b)`` depends on ``a ^ b`` alone. Zero bytes before the first difference have no effect, and n zero bytes after it
multiply by x^(8n) modulo the polynomial, which takes log2(n) steps.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
"""Polynomial without its highest term, and reflected: bit 31 is the coefficient of x^0."""
_ONE = 1 << 31
_POWERS = 3 + 64


def crc_change(difference: bytes, bytes_after: int) -> int:
    """The mask to xor into a CRC-32 after ``difference`` was xor-ed into the content.

    Args:
        difference: The old bytes xor the new bytes.
        bytes_after: Number of unchanged bytes of the content after them.

    >>> old, new = b"abcdef", b"abXdef"
    >>> zlib.crc32(old) ^ crc_change(bytes([ord("c") ^ ord("X")]), 3) == zlib.crc32(new)
    True
    """
    # The CRC's initial value and final complement are the same for the difference and for zeros of the same length.
    change = zlib.crc32(difference) ^ zlib.crc32(bytes(len(difference)))
    return _times(change, _x_to_the(8 * bytes_after))


@lru_cache(maxsize=4096)
def _x_to_the(n: int) -> int:
    """The polynomial x^n modulo the CRC-32 polynomial."""
    result, bit = _ONE, 0
    squares = _squares()
    while n:
        if n & 1:
            result = _times(result, squares[bit])
        n >>= 1
        bit += 1
    return result


@lru_cache(maxsize=1)
def _squares() -> tuple[int, ...]:
    """The polynomials x^(2^k) modulo the CRC-32 polynomial, for k = 0, 1, 2 and so on."""
    result = [_ONE >> 1]
    for _ in range(_POWERS):
        result.append(_times(result[-1], result[-1]))
    return tuple(result)


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC-32 polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
