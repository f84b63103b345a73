"""Interface of rules on activations: a rule is fitted to clean samples, and scores how unusual a sample is.

A layer gives some numbers for each sample, its *reading*: float64[samples, numbers]. A rule gives a score for each layer and
sample; larger is more unusual. Scores of the first layers up to one layer are cumulated to a *margin*, so that a sample can be
judged before the model has computed the rest. The threshold of margins comes from clean samples
(`unsilent.statistics.conformal`), because the rate of false alarms is the user's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SITES, RANGE, QUANTILES, CHECKSUM = "sites", "range", "quantiles", "checksum"
READINGS = (SITES, RANGE, QUANTILES, CHECKSUM)
"""Readings of a layer: some neurons; smallest and largest value; quantiles; the residual of a checksum."""
LARGEST_SCORE = 1e6
"""Score that is used for anything larger, and for NaN."""


class ActivationRule(Protocol):
    """A rule on activations with its settings, a frozen dataclass.

    Attributes:
        name: Name by which it is chosen.
        reads: One of `READINGS`.
    """

    name: ClassVar[str]
    reads: ClassVar[str]

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """The arrays, by name, that scoring one layer needs.

        Args:
            profile: Readings of clean samples, float64[n, numbers].
            held_out: Readings of other clean samples, by which scores are standardised.
        """

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """Score of each sample in one layer, float64[n], or in several, float64[layers, n]; never NaN.

        Args:
            layer: Arrays from `fit`; for several layers their arrays, stacked.
            reading: float64[n, numbers] or [layers, n, numbers]; any number, NaN and infinity included.
        """

    def cumulate(self, scores: Floats) -> Floats:
        """Scores of n samples up to each layer, float64[layers, n], from the scores of single layers."""


class LayersAlone:
    """Base class of rules that score each layer independently."""

    def cumulate(self, scores: Floats) -> Floats:
        """The largest score among the layers up to each one, float64[layers, n]."""
        return np.maximum.accumulate(scores, axis=0)


def limit_scores(scores: Floats) -> Floats:
    """Limit scores to plus and minus `LARGEST_SCORE`; NaN becomes the largest."""
    return np.clip(np.nan_to_num(scores, nan=LARGEST_SCORE), -LARGEST_SCORE, LARGEST_SCORE)
