"""Receipts: proof of what an injection did, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.faults.record import Fault

Words = NDArray[np.unsignedinteger]


@dataclass(frozen=True, eq=False)
class Hit:
    """One fault as it landed: the words (unsigned[n]) at ``fault.elements`` before and after."""

    fault: Fault
    before: Words
    after: Words

    @property
    def changed_bits(self) -> int:
        """How many bits differ (a stuck-at fault on a bit that has that value already changes none)."""
        return int(np.bitwise_count(self.before ^ self.after).sum())


@dataclass(frozen=True, eq=False)
class Receipt:
    """What an injection did. ``asked`` elements were to be written, ``hits`` were read back as intended."""

    entries: tuple[Hit, ...]

    @property
    def asked(self) -> int:
        """Elements that the faults name."""
        return sum(len(hit.fault) for hit in self.entries)

    @property
    def hits(self) -> int:
        """Elements verified after writing; entering an injection raises unless it equals ``asked``."""
        return sum(len(hit.after) for hit in self.entries)

    @property
    def changed_bits(self) -> int:
        """Bits that differ from before, over all faults."""
        return sum(hit.changed_bits for hit in self.entries)

    def to_json(self) -> list[dict[str, Any]]:
        """One JSON object a fault: the fault, and its words before and after in hex."""
        return [
            {
                "fault": hit.fault.to_json(),
                "before": [f"{int(w):#x}" for w in hit.before],
                "after": [f"{int(w):#x}" for w in hit.after],
            }
            for hit in self.entries
        ]

    def __str__(self) -> str:
        lines = [hit.fault.describe() for hit in self.entries]
        return f"{self.hits} of {self.asked} hit, {self.changed_bits} bits changed: " + "; ".join(lines[:4])
