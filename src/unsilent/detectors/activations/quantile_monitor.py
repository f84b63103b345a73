"""Rule on a few quantiles of each layer, compared with those of clean samples.

    score = the largest of |q - mean of clean q| / deviation of clean q, over the quantiles of a layer

A quantile may have nearly no spread, for example the lower ones after a ReLU; the smallest clean change would then have a large
score. So each deviation is at least a share of the mean deviation over all quantiles of the layer.

The published monitor (Geissler et al., SafeComp 2023, arXiv 2310.20349; the abstract was read) feeds quantiles of two or more
layers to a decision tree that is trained with faults. This rule needs only clean samples, as all rules here do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.detectors.activations.rule import QUANTILES, Floats, LayersAlone, limit_scores

_LEAST = 1e-12
_LEAST_SHARE = 0.1
"""Smallest deviation, as a share of the mean deviation over the quantiles of a layer."""


@dataclass(frozen=True)
class QuantileMonitor(LayersAlone):
    """Quantiles of a layer, standardised with clean samples."""

    name: ClassVar[str] = "quantiles"
    reads: ClassVar[str] = QUANTILES

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """Mean and standard deviation of each quantile over clean samples."""
        mean, deviation = profile.mean(0), profile.std(0)
        least = np.maximum(_LEAST_SHARE * deviation.mean(), _LEAST * np.maximum(1, np.abs(mean)))
        return {"mean": mean, "deviation": np.maximum(deviation, least)}

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """The largest standardised difference, float64[..., n]."""
        values = np.clip(reading, -1e200, 1e200)
        return limit_scores((np.abs(values - layer["mean"][..., None, :]) / layer["deviation"][..., None, :]).max(-1))
