"""Dr. DNA: the distribution of some neurons of each layer, compared with that of clean inputs.

Three terms of a layer, for one sample whose sites have the values v:

    surprise = mean of -log p_i(v_i), over sites i; p_i: smoothed share of the cell of v_i among clean values of the site
    distance = mean of |sorted(z) - quantiles of clean z|, with z = (v - mean_i) / deviation_i: an earth mover's distance
    location = 0, 1/2 or 1: whether the largest and the smallest z are at sites where clean samples have theirs

Each is standardised by held-out clean samples; their sum is the score of the layer. A value outside of all cells counts as one of
an empty cell, and the more the further away. The margin after a layer is the larger one of its own score and of the sum of
scores so far, standardised as for independent layers.

Source: the scheme of surprise, distance and location is that of public reproductions of Dr. DNA (Ma et al., ASPLOS 2024,
doi 10.1145/3620666.3651349), of which the abstract alone was read; all formulas and numbers here are chosen by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.detectors.activations.rule import SITES, Floats, limit_scores

_LEAST = 1e-12
"""Stands for a spread of 0."""
_FAR = 1e200
"""Stands for anything further from 0, NaN included."""


@dataclass(frozen=True)
class DrDna:
    """Surprise, distance and location, see the module.

    Attributes:
        bins: Cells of a site between its smallest and largest clean value.
        smoothing: Added to the count of each cell.
        surprise, distance, location: Weights of the terms.
    """

    name: ClassVar[str] = "dr-dna"
    reads: ClassVar[str] = SITES
    bins: int = 32
    smoothing: float = 1.0
    surprise: float = 1.0
    distance: float = 1.0
    location: float = 1.0

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """Edges and costs of cells, quantiles, places of extremes, and how terms of clean samples are distributed."""
        low, high = profile.min(0), profile.max(0)
        width = np.maximum((high - low) / self.bins, _LEAST * np.maximum(1, np.abs(high)))
        cells = np.clip(((profile - low) / width).astype(np.int64), 0, self.bins - 1)
        sites = profile.shape[1]
        counts = np.zeros((self.bins + 2, sites))
        np.add.at(counts, (cells + 1, np.arange(sites)), 1)
        layer = {
            "low": low,
            "width": width,
            "cost": -np.log((counts + self.smoothing) / (len(profile) + self.smoothing * (self.bins + 2))),
            "mean": profile.mean(0),
            "deviation": np.maximum(profile.std(0), _LEAST),
        }
        usual = (profile - layer["mean"]) / layer["deviation"]
        layer["quantiles"] = np.sort(usual, axis=1).mean(0)
        layer["largest"] = np.bincount(usual.argmax(1), minlength=sites) / len(profile)
        layer["smallest"] = np.bincount(usual.argmin(1), minlength=sites) / len(profile)
        terms = self._terms(layer, held_out)
        layer["usual"] = terms.mean(1)
        layer["spread"] = np.maximum(terms.std(1), _LEAST)
        return layer

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """The weighted sum of the standardised terms, in their standard deviations, float64[n]."""
        terms = (self._terms(layer, reading) - layer["usual"][..., None]) / layer["spread"][..., None]
        weights = np.array([self.surprise, self.distance, self.location])
        return limit_scores((weights[:, None] * limit_scores(terms)).sum(-2))

    def cumulate(self, scores: Floats) -> Floats:
        """The larger one of the last score and the sum so far over the root of the number of layers."""
        count = np.arange(1, len(scores) + 1)[:, None]
        return np.maximum(scores, scores.cumsum(0) / np.sqrt(count))

    def _terms(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """Surprise, distance and location of n samples, float64[..., 3, n]."""
        known = {name: value[..., None, :] for name, value in layer.items()}
        values = np.clip(np.nan_to_num(reading, nan=_FAR), -_FAR, _FAR)
        place = (values - known["low"]) / known["width"]
        cells = np.clip(np.floor(place), -1, self.bins).astype(np.int64) + 1
        cells = np.where(place == self.bins, self.bins, cells)  # the largest clean value is in the last cell
        outside = np.maximum(np.maximum(-place, place - self.bins), 0) / self.bins
        cost = np.take_along_axis(layer["cost"], cells, axis=-2) + np.log1p(outside)
        standard = (values - known["mean"]) / known["deviation"]
        distance = np.abs(np.sort(standard, axis=-1) - known["quantiles"]).mean(-1)
        seen = [
            np.take_along_axis(layer[name], where, axis=-1) > 0
            for name, where in (("largest", standard.argmax(-1)), ("smallest", standard.argmin(-1)))
        ]
        return np.stack([cost.mean(-1), distance, 1 - (seen[0].astype(float) + seen[1]) / 2], axis=-2)
