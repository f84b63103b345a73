"""Algorithm-based fault tolerance (ABFT): checksum of a layer's outputs, predicted from its inputs and clean weights.

A reading is the largest residual of a sample, in rounding errors: |sum of outputs - expected sum| over the sum of absolute
products times the machine epsilon. Residuals of clean samples are small multiples of this unit for any values, so the threshold
is scaled by the largest clean residual. Linear layers, convolutions, ``matmul``, ``bmm`` and ``scaled_dot_product_attention`` are
read; `torch.nn.MultiheadAttention` is not, because its products are computed inside one function.

Source: checksums of matrix products go back to Huang and Abraham (IEEE Trans. Computers 1984).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.detectors.activations.rule import CHECKSUM, Floats, LayersAlone, limit_scores

_LEAST = 1e-3
"""Smallest value, in rounding errors, that is used for the largest clean residual."""


@dataclass(frozen=True)
class Checksum(LayersAlone):
    """The residual of a checksum, relative to the largest residual in clean samples."""

    name: ClassVar[str] = "abft"
    reads: ClassVar[str] = CHECKSUM

    def fit(self, profile: Floats, held_out: Floats) -> Mapping[str, Floats]:
        """The largest residual of clean samples."""
        return {"largest": np.maximum(profile.max(0), _LEAST)}

    def score(self, layer: Mapping[str, Floats], reading: Floats) -> Floats:
        """Ratio of the residual to the largest residual of clean samples, float64[n]."""
        return limit_scores((reading / layer["largest"][..., None, :]).max(-1))
