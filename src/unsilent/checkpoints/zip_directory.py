"""The directory of a zip file: the positions of each entry's content and of every copy of its CRC-32.

Follows PKWARE's APPNOTE 6.3: end of central directory, its 64-bit form, central directory, local headers and data descriptors.
No content is unpacked. All positions are checked against the file's end, and overlapping contents are refused. Archives that
loaders read in different ways are refused as well: two end records that disagree, an entry that is named twice, parts on other
disks. An archive may begin inside a larger file, as in a sharded checkpoint.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from functools import cached_property

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import MOST_METADATA, CheckpointFiles
from unsilent.checkpoints.crc32 import crc_change
from unsilent.checkpoints.stored_tensors import Patch, Read

_END = struct.Struct("<4s4H2LH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_DESCRIPTOR = b"PK\x07\x08"
_FULL_32, _FULL_16 = 0xFFFFFFFF, 0xFFFF
_HAS_DESCRIPTOR = 1 << 3
_ENCRYPTED = 1 | 1 << 5 | 1 << 6 | 1 << 13
"""Flags of content that is encrypted in any way or is a patch of other content."""
_FOLDER = 0x10
"""External attribute of MS-DOS; loaders return nothing for such an entry."""
STORED, DEFLATED = 0, 8
MOST_ENTRIES = 300_000
"""Largest number of entries. A checkpoint has one for each tensor; each takes about a kilobyte of memory and 10 us."""


@dataclass(frozen=True)
class ZipEntry:
    """One entry of an archive.

    Attributes:
        name: Name as the archive has it.
        file: Name of the checkpoint's file with the archive.
        offset: Position of its content in that file, in bytes.
        size: Size of the stored content in bytes.
        unpacked_size: Size of the unpacked content in bytes.
        method: Compression method: `STORED` or `DEFLATED`.
        crc: CRC-32 of the content; also 0 if the writer computed none.
        crc_offsets: Positions in the file of the copies of the CRC-32, four bytes each, least significant first.
    """

    name: str
    file: str
    offset: int
    size: int
    unpacked_size: int
    method: int
    crc: int
    crc_offsets: tuple[int, ...]

    @cached_property
    def checksum(self) -> ZipChecksum:
        """The entry's CRC-32, which covers its content."""
        return ZipChecksum(self)


@dataclass(frozen=True)
class ZipChecksum:
    """The CRC-32 of an entry."""

    entry: ZipEntry

    @property
    def name(self) -> str:
        """Name of the checksum, for messages."""
        return f"the CRC-32 of {self.entry.name}"

    @property
    def places(self) -> tuple[tuple[str, int, int], ...]:
        """See `unsilent.checkpoints.stored_tensors.Checksum`."""
        return tuple((self.entry.file, offset, 4) for offset in self.entry.crc_offsets)

    def update(self, patches: list[Patch], read: Read) -> list[Patch]:
        """See `unsilent.checkpoints.stored_tensors.Checksum`. Costs nothing that grows with the entry's size."""
        entry, crc = self.entry, self.entry.crc
        if not crc:
            return []  # the writer computed none, and no loader checks it
        end = entry.offset + entry.size
        for patch in patches:
            # Adjacent patches are joined, so a patch may begin before the entry or end after it.
            low, high = max(patch.offset, entry.offset), min(patch.offset + len(patch.after), end)
            if patch.file == entry.file and low < high:
                part = slice(low - patch.offset, high - patch.offset)
                difference = bytes(a ^ b for a, b in zip(patch.before[part], patch.after[part], strict=True))
                crc ^= crc_change(difference, end - high)
        if crc == entry.crc:
            return []
        after = crc.to_bytes(4, "little")
        stored = entry.crc.to_bytes(4, "little")
        held = [offset for offset in entry.crc_offsets if read(entry.file, offset, 4) == stored]
        return [Patch(entry.file, offset, stored, after) for offset in held]


class ZipDirectory:
    """The entries of one archive.

    Attributes:
        names: Names of the entries, as written in the directory.

    Args:
        files: The checkpoint's files.
        file: The file that is or contains the archive.
        start, size: The archive's bytes within that file; by default all.

    Raises:
        UsageError: it is not a zip file, or it is damaged.
    """

    def __init__(self, files: CheckpointFiles, file: str, start: int = 0, size: int | None = None) -> None:
        self._files, self._file, self._start = files, file, start
        self._size = files.size(file) - start if size is None else size
        self._where = files.shown(file)
        self._records = self._central()
        self.names = [name for _, _, name, _ in self._records]

    @cached_property
    def entries(self) -> dict[str, ZipEntry]:
        """The entries by name, each checked against its local header.

        Raises ``UsageError`` if the archive is damaged.
        """
        entries = [self._entry(*record) for record in self._records]
        result = {entry.name: entry for entry in entries}
        if len({name.lower() for name in result}) != len(entries):  # some loaders ignore the case of names
            raise self._damage_error("two entries have the same name")
        parts = sorted((e.offset, e.offset + e.size, e.name) for e in entries if e.size)
        for (_, end, name), (begin, _, next_name) in itertools.pairwise(parts):
            if begin < end:
                raise self._damage_error(f"the entries {ascii(name)[:60]} and {ascii(next_name)[:60]} overlap")
        return result

    def content(self, entry: ZipEntry, what: str) -> bytes:
        """The content of an uncompressed entry.

        Raises ``UsageError`` if the entry is compressed or too large.
        """
        if entry.method != STORED or entry.size != entry.unpacked_size:
            raise self._damage_error(f"{ascii(entry.name)[:60]} is compressed; expected {what} stored as it is")
        if entry.size > MOST_METADATA:
            raise self._damage_error(
                f"{ascii(entry.name)[:60]} has {entry.size:,} bytes; {what} has {MOST_METADATA:,} at most"
            )
        return self._files.read(entry.file, entry.offset, entry.size)

    def _damage_error(self, problem: str) -> UsageError:
        return UsageError(f"{self._where} is not a usable zip file: {problem}")

    def _read(self, offset: int, length: int) -> bytes:
        """Read bytes of the archive."""
        if offset < 0 or length < 0 or offset + length > self._size:
            raise self._damage_error("it names bytes beyond its end; it is truncated or damaged")
        return self._files.read(self._file, self._start + offset, length)

    def _central(self) -> list[tuple[tuple[int, ...], int, str, bytes]]:
        """Fields, position, name and extra field of every entry of the central directory."""
        length, begin, count = self._end()
        if length > MOST_METADATA or count > MOST_ENTRIES:
            raise self._damage_error(
                f"its directory has {count:,} entries in {length:,} bytes; at most {MOST_ENTRIES:,} in {MOST_METADATA:,} are read"
            )
        read_entries: list[tuple[tuple[int, ...], int, str, bytes]] = []
        directory, at = self._read(begin, length), 0
        while at + _CENTRAL.size <= length and len(read_entries) < count:
            signature, *fields = _CENTRAL.unpack_from(directory, at)
            name_length, extra_length, comment_length = fields[9], fields[10], fields[11]
            if signature != b"PK\x01\x02":
                raise self._damage_error("its directory has an entry that is none")
            after = at + _CENTRAL.size
            name = directory[after : after + name_length].decode("utf-8", "backslashreplace")
            extra = directory[after + name_length : after + name_length + extra_length]
            read_entries.append((tuple(fields), begin + at, name, extra))
            at = after + name_length + extra_length + comment_length
        if at != length or len(read_entries) != count:
            raise self._damage_error("its directory is cut off, or has more entries than it says")
        return read_entries

    def _end(self) -> tuple[int, int, int]:
        """Length and offset of the central directory, and its number of entries."""
        tail_length = min(self._size, _END.size + _FULL_16)
        tail = self._read(self._size - tail_length, tail_length)
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > len(tail):
            raise self._damage_error("it has no end record; it is truncated, or no zip file")
        _, disk, directory_disk, here, count, length, begin, _ = _END.unpack_from(tail, at)
        end = self._size - tail_length + at
        wide = self._end_64(end)
        if wide is not None:
            for narrow, value, full in zip((length, begin, count), wide, (_FULL_32, _FULL_32, _FULL_16), strict=True):
                if narrow not in (value, full):
                    raise self._damage_error("its end records disagree")
            length, begin, count = wide
        elif _FULL_32 in (length, begin) or count == _FULL_16:
            raise self._damage_error("its 64-bit end record is missing")
        if disk or directory_disk or here not in (count, _FULL_16) or begin + length > end:
            raise self._damage_error("its end record is damaged")
        return length, begin, count

    def _end_64(self, end: int) -> tuple[int, int, int] | None:
        """Length, offset and number of entries from the 64-bit end record; None if there is none."""
        if end < _END_64_LOCATOR.size:
            return None
        locator = self._read(end - _END_64_LOCATOR.size, _END_64_LOCATOR.size)
        signature, disk, where, disks = _END_64_LOCATOR.unpack(locator)
        if signature != b"PK\x06\x07":
            return None
        record = _END_64.unpack(self._read(where, _END_64.size))
        signature, size, _, _, disk_entries, directory, here, count, length, begin = record
        is_whole = (disk, disks, disk_entries, directory) == (0, 1, 0, 0)
        if signature != b"PK\x06\x06" or size < _END_64.size - 12 or not is_whole:
            raise self._damage_error("its 64-bit end record is damaged")
        if here != count:
            raise self._damage_error("it is one of several parts")
        return length, begin, count

    def _entry(self, fields: tuple[int, ...], central: int, name: str, extra: bytes) -> ZipEntry:
        """One entry, from its central record and its local header."""
        flags, method, crc, packed, unpacked = fields[2], fields[3], fields[6], fields[7], fields[8]
        header = fields[15]
        unpacked, packed, header = self._wide(extra, (unpacked, packed, header))
        local = _LOCAL.unpack(self._read(header, _LOCAL.size))
        if local[0] != b"PK\x03\x04":
            raise self._damage_error(f"the entry {ascii(name)[:60]} has no header where the directory says")
        if self._read(header + _LOCAL.size, local[9]).decode("utf-8", "backslashreplace") != name:
            raise self._damage_error(f"the entry {ascii(name)[:60]} has another name in its header")
        if fields[12] or (packed and fields[14] & _FOLDER):
            raise self._damage_error(f"the entry {ascii(name)[:60]} is in another part, or marked as a folder")
        if method not in (STORED, DEFLATED) or (method == STORED and packed != unpacked):
            raise self._damage_error(f"the entry {ascii(name)[:60]} has two sizes, or an unknown compression")
        if flags & _ENCRYPTED:
            raise self._damage_error(f"the entry {ascii(name)[:60]} is encrypted")
        begin = header + _LOCAL.size + local[9] + local[10]
        self._read(begin + packed, 0)
        places = [central + 16]
        if flags & _HAS_DESCRIPTOR:
            head = self._read(begin + packed, min(8, self._size - begin - packed))
            places.append(begin + packed + (4 if head[:4] == _DESCRIPTOR else 0))
        else:
            places.append(header + 14)
        crc_offsets = tuple(self._start + place for place in places)
        return ZipEntry(name, self._file, self._start + begin, packed, unpacked, method, crc, crc_offsets)

    def _wide(self, extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
        """The given sizes and offset, with the overflowed ones replaced from the 64-bit extra field."""
        at, wide = 0, b""
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            if kind == 1:
                wide = extra[at + 4 : at + 4 + length]
            at += 4 + length
        result = []
        for value in values:
            if value == _FULL_32:
                if len(wide) < 8:
                    raise self._damage_error("a 64-bit size is missing")
                value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
            result.append(value)
        return result[0], result[1], result[2]
