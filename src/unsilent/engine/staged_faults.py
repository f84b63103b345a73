"""Faults of many trials that are prepared on the host and copied to a device together, so that no trial waits for the device.

What a trial writes is computed beforehand from the golden words, all faults of one tensor together. On the device each trial logs
the words that it finds, leaves and restores; the log is read once for all trials, and is the proof of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine.fault_entries import storage_offsets
from unsilent.errors import InjectionError
from unsilent.faults import Fault
from unsilent.sites.memory import WORDS, TensorMemory, Words, read_together

MemoryFault = tuple[TensorMemory, Fault]
"""A fault and the tensor that it corrupts."""


class MemoryEdit(NamedTuple):
    """What one trial writes into one tensor: elements int64[n], distinct; their golden words and the new ones, both [n]."""

    memory: TensorMemory
    elements: NDArray[np.int64]
    golden: Words
    corrupted: Words


class GoldenWords:
    """The words that the faults of several trials read, read from each tensor once."""

    def __init__(self, trials: Sequence[Sequence[MemoryFault]]) -> None:
        wanted: dict[int, list[NDArray[np.int64]]] = {}
        memories: dict[int, TensorMemory] = {}
        for memory, fault in (one for trial in trials for one in trial):
            memories[id(memory)] = memory
            wanted.setdefault(id(memory), []).append(fault.elements)
            if fault.operation == "copy_from":
                wanted[id(memory)].append(np.asarray(fault.operands, np.int64))
        self._elements = {key: np.unique(np.concatenate(parts)) for key, parts in wanted.items()}
        words = read_together([(memories[key], elements) for key, elements in self._elements.items()])
        self._words = dict(zip(self._elements, words, strict=True))

    def of(self, memory: TensorMemory, elements: NDArray[np.int64]) -> Words:
        """The words at some of the elements, a copy."""
        return self._words[id(memory)][np.searchsorted(self._elements[id(memory)], elements)]


def edits_of_trial(faults: Sequence[MemoryFault], golden: GoldenWords) -> list[MemoryEdit]:
    """What the faults of one trial, applied in order, make of each tensor; raises what `Fault.apply` raises."""
    by_tensor: dict[int, list[MemoryFault]] = {}
    for memory, fault in faults:
        by_tensor.setdefault(id(memory), []).append((memory, fault))
    return [_edit_of_tensor(same, golden) for same in by_tensor.values()]


def _edit_of_tensor(faults: Sequence[MemoryFault], golden: GoldenWords) -> MemoryEdit:
    memory = faults[0][0]
    elements = np.unique(np.concatenate([fault.elements for _, fault in faults]))
    before = golden.of(memory, elements)
    now = before.copy()
    for _, fault in faults:
        places = np.searchsorted(elements, fault.elements)
        now[places] = fault.apply(now[places], _source(memory, fault, golden, elements, now))
    return MemoryEdit(memory, elements, before, now)


def _source(
    memory: TensorMemory, fault: Fault, golden: GoldenWords, elements: NDArray[np.int64], now: Words
) -> Words | None:
    """The words that a fault copies: golden ones, or what an earlier fault of the trial has made of them."""
    if fault.operation != "copy_from":
        return None
    operands = np.asarray(fault.operands, np.int64)
    words = golden.of(memory, operands)
    places = np.minimum(np.searchsorted(elements, operands), len(elements) - 1)
    changed = elements[places] == operands
    words[changed] = now[places[changed]]
    return words


@dataclass(frozen=True)
class _Place:
    """One edit on the device: the storage as words, and where in the copied arrays its part lies."""

    storage: Tensor
    width: int
    positions: slice
    words: slice


class StagedFaults:
    """The edits of several trials on their device.

    Args:
        trials: Of each trial its edits; all tensors on ``device``.

    The words of each width are copied in one tensor each: golden and corrupted ones, and room for the log.
    """

    def __init__(self, trials: Sequence[Sequence[MemoryEdit]], device: torch.device) -> None:
        self._trials = trials
        self._places: list[list[_Place]] = []
        self._storages: dict[int, Tensor] = {}
        positions: list[NDArray[np.int64]] = []
        words: dict[int, list[tuple[Words, Words]]] = {}
        count: dict[int, int] = {}
        total = 0
        for edits in trials:
            places = []
            for edit in edits:
                width, size = edit.golden.itemsize, len(edit.elements)
                first = count.get(width, 0)
                places.append(
                    _Place(self._storage(edit.memory), width, slice(total, total + size), slice(first, first + size))
                )
                positions.append(storage_offsets(edit.memory.tensor, edit.elements))
                words.setdefault(width, []).append((edit.golden, edit.corrupted))
                total, count[width] = total + size, first + size
            self._places.append(places)
        self._positions = torch.from_numpy(np.concatenate(positions)).to(device)
        self._golden, self._corrupted = (
            {width: _copied(parts, which, device) for width, parts in words.items()} for which in (0, 1)
        )
        self._log = {width: torch.zeros((3, size), dtype=WORDS[width], device=device) for width, size in count.items()}

    def _storage(self, memory: TensorMemory) -> Tensor:
        """All words of the memory that a tensor lies in, flat."""
        known = self._storages.get(id(memory))
        if known is None:
            words = memory.tensor.data.view(WORDS[memory.tensor.element_size()])
            size = words.untyped_storage().nbytes() // words.element_size()
            known = self._storages[id(memory)] = words.as_strided((size,), (1,), 0)
        return known

    @contextmanager
    def applied(self, trial: int) -> Iterator[None]:
        """The context in which the edits of a trial are in memory. What was found, left and restored is logged there."""
        places = self._places[trial]
        try:
            self._write(places, self._corrupted, found=0)
            yield
        finally:
            try:
                self._restore(places)
            except BaseException:  # Ctrl-C in the middle: finish first, then let it through
                self._restore(places)
                raise

    def _restore(self, places: Sequence[_Place]) -> None:
        self._write(places, self._golden, found=1)
        for place in places:
            self._note(place, 2)

    def _write(self, places: Sequence[_Place], words: Mapping[int, Tensor], found: int) -> None:
        for place in places:
            self._note(place, found)
            place.storage.index_copy_(0, self._positions[place.positions], words[place.width][place.words])

    def _note(self, place: _Place, row: int) -> None:
        out = self._log[place.width][row, place.words]
        torch.index_select(place.storage, 0, self._positions[place.positions], out=out)

    def check(self, ran: Sequence[int]) -> None:
        """Wait for the device, and raise ``InjectionError`` unless each of the trials found, left and restored what it should."""
        log = {width: rows.cpu().numpy() for width, rows in self._log.items()}
        for trial in ran:
            for place, edit in zip(self._places[trial], self._trials[trial], strict=True):
                rows = log[place.width][:, place.words].view(edit.golden.dtype)
                for got, wanted, what in zip(
                    rows, (edit.golden, edit.corrupted, edit.golden), ("found", "left", "restored"), strict=True
                ):
                    if not np.array_equal(got, wanted):
                        raise InjectionError(
                            f"a trial {what} other bits than it should in {int((got != wanted).sum())} of {len(wanted)} "
                            "elements; find what else writes into the model or its inputs"
                        )


def _copied(parts: Sequence[tuple[Words, Words]], which: int, device: torch.device) -> Tensor:
    joined = np.concatenate([part[which] for part in parts])
    return torch.from_numpy(joined.view(f"i{joined.itemsize}")).to(device)
