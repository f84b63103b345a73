"""AP50: how well detections fit the objects of many images, as in PASCAL VOC since 2010 and COCO at IoU 0.5."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unsilent.workloads.scenes.detector_model import Detections, intersection_over_union

IOU = 0.5


def average_precision(found: Detections, boxes: Tensor, digits: Tensor) -> float:
    """Mean over the classes that occur of the area under precision (its largest value at any higher recall) against recall.

    A detection is right if its box has an IoU of 0.5 or more with an object of its class that no better detection has taken;
    it is compared with the object that it overlaps most.

    Args:
        found: Detections of n images; those with score 0 are left out.
        boxes: Objects, float32 [n, k, 4].
        digits: Their classes int64 [n, k], -1 where there is none.
    """
    overlap = intersection_over_union(found.boxes, boxes)
    occurring = sorted(set(digits[digits >= 0].tolist()))
    return float(np.mean([_of_class(number, found, overlap, digits) for number in occurring]))


def _of_class(number: int, detections: Detections, overlap: Tensor, digits: Tensor) -> float:
    """Average precision of one class; ``overlap``: IoU of detections and objects [n, detections, k]."""
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
