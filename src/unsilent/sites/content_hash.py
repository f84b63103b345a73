"""Hashes of tensors' bits, computed on the tensors' own device to prove that nothing has changed.

On a device the hash is a sum of integers, so it does not depend on the order of the additions and equals the hash on a CPU. The
bytes of a tensor are read as 32-bit words, the last one padded with zeros, in chunks of `CHUNK` words:

    hash = sum over chunks c of r(c) * (sum over words i of the chunk of m(w(c, i) * k(i)))  modulo 2^64

with odd factors ``r(c)`` and ``k(i)``, and m(x) = x xor (x >> 32). Multiplication by an odd number and m are both one-to-one
modulo 2^64. So if one word changes, its term and the sum change: **every change within one word is noticed**, including every
single flipped bit. Changes of several words cancel only by chance, with probability about 2^-64 for words that do not depend on
the factors; without m, flips of two high bits would cancel with probability 2^-32. For tensors on the CPU xxh3 is used,
which is several times faster and misses changes with a probability of the same size, but has no guarantee for single words.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from unsilent.sites.memory import content_of

CHUNK = 1 << 20
"""Number of words in a chunk, whose products take 8 MiB."""
FACTORS_SEED = 0x5EED
MASK = 2**64 - 1
UPPER = 2**32 - 1


class ContentHash(NamedTuple):
    """Hash of a tensor: its dtype, its shape, and a 64-bit hash of its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int


def content_hashes(tensors: Iterable[Tensor]) -> list[ContentHash]:
    """A hash for each tensor, computed by `device_hash`, or by xxh3-64 of the bytes on the CPU."""
    tensors = list(tensors)
    bits: dict[int, int] = {}
    begun: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            bits[number] = xxhash.xxh3_64_intdigest(content_of(tensor))
        else:
            begun.setdefault(tensor.device, []).append((number, device_hash(tensor)))
    for pairs in begun.values():  # one copy for each device
        values = torch.stack([value for _, value in pairs]).cpu().tolist()
        bits.update((number, value & MASK) for (number, _), value in zip(pairs, values, strict=True))
    return [ContentHash(tensor.dtype, tuple(tensor.shape), bits[number]) for number, tensor in enumerate(tensors)]


def device_hash(tensor: Tensor) -> Tensor:
    """The hash of a tensor's bits in logical order, as an int64 scalar on its device, without synchronisation."""
    words = _words_in_order(tensor)
    factors = _factors(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, chunk in enumerate(words.split(CHUNK)):
        terms = chunk.to(torch.int64).mul_(factors[: len(chunk)])
        terms.bitwise_xor_((terms >> 32).bitwise_and_(UPPER))  # the shift of a signed number copies its sign bit
        total += terms.sum() * chunk_factor(number)
    return total


def chunk_factor(number: int) -> int:
    """The odd factor of the chunk with this number, a pseudorandom signed 64-bit number (SplitMix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor & MASK
    mixed = (mixed ^ (mixed >> 31)) | 1
    return mixed - 2**64 if mixed >= 2**63 else mixed


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """The odd factors of the words in a chunk, int64[CHUNK]."""
    drawn = np.random.Generator(np.random.PCG64(FACTORS_SEED)).integers(0, 2**64, CHUNK, np.uint64, endpoint=False)
    return torch.from_numpy((drawn | np.uint64(1)).view(np.int64)).to(device)


def _words_in_order(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in logical order as int32 words, padded with zeros; a view if possible."""
    dense = tensor.detach()
    dense = torch.view_as_real(dense.resolve_conj()) if dense.dtype.is_complex else dense
    dense = dense.contiguous()
    data = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    left = -data.numel() % 4
    if left:
        data = torch.cat([data, data.new_zeros(left)])
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)
