"""A one-stage detector without anchors, like FCOS (Tian et al., ICCV 2019).

Each cell of a coarse grid gives class scores and a box.

For each cell of 4x4 pixels, the network predicts which digit has its centre near, the distance of that centre from the
cell's centre, and the size of the box. Training compares the cells near a digit's centre with that digit (`target_of`,
`detection_loss`). `detect` converts the predictions to detections: those with the highest scores, without those whose
box overlaps a better one (non-maximum suppression).

Invariants: `detect` returns tensors of a fixed size and copies nothing to the host; values that are not finite stay
visible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot, smooth_l1_loss

STRIDE = 4
"""Height and width in pixels of the cell of one prediction."""
CLASSES = 10
CANDIDATES = 32
"""Number of cells with the highest scores from which overlapping ones are removed."""
OVERLAP = 0.5
"""Intersection over union from which two boxes are taken as the same object."""
BOX_WEIGHT = 2.0
PRIOR = -4.0
"""Class scores (before the sigmoid) of an untrained detector: nearly all cells have no object."""


class Detector(nn.Module):
    """The detector network: images [n, 1, h, w] -> cells [n, 14, h / 4, w / 4].

    A cell has ten class scores before the sigmoid, then a box for `boxes_of`.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_layer(1, width), *_layer(width, 2 * width, 2))
        self.body = nn.Sequential(*_layer(2 * width, 4 * width, 2), *_layer(4 * width, 4 * width))
        self.tower = nn.Sequential(*_layer(4 * width, 4 * width), *_layer(4 * width, 4 * width))
        self.classes = nn.Conv2d(4 * width, CLASSES, 1)
        self.boxes = nn.Conv2d(4 * width, 4, 1)
        nn.init.constant_(self.classes.bias, PRIOR)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        features = self.tower(self.body(self.stem(x)))
        return torch.cat([self.classes(features), self.boxes(features)], 1)


def _layer(c_in: int, c_out: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]


def cell_centres(height: int, width: int, like: Tensor) -> Tensor:
    """The x and y coordinates of the cell centres in pixels, [2, height, width]."""
    y, x = (torch.arange(size, device=like.device, dtype=like.dtype) for size in (height, width))
    return (torch.stack([x.expand(height, width), y[:, None].expand(height, width)]) + 0.5) * STRIDE


def boxes_of(cells: Tensor) -> Tensor:
    """The boxes that the cells encode, [n, 4, h, w] as left, top, right, bottom in pixels.

    Args:
        cells: [n, 4, h, w]: distance of the box's centre from the cell's, x and y; logarithms of width and height; all in cells.
    """
    centre = cell_centres(cells.shape[2], cells.shape[3], cells) + STRIDE * cells[:, :2]
    half = STRIDE / 2 * cells[:, 2:].exp()
    return torch.cat([centre - half, centre + half], 1)


def target_of(boxes: Tensor, digits: Tensor, height: int, width: int) -> Tensor:
    """Training targets of the cells, [n, 5, height, width].

    A target is the digit (-1: none) and the box in the encoding of `boxes_of`. A cell stands for the nearest digit
    whose centre is less than one cell away from its own, in both directions.

    Args:
        boxes: float32 [n, k, 4].
        digits: int64 [n, k], -1 if there is no digit.
    """
    centre = (boxes[..., :2] + boxes[..., 2:]) / 2
    distance = centre[..., None, None] - cell_centres(height, width, boxes)  # [n, k, 2, height, width]
    furthest = distance.abs().amax(2).masked_fill((digits < 0)[..., None, None], torch.inf)
    nearest = furthest.argmin(1, keepdim=True)  # [n, 1, height, width]
    has_digit = furthest.gather(1, nearest) < STRIDE
    size = ((boxes[..., 2:] - boxes[..., :2]).clamp(min=1) / STRIDE).log()
    whole = torch.cat([digits[..., None], size], 2)[..., None, None].expand(-1, -1, -1, height, width)
    every = torch.cat([whole[:, :, :1], distance / STRIDE, whole[:, :, 1:]], 2)  # [n, k, 5, height, width]
    target = every.gather(1, nearest[:, :, None].expand(-1, -1, 5, -1, -1))[:, 0]
    return torch.cat([torch.where(has_digit, target[:, :1], -1), torch.where(has_digit, target[:, 1:], 0)], 1)


def detection_loss(cells: Tensor, target: Tensor) -> Tensor:
    """Focal loss of the class scores plus smooth L1 loss of the boxes, per cell with a digit.

    Focal loss: Lin et al., ICCV 2017.

    Args:
        cells: [n, 14, h, w] as from `Detector`.
        target: [n, 5, h, w] as from `target_of`.
    """
    has_digit = target[:, 0] >= 0
    wanted = one_hot(target[:, 0].long() + 1, CLASSES + 1)[..., 1:].to(cells.dtype)
    scores = cells[:, :CLASSES].movedim(1, -1)
    plain = binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    missed = (wanted - scores.sigmoid()).abs()
    distance = smooth_l1_loss(cells[:, CLASSES:], target[:, 1:], reduction="none", beta=0.1).sum(1)
    return ((plain * missed**2).sum() + BOX_WEIGHT * (distance * has_digit).sum()) / has_digit.sum().clamp(min=1)


class Detections(NamedTuple):
    """Detections in each image, sorted from best to worst.

    A removed detection is zero in every field.

    Attributes:
        boxes: float [n, 32, 4]: left, top, right, bottom in pixels.
        scores: float [n, 32], 0 … 1.
        labels: int64 [n, 32]: the digit.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor


def detect(cells: Tensor) -> Detections:
    """The detections that the cells [n, 14, h, w] of a `Detector` encode."""
    scores, labels = cells[:, :CLASSES].sigmoid().flatten(2).max(1)
    best, which = scores.topk(min(CANDIDATES, scores.shape[1]), 1)  # NaN counts as the highest score
    labels = labels.gather(1, which)
    boxes = boxes_of(cells[:, CLASSES:]).flatten(2).gather(2, which[:, None].expand(-1, 4, -1)).transpose(1, 2)
    dropped = ~not_overlapped(boxes)
    boxes = boxes.masked_fill(dropped[..., None], 0)
    return Detections(boxes, best.masked_fill(dropped, 0), labels.masked_fill(dropped, 0))


def not_overlapped(boxes: Tensor) -> Tensor:
    """Whether each box is kept by non-maximum suppression, bool [n, k].

    ``boxes``: [n, k, 4], best first. A box is dropped if it overlaps a better box that is kept.
    """
    overlapping = intersection_over_union(boxes, boxes) > OVERLAP
    is_kept = torch.ones(boxes.shape[:2], dtype=torch.bool, device=boxes.device)
    for row in range(1, boxes.shape[1]):
        is_kept[:, row] = ~(overlapping[:, row, :row] & is_kept[:, :row]).any(1)
    return is_kept


def intersection_over_union(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of boxes [n, j, 4] and [n, k, 4], as [n, j, k]; 0 for two empty boxes."""
    a, b = first[:, :, None], second[:, None]
    both = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    return both / (area - both).clamp(min=torch.finfo(area.dtype).tiny)
