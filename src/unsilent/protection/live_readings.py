"""Margins of a call while it runs, from readings that are collected in one buffer on the device.

In mode ``end`` a forward pass ends with one transfer of the buffer to the host and one scoring of all layers. In mode ``early``
each layer is transferred and scored as soon as it has run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unsilent.detectors.activations.rule import Floats
from unsilent.protection.activation_detector import ActivationDetector
from unsilent.protection.layer_watch import LayerRun


class LiveReadings:
    """Readings and margins of one detector during a call.

    Attributes:
        names: Names of the layers of the rows of `margins`.
        margins: Margins of ended forward passes, or in mode ``early`` of the layers so far: float64[n] each.
    """

    def __init__(self, detector: ActivationDetector, is_early: bool) -> None:
        self.detector, self._is_early = detector, is_early
        ends = np.cumsum([0, *detector.widths.values()])
        columns = zip(detector.widths, ends, ends[1:], strict=False)
        self._columns = {name: slice(int(begin), int(end)) for name, begin, end in columns}
        self._width = int(ends[-1])
        self._buffer = torch.zeros(0, self._width)
        self._memory: dict[str, Tensor] = {}
        self.begin(0)

    def begin(self, samples: int) -> None:
        """Begin a call with this many samples."""
        self._samples = samples
        self.names: list[str] = []
        self.margins: list[Floats] = []
        self._written: list[str] = []
        self._scores: list[Floats] = []

    def add(self, layer: LayerRun) -> Floats | None:
        """Read a layer.

        In mode ``early`` its margins are returned, float64[samples]. ``None`` if it is not judged now.
        """
        columns = self._columns.get(layer.name)
        if columns is None or len(layer.output) != self._samples:
            return None
        if not self._is_early:
            self._prepare(layer.output)
            self.detector.read(layer, self._memory[layer.name])
            self._written.append(layer.name)
            return None
        reading = self.detector.read(layer).double().numpy(force=True)
        self._scores.append(self.detector.scores({layer.name: reading})[0])
        self.names.append(layer.name)
        self.margins.append(self.detector.rule.cumulate(np.array(self._scores))[-1])
        return self.margins[-1]

    def take_back(self, name: str) -> None:
        """Forget the last reading if it is of this layer, because the layer runs again (mode ``early``)."""
        if self.names and self.names[-1] == name:
            for entries in (self.names, self.margins, self._scores):
                entries.pop()

    def end_pass(self) -> None:
        """Score the layers at the end of a forward pass."""
        self._scores = []
        if self._written:
            values = self._buffer.numpy(force=True).astype(np.float64)
            readings = {name: values[:, self._columns[name]] for name in self._written}
            self.names += self._written
            self.margins += list(self.detector.margins_of(readings))
            self._written = []

    def _prepare(self, output: Tensor) -> None:
        """Allocate memory for the readings of all layers, on the device of the first layer.

        Its shape is float32[samples, numbers of all layers].
        """
        if len(self._buffer) != self._samples or (self._buffer.device != output.device and not self._written):
            self._buffer = torch.zeros(self._samples, self._width, device=output.device)
            self._memory = {name: self._buffer[:, columns] for name, columns in self._columns.items()}


def largest_of(rows: Sequence[Floats], samples: int) -> Floats:
    """The largest value of each sample over all rows, float64[samples]; zeros without rows."""
    return np.max(rows, axis=0) if len(rows) else np.zeros(samples)
