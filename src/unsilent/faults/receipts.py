"""Receipts: proof of what an injection did, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.faults.record import Fault

Words = NDArray[np.unsignedinteger]
MAX_ITEMS_SHOWN = 4
"""Number of tensors, and of elements of each tensor, that the text of a receipt shows."""


@dataclass(frozen=True, eq=False)
class AppliedFault:
    """An applied fault, with the words (unsigned[n]) at ``fault.elements`` before and after it."""

    fault: Fault
    before: Words
    after: Words

    @property
    def changed_bits(self) -> int:
        """Number of bits that the fault changed (a stuck bit may already have had its value)."""
        return int(np.bitwise_count(self.before ^ self.after).sum())

    @property
    def element_changes(self) -> Iterator[tuple[tuple[int, ...], float, float]]:
        """Index, value before and value after of every corrupted element, in order."""
        fault = self.fault
        index = np.unravel_index(fault.elements, fault.shape) if fault.shape else ()
        places = np.stack(index, axis=-1) if index else np.empty((len(fault), 0), np.int64)
        values = (fault.codec.decode(words).tolist() for words in (self.before, self.after))
        for place, before, after in zip(places.tolist(), *values, strict=True):
            yield tuple(place), before, after

    def __str__(self) -> str:
        shown = itertools.islice(self.element_changes, MAX_ITEMS_SHOWN)
        lines = [f"[{','.join(map(str, p))}] {b:g} -> {a:g}" for p, b, a in shown]
        more = f", and {len(self.fault) - MAX_ITEMS_SHOWN} more" if len(self.fault) > MAX_ITEMS_SHOWN else ""
        return f"{self.fault.describe()}: {', '.join(lines)}{more}"


@dataclass(frozen=True, eq=False)
class Receipt:
    """The faults that an injection applied.

    ``requested_elements`` is the number of elements to write, ``verified_elements`` the number that were read back as intended.
    """

    applied_faults: tuple[AppliedFault, ...]

    @property
    def requested_elements(self) -> int:
        """Number of elements that the faults should corrupt."""
        return sum(len(hit.fault) for hit in self.applied_faults)

    @property
    def verified_elements(self) -> int:
        """Number of elements that were verified after writing."""
        return sum(len(hit.after) for hit in self.applied_faults)

    @property
    def changed_bits(self) -> int:
        """Number of bits that changed, over all faults."""
        return sum(hit.changed_bits for hit in self.applied_faults)

    def to_json(self) -> list[dict[str, Any]]:
        """The faults as JSON objects, each with its words before and after in hex."""
        return [
            {
                "fault": hit.fault.to_json(),
                "before": [f"{int(w):#x}" for w in hit.before],
                "after": [f"{int(w):#x}" for w in hit.after],
            }
            for hit in self.applied_faults
        ]

    def __str__(self) -> str:
        if not self.applied_faults:
            return "there was nothing to inject"
        left = len(self.applied_faults) - MAX_ITEMS_SHOWN
        more = f"; and {left} more tensors" if left > 0 else ""
        lines = "; ".join(map(str, self.applied_faults[:MAX_ITEMS_SHOWN]))
        return f"{self.verified_elements} of {self.requested_elements} hit, {self.changed_bits} bits changed: {lines}{more}"
