"""Finds and repairs corrupted weights: a checksum for each block of memory, and parity of groups of blocks.

Parameters and buffers are divided into blocks of `BLOCK_BYTES`. The checksum of a block is the sum of its 64-bit words, each
times an odd number of its own, modulo 2**64: every change within one word changes it, any other one but for a chance of 2**-64.
Blocks of one device are dealt to groups in turn, so that neighbours in memory are in different groups. The parity of a group is
the XOR of its blocks. One bad block of a group is therefore known bit for bit: the XOR of parity and all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unsilent.errors import UsageError
from unsilent.sites.modules import named_tensors

BLOCK_BYTES = 4096
GROUP = 256
"""Blocks of a group: parity takes 1/256 of the memory."""
_WORDS = BLOCK_BYTES // 8
_CHUNK = 256
"""Blocks that are read together, so that little memory is needed besides."""


class Block(NamedTuple):
    """A piece of a tensor's memory.

    Attributes:
        tensor: Name of the tensor.
        start: First byte.
        group: Its parity group.
    """

    tensor: str
    start: int
    group: int


class Repair(NamedTuple):
    """What was done about bad blocks.

    Attributes:
        repaired: Have the bits again that they had when checksums were taken.
        refused: Were left alone: another block of the group is bad as well, or the parity is.
    """

    repaired: tuple[Block, ...]
    refused: tuple[Block, ...]


@dataclass(eq=False)
class _Part:
    """One tensor: where its blocks are among those of its device."""

    name: str
    tensor: Tensor
    first: int

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def count(self) -> int:
        return -(-self.nbytes // BLOCK_BYTES)

    def words(self, first: int, last: int) -> Tensor:
        """Blocks of this tensor, int64[n, words]; the last one filled up with zeros."""
        flat = self.tensor.detach().contiguous().view(-1).view(torch.uint8)[first * BLOCK_BYTES : last * BLOCK_BYTES]
        missing = (last - first) * BLOCK_BYTES - len(flat)
        if missing or flat.data_ptr() % 8:
            flat = nn.functional.pad(flat, (0, missing)).clone()
        return flat.view(torch.int64).view(last - first, _WORDS)

    def write(self, block: int, words: Tensor) -> None:
        """Put the bits of a block back."""
        start = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.nbytes - start) // self.tensor.element_size()
        values = words.view(torch.uint8).view(self.tensor.dtype)[:size]
        first = start // self.tensor.element_size()
        if self.tensor.is_contiguous():
            self.tensor.data.view(-1)[first : first + size] = values
        else:
            index = torch.unravel_index(torch.arange(first, first + size, device=words.device), self.tensor.shape)
            self.tensor.data[index] = values


class _Device:
    """Checksums and parity of all tensors on one device."""

    def __init__(self, device: torch.device, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.parts: list[_Part] = []
        self.blocks = 0
        for name, tensor in tensors:
            self.parts.append(_Part(name, tensor, self.blocks))
            self.blocks += self.parts[-1].count
        self.groups = -(-self.blocks // GROUP)
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator) * 2 + 1
        self._factors = factors.to(device)
        self.checksums = torch.cat([self._checksums(self.words(n, m)) for n, m in self._chunks(range(self.blocks))])
        self.parity = torch.zeros(self.groups, _WORDS, dtype=torch.int64, device=device)
        self._add_parity(self.parity, range(self.blocks))

    @property
    def nbytes(self) -> int:
        """Of checksums and parity."""
        return sum(one.numel() * 8 for one in (self.checksums, self.parity, self._factors))

    def words(self, first: int, last: int) -> Tensor:
        """Blocks of all tensors by their numbers, int64[n, words]."""
        pieces = []
        for part in self.parts:
            low, high = max(first - part.first, 0), min(last - part.first, part.count)
            if low < high:
                pieces.append(part.words(low, high))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def bad_blocks(self, blocks: range) -> list[int]:
        """Those whose checksum is not what it was."""
        changed = [
            self._checksums(self.words(first, last)) != self.checksums[first:last]
            for first, last in self._chunks(blocks)
        ]
        return [blocks.start + n for n in torch.cat(changed).nonzero().flatten().tolist()] if changed else []

    def repair(self, block: int) -> bool:
        """Put the bits of a block back, if it is the only bad one of its group; whether that was possible."""
        group = block % self.groups
        words = self.parity[group].clone()
        for other in range(group, self.blocks, self.groups):
            if other != block:
                words ^= self.words(other, other + 1)[0]
        if self._checksums(words[None]) != self.checksums[block]:
            return False
        part = self.part(block)
        part.write(block - part.first, words)
        return True

    def part(self, block: int) -> _Part:
        """The tensor that a block is of."""
        return next(part for part in self.parts if block < part.first + part.count)

    def _checksums(self, words: Tensor) -> Tensor:
        return (words * self._factors).sum(1)

    def _add_parity(self, parity: Tensor, blocks: range) -> None:
        width = min(_CHUNK, self.groups)  # so that no group comes twice in a piece
        for first, last in self._chunks(blocks, width):
            groups = torch.arange(first, last, device=parity.device) % self.groups
            parity[groups] ^= self.words(first, last)

    def _chunks(self, blocks: range, width: int = _CHUNK) -> Iterable[tuple[int, int]]:
        return [(first, min(first + width, blocks.stop)) for first in range(blocks.start, blocks.stop, width)]


class WeightIntegrity:
    """Checksums and parity of the parameters and buffers of a model, as they are now.

    Args:
        model: Whose bits are right. Tensors that change on purpose must not be checked later, or `renew` be called.

    Raises:
        UsageError: the model has no parameters and no buffers.

    Attributes:
        nbytes: Memory that this takes.
        model_bytes: Memory that is checked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._next = 0
        self.renew()

    def renew(self) -> None:
        """Take checksums and parity anew: the bits of now are right."""
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, tensor in named_tensors(self._model).items():
            if tensor.numel():
                by_device.setdefault(tensor.device, []).append((name, tensor))
        if not by_device:
            raise UsageError("the model has neither parameters nor buffers, so that there are no weights to check")
        self._devices = [_Device(device, tensors) for device, tensors in by_device.items()]
        self.nbytes = sum(device.nbytes for device in self._devices)
        self.model_bytes = sum(part.nbytes for device in self._devices for part in device.parts)

    def check(self) -> list[Block]:
        """All blocks whose bits are not those of before."""
        return [
            self._block(device, number)
            for device in self._devices
            for number in device.bad_blocks(range(device.blocks))
        ]

    def check_slice(self, slices: int) -> list[Block]:
        """The same of one slice of all blocks, the next one at each call; after ``slices`` calls all were checked."""
        turn, self._next = self._next % slices, self._next + 1
        return [
            self._block(device, number)
            for device in self._devices
            for number in device.bad_blocks(range(device.blocks * turn // slices, device.blocks * (turn + 1) // slices))
        ]

    def repair(self, bad: Sequence[Block] | None = None) -> Repair:
        """Put the bits of bad blocks back (of all that there are by default). Two of one group are left alone."""
        blocks = self.check() if bad is None else list(bad)
        per_group = Counter((self._device(block), block.group) for block in blocks)
        repaired: list[Block] = []
        refused: list[Block] = []
        for block in blocks:
            device = self._device(block)
            alone = per_group[device, block.group] == 1
            (repaired if alone and device.repair(self._number(device, block)) else refused).append(block)
        return Repair(tuple(repaired), tuple(refused))

    def _block(self, device: _Device, number: int) -> Block:
        part = device.part(number)
        return Block(part.name, (number - part.first) * BLOCK_BYTES, number % device.groups)

    def _device(self, block: Block) -> _Device:
        return next(device for device in self._devices if any(part.name == block.tensor for part in device.parts))

    def _number(self, device: _Device, block: Block) -> int:
        part = next(part for part in device.parts if part.name == block.tensor)
        return part.first + block.start // BLOCK_BYTES
