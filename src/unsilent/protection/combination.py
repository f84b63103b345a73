"""Several detectors in combination: there is an alarm if any of them has one.

Margins of different detectors have different units. Each part is therefore scaled with clean samples that it did not learn from:
0 is the median of its largest margins, 1 their 99 % quantile. The margin of the combination is the largest margin of its parts.
Its threshold comes from further clean samples, as for any detector, so the false-alarm rate holds for all parts together. With
this scale each part causes about the same share of false alarms; a part that is constant on clean samples (a checksum, a
comparison of bits) causes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.detectors.activations.rule import Floats, limit_scores
from unsilent.protection.recorded_pass import RecordedPass, record_pass
from unsilent.workloads.base import call_model

if TYPE_CHECKING:
    from unsilent.protection.detector import InferenceDetector

SCALED_QUANTILE = 0.99
_LEAST = 1e-12
_SHARE_FOR_SCALE = 0.3


class Combination:
    """A combination of detectors whose alarms have the same weight.

    Args:
        parts: Two or more detectors.
    """

    def __init__(self, parts: Sequence[InferenceDetector]) -> None:
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in parts)
        self.needs_layers = any(part.needs_layers for part in parts)
        self.scales: list[tuple[float, float]] = []
        """Median and 99 % quantile of the largest clean margins of each part."""

    @property
    def nbytes(self) -> int:
        """Bytes that all parts take."""
        return sum(part.nbytes for part in self.parts)

    def calibrate(
        self, model: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any], Any] = call_model
    ) -> None:
        """Calibrate the parts with the first batches, and scale their margins with the last ones."""
        batches = list(batches)
        if len(batches) < 2:
            raise UsageError(
                f"{self.name} was given {len(batches)} clean batch; expected 2 or more, as parts are scaled with other batches "
                "than they learn from: give smaller batches"
            )
        first = min(len(batches) - 1, max(1, round(len(batches) * (1 - _SHARE_FOR_SCALE))))
        for part in self.parts:
            part.calibrate(model, batches[:first], run)
        records = (record_pass(model, run, batch, self.needs_layers) for batch in batches[first:])
        largest = [[part.margins(record).max(0) for part in self.parts] for record in records]
        self.scales = []
        for number in range(len(self.parts)):
            values = np.concatenate([margins[number] for margins in largest])
            self.scales.append((float(np.median(values)), float(np.quantile(values, SCALED_QUANTILE))))

    def margins(self, recorded: RecordedPass) -> Floats:
        """Scaled margins of all parts, stacked as float64[layers of all parts, samples]."""
        return np.concatenate([self.scaled_part(part, part.margins(recorded)) for part in self.parts])

    def scaled_part(self, part: InferenceDetector, margins: Floats) -> Floats:
        """Margins of one part on the common scale."""
        middle, high = self.scales[self.parts.index(part)]
        return limit_scores((margins - middle) / max(high - middle, _LEAST * max(1.0, abs(high))))
