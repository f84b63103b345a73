"""`scenes-detector`: a model that finds and classifies the digits of a scene.

The answer that is judged is the list of detections.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.workloads.base import call_model
from unsilent.workloads.model_fitting import Goal, Progress, Schedule, no_progress
from unsilent.workloads.scenes.composing import CANVAS, Scenes, ScenesWorkload
from unsilent.workloads.scenes.detector_model import (
    STRIDE,
    Detections,
    Detector,
    detect,
    detection_loss,
    intersection_over_union,
    target_of,
)
from unsilent.workloads.scenes.models import SceneModel, scenes_workload

IOU = 0.5


def average_precision(detections: Detections, boxes: Tensor, digits: Tensor) -> float:
    """Mean average precision over the classes that occur.

    For each class it is the area under the curve of precision against recall, with the largest precision at any higher
    recall. Each detection is compared with the object of its class that it overlaps most. It is right if the IoU is 0.5
    or more and no better detection has taken that object.

    Args:
        found: Detections in n images; detections with score 0 are ignored.
        boxes: Objects, float32 [n, k, 4].
        digits: Classes of the objects, int64 [n, k]; -1 if there is no object.
    """
    overlap = intersection_over_union(detections.boxes, boxes)
    occurring = sorted(set(digits[digits >= 0].tolist()))
    return float(np.mean([_of_class(number, detections, overlap, digits) for number in occurring]))


def _of_class(number: int, detections: Detections, overlap: Tensor, digits: Tensor) -> float:
    """Average precision of one class.

    ``overlap``: IoU of detections and objects [n, detections, k].
    """
    objects = digits == number
    mine = ((detections.labels == number) & (detections.scores > 0)).nonzero()
    order = detections.scores[mine[:, 0], mine[:, 1]].argsort(descending=True, stable=True)
    taken = torch.zeros_like(objects)
    right = np.zeros(len(mine), bool)
    for place, (image, detection) in enumerate(mine[order].tolist()):
        fits = overlap[image, detection].masked_fill(~objects[image], -1)
        best = int(fits.argmax())
        right[place] = fits[best] >= IOU and not taken[image, best]
        taken[image, best] |= bool(right[place])
    precision = right.cumsum() / np.arange(1, len(right) + 1)
    highest = np.maximum.accumulate(precision[::-1])[::-1]
    return float(highest[right].sum() / int(objects.sum()))


def run(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The detections in images [n, 1, 32, 32], as a dict of the fields of `Detections`."""
    return detections_in(model, batch)._asdict()


def detections_in(model: nn.Module, images: Tensor) -> Detections:
    """The detections in images [n, 1, 32, 32]."""
    return detect(call_model(model, images))


def _score(model: nn.Module, scenes: Scenes) -> float:
    return average_precision(detections_in(model, scenes.images), scenes.boxes, scenes.digits)


MODEL = SceneModel(
    version=1,
    description="small anchor-free one-stage detector with batch norm that finds handwritten digits in scenes",
    build=Detector,
    scenes=8000,
    schedule=Schedule(epochs=2, batch=32, rate=0.01),
    components={part: f"{part}.*" for part in ("stem", "body", "tower", "classes", "boxes")},
    targets=lambda scenes: target_of(scenes.boxes, scenes.digits, CANVAS // STRIDE, CANVAS // STRIDE),
    loss=detection_loss,
    score=_score,
    run=run,
    goal=Goal("AP50", 0.60),
    judge="detections",
)


def detector(*, eval: int = 64, seed: int = 0, progress: Progress = no_progress) -> ScenesWorkload:  # noqa: A002 - option name
    """The workload of the trained detector on ``eval`` scenes of held-out digits [eval, 1, 32, 32].

    The answer of the model is the detected digits.
    """
    return scenes_workload("scenes-detector", MODEL, eval, seed, progress)
