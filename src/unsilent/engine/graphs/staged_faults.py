"""Faults of many trials, prepared on the host and copied to a device together.

No trial has to wait for the device. The words that a trial writes are computed beforehand from the golden words, for
all faults of one tensor together. On the device, each trial logs the words before, during and after its faults. The log
is read once for all trials, and proves that the faults were applied and removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import InjectionError
from unsilent.engine.fault_entries import storage_offsets
from unsilent.faults import Fault
from unsilent.sites.memory import WORDS, TensorMemory, Words, read_together

MemoryFault = tuple[TensorMemory, Fault]
"""A fault and the tensor that it corrupts."""


class MemoryEdit(NamedTuple):
    """The words that one trial writes into one tensor.

    It consists of distinct elements int64[n], with their golden and new words [n].
    """

    memory: TensorMemory
    elements: NDArray[np.int64]
    golden: Words
    corrupted: Words


class GoldenWords:
    """The golden words that the faults of several trials need, read once from each tensor."""

    def __init__(self, trials: Sequence[Sequence[MemoryFault]]) -> None:
        wanted: dict[int, list[NDArray[np.int64]]] = {}
        memories: dict[int, TensorMemory] = {}
        for memory, fault in (pair for trial in trials for pair in trial):
            memories[id(memory)] = memory
            wanted.setdefault(id(memory), []).append(fault.elements)
            if fault.operation == "copy_from":
                wanted[id(memory)].append(np.asarray(fault.operands, np.int64))
        self._elements = {key: np.unique(np.concatenate(parts)) for key, parts in wanted.items()}
        words = read_together([(memories[key], elements) for key, elements in self._elements.items()])
        self._words = dict(zip(self._elements, words, strict=True))

    def of(self, memory: TensorMemory, elements: NDArray[np.int64]) -> Words:
        """A copy of the golden words of some elements."""
        return self._words[id(memory)][np.searchsorted(self._elements[id(memory)], elements)]


def edits_of_trial(faults: Sequence[MemoryFault], golden: GoldenWords) -> list[MemoryEdit]:
    """The edits of each tensor by the faults of one trial, which are applied in order.

    Raises the same errors as `Fault.apply`.
    """
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
    """The words that a fault copies from other elements, or None for a fault that does not copy.

    These are golden words, unless an earlier fault of the trial has changed them.
    """
    if fault.operation != "copy_from":
        return None
    operands = np.asarray(fault.operands, np.int64)
    words = golden.of(memory, operands)
    places = np.minimum(np.searchsorted(elements, operands), len(elements) - 1)
    changed = elements[places] == operands
    words[changed] = now[places[changed]]
    return words


class _Place(NamedTuple):
    """One edit on the device, with a buffer for the words that are found there.

    It holds the storage as words, positions in it, golden and corrupted words, and three rows of the log.
    """

    storage: Tensor
    positions: Tensor
    golden: Tensor
    corrupted: Tensor
    found: Tensor
    left: Tensor
    restored: Tensor

    def write(self, words: Tensor, log: Tensor) -> None:
        """Write words into memory, and log the words that were there before."""
        torch.index_select(self.storage, 0, self.positions, out=log)
        self.storage.index_copy_(0, self.positions, words)


class StagedFaults:
    """The memory edits of several trials on their device.

    Args:
        trials: Edits of each trial; all tensors must be on ``device``.

    Positions are copied in one tensor. Golden and corrupted words are copied in one tensor for each width.
    """

    def __init__(self, trials: Sequence[Sequence[MemoryEdit]], device: torch.device) -> None:
        self._trials = trials
        self._storages: dict[int, Tensor] = {}
        edits = [edit for trial in trials for edit in trial]
        positions = np.concatenate([storage_offsets(edit.memory.tensor, edit.elements) for edit in edits])
        places = torch.from_numpy(positions).to(device).split([len(edit.elements) for edit in edits])
        self._log: dict[int, Tensor] = {}
        self._words: dict[int, tuple[NDArray[np.signedinteger], NDArray[np.signedinteger]]] = {}
        parts = {width: self._parts([e for e in edits if e.golden.itemsize == width], device)
            for width in {edit.golden.itemsize for edit in edits}}  # fmt: skip
        new_places = iter([
            _Place(self._storage(edit.memory), place, *next(parts[edit.golden.itemsize]))
            for edit, place in zip(edits, places, strict=True)
        ])  # fmt: skip
        self._places = [[next(new_places) for _ in trial] for trial in trials]

    def _parts(self, edits: Sequence[MemoryEdit], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """For each edit, its words and its part of the log.

        All words have the same width.
        """
        sizes, width = [len(edit.elements) for edit in edits], edits[0].golden.itemsize
        self._log[width] = log = torch.zeros((3, sum(sizes)), dtype=WORDS[width], device=device)
        joined = (np.concatenate([e.golden for e in edits]), np.concatenate([e.corrupted for e in edits]))
        golden, corrupted = self._words[width] = joined[0].view(f"i{width}"), joined[1].view(f"i{width}")
        words = (torch.from_numpy(w).to(device) for w in (golden, corrupted))
        return iter(list(zip(*(row.split(sizes) for row in (*words, *log)), strict=True)))

    def _storage(self, memory: TensorMemory) -> Tensor:
        """The whole storage of a tensor as a flat array of words."""
        known = self._storages.get(id(memory))
        if known is None:
            words = memory.tensor.data.view(WORDS[memory.tensor.element_size()])
            size = words.untyped_storage().nbytes() // words.element_size()
            known = self._storages[id(memory)] = words.as_strided((size,), (1,), 0)
        return known

    @contextmanager
    def applied(self, trial: int) -> Iterator[None]:
        """Context in which the edits of a trial are in memory.

        The context logs the words before, during and after the edits.
        """
        places = self._places[trial]
        try:
            for place in places:
                place.write(place.corrupted, place.found)
            yield
        finally:
            try:
                _restore(places)
            except BaseException:  # Ctrl-C in the middle: finish first, then raise it
                _restore(places)
                raise

    def check(self) -> None:
        """Wait for the device, and raise ``InjectionError`` unless all logged words are as expected."""
        for width, log in self._log.items():
            golden, corrupted = self._words[width]
            rows = log.cpu().numpy()
            for row, words, stage in zip(rows, (golden, corrupted, golden), STAGES, strict=True):
                if not np.array_equal(row, words):
                    raise InjectionError(
                        f"trials {stage} other bits than they should in {int((row != words).sum())} of {len(words)} elements; "
                        "find what else writes into the model or its inputs"
                    )


STAGES = ("found", "left", "restored")


def _restore(places: Sequence[_Place]) -> None:
    for place in places:
        place.write(place.golden, place.left)
        torch.index_select(place.storage, 0, place.positions, out=place.restored)
