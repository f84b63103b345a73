"""Steps between two readings of a tensor: as they came, not as they were planned."""

from __future__ import annotations

import numpy as np

from unsilent.monitor.signals.row import Ints, SignalValues


class Waits:
    """Waits of all series, and of all tensors whose bits are compared.

    Attributes:
        longest: Steps from one reading to the next, at most.
    """

    def __init__(self) -> None:
        self.longest = 0
        self._read: Ints = np.zeros(0, np.int64)
        self._compared: dict[str, int] = {}

    def add(self, step: int, signals: SignalValues) -> None:
        """Add a step. What was never read before counts from the step in which it was first known."""
        new = len(signals.seen) - len(self._read)
        self._read = np.pad(self._read, (0, new), constant_values=step - 1 if len(self._read) else -1)
        steps = [int((step - self._read[signals.seen]).max(initial=0))]
        self._read[signals.seen] = step
        steps += [step - self._compared.get(name, step) for name in signals.compared]
        self._compared.update(dict.fromkeys(signals.compared, step))
        self.longest = max(self.longest, *steps)
