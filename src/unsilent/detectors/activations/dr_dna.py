"""Dr. DNA: a score with three terms for unusual distributions of a layer's activations.

A layer is read at its *sites*: the means over positions of some of its channels, and the smallest and the largest value of its
whole output, so that one corrupted value is detected as well. With value x_i at site i, standardised by clean samples to z_i:

- surprise: mean over sites of -log(share of clean values in the cell of x_i), with smoothing, so that an empty cell has a finite
  cost; outside of all cells, log(1 + distance in units of their range) is added
- distance: log(1 + mean square of W z), where W whitens clean samples (their shrunk correlation becomes the identity): sites that
  are usual individually but not together have a large distance
- location: the share of the two sites, the largest and the smallest z of the sample, at which clean samples never have theirs

Surprise and distance are scaled by held-out clean samples: 0 is the median, 1 the 99 % quantile. The score of a layer is the
weighted sum of the terms, and the margin after a layer the largest score so far. Distance has the largest weight, as clean
samples that are unusual at a few sites make surprise heavy-tailed. The sum over layers of reproductions was tried and detects
less: clean outliers are unusual in all layers, and their sums set the threshold.

Source: the scheme of surprise, distance and location is that of public reproductions of Dr. DNA (Ma et al., ASPLOS 2024,
doi 10.1145/3620666.3651349), of which the abstract alone was read; all formulas and numbers here are chosen by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.detectors.activations.rule import SITES, Floats, LayersAlone, limit_scores

_MOST_BINS = 10**6
_LEAST = 1e-12
"""Value that is used in place of a spread of 0."""
_LEAST_RELATIVE = 1e-6
"""Smallest spread, as a share of the magnitude of a site, because rounding can exceed a smaller one."""
_LEAST_SPREAD = 0.1
"""Smallest distance from a term's median to its 99 % quantile; smaller ones are replaced by it."""
_FAR = 1e60
"""Value that is used for anything further from 0, and for NaN."""


@dataclass(frozen=True)
class DrDna(LayersAlone):
    """Surprise, distance and location of a layer's activations, compared with clean samples.

    The module has the formulas.

    Attributes:
        bins: Number of cells of a site between its smallest and largest clean value.
        smoothing: Number that is added to the count of each cell.
        shrinkage: Share of the identity in the correlation of sites.
        surprise, distance, location: Weights of the terms.
    """

    name: ClassVar[str] = "dr-dna"
    reads: ClassVar[str] = SITES
    bins: int = 16
    smoothing: float = 1.0
    shrinkage: float = 0.02
    surprise: float = 0.25
    distance: float = 1.0
    location: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= _MOST_BINS:
            raise UsageError(f"dr-dna: bins is {self.bins}; expected a number from 1 to {_MOST_BINS:,}")

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """The statistics of clean samples that the terms need: histograms, whitening, extremes and scales."""
        low, high = profile.min(0), profile.max(0)
        width = np.maximum((high - low) / self.bins, _LEAST * np.maximum(1, np.abs(high)))
        cells = np.clip(((profile - low) / width).astype(np.int64), 0, self.bins - 1)
        sites = profile.shape[1]
        counts = np.zeros((self.bins + 2, sites))
        np.add.at(counts, (cells + 1, np.arange(sites)), 1)
        cost = -np.log((counts + self.smoothing) / (len(profile) + self.smoothing * (self.bins + 2)))
        mean = profile.mean(0)
        deviation = np.maximum(profile.std(0), np.maximum(_LEAST, _LEAST_RELATIVE * np.abs(mean)))
        layer = {"low": low, "width": width, "cost": cost, "mean": mean, "deviation": deviation}
        usual = (profile - mean) / deviation
        correlation = (1 - self.shrinkage) * usual.T @ usual / len(usual) + self.shrinkage * np.eye(sites)
        values, vectors = np.linalg.eigh(correlation)
        layer["whitening"] = vectors / np.sqrt(values)
        layer["largest"] = np.bincount(usual.argmax(1), minlength=sites) / len(profile)
        layer["smallest"] = np.bincount(usual.argmin(1), minlength=sites) / len(profile)
        terms = self._terms(layer, held_out)[:2]
        layer["usual"] = np.median(terms, axis=1)
        layer["spread"] = np.maximum(np.quantile(terms, 0.99, axis=1) - layer["usual"], _LEAST_SPREAD)
        return layer

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """The weighted sum of the scaled terms, float64[..., n]."""
        surprise, distance, location = np.moveaxis(self._terms(layer, reading), -2, 0)
        usual, spread = layer["usual"][..., None], layer["spread"][..., None]
        score = self.surprise * (surprise - usual[..., 0, :]) / spread[..., 0, :]
        score += self.distance * (distance - usual[..., 1, :]) / spread[..., 1, :]
        return limit_scores(score + self.location * location)

    def _terms(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """Surprise, distance and location of n samples, float64[..., 3, n]."""
        known = {name: value[..., None, :] for name, value in layer.items()}
        values = np.clip(np.nan_to_num(reading, nan=_FAR), -_FAR, _FAR)
        place = (values - known["low"]) / known["width"]
        outside = np.maximum(np.maximum(-place, place - self.bins), 0) / self.bins
        # The largest clean value is in the last cell, also after rounding.
        place = np.where(outside < _LEAST_RELATIVE, np.clip(place, 0, self.bins - 0.5), place)
        cells = np.clip(np.floor(place), -1, self.bins).astype(np.int64) + 1
        cost = np.take_along_axis(layer["cost"], cells, axis=-2) + np.log1p(outside)
        standard = (values - known["mean"]) / known["deviation"]
        distance = np.log1p(np.square(np.clip(standard, -_FAR, _FAR) @ layer["whitening"]).mean(-1))
        seen_largest = np.take_along_axis(layer["largest"], standard.argmax(-1), axis=-1) > 0
        seen_smallest = np.take_along_axis(layer["smallest"], standard.argmin(-1), axis=-1) > 0
        location = 1 - (seen_largest.astype(float) + seen_smallest) / 2
        return np.stack([cost.mean(-1), distance, location], axis=-2)
