"""Mixtures of fault models, written ``0.7*bitflip + 0.3*burst:length=3``.

Each fault is drawn from one of the models by weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from unsilent.faults.fault_texts import (
    check_paths,
    function_file,
    mixture_text,
    split_from,
    split_lasts,
    weighted_parts,
)
from unsilent.faults.models import FaultModel, fault_model
from unsilent.faults.population import Region
from unsilent.faults.value_functions import function_fault_model


@dataclass(frozen=True)
class Mixture:
    """Several fault models, one of which is drawn for each fault.

    Attributes:
        parts: Fault models, at least two.
        weights: Weight of each part, above 0; the probability of a part is its weight divided by the sum of all weights.
    """

    parts: tuple[FaultModel, ...]
    weights: tuple[float, ...]

    @property
    def text(self) -> str:
        """The text that re-creates the mixture."""
        return mixture_text([(weight, part.text) for weight, part in zip(self.weights, self.parts, strict=True)])

    def can_corrupt(self, region: Region) -> bool:
        """Whether every model of the mixture can corrupt elements of this dtype."""
        return all(part.can_corrupt(region) for part in self.parts)

    def choose(self, rng: np.random.Generator) -> FaultModel:
        """Draw the model of one fault by weight."""
        share = np.array(self.weights) / sum(self.weights)
        return self.parts[int(rng.choice(len(self.parts), p=share))]


def asked_fault_model(text: str) -> FaultModel | Mixture:
    """Parse a fault model that the user gave; runs the user's file if the model is a function in one.

    Must not be used for a text that comes from a file (see `unsilent.campaigns.confirmed_files`). Raises ``UsageError``.
    """
    if not isinstance(text, str):
        return fault_model(text)
    check_paths(text)
    function_file(text)  # raises an error for functions in several files
    parts = weighted_parts(text)
    models = tuple(lasting_fault_model(part, function_fault_model) for _, part in parts)
    return models[0] if len(models) == 1 else Mixture(models, tuple(weight for weight, _ in parts))


def lasting_fault_model(text: str, read_other: Callable[[str], FaultModel | None] = lambda text: None) -> FaultModel:
    """Parse a fault model that may end in ``from=2,lasts=5``; ``read_other`` reads additional names."""
    without, lasts = split_lasts(text)
    without, begins = split_from(without)
    return replace(read_other(without) or fault_model(without), lasts=lasts, begins=begins)
