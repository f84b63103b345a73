"""HDF5's chunk filters Fletcher-32, shuffle and deflate (gzip), compatible with libhdf5 2.0.

A filter transforms the bytes of a chunk when it is written, in the order of the pipeline, and back when it is read.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.stored_tensors import Patch, Read

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
CHECKSUM_BYTES = 4
_PART = 1 << 20
"""Number of bytes that are summed at once; it must be even."""


_MOST_TRIED = 2**30
"""Largest number of bytes that are compressed to find a form that is short enough."""


class Fletcher32:
    """Computes HDF5's Fletcher-32 of bytes that arrive in parts.

    The checksum consists of the sum of 16-bit words, more significant byte first, and the sum of these partial sums, modulo
    65535; zero stays zero, and any other multiple of 65535 becomes 65535. A last odd byte is the more significant byte of a word.
    """

    def __init__(self) -> None:
        self._first = self._second = 0
        self._any = False

    def update(self, part: bytes) -> None:
        """Add bytes; their number must be even except in the last part."""
        for begin in range(0, len(part), _PART):
            piece = part[begin : begin + _PART]
            words = np.frombuffer(piece + b"\0" * (len(piece) % 2), ">u2").astype(np.uint64)
            weights = np.arange(len(words), 0, -1, dtype=np.uint64)
            self._second += self._first * len(words) + int(words @ weights)
            self._first += int(words.sum())
            self._any = self._any or bool(self._first)
            self._first, self._second = self._first % 65535, self._second % 65535

    def stored(self) -> bytes:
        """The checksum as it is stored in a file, least significant byte first."""
        zero = 65535 if self._any else 0
        return ((self._second or zero) << 16 | (self._first or zero)).to_bytes(CHECKSUM_BYTES, "little")


def fletcher32(content: bytes) -> bytes:
    """HDF5's Fletcher-32 of some bytes, as it is stored in a file.

    >>> fletcher32(bytes([1, 0, 0, 2])).hex()
    '02010202'
    """
    result = Fletcher32()
    result.update(content)
    return result.stored()


@dataclass(frozen=True)
class ChunkChecksum:
    """The Fletcher-32 at the end of a chunk; it covers all bytes before it.

    Attributes:
        file: The checkpoint's file.
        offset, size: Position and number of the covered bytes; the checksum follows them.
        tensor: Name of the chunk's tensor, for messages.
    """

    file: str
    offset: int
    size: int
    tensor: str

    @property
    def name(self) -> str:
        """Name of the checksum, for messages."""
        return f"the Fletcher-32 of a chunk of {self.tensor}"

    @property
    def places(self) -> tuple[tuple[str, int, int], ...]:
        """See `unsilent.checkpoints.stored_tensors.Checksum`."""
        return ((self.file, self.offset + self.size, CHECKSUM_BYTES),)

    def update(self, patches: list[Patch], read: Read) -> list[Patch]:
        """See `unsilent.checkpoints.stored_tensors.Checksum`. Reads the chunk."""
        end = self.offset + self.size
        of_file = [patch for patch in patches if patch.file == self.file]
        inside = [patch for patch in of_file if patch.offset < end and patch.offset + len(patch.after) > self.offset]
        if not inside:
            return []
        total = Fletcher32()
        for begin in range(self.offset, end, _PART):
            part = bytearray(read(self.file, begin, min(_PART, end - begin)))
            for patch in inside:
                low, high = max(patch.offset, begin), min(patch.offset + len(patch.after), begin + len(part))
                if low < high:
                    part[low - begin : high - begin] = patch.after[low - patch.offset : high - patch.offset]
            total.update(bytes(part))
        before = read(self.file, end, CHECKSUM_BYTES)
        return [Patch(self.file, end, before, total.stored())] if before != total.stored() else []


@dataclass(frozen=True)
class ChunkPacking:
    """The filters of a chunk, as a way of packing its elements.

    If one of them is a Fletcher-32 whose bytes are packed, it is computed again with the elements, as a writer does.

    Attributes:
        filters: Filters in the order of writing; `DEFLATE`, `SHUFFLE` and `FLETCHER32` occur at most once each.
        size: Size in bytes of the elements of a chunk.
        shuffled_item: Size in bytes of a shuffled item.
        tensor: Name of the chunk's tensor, for messages.
    """

    filters: tuple[int, ...]
    size: int
    shuffled_item: int
    tensor: str

    def unpack(self, stored: bytes) -> bytes:
        """See `unsilent.checkpoints.stored_tensors.Packing`."""
        content = stored
        for place in range(len(self.filters) - 1, -1, -1):
            kind = self.filters[place]
            if kind == DEFLATE:
                content = self._inflated_bytes(content, self.size + self._checksum_bytes(self.filters[:place]))
            elif kind == SHUFFLE:
                content = _shuffled_bytes(content, self.shuffled_item, back=True)
            else:
                content, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
                if fletcher32(content) != checksum:
                    raise self._damage_error("its Fletcher-32 does not fit")
        if len(content) != self.size:
            raise self._damage_error(f"it unpacks to {len(content):,} bytes instead of {self.size:,}")
        return content

    def pack(self, content: bytes, stored_size: int) -> bytes:
        """See `unsilent.checkpoints.stored_tensors.Packing`."""
        result = content
        for place, kind in enumerate(self.filters):
            if kind == DEFLATE:
                result = self._deflated_bytes(result, stored_size - self._checksum_bytes(self.filters[place + 1 :]))
            elif kind == SHUFFLE:
                result = _shuffled_bytes(result, self.shuffled_item)
            else:
                result += fletcher32(result)
        assert len(result) == stored_size
        return result

    @staticmethod
    def _checksum_bytes(filters: tuple[int, ...]) -> int:
        return CHECKSUM_BYTES * filters.count(FLETCHER32)

    def _damage_error(self, problem: str) -> UsageError:
        return UsageError(f"a chunk of {self.tensor} is damaged: {problem}; restore the file from a copy")

    def _inflated_bytes(self, stored: bytes, size: int) -> bytes:
        """Decompress a zlib stream as libhdf5 does, to at most ``size`` bytes; later bytes are ignored."""
        stream = zlib.decompressobj()
        try:
            content = stream.decompress(stored, size)
            content += stream.decompress(stream.unconsumed_tail, 1)
        except zlib.error as error:
            raise self._damage_error(f"zlib says {error}") from None
        if not stream.eof or len(content) != size:
            raise self._damage_error(f"it does not unpack to {size:,} bytes")
        return content

    def _deflated_bytes(self, content: bytes, size: int) -> bytes:
        """A zlib stream that is padded with zeros to exactly ``size`` bytes; libhdf5 ignores the padding."""
        shortest = math.inf
        for stream in _zlib_streams(content):
            if len(stream) <= size:
                return stream.ljust(size, b"\0")
            shortest = min(shortest, len(stream))
        raise UsageError(
            f"a changed chunk of {self.tensor} cannot be compressed to the {size:,} bytes that it has in the file "
            f"(at best {shortest:,}); choose another element or bit, or save the file without compression"
        )


def _zlib_streams(content: bytes) -> Iterator[bytes]:
    """Yield the content compressed with different settings, those that usually give the smallest first.

    Less memory gives shorter blocks with their own codes, which suits shuffled bytes.
    """
    plain = itertools.product(range(9, 0, -1), (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED), (9, 6, 4, 1, 5, 3, 2))
    most = max(10, _MOST_TRIED // max(len(content), 1))
    for memory, strategy, level in itertools.islice(itertools.chain(plain, [(9, zlib.Z_HUFFMAN_ONLY, 9)]), most):
        stream = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS, memory, strategy)
        yield stream.compress(content) + stream.flush()
    yield zlib.compress(content, 0)


def _shuffled_bytes(content: bytes, item: int, back: bool = False) -> bytes:
    """The bytes reordered by HDF5's shuffle filter: the first byte of each item, then the second, and so on.

    Bytes after the last whole item keep their positions. ``back`` restores the original order.
    """
    count = len(content) // item
    whole = np.frombuffer(content, np.uint8, count * item)
    return whole.reshape((item, count) if back else (count, item)).T.tobytes() + content[count * item :]
