"""Values outside of the range that clean samples have in a layer: the detection of Ranger, and of a magnitude symptom.

    score = the larger one of (largest - high) / width and (low - smallest) / width;  width = high - low

0 at the ends of the range; -1/2 in its middle. NaN is the largest score.

Source: the bounds of Ranger (Chen, Li, Pattabiraman, DSN 2021, arXiv 2003.13874), of which the abstract was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.detectors.activations.rule import RANGE, Floats, largest_so_far, limit_scores

_LEAST = 1e-30


@dataclass(frozen=True)
class ValueRange:
    """How far a layer's values leave the range of clean samples, in units of its width."""

    name: ClassVar[str] = "ranger"
    reads: ClassVar[str] = RANGE

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """The ends of the range, of smallest and largest values [n, 2]."""
        return {"low": profile[:, :1].min(0), "high": profile[:, 1:].max(0)}

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """The excess beyond the range, float64[n]."""
        low, high = layer["low"], layer["high"]
        values = np.clip(reading, -1e300, 1e300)
        width = np.maximum(high - low, _LEAST * np.maximum(1, np.abs(high)))
        excess = np.maximum(values[:, 1] - high, low - values[:, 0]) / width
        return limit_scores(np.where(np.isnan(reading).any(1), np.nan, excess))

    def cumulate(self, scores: Floats) -> Floats:
        """The largest so far."""
        return largest_so_far(scores)


@dataclass(frozen=True)
class Nonfinite:
    """NaN or infinity in a layer: score 1, otherwise 0."""

    name: ClassVar[str] = "nonfinite"
    reads: ClassVar[str] = RANGE

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """Nothing needs to be known."""
        return {}

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """1 where a value is not finite, float64[n]."""
        return np.asarray((~np.isfinite(reading)).any(1), np.float64)

    def cumulate(self, scores: Floats) -> Floats:
        """The largest so far."""
        return largest_so_far(scores)
