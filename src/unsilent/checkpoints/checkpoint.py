"""`Checkpoint`: its tensors by name, reads of single elements, and the bytes that a fault changes."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from unsilent.basics.closing import Closing
from unsilent.basics.errors import UsageError, check_name, unknown_name_error
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.content import content_parts
from unsilent.checkpoints.formats.known import Format, format_of
from unsilent.checkpoints.names import free_name
from unsilent.checkpoints.stored_tensors import Block, Ints, Patch, StoredTensor, words_from_bytes
from unsilent.faults.codecs import Array
from unsilent.faults.receipts import AppliedFault, Receipt
from unsilent.faults.record import Fault

# Every tensor may be a view of the same bytes, and a view may repeat one element 2^60 times, so that a file of a few
# hundred bytes could take years to read.

MOST_TIMES = 16
"""Largest total size of a checkpoint's tensors, in multiples of the size of its files."""
LEAST_BYTES = 2**28
"""Bytes that the tensors may have in addition, for small checkpoints."""


def without_excess(tensors: Iterable[StoredTensor], files: CheckpointFiles) -> Iterator[StoredTensor]:
    """Yield the tensors, and mark those as unreadable that exceed a plausible total size.

    A damaged file may claim the same bytes for many tensors. Such tensors are only listed; tensors with packed elements do not
    count.
    """
    left, known = LEAST_BYTES, set[str]()
    for tensor in tensors:
        for file in {block.file for block in tensor.blocks} - known:
            known.add(file)
            left += MOST_TIMES * files.size(file)
        size = tensor.nbytes
        if not tensor.blocks or any(block.packing is not None for block in tensor.blocks):
            yield tensor
        elif size <= left:
            left -= size
            yield tensor
        else:
            why = f"it repeats the bytes of its file to {size:,} bytes in all, which no checkpoint does"
            yield replace(tensor, blocks=(), obstacle=why)


CHECKSUMS = ("stale", "fixed")
"""Checksums over a changed byte stay as they are (a fault in storage) or are made to fit (a fault in memory, before saving)."""


class Checkpoint(Closing):
    """A checkpoint that is open for reading; no tensor is loaded until it is read.

    Args:
        path: A file or folder.
        known_format: A format to use; by default the format is determined from the files.

    Attributes:
        format: Name of its format.
        tensors: Tensors and numbers by name, in the file's order.
        unread_files: Names of the files of a folder that the format does not read.

    Raises:
        UsageError: the checkpoint is damaged, or its format is not known.
    """

    def __init__(self, path: str | Path, known_format: Format | None = None) -> None:
        self.files = CheckpointFiles(path)
        self.path = self.files.root
        try:
            known = format_of(self.files) if known_format is None else format_of(self.files, [known_format])
            self.format = known.name
            with _without_collections():
                listed = without_excess(known.tensors(self.files), self.files)
                self.tensors: Mapping[str, StoredTensor] = MappingProxyType(_by_name(listed))
            self.unread_files = self.files.unused()
        except BaseException:
            self.files.close()
            raise

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.files.close()

    def tensor(self, name: str) -> StoredTensor:
        """The tensor with a name (``model/fc.weight``) or a site (``file:model/fc.weight``).

        Raises ``UsageError`` if there is no such tensor.
        """
        result = self.tensors.get(name.removeprefix("file:"))
        if result is None:
            raise unknown_name_error(f"tensor in {self.path}:", name.removeprefix("file:"), self.tensors)
        return result

    def select(self, globs: Sequence[str] = (), sections: Sequence[str] = ()) -> list[StoredTensor]:
        """The tensors whose name matches a glob and that belong to one of the sections, in the file's order.

        Without globs, or without sections, all of them are selected.

        A glob is compared with the whole name and with the name within its section. Raises ``UsageError`` for a glob
        or section that selects nothing.
        """
        known = {tensor.section for tensor in self.tensors.values()}
        for section in sections:
            check_name(f"section in {self.path}:", section, known)
        result = [t for t in self.tensors.values() if not sections or t.section in sections]
        for glob in globs:
            if not any(fits(tensor, glob) for tensor in result):
                raise unknown_name_error(f"tensor in {self.path}:", glob, [t.name for t in result])
        return [t for t in result if not globs or any(fits(t, glob) for glob in globs)]

    def read(self, tensor: StoredTensor, elements: Ints) -> Array:
        """The bits of some elements of a tensor, as unsigned integers.

        Args:
            tensor: A tensor of this checkpoint.
            elements: int64[n], flat C-order indices.

        Returns:
            unsigned[n], of the dtype's word dtype.
        """
        result = np.zeros(len(elements), tensor.codec.word_dtype)
        for block, places, positions in tensor.locate(elements):
            result[places] = words_from_bytes(tensor, self._elements(tensor, block, positions))
        return result

    def content(self, tensor: StoredTensor) -> Iterator[memoryview]:
        """Yield all elements of a tensor in C order, least significant byte first, in parts of a few MiB.

        Raises ``UsageError`` if they cannot be read.
        """
        return content_parts(self.files, tensor)

    def editable_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """For each file, the byte ranges of its editable tensors and of the checksums that cover them.

        A range is its first byte and the byte after its last.
        """
        by_file: dict[str, list[tuple[int, int]]] = {}
        for tensor in self.tensors.values():
            for block in () if tensor.reason_not_editable else tensor.blocks:
                places = (place for checksum in block.checksums for place in checksum.places)
                for file, offset, length in ((block.file, block.offset, tensor.stored_size(block)), *places):
                    by_file.setdefault(file, []).append((offset, offset + length))
        result: dict[str, list[tuple[int, int]]] = {}
        for file, ranges in by_file.items():
            joined = result.setdefault(file, [])
            for begin, end in sorted(ranges):
                if joined and begin <= joined[-1][1]:
                    joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
                else:
                    joined.append((begin, end))
        return result

    def plan(self, faults: Iterable[Fault], checksums: str = "stale") -> tuple[list[Patch], Receipt]:
        """The byte changes that some faults need, and the receipt of the faults; nothing is written.

        Args:
            faults: Resolved faults with sites of this checkpoint (``file:…``); later faults act on the results of earlier ones.
            checksums: One of `CHECKSUMS`.

        Raises:
            UsageError: a fault does not fit its tensor or into its packed bytes, or the tensor is not editable.
        """
        return _Plan(self).make(faults, checksums)

    def _elements(self, tensor: StoredTensor, block: Block, positions: Ints) -> bytes:
        """The bytes of some elements of one block, concatenated."""
        size = tensor.item_size
        if block.packing is not None:
            content = self.unpacked(block)
            return b"".join(content[p * size : (p + 1) * size] for p in positions.tolist())
        offsets = (block.offset + positions * size).tolist()
        return b"".join(self.files.read(block.file, offset, size) for offset in offsets)

    def unpacked(self, block: Block) -> bytes:
        """The bytes of the elements of a packed block."""
        assert block.packing is not None
        return block.packing.unpack(self.files.read(block.file, block.offset, block.packed_size))


def _by_name(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by unique name: a repeated name gets a number."""
    result: dict[str, StoredTensor] = {}
    used: Counter[str] = Counter()
    for tensor in tensors:
        name = free_name(tensor.name, result, used)
        result[name] = tensor if name == tensor.name else replace(tensor, name=name)
    return result


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Context in which Python's cyclic garbage collector is off, which makes creating many objects faster."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Plan:
    """Collects the patches of single elements, then those of packed blocks and checksums."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.by_place: dict[tuple[str, int], Patch] = {}
        self.packed: dict[tuple[str, int], tuple[Block, bytes, bytearray]] = {}
        self.blocks: dict[tuple[str, int], Block] = {}

    def make(self, faults: Iterable[Fault], checksums: str) -> tuple[list[Patch], Receipt]:
        check_name("treatment of checksums", checksums, CHECKSUMS)
        receipt = Receipt(tuple(self._apply(fault) for fault in faults))
        patches = list(self.by_place.values())
        for block, before, after in self.packed.values():
            assert block.packing is not None
            stored = block.packing.pack(bytes(after), block.packed_size) if before != after else None
            if stored is not None:
                old = self.checkpoint.files.read(block.file, block.offset, block.packed_size)
                patches.append(Patch(block.file, block.offset, old, stored))
        patches = _merged_patches([patch for patch in patches if patch.before != patch.after])
        if checksums == "fixed":
            levels = [block.checksums for block in self.blocks.values()]
            # Counted from the outermost, which blocks with and without a checksum of their own have in common.
            for level in range(max(map(len, levels), default=0), 0, -1):
                for checksum in dict.fromkeys(every[-level] for every in levels if level <= len(every)):
                    patches = _merged_patches([*patches, *checksum.update(patches, self.checkpoint.files.read)])
        return patches, receipt

    def _apply(self, fault: Fault) -> AppliedFault:
        tensor = self.checkpoint.tensor(fault.site)
        if tensor.reason_not_editable:
            raise UsageError(
                f"{tensor.name!r} in {self.checkpoint.path} cannot be edited: {tensor.reason_not_editable}"
            )
        if (fault.dtype, fault.shape) != (tensor.dtype, tensor.shape):
            reordered = sorted(fault.shape) == sorted(tensor.shape) and fault.shape != tensor.shape
            raise UsageError(
                f"the fault is for {fault.dtype}{list(fault.shape)}, but {tensor.name!r} in {self.checkpoint.path} is "
                f"{tensor.dtype}{list(tensor.shape)}; give a fault made for this checkpoint"
                + (", or the order of the axes with checkpoint replay --axes" if reordered else "")
            )
        before = self._words(tensor, fault.elements)
        source = self._words(tensor, fault.operands) if fault.operation == "copy_from" else None
        after = fault.apply(before, source)
        for block, places, positions in tensor.locate(fault.elements):
            self._write(tensor, block, positions, after[places])
        return AppliedFault(fault, before, after)

    def _words(self, tensor: StoredTensor, elements: Ints) -> Array:
        """The words of some elements after the faults that were planned before."""
        result = self.checkpoint.read(tensor, elements)
        size = tensor.item_size
        for block, places, positions in tensor.locate(elements):
            packed = self.packed.get((block.file, block.offset))
            for place, position in zip(places.tolist(), positions.tolist(), strict=True):
                patch = self.by_place.get((block.file, block.offset + position * size))
                if packed is not None:
                    changed = bytes(packed[2][position * size : (position + 1) * size])
                    result[place] = words_from_bytes(tensor, changed)[0]
                elif patch is not None:
                    result[place] = words_from_bytes(tensor, patch.after)[0]
        return result

    def _write(self, tensor: StoredTensor, block: Block, positions: Ints, words: Array) -> None:
        size, new, key = tensor.item_size, words.astype(tensor.file_dtype).tobytes(), (block.file, block.offset)
        self.blocks[key] = block
        if block.packing is not None:
            if key not in self.packed:
                content = self.checkpoint.unpacked(block)
                self.packed[key] = (block, content, bytearray(content))
            for place, position in enumerate(positions.tolist()):
                self.packed[key][2][position * size : (position + 1) * size] = new[place * size : (place + 1) * size]
            return
        for place, offset in enumerate((block.offset + positions * size).tolist()):
            earlier = self.by_place.get((block.file, offset))
            before = earlier.before if earlier else self.checkpoint.files.read(block.file, offset, size)
            after = new[place * size : (place + 1) * size]
            self.by_place[block.file, offset] = Patch(block.file, offset, before, after)


def fits(tensor: StoredTensor, glob: str) -> bool:
    """Whether a glob selects a tensor: by its whole name, or by its name within the section."""
    names = (tensor.name, tensor.name.partition("/")[2])
    return any(name == glob or fnmatch.fnmatchcase(name, glob) for name in names)


def _merged_patches(patches: list[Patch]) -> list[Patch]:
    """The patches sorted by position, with adjacent ones joined.

    Raises ``UsageError`` if two patches change the same byte.
    """
    result: list[Patch] = []
    for patch in sorted(patches, key=lambda p: p[:2]):
        last = result[-1] if result else None
        end = last.offset + len(last.after) if last else 0
        if last is not None and last.file == patch.file and patch.offset < end:
            raise UsageError(
                f"two faults change the byte {patch.offset:,} of one file; inject them one after the other"
            )
        if last is not None and last.file == patch.file and patch.offset == end:
            result[-1] = Patch(last.file, last.offset, last.before + patch.before, last.after + patch.after)
        else:
            result.append(patch)
    return result
