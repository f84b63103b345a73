"""The judge of object detection: whether a faulty run found the same objects.

Boxes need not have the same bits: a golden and a faulty detection are the same object if their class is the same and their boxes
overlap well. Pairs are formed so that as many detections as possible have a partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.outcomes.base import JudgeVerdict
from unsilent.outcomes.tensors import array_of

_FIELDS = ("boxes", "scores", "labels")


@dataclass(frozen=True)
class DetectionSet:
    """Judges an image incorrect if an object was missed, added or given another class.

    Severity: share of golden and faulty detections without a partner.

    Output: a dict with ``boxes`` [n, k, 4] (left, top, right, bottom), ``scores`` [n, k] and ``labels`` [n, k], padded
    with entries whose score is below ``score``; or a list with one such dict per image, without the first dimension, as
    the detectors of torchvision return it. Only detections with a score of at least ``score`` count. Two are the same
    object if they have the same label and an intersection over union of ``iou`` or more.
    """

    iou: float = 0.5
    score: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.iou <= 1:
            raise UsageError(f"detections: iou is {self.iou}; expected a value above 0, at most 1")
        if not 0 < self.score < 1:
            raise UsageError(f"detections: score is {self.score}; expected a value between 0 and 1")

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        before, after = self._images(golden), self._images(faulty)
        if len(before) != len(after):
            raise UsageError(
                f"{self!r}: {len(before)} golden images, {len(after)} faulty ones; the batch size must not change"
            )
        unpaired = np.array(
            [self._share_without_partner(*pair) for pair in zip(before, after, strict=True)], np.float64
        )
        return JudgeVerdict(unpaired > 0, unpaired)

    def _images(self, output: Any) -> list[tuple[NDArray[np.float64], NDArray[Any]]]:
        """Boxes [k, 4] and labels [k] of each image, with a score above the judge's threshold."""
        return [
            (boxes[scores >= self.score], labels[scores >= self.score]) for boxes, scores, labels in self._rows(output)
        ]

    def _rows(self, output: Any) -> list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[Any]]]:
        """Boxes, scores and labels of each image."""
        single = isinstance(output, Mapping)
        entries = _entries(output)
        if not is_detections(output):
            raise UsageError(
                f"{self!r} needs an output with {', '.join(_FIELDS)}: a dict, or a list with one dict per image; "
                "choose another judge"
            )
        images = [tuple(array_of(entry[field]) for field in _FIELDS) for entry in entries]
        for boxes, scores, labels in images:
            if boxes.shape != (*scores.shape, 4) or labels.shape != scores.shape or scores.ndim != 1 + single:
                each = "[n, k, 4], [n, k] and [n, k]" if single else "[k, 4], [k] and [k]"
                raise UsageError(
                    f"{self!r}: boxes {list(boxes.shape)}, scores {list(scores.shape)} and labels {list(labels.shape)} "
                    f"do not fit each other; expected {each}"
                )
        if single:
            images = list(zip(*images[0], strict=True))
        return [(boxes.astype(np.float64), scores.astype(np.float64), labels) for boxes, scores, labels in images]

    def _share_without_partner(
        self, golden: tuple[NDArray[np.float64], NDArray[Any]], faulty: tuple[NDArray[np.float64], NDArray[Any]]
    ) -> float:
        """Share of an image's detections without a partner; 0 if the image has none."""
        from scipy.optimize import linear_sum_assignment

        count = len(golden[1]) + len(faulty[1])
        same = (golden[1][:, None] == faulty[1][None]) & (box_overlap(golden[0], faulty[0]) >= self.iou)
        pairs = same[linear_sum_assignment(same, maximize=True)].sum()
        return float(count - 2 * pairs) / max(count, 1)


def is_detections(output: Any) -> bool:
    """Whether an output has boxes, scores and labels: a dict, or a list with one dict per image."""
    return all(isinstance(entry, Mapping) and all(field in entry for field in _FIELDS) for entry in _entries(output))


def _entries(output: Any) -> Sequence[Any]:
    """The dicts of an output, one per image."""
    return [output] if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else [None]


def box_overlap(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union [j, k] of boxes [j, 4] and [k, 4] (left, top, right, bottom); 1 for equal boxes."""
    a, b = first[:, None], second[None]
    with np.errstate(all="ignore"):  # infinite boxes give NaN, which counts as no overlap
        both = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None).prod(-1)
        area = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
        return np.asarray(np.where((a == b).all(-1), 1.0, both / (area - both)))
