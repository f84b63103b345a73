"""Scenes composed of scikit-learn's 8x8 digits: several digits of different sizes without overlap.

Source of the digits: `workloads.digits`, with its split into training and held-out digits.
Invariants: a held-out digit belongs to one part only; scene k of a group of digits has the same bits on every machine and
for any number of requested scenes; no scene mixes digits of two batches of clean inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import unknown_name_error
from unsilent.workloads.base import CALIBRATION, CLEAN_PARTS, SHIFTED, TEST, Workload
from unsilent.workloads.digits import digits

DESCRIPTION = (
    "scenes of 32x32 pixels with up to four of scikit-learn's digits (UCI handwritten digits); "
    "1,347 digits for training, 450 held out"
)
CANVAS = 32
"""Height and width of a scene in pixels."""
MOST_DIGITS = 4
BACKGROUND = 0
"""Pixel label of the background; pixels of digit d have the label d + 1."""
PIXEL_LABELS = 11
EVALUATION_SCENES = 256
EVALUATION = "evaluation"
HELD_OUT_PARTS = (EVALUATION, CALIBRATION, TEST, SHIFTED)
"""Parts that successive held-out digits belong to in turn."""
BATCHES = 36
"""Number of groups of a part, with three or four digits each; each group makes one batch of clean inputs."""
_PLACES_TRIED = 20
_WEIGHT_STEPS = 64
"""Interpolation weights are multiples of 1 / 64, so sums of their products with integer grey levels are exact in any
order.
"""


class Scenes(NamedTuple):
    """Images of scenes with the digits, boxes and pixel labels in them.

    Attributes:
        images: float32 [n, 1, 32, 32], multiples of 1/256; the background is near 0, digits reach up to 1.
        labels: int64 [n, 32, 32], see `BACKGROUND`.
        boxes: float32 [n, 4, 4]: left, top, right and bottom edge of the pixels of each digit; 0 if there is no digit.
        digits: int64 [n, 4]: value of each digit; -1 if there is no digit.
    """

    images: Tensor
    labels: Tensor
    boxes: Tensor
    digits: Tensor


@dataclass(frozen=True)
class SceneStyle:
    """Ranges of the random properties of a scene; each is drawn uniformly, with both ends included.

    Attributes:
        sizes: Height and width in pixels to which a digit's 8x8 image is enlarged.
        contrast: Factor of a digit's grey levels, in sixteenths.
        background: Grey level added to the whole scene, in 256ths.
        noise: Largest change of each pixel, in 256ths.
    """

    sizes: tuple[int, int] = (8, 14)
    contrast: tuple[int, int] = (10, 14)
    background: tuple[int, int] = (0, 16)
    noise: int = 8


USUAL = SceneStyle()
UNUSUAL = SceneStyle(sizes=(7, 16), contrast=(7, 15), background=(16, 40), noise=24)
"""Fainter, noisier and brighter scenes with digits of more sizes: unusual, but a person reads them without doubt."""


def compose(rows: Sequence[int] | Tensor, count: int, seed: Sequence[int], *, style: SceneStyle = USUAL,
            held_out: bool = True) -> Scenes:  # fmt: skip
    """``count`` scenes of two to four digits each.

    A scene has fewer digits if there is no place for one.

    Args:
        rows: The digits to draw from: indices into the held-out digits (or into the training digits).
        seed: Seed of all random properties.
    """
    data, choice = digits(), np.asarray(rows)
    images, names = (data.test, data.test_labels) if held_out else (data.train, data.train_labels)
    levels = np.rint((images[choice, 0].numpy() + 1) * 8).astype(np.float64)  # 0 … 16
    rng = np.random.default_rng(seed)
    drawn = [_scene(levels, names[choice].numpy(), style, rng) for _ in range(count)]
    columns = zip(*drawn, strict=True) if drawn else ()
    return Scenes(*(torch.from_numpy(np.stack(column)) for column in columns))


def _scene(
    levels: NDArray[np.float64], names: NDArray[np.int64], style: SceneStyle, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Image, labels, boxes and digits of one random scene; see `Scenes`."""
    image = np.zeros((CANVAS, CANVAS))
    labels = np.full((CANVAS, CANVAS), BACKGROUND, np.int64)
    boxes, placed_digits = np.zeros((MOST_DIGITS, 4), np.float32), np.full(MOST_DIGITS, -1, np.int64)
    taken = np.zeros((CANVAS, CANVAS), bool)
    image += rng.integers(*style.background, endpoint=True)
    number = 0
    for _ in range(rng.integers(2, MOST_DIGITS, endpoint=True)):
        row, size = rng.integers(len(levels)), int(rng.integers(*style.sizes, endpoint=True))
        contrast = rng.integers(*style.contrast, endpoint=True)
        place = _free_place(taken, size, rng)
        if place is None:
            continue
        taken[place] = True
        weights = _enlarging_weights(size)
        enlarged = np.einsum("yi,ij,xj->yx", weights, levels[row], weights)
        image[place] += contrast * enlarged
        ink = enlarged >= 6
        labels[place] = np.where(ink, names[row] + 1, BACKGROUND)
        down, across = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
        top, left = place[0].start, place[1].start
        boxes[number] = left + across[0], top + down[0], left + across[-1] + 1, top + down[-1] + 1
        placed_digits[number] = names[row]
        number += 1
    image += rng.integers(-style.noise, style.noise, image.shape, endpoint=True)
    grey = np.clip(np.rint(image), 0, 256) / 256
    return grey.astype(np.float32)[None], labels, boxes, placed_digits


def _free_place(taken: NDArray[np.bool_], size: int, rng: np.random.Generator) -> tuple[slice, slice] | None:
    """A free square of the given size at a random place, or None if no try finds one."""
    for top, left in rng.integers(0, CANVAS - size, (_PLACES_TRIED, 2), endpoint=True):
        place = slice(top, top + size), slice(left, left + size)
        if not taken[place].any():
            return place
    return None


def _enlarging_weights(size: int) -> NDArray[np.float64]:
    """Weights [size, 8] that enlarge 8 pixels to ``size`` pixels by linear interpolation."""
    at = np.clip((np.arange(size) + 0.5) * 8 / size - 0.5, 0, 7)
    near = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(8)))
    return np.asarray(np.rint(near * _WEIGHT_STEPS) / _WEIGHT_STEPS, np.float64)


def held_out_rows(part: str) -> Tensor:
    """The indices int64 of the held-out digits in a part of `HELD_OUT_PARTS`."""
    return torch.arange(HELD_OUT_PARTS.index(part), len(digits().test), len(HELD_OUT_PARTS))


def clean_scenes(part: str, samples: int) -> list[Scenes]:
    """Batches of scenes of one part, with ``samples`` scenes in total.

    There are at most `BATCHES` batches, and no digit is in two of them.

    Args:
        part: One of `CLEAN_PARTS`.
    """
    if part not in CLEAN_PARTS:
        raise unknown_name_error("part of the clean inputs", part, CLEAN_PARTS)
    style, number = UNUSUAL if part == SHIFTED else USUAL, HELD_OUT_PARTS.index(part)
    groups = held_out_rows(part).tensor_split(BATCHES)
    each = [samples // BATCHES + (group < samples % BATCHES) for group in range(BATCHES)]
    return [
        compose(rows, count, [1, number, group], style=style)
        for group, (rows, count) in enumerate(zip(groups, each, strict=True))
        if count
    ]


def evaluation_scenes() -> Scenes:
    """The scenes that models are evaluated on."""
    return compose(held_out_rows(EVALUATION), EVALUATION_SCENES, [1, HELD_OUT_PARTS.index(EVALUATION)])


def training_scenes(count: int) -> Scenes:
    """``count`` scenes of training digits."""
    return compose(range(len(digits().train)), count, [0], held_out=False)


class ScenesWorkload(Workload):
    """A workload on images of scenes, which can compose further scenes as clean inputs."""

    def clean_batches(self, part: str, samples: int) -> Sequence[Tensor]:
        """Images of further scenes, float32 [n, 1, 32, 32]; see `CalibratedWorkload`."""
        return [scenes.images for scenes in clean_scenes(part, samples)]

    def clean_originals(self, part: str, samples: int) -> Sequence[Sequence[int]]:
        """For each scene, the number of the group of digits that it is composed of.

        All scenes of one batch are composed of the same few digits.
        """
        return [[group] * len(scenes.images) for group, scenes in enumerate(clean_scenes(part, samples))]
