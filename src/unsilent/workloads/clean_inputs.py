"""Clean inputs of the built-in workloads for detectors: disjoint sets of originals, and altered copies of images.

Invariants: an original is in one part only; copy j of an original does not depend on the rest of the request; all
copies of an original are in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

from unsilent.basics.errors import UsageError
from unsilent.workloads.base import CALIBRATION, SHIFTED, TEST

MOST_COPIES = 16
"""Largest number of copies of one original; more copies add hardly any information for a detector."""
PARTS_IN_TURN = (CALIBRATION, TEST, CALIBRATION, TEST, SHIFTED)
"""Parts that successive originals belong to."""


def split_originals(free: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """Split the originals into a calibration, a test and a shifted part, int64 each.

    Two fifths are for calibration, two fifths for test and one fifth is shifted. ``free``: originals that neither the
    training nor the evaluation uses.
    """
    rows = torch.as_tensor(free, dtype=torch.int64)
    turn = np.array(PARTS_IN_TURN)[np.arange(len(rows)) % len(PARTS_IN_TURN)]
    return {part: rows[torch.from_numpy(turn == part)] for part in (CALIBRATION, TEST, SHIFTED)}


@dataclass(frozen=True)
class CleanInputs:
    """The ``clean`` argument of `Workload` for a workload that has a limited number of originals.

    Called with a part and a number of samples, it takes as many copies of each original as are needed, at most ``most_copies``.

    Attributes:
        name: Name of the workload.
        originals: ``originals(part)`` -> numbers of the originals, int64.
        make: ``make(part, original, copies)`` -> a tensor or a dict of tensors: the first ``copies`` copies of an original.
        batch: Samples per batch, as far as the copies of an original allow.
        most_copies: Largest number of copies of an original.
    """

    name: str
    originals: Callable[[str], Tensor]
    make: Callable[[str, int, int], Any]
    batch: int
    most_copies: int = MOST_COPIES

    def __call__(self, part: str, samples: int) -> list[Any]:
        """Batches with ``samples`` samples in total, or with all samples if there are fewer.

        If an original is not used, none of its altered copies is used either.

        Raises:
            UsageError: the evaluation uses all originals.
        """
        plan = self._plan(part, samples)
        return [joined([self.make(part, original, copies) for original, copies in batch]) for batch in plan]

    def originals_of_samples(self, part: str, samples: int) -> list[list[int]]:
        """The original of each sample in the batches for the same part and number of samples.

        Raises ``UsageError`` like the call.
        """
        return [[original for original, copies in batch for _ in range(copies)] for batch in self._plan(part, samples)]

    def _plan(self, part: str, samples: int) -> list[list[tuple[int, int]]]:
        """The originals in each batch, each with its number of copies."""
        originals = self.originals(part).tolist()
        if not originals:
            raise UsageError(
                f"workload {self.name!r}: no held-out originals are left for the clean inputs {part!r}; lower the option 'eval'"
            )
        copies = min(self.most_copies, math.ceil(samples / len(originals)))
        wanted = min(samples, copies * len(originals))
        each = [min(copies, wanted - start) for start in range(0, wanted, copies)]
        pairs, per_batch = list(zip(originals, each, strict=False)), max(1, self.batch // copies)
        return [pairs[start : start + per_batch] for start in range(0, len(pairs), per_batch)]


def joined(inputs: Sequence[Any]) -> Any:
    """One batch made from several batches, which are tensors or dicts of tensors."""
    if isinstance(inputs[0], Mapping):
        return {key: torch.cat([batch[key] for batch in inputs]) for key in inputs[0]}
    return torch.cat(list(inputs))


@dataclass(frozen=True)
class ImageAlteration:
    """Limits of the random changes in an altered copy of an image.

    Each change is drawn uniformly within its limits.

    Attributes:
        rotation: Largest rotation in degrees, in both directions.
        shift: Largest shift in pixels, along both axes.
        brightness: Largest relative change of all values.
        noise: Largest standard deviation of Gaussian noise; values range from 0 to 1.
        mirrored: Whether every other copy is mirrored left to right.
    """

    rotation: float
    shift: float
    brightness: float
    noise: float
    mirrored: bool = False


def altered_copies(
    image: Tensor, copies: int, alteration: ImageAlteration, levels: int, seed: Sequence[int], *, plain_first: bool
) -> Tensor:
    """Altered copies of one image [c, h, w] with values 0 … 1, as float32 [copies, c, h, w].

    Values are rounded to multiples of 1 / levels.

    Args:
        plain_first: Whether the first copy is the image itself.
    """
    rng = np.random.default_rng(seed)
    drawn = [_alter(image, alteration, rng, mirrored=alteration.mirrored and j % 2 == 1) for j in range(copies)]
    result = (torch.stack(drawn).clamp(0, 1) * levels).round() / levels
    if plain_first:
        result[0] = image
    return result


def _alter(image: Tensor, how: ImageAlteration, rng: np.random.Generator, *, mirrored: bool) -> Tensor:
    """One altered copy of an image.

    Computed with elementwise arithmetic only, which gives the same bits with any number of threads.
    """
    _, h, w = image.shape
    angle, right, down, brighter, noisy = rng.uniform(-1, 1, 5)
    noise = rng.standard_normal(tuple(image.shape))
    cos, sin = math.cos(math.radians(how.rotation * angle)), math.sin(math.radians(how.rotation * angle))
    y, x = np.meshgrid(np.arange(h) - (h - 1) / 2, np.arange(w) - (w - 1) / 2, indexing="ij")
    if mirrored:
        x = -x
    column = cos * x - sin * y + how.shift * right
    row = sin * x + cos * y + how.shift * down
    grid = np.stack([2 * column / w, 2 * row / h], -1)
    moved = grid_sample(image[None], _float32(grid)[None], align_corners=False)[0]
    return moved * (1 + how.brightness * float(brighter)) + how.noise * abs(float(noisy)) * _float32(noise)


def _float32(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
