"""The places on a tape at which the faults of a trial take effect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine.tape import Diverged, FaultEntryPoint, StorageWindow, Tape
from unsilent.engine.walk import TrialEntry
from unsilent.faults import Fault
from unsilent.faults.naming import PHASES, SiteName, parse_site
from unsilent.sites import Parameters
from unsilent.sites.operands import operand_number

WORD = 4
"""Bytes of the elements of blockwise operations; a wider corrupted element counts at each of its words."""


def trial_entry_of(tape: Tape, parameters: Parameters, faults: Sequence[Fault]) -> TrialEntry:
    """The values and operations on a tape that the faults of a trial change.

    Faults in parameters must be in memory already.

    Raises:
        Diverged: a fault has no place on this tape; the plain run reports the error.
    """
    start = TrialEntry()
    for fault in faults:
        site = parse_site(fault.site)
        if site.kind == "param":
            _parameter(start, tape, parameters.memory(fault).tensor, fault)
        elif site.phase not in ("", PHASES[0]) or fault.reach is not None:
            raise Diverged("a fault that affects only some outputs, or a fault of a training step")
        elif site.kind == "op":
            _operation(start, tape, site, fault)
        else:
            start.value_faults.append((_entry(tape, site, fault), fault))
    return start


def _parameter(start: TrialEntry, tape: Tape, tensor: Tensor, fault: Fault) -> None:
    value = tape.by_storage.get(tensor.untyped_storage().data_ptr())
    if value is None:
        return
    if tape.values[value].output:
        start.dirty[value] = tape.externals[value]
    offsets = storage_offsets(tensor, fault.elements)
    size = tensor.element_size()
    places = (offsets[:, None] * size + np.arange(0, size, min(size, WORD))).ravel()
    before = start.offsets.get(value)
    start.offsets[value] = places if before is None else np.concatenate([before, places])
    if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
        start.corrupted.update(tape.values[value].readers)
        return
    low, high = int(offsets.min()) * size, (int(offsets.max()) + 1) * size
    for reader in tape.values[value].readers:
        spans = (_extent(w) for w in tape.nodes[reader].reads if w.value == value)
        if any(a < high and low < b for a, b in spans):
            start.corrupted.add(reader)


def _extent(window: StorageWindow) -> tuple[int, int]:
    """The range of bytes in its storage that a window covers, as start and end."""
    if 0 in window.shape:
        return 0, 0
    last = window.offset + sum((n - 1) * s for n, s in zip(window.shape, window.stride, strict=True))
    return window.offset * window.dtype.itemsize, (last + 1) * window.dtype.itemsize


def storage_offsets(tensor: Tensor, elements: NDArray[np.int64]) -> NDArray[np.int64]:
    """Offsets in a tensor's storage, in elements, of elements given by flat index in C order."""
    if tensor.is_contiguous():
        return np.asarray(elements + int(tensor.storage_offset()), np.int64)
    return strided_offsets(elements, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def strided_offsets(
    elements: NDArray[np.int64], shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> NDArray[np.int64]:
    """Offsets in memory of the elements of a tensor with given shape, strides and offset."""
    offsets = np.full(len(elements), offset, np.int64)
    for places, step in zip(np.unravel_index(elements, shape) if shape else (), stride, strict=True):
        offsets += places * step
    return offsets


def _operation(start: TrialEntry, tape: Tape, site: SiteName, fault: Fault) -> None:
    index = tape.by_name.get(site.name)
    if index is None:
        raise Diverged(f"{fault.site} is not in the recorded run")
    node = tape.nodes[index]
    number = operand_number(node.func, site.operand)
    if number < 0:
        out = next((w for w in node.results if isinstance(w, StorageWindow)), None)
        if out is None or out.value not in node.new_values:
            raise Diverged(f"{fault.site} has no memory of its own")
        start.value_faults.append((FaultEntryPoint(index + 1, out), fault))
    elif number < len(node.reads):
        start.operand_faults.setdefault(index, []).append((number, fault))
    else:
        raise Diverged(f"{fault.site} has no such operand")


def _entry(tape: Tape, site: SiteName, fault: Fault) -> FaultEntryPoint:
    if site.kind == "kv":
        entry = tape.caches.get((f"{site.name}/{site.operand}", fault.occurrence or 0))
    else:
        entry = tape.inputs.get(site.name)
        if entry is not None and sum(e.window.value == entry.window.value for e in tape.inputs.values()) > 1:
            raise Diverged(f"{fault.site} shares its memory with another input")
    if entry is None:
        raise Diverged(f"{fault.site} is not in the recorded run")
    return entry
