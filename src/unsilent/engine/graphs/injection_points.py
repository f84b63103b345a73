"""Points in a captured evaluation at which faults are injected: the outputs of its operations.

A graph cannot stop at an operation. Therefore every floating-point operation is followed by a change of up to
`MOST_ELEMENTS` words of its output, ``word & keep ^ flip``, with the operands in buffers on the device. Without a fault
no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unsilent.engine.fault_entries import strided_offsets
from unsilent.faults import Fault
from unsilent.faults.naming import PHASES, parse_site
from unsilent.sites.calls import OperationNamer
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.memory import WORDS, Words, dtype_name
from unsilent.sites.operands import corruptible_output

MOST_ELEMENTS = 16
"""Largest number of words of one operation that the faults of a trial can change."""
Masks = tuple[Words, Words]
"""Masks of each word: bits that are kept, and bits that are then flipped."""
OnDevice = tuple["InjectionPoint", Tensor, Tensor, Tensor]
"""A point, positions in the memory of its output, and masks, all int[MOST_ELEMENTS] on the device."""


class InjectionPoint(NamedTuple):
    """The output of one operation as a place for faults.

    ``row``: its index in the buffers for words of its width.
    """

    row: int
    width: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class PointFault(NamedTuple):
    """The changes that a trial's faults make at one point.

    The changes are positions in the output's memory, int64[n], and bit masks [n].
    """

    point: InjectionPoint
    places: NDArray[np.int64]
    keep: Words
    flip: Words


class InjectionPoints(DispatchMode):
    """Injects faults at the points of a batch's evaluation.

    The first evaluation finds the points; the buffers are made after it.

    Attributes:
        points: Points by name of the operation.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._calls = OperationNamer(model)
        super().__init__(self._calls)
        self.points: dict[str, InjectionPoint] = {}
        self._device = device
        self._rows: dict[int, int] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def allocate(self) -> None:
        """Allocate the buffers for the points that the first evaluation has found."""
        for width, rows in self._rows.items():
            shape = (rows, MOST_ELEMENTS)
            places = torch.zeros(shape, dtype=torch.int64, device=self._device)
            keep, flip = (torch.full(shape, bits, dtype=WORDS[width], device=self._device) for bits in (-1, 0))
            self._buffers[width] = places, keep, flip

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._calls.next_name(func)
        result = func(*args, **kwargs)
        out = corruptible_output(func, args, kwargs, result)
        if out is not None and out.is_floating_point() and out.device == self._device:
            self._visit(name, out.detach())
        return result

    def _visit(self, name: str, out: Tensor) -> None:
        width = out.element_size()
        if not self._buffers:
            row = self._rows.get(width, 0)
            geometry = tuple(out.shape), out.stride(), int(out.storage_offset())
            self.points[name] = InjectionPoint(row, width, dtype_name(out.dtype), *geometry)
            self._rows[width] = row + 1
            return
        places, keep, flip = (buffer[self.points[name].row] for buffer in self._buffers[width])
        size = out.untyped_storage().nbytes() // width
        words = out.view(WORDS[width]).as_strided((size,), (1,), 0)
        words.index_copy_(0, places, words.index_select(0, places).bitwise_and_(keep).bitwise_xor_(flip))

    def faults_at_points(self, faults: Sequence[Fault]) -> list[PointFault] | None:
        """The changes by the faults of one trial at each point, or None if they cannot be injected here."""
        at: dict[str, dict[int, tuple[Any, Any]]] = {}
        for fault in faults:
            site, point = parse_site(fault.site), self.points.get(parse_site(fault.site).name)
            masks = masks_of(fault)
            if point is None or (site.kind, site.phase, site.operand) != ("op", PHASES[0], "out") or masks is None:
                return None
            if (point.dtype, point.shape) != (fault.dtype, tuple(fault.shape)) or fault.reach is not None:
                return None
            words = at.setdefault(site.name, {})
            places = strided_offsets(fault.elements, point.shape, point.stride, point.offset)
            for place, keep, flip in zip(places.tolist(), *masks, strict=True):
                before = words.get(place)  # an earlier fault in the same word
                words[place] = (keep, flip) if before is None else (before[0] & keep, (before[1] & keep) ^ flip)
        if any(len(words) > MOST_ELEMENTS for words in at.values()):
            return None
        return [_padded_changes(self.points[name], words) for name, words in at.items()]

    @contextmanager
    def applied(self, staged: Sequence[OnDevice]) -> Iterator[None]:
        """Context in which evaluations have these faults, whose places and masks are on the device."""
        try:
            for point, *new in staged:
                for buffer, values in zip(self._buffers[point.width], new, strict=True):
                    buffer[point.row].copy_(values)
            yield
        finally:
            for point, *_ in staged:
                _, keep, flip = self._buffers[point.width]
                keep[point.row].fill_(-1)
                flip[point.row].zero_()


def masks_of(fault: Fault) -> Masks | None:
    """The bit masks of a fault: bits to keep, and bits to flip.

    None for a fault that computes with values or copies them.
    """
    if fault.held is not None or fault.operation not in ("xor", "or", "and", "set"):
        return None
    words = np.asarray(fault.operands, fault.codec.word_dtype)
    all_bits, none = ~np.zeros_like(words), np.zeros_like(words)
    keep = {"xor": all_bits, "or": ~words, "and": words, "set": none}[fault.operation]
    return keep, none if fault.operation == "and" else words


def _padded_changes(point: InjectionPoint, words: dict[int, tuple[Any, Any]]) -> PointFault:
    """The changes at one point, filled up to a fixed number by repeating the last word.

    A repeated write changes nothing, because all writes start from the original word.
    """
    entries = [(place, *masks) for place, masks in words.items()]
    entries += entries[-1:] * (MOST_ELEMENTS - len(entries))
    places, keep, flip = zip(*entries, strict=True)
    return PointFault(point, np.array(places, np.int64), np.array(keep), np.array(flip))


class StagedPointFaults:
    """The faults of several trials on their device, copied there together.

    Args:
        trials: Injection points of the batch of each trial, and the changes there.
    """

    def __init__(self, trials: Sequence[tuple[InjectionPoints, Sequence[PointFault]]], device: torch.device) -> None:
        every = [point_fault for _, faults in trials for point_fault in faults]
        all_places = torch.from_numpy(np.concatenate([point_fault.places for point_fault in every]))
        places = all_places.to(device).split(MOST_ELEMENTS)
        masks: dict[int, Sequence[Tensor]] = {}
        for width in {point_fault.point.width for point_fault in every}:
            numbers = [k for k, point_fault in enumerate(every) if point_fault.point.width == width]
            joined = (np.concatenate([getattr(every[k], which) for k in numbers]) for which in ("keep", "flip"))
            parts = (torch.from_numpy(words.view(f"i{width}")).to(device).split(MOST_ELEMENTS) for words in joined)
            masks.update(zip(numbers, zip(*parts, strict=True), strict=True))
        staged = iter([(point_fault.point, places[k], *masks[k]) for k, point_fault in enumerate(every)])
        self._trials = [(points, [next(staged) for _ in faults]) for points, faults in trials]

    def applied(self, trial: int) -> AbstractContextManager[None]:
        """Context in which an evaluation of the trial's batch has the trial's faults."""
        points, staged = self._trials[trial]
        return points.applied(staged)

    def check(self) -> None:
        """Check that no fault remains after the trials.

        Trials that are evaluated both ways prove that the faults land.
        """
