"""Rules on values outside of the range of clean samples, as in Ranger, Clip-Act and symptom-based detection.

    score = the larger one of (largest - high) / width and (low - smallest) / width;  width = high - low

The score is 0 at the ends of the range and -1/2 in its middle. NaN gets the largest score.

A magnitude symptom compares only the largest magnitude, regardless of sign; Clip-Act checks only values above the range.

Sources: the bounds of Ranger (Chen, Li, Pattabiraman, DSN 2021, arXiv 2003.13874) and the clipped activations of FT-ClipAct
(DATE 2020, arXiv 1912.00941), of which the abstracts were read. FT-ClipAct finds its thresholds with
faults; here they are the largest clean values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.detectors.activations.rule import RANGE, Floats, LayersAlone, limit_scores

_LEAST = 1e-30


@dataclass(frozen=True)
class ValueRange(LayersAlone):
    """The distance of a layer's values from the range of clean samples, relative to the range's width."""

    name: ClassVar[str] = "ranger"
    reads: ClassVar[str] = RANGE

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """The smallest and the largest value of clean samples."""
        return {"low": profile[:, :1].min(0), "high": profile[:, 1:].max(0)}

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """The distance from the range relative to its width, float64[n]."""
        low, high = layer["low"][..., 0, None], layer["high"][..., 0, None]
        width = np.maximum(high - low, _LEAST * np.maximum(1, np.abs(high)))
        excess = self.excess(np.clip(reading, -1e300, 1e300), low, high) / width
        return limit_scores(np.where(np.isnan(reading).any(-1), np.nan, excess))

    def excess(self, values: Floats, low: Floats, high: Floats) -> Floats:
        """The distance of each sample's extreme values, float64[n, 2], from the clean range, as float64[n]."""
        return np.maximum(values[..., 1] - high, low - values[..., 0])


@dataclass(frozen=True)
class ClippedActivations(ValueRange):
    """The excess of a layer's values above the largest clean value, which Clip-Act would clip."""

    name: ClassVar[str] = "clip-act"

    def excess(self, values: Floats, low: Floats, high: Floats) -> Floats:
        """The excess of the largest values above the range, float64[n]."""
        return values[..., 1] - high


@dataclass(frozen=True)
class MagnitudeSymptom(LayersAlone):
    """The largest magnitude in a layer, relative to the largest one in clean samples."""

    name: ClassVar[str] = "symptom"
    reads: ClassVar[str] = RANGE

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """The largest magnitude in clean samples."""
        return {"largest": np.maximum(np.abs(profile).max(keepdims=True)[0], _LEAST)}

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """Ratio of the largest magnitude to that of clean samples, float64[n]."""
        values = np.clip(np.abs(reading), 0, 1e200).max(-1)  # NaN stays
        return limit_scores(values / layer["largest"])


@dataclass(frozen=True)
class Nonfinite(LayersAlone):
    """NaN and infinity in a layer: score 1 if there is one, else 0."""

    name: ClassVar[str] = "nonfinite"
    reads: ClassVar[str] = RANGE

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """An empty mapping, because this rule learns nothing from clean samples."""
        return {}

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """1 for a sample with a value that is not finite, else 0, float64[n]."""
        return np.asarray((~np.isfinite(reading)).any(-1), np.float64)
