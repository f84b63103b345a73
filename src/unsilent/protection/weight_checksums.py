"""Checksums of blocks of memory, from which one or two flipped bits of a block can be located.

The checksum of a block of 64-bit signed words w_i, modulo 2**64:

    sum of f_i w_i + g_i floor(w_i / 2**32)

so that the lower half of a word counts times f_i and the upper half times h_i = 2**32 f_i + g_i. All f_i and h_i are odd and
differ from one another modulo 2**32, whatever their signs. Every change within one half of a word, and every two flipped bits,
therefore change the checksum. Any other change is missed with a probability of about 2**-64, or 2**-32 if all flipped bits are
the highest of their halves. A flipped bit changes it by plus or minus 2**b times a factor, and is found from the difference
alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MOST_WORDS = 256


class Correction(NamedTuple):
    """A block of memory after the correction of flipped bits.

    Attributes:
        words: int64[words].
        flips: Number of bits that were flipped, 1 or 2.
    """

    words: Tensor
    flips: int


@lru_cache(maxsize=32)
def factors(words: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The factors f and g of the checksum for blocks of this many words, int64[words] each.

    The same in every process.
    """
    generator = torch.Generator().manual_seed(seed)
    lower, upper = torch.randint(-(2**62), 2**62, (2, MOST_WORDS), generator=generator)[:, :words] * 2 + 1
    return lower.to(device), (upper - (lower << 32)).to(device)


def checksums(words: Tensor, seed: int = 0) -> Tensor:
    """Checksum of each block, int64[blocks]; ``words`` has the blocks as rows.

    Args:
        seed: Seed of the factors; the factors of seed 0 have the properties above.
    """
    whole, upper = factors(words.shape[1], words.device, seed)
    return (words * whole).addcmul_(words >> 32, upper).sum(1)


def correct(words: Tensor, checksum: Tensor) -> Correction | None:
    """Correct one or two flipped bits so that the block has the checksum.

    Returns ``None`` if there is no such correction, or more than one.

    Args:
        words: int64[words], a block with another checksum.
        checksum: int64, checksum of the original block.
    """
    missing = checksum - checksums(words[None])[0]
    whole, upper = factors(len(words), words.device)
    bits = torch.arange(64, device=words.device)
    change = (whole[:, None] << bits) + torch.where(bits >= 32, upper[:, None] << (bits - 32).clamp(0), 0)
    is_set = (words[:, None] >> bits) & 1 == 1
    change = torch.where(is_set ^ (bits == 63), -change, change).flatten()  # the highest bit counts -2**63
    flipped = (change == missing).nonzero().flatten()[:2, None]
    if not len(flipped):
        ordered, places = change.sort()
        partner = torch.searchsorted(ordered, missing - change).clamp(max=len(ordered) - 1)
        pairs = torch.stack([torch.arange(len(change), device=words.device), places[partner]], 1)
        flipped = pairs[(ordered[partner] == missing - change) & (pairs[:, 0] < pairs[:, 1])]
    if len(flipped) != 1:
        return None
    right = words.clone()
    for place in flipped[0].tolist():
        right[place // 64] ^= torch.tensor(1, device=words.device) << place % 64
    return Correction(right, flipped.shape[1])


def xor_of(rows: Tensor) -> Tensor:
    """The XOR of all rows of an int64 tensor."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = torch.cat([rows[:half] ^ rows[half : 2 * half], rows[2 * half :]])
    return rows[0]
