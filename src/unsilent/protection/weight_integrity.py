"""Finds and repairs corrupted weights, with a checksum for each block of memory and parity of groups of blocks.

Parameters and buffers are divided into blocks with a checksum each (`unsilent.protection.weight_checksums`). Blocks of one device
are assigned to groups in turn, so that neighbours in memory are in different groups. The parity of a group is the XOR of its
blocks.

- A single bad block of a group is restored bit for bit, whatever happened to it: it is the XOR of the parity and all other
  blocks.
- Among several bad blocks, those with one or two flipped bits are corrected by their checksums. If only one cannot be corrected,
  parity gives it.

Each group also has a digest, a sum of checksums with other factors. If the parity or the digest of a repaired group differs from
the original, all of its bad blocks are left unrepaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.protection.corrupted_weights import CorruptedWeights, repaired_weights
from unsilent.protection.weight_checksums import checksums, correct, xor_of
from unsilent.sites.modules import named_tensors, packed_weights

MEMORY_SHARE = 0.0085
"""Share of the weights' memory that checksums and parity may take."""
BLOCK_SIZES = (512, 1024, 2048)
"""Sizes of a block in bytes; with smaller blocks, more flipped bits can be corrected."""
_DIGEST_SEED = 1
_CHUNK_BYTES = 2**20
"""Bytes that are read at a time, to need little additional memory."""


class Block(NamedTuple):
    """A block of a tensor's memory.

    Attributes:
        tensor: Name of the tensor.
        start: First byte of the block.
        group: Parity group of the block.
    """

    tensor: str
    start: int
    group: int


class Repair(NamedTuple):
    """The result of a repair of bad blocks.

    Attributes:
        repaired: Blocks that again have the bits that they had when checksums were taken.
        refused: Blocks that were left unrepaired, because too much of their group or its parity is bad.
        corrected: Corrupted elements and bits of the repaired blocks, a record for each block.
    """

    repaired: tuple[Block, ...]
    refused: tuple[Block, ...]
    corrected: tuple[CorruptedWeights, ...]


@dataclass(eq=False)
class _Part:
    """A tensor of a device, divided into blocks.

    ``size``: size of a block in bytes; ``first``: number of its first block among those of the device.
    """

    name: str
    tensor: Tensor
    size: int
    first: int

    @property
    def count(self) -> int:
        return -(-self.tensor.nbytes // self.size)

    def words(self, first: int, last: int) -> Tensor:
        """A range of the blocks of this tensor, int64[n, words].

        The last block is padded with zeros.
        """
        flat = self.tensor.detach().contiguous().view(-1).view(torch.uint8)[first * self.size : last * self.size]
        missing = (last - first) * self.size - len(flat)
        if missing or flat.data_ptr() % 8:
            flat = nn.functional.pad(flat, (0, missing)).clone()
        return flat.view(torch.int64).view(last - first, -1)

    def write(self, block: int, words: Tensor) -> None:
        """Write the content of a block."""
        start = block * self.size
        size = min(self.size, self.tensor.nbytes - start) // self.tensor.element_size()
        values = words.view(torch.uint8).view(self.tensor.dtype)[:size]
        first = start // self.tensor.element_size()
        if self.tensor.is_contiguous():
            self.tensor.data.view(-1)[first : first + size] = values
        else:
            index = torch.unravel_index(torch.arange(first, first + size, device=words.device), self.tensor.shape)
            self.tensor.data[index] = values


def choose_sizes(tensors: Iterable[int]) -> tuple[int, int]:
    """The size of a block in bytes and the number of parity groups.

    ``tensors``: sizes of the tensors in bytes.

    Blocks are the smallest with which checksums and parity stay within `MEMORY_SHARE`, with as many groups as that allows. If the
    weights are so small that no size fits, the blocks that take least memory are used, in one group.
    """
    sizes = list(tensors)
    allowed = MEMORY_SHARE * sum(sizes)
    checks = {size: 8 * sum(-(-length // size) for length in sizes) for size in BLOCK_SIZES}
    fitting = [size for size in BLOCK_SIZES if checks[size] + size + 8 <= allowed]
    size = fitting[0] if fitting else min(BLOCK_SIZES, key=lambda size: checks[size] + size)
    return size, max(1, int((allowed - checks[size]) / (size + 8)))


class _Device:
    """Checksums and parity of all tensors on one device."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.size, self.groups = choose_sizes(tensor.nbytes for _, tensor in tensors)
        self.parts: list[_Part] = []
        self.blocks = 0
        for name, tensor in tensors:
            self.parts.append(_Part(name, tensor, self.size, self.blocks))
            self.blocks += self.parts[-1].count
        self.groups = min(self.groups, self.blocks)
        self.checksums = torch.cat([checksums(self.words(n, m)) for n, m in self._chunks(range(self.blocks))])
        self.parity = self._parity()
        self.digests = self._digests()

    @property
    def nbytes(self) -> int:
        """Bytes of the checksums, parity and digests."""
        return self.checksums.nbytes + self.parity.nbytes + self.digests.nbytes

    def words(self, first: int, last: int) -> Tensor:
        """A range of the blocks of all tensors, int64[n, words]."""
        pieces = []
        for part in self.parts:
            low, high = max(first - part.first, 0), min(last - part.first, part.count)
            if low < high:
                pieces.append(part.words(low, high))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def bad_blocks(self, blocks: range) -> list[int]:
        """Numbers of the blocks whose checksum has changed."""
        chunks = self._chunks(blocks)
        changed = [checksums(self.words(first, last)) != self.checksums[first:last] for first, last in chunks]
        return [blocks.start + n for n in torch.cat(changed).nonzero().flatten().tolist()] if changed else []

    def repair(self, bad: Sequence[int]) -> dict[int, Tensor]:
        """Restore the bits of bad blocks if they are known for certain.

        Returns the bits that differed, by number of the block.
        """
        by_group: dict[int, list[int]] = {}
        for block in bad:
            by_group.setdefault(block % self.groups, []).append(block)
        before = {block: self.words(block, block + 1)[0].clone() for block in bad}
        doubtful: dict[int, list[int]] = {}
        for group, blocks in by_group.items():
            flips = {block: self._correct(block) for block in blocks} if len(blocks) > 1 else {blocks[0]: 0}
            left = [block for block in blocks if not flips[block]]
            if len(left) > 1:
                self._undo(blocks, before)
            else:
                doubtful[group] = left
        if not doubtful:
            return {}
        missing = self._parity() ^ self.parity
        for group, left in doubtful.items():
            for block in left:
                self._write(block, before[block] ^ missing[group])
        as_before = (self._digests() == self.digests) & (self._parity() == self.parity).all(1)
        right: set[int] = set()
        for group in doubtful:
            blocks = by_group[group]
            fitting = [checksums(self.words(n, n + 1))[0] == self.checksums[n] for n in blocks]
            if as_before[group] and all(fitting):
                right.update(blocks)
            else:
                self._undo(blocks, before)
        return {block: before[block] ^ self.words(block, block + 1)[0] for block in right}

    def part(self, block: int) -> _Part:
        """The tensor that contains a block."""
        return next(part for part in self.parts if block < part.first + part.count)

    def _correct(self, block: int) -> int:
        """Correct one or two flipped bits of a block, and return their number, or 0 if that is not possible."""
        correction = correct(self.words(block, block + 1)[0], self.checksums[block])
        if correction is None:
            return 0
        self._write(block, correction.words)
        return correction.flips

    def _undo(self, blocks: Sequence[int], before: dict[int, Tensor]) -> None:
        for block in blocks:
            self._write(block, before[block])

    def _write(self, block: int, words: Tensor) -> None:
        part = self.part(block)
        part.write(block - part.first, words)

    def _parity(self) -> Tensor:
        """XOR of the blocks of each group, int64[groups, words]."""
        parity = torch.zeros(self.groups, self.size // 8, dtype=torch.int64, device=self.parts[0].tensor.device)
        most = _CHUNK_BYTES // self.size
        for first, last in self._chunks(range(self.blocks), most - most % min(self.groups, most)):
            words = self.words(first, last)
            if self.groups <= most:  # pieces begin with the first group, and have each group several times
                rest = nn.functional.pad(words, (0, 0, 0, -len(words) % self.groups))
                parity ^= xor_of(rest.view(-1, *parity.shape))
            else:
                parity[torch.arange(first, last, device=parity.device) % self.groups] ^= words
        return parity

    def _digests(self) -> Tensor:
        """A digest of each group, int64[groups], to verify repairs.

        The digest is the sum of checksums of its blocks with other factors, each times an odd number.
        """
        generator = torch.Generator().manual_seed(_DIGEST_SEED)
        digests = torch.zeros_like(self.parity[:, 0])
        for first, last in self._chunks(range(self.blocks)):
            odd = torch.randint(-(2**62), 2**62, (last - first,), generator=generator).to(digests.device) * 2 + 1
            groups = torch.arange(first, last, device=digests.device) % self.groups
            digests.index_add_(0, groups, odd * checksums(self.words(first, last), _DIGEST_SEED))
        return digests

    def _chunks(self, blocks: range, width: int = 0) -> Iterable[tuple[int, int]]:
        width = width or _CHUNK_BYTES // self.size
        return [(first, min(first + width, blocks.stop)) for first in range(blocks.start, blocks.stop, width)]


def reject_packed_weights(model: nn.Module) -> None:
    """Raise ``UsageError`` for a model with packed weights, which could not be checked.

    They are neither parameters nor buffers.
    """
    if packed := packed_weights(model):
        raise UsageError(
            f"{', '.join(packed[:3])}{', …' if len(packed) > 3 else ''} holds weights of a quantised module in packed form, "
            "which cannot be checked or repaired; protect the model before quantisation, or leave weight-integrity, repair and "
            "golden out"
        )


class WeightIntegrity:
    """Checksums and parity of the parameters and buffers of a model.

    Args:
        model: Model whose bits are right. If tensors change on purpose later, they must not be checked, or `renew` must be
            called.

    Raises:
        UsageError: the model has no parameters and no buffers, or packed weights of quantised modules.

    Attributes:
        nbytes: Memory of checksums and parity in bytes: at most 0.85 % of the weights. For weights of less than about 450 kB, or
            very many small tensors: at most 520 bytes plus 1/64 of the weights plus 8 bytes per tensor. Factors of checksums,
            which are the same for all models (4 KiB at most), are not counted.
        model_bytes: Checked memory in bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._next = 0
        self.renew()

    def renew(self) -> None:
        """Compute checksums and parity anew from the present weights."""
        reject_packed_weights(self._model)
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, tensor in named_tensors(self._model).items():
            if tensor.numel():
                by_device.setdefault(tensor.device, []).append((name, tensor))
        if not by_device:
            raise UsageError("the model has neither parameters nor buffers, so that there are no weights to check")
        self._devices = [_Device(tensors) for tensors in by_device.values()]
        self.nbytes = sum(device.nbytes for device in self._devices)
        self.model_bytes = sum(part.tensor.nbytes for device in self._devices for part in device.parts)

    def check(self) -> list[Block]:
        """All blocks whose bits have changed."""
        return self._bad_blocks(0, 1)

    def check_slice(self, slices: int) -> list[Block]:
        """Check the next of ``slices`` slices of the memory, and return its bad blocks.

        After ``slices`` calls all blocks have been checked.
        """
        turn, self._next = self._next % slices, self._next + 1
        return self._bad_blocks(turn, slices)

    def repair(self, bad: Sequence[Block] | None = None) -> Repair:
        """Repair bad blocks, by default all that `check` finds.

        The blocks of a group are left unrepaired if two of them have more than two flipped bits, or if it is not certain which
        bits were right.
        """
        blocks = self.check() if bad is None else list(bad)
        of_device: dict[_Device, list[int]] = {}
        for block in blocks:
            device = self._device(block)
            of_device.setdefault(device, []).append(self._part(block).first + block.start // device.size)
        differences: dict[Block, Tensor] = {}
        for device, numbers in of_device.items():
            differences |= {self._block(device, number): words for number, words in device.repair(numbers).items()}
        repaired = tuple(block for block in blocks if block in differences)
        corrected = tuple(self._corrected_weights(block, differences[block]) for block in repaired)
        return Repair(repaired, tuple(block for block in blocks if block not in differences), corrected)

    def suspects(self, blocks: Iterable[Block]) -> tuple[CorruptedWeights, ...]:
        """The elements of bad blocks that were not repaired."""
        result = []
        for block in blocks:
            tensor, size = self._part(block).tensor, self._device(block).size
            ends = block.start, min(block.start + size, tensor.nbytes)
            elements = np.arange(*(end // tensor.element_size() for end in ends), dtype=np.int64)
            result.append(CorruptedWeights(block.tensor, tuple(tensor.shape), elements))
        return tuple(result)

    def _bad_blocks(self, turn: int, slices: int) -> list[Block]:
        """The blocks of one slice of the memory whose bits have changed."""
        result = []
        for device in self._devices:
            numbers = range(device.blocks * turn // slices, device.blocks * (turn + 1) // slices)
            result += [self._block(device, number) for number in device.bad_blocks(numbers)]
        return result

    def _corrected_weights(self, block: Block, differences: Tensor) -> CorruptedWeights:
        tensor = self._part(block).tensor
        size = tensor.element_size()
        inside = differences.view(torch.uint8)[: tensor.nbytes - block.start]
        return repaired_weights(block.tensor, tensor.shape, size, inside, block.start // size)

    def _block(self, device: _Device, number: int) -> Block:
        part = device.part(number)
        return Block(part.name, (number - part.first) * device.size, number % device.groups)

    def _device(self, block: Block) -> _Device:
        return next(device for device in self._devices if any(part.name == block.tensor for part in device.parts))

    def _part(self, block: Block) -> _Part:
        return next(part for part in self._device(block).parts if part.name == block.tensor)
