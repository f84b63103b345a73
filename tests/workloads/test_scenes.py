"""Scenes of digits, what is measured on them, and how detections are read from a detector, against obvious references."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from conftest import few
from unsilent.basics.errors import UsageError
from unsilent.workloads import load
from unsilent.workloads.base import CLEAN_PARTS, CalibratedWorkload
from unsilent.workloads.digits import digits
from unsilent.workloads.scenes import detector_model
from unsilent.workloads.scenes.composing import (
    EVALUATION,
    HELD_OUT_PARTS,
    clean_scenes,
    compose,
    evaluation_scenes,
    held_out_rows,
    training_scenes,
)
from unsilent.workloads.scenes.detection import average_precision
from unsilent.workloads.scenes.detector_model import Detections, boxes_of, detect, not_overlapped, target_of
from unsilent.workloads.scenes.segmentation import UNet, mean_iou, pixel_scores

SCENES = ("scenes-unet", "scenes-segformer", "scenes-detector")


def iou(a, b):
    both = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def test_every_held_out_digit_is_in_one_part():
    rows = torch.cat([held_out_rows(part) for part in HELD_OUT_PARTS])
    assert sorted(rows.tolist()) == list(range(450))
    for part in (EVALUATION, *CLEAN_PARTS):
        assert set(digits().test_labels[held_out_rows(part)].tolist()) == set(range(10))


def test_labels_boxes_and_digits_agree():
    scenes = training_scenes(60)
    assert scenes.images.shape == (60, 1, 32, 32)
    assert torch.equal(scenes.images * 256, (scenes.images * 256).round())
    assert ((scenes.digits >= 0).sum(1) >= 1).all()
    assert len((scenes.digits >= 0).sum(1).unique()) > 1
    for labels, boxes, found in zip(scenes.labels, scenes.boxes, scenes.digits, strict=True):
        covered = torch.zeros(32, 32, dtype=torch.bool)
        for box, digit in zip(boxes.int().tolist(), found.tolist(), strict=True):
            if digit < 0:
                assert box == [0, 0, 0, 0]
                continue
            area = slice(box[1], box[3]), slice(box[0], box[2])
            inked = labels[area] == digit + 1
            assert set(labels[area].unique().tolist()) <= {0, digit + 1}
            assert all(edge.any() for edge in (inked[0], inked[-1], inked[:, 0], inked[:, -1]))
            assert not covered[area].any()
            covered[area] = True
        assert not labels[~covered].any()


def test_pixels_of_digits_are_brighter_than_the_background():
    scenes = compose(range(50), 40, [5])
    grey = scenes.images[:, 0]
    assert grey[scenes.labels > 0].mean() > 3 * grey[scenes.labels == 0].mean()


@pytest.mark.parametrize("part", CLEAN_PARTS)
def test_clean_scenes_are_the_same_whatever_is_asked(part):
    some, more = clean_scenes(part, 50), clean_scenes(part, 90)
    assert sum(len(scenes.images) for scenes in some) == 50
    assert sum(len(scenes.images) for scenes in more) == 90
    for one, other in zip(some, more, strict=True):
        assert all(torch.equal(a, b[: len(a)]) for a, b in zip(one, other, strict=True))
    assert len(clean_scenes(part, 3)) == 3


def test_scenes_of_a_batch_show_only_its_digits(monkeypatch):
    from unsilent.workloads.scenes import composing

    asked = []

    def spy(rows, count, seed, **how):
        asked.append(list(map(int, rows)))
        return compose(rows, count, seed, **how)

    monkeypatch.setattr(composing, "compose", spy)
    for part in CLEAN_PARTS:
        composing.clean_scenes(part, 40)
    composing.evaluation_scenes()
    every = [row for rows in asked for row in rows]
    assert len(asked) == 3 * composing.BATCHES + 1
    assert len(every) == len(set(every)) == 450


def test_a_drawn_scene_has_only_digits_it_may_have():
    sevens = torch.nonzero(digits().test_labels == 7)[:, 0]
    assert set(compose(sevens, 20, [3]).digits.unique().tolist()) == {-1, 7}


def test_unknown_part():
    with pytest.raises(UsageError, match="unknown part of the clean inputs 'tests'; did you mean 'test'"):
        clean_scenes("tests", 3)


def test_shifted_scenes_are_unlike_the_usual_ones():
    usual, shifted = (torch.cat([s.images for s in clean_scenes(part, 100)]) for part in ("test", "shifted"))
    assert shifted.median() > usual.median() + 0.04
    assert shifted.std() > 0.05, "the digits can be seen"


def test_mean_iou_against_sets():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (3, 5, 5))
    decided = np.where(rng.random(labels.shape) < 0.3, rng.integers(0, 5, labels.shape), labels)
    expected = []
    for label in range(5):
        a, b = (set(map(tuple, np.argwhere(x == label))) for x in (labels, decided))
        expected.append(len(a & b) / len(a | b))
    assert mean_iou(torch.tensor(decided), torch.tensor(labels)) == pytest.approx(np.mean(expected), abs=1e-12)


def _slow_average_precision(found, boxes, digits):
    """Every detection of every class in the order of scores, with loops; the area by its definition."""
    areas = []
    for digit in sorted({int(d) for d in digits.flatten() if d >= 0}):
        mine = [
            (float(score), image, box)
            for image in range(len(digits))
            for score, label, box in zip(
                found.scores[image], found.labels[image], found.boxes[image].tolist(), strict=True
            )
            if label == digit and score > 0
        ]
        objects = {(i, k) for i in range(len(digits)) for k in range(digits.shape[1]) if digits[i, k] == digit}
        taken, points, right = set(), [], 0
        for number, (_, image, box) in enumerate(sorted(mine, key=lambda m: -m[0]), 1):
            fits = [(iou(box, boxes[i, k].tolist()), (i, k)) for i, k in objects if i == image]
            overlap, which = max(fits, default=(0, None))
            if overlap >= 0.5 and which not in taken:
                taken.add(which)
                right += 1
            points.append((right / len(objects), right / number))
        recalls = sorted({recall for recall, _ in points})
        area, last = 0.0, 0.0
        for recall in recalls:
            area += (recall - last) * max(p for r, p in points if r >= recall)
            last = recall
        areas.append(area)
    return np.mean(areas)


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_against_loops(seed):
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 20, (6, 4, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(4, 12, (6, 4, 2))], 2)
    numbers = rng.integers(-1, 3, (6, 4))
    guessed = np.concatenate([boxes, boxes], 1) + rng.normal(0, 1.0, (6, 8, 4))
    labels = np.where(
        rng.random((6, 8)) < 0.3, rng.integers(0, 3, (6, 8)), np.concatenate([numbers, numbers], 1).clip(0)
    )
    scores = rng.random((6, 8)) * (rng.random((6, 8)) < 0.8)
    found = Detections(*map(torch.tensor, (guessed, scores, labels)))
    result = average_precision(found, torch.tensor(boxes), torch.tensor(numbers))
    assert 0.05 < result < 0.95
    assert result == pytest.approx(_slow_average_precision(found, torch.tensor(boxes), numbers), abs=1e-9)


def test_targets_read_back_are_the_boxes():
    scenes = evaluation_scenes()
    target = target_of(scenes.boxes, scenes.digits, 8, 8)
    read = boxes_of(target[:, 1:])
    for image in range(40):
        shown = [(d, b) for d, b in zip(scenes.digits[image].tolist(), scenes.boxes[image], strict=True) if d >= 0]
        found = set()
        for y, x in torch.nonzero(target[image, 0] >= 0).tolist():
            fits = [k for k, (_, box) in enumerate(shown) if torch.allclose(read[image, :, y, x], box, atol=1e-3)]
            assert any(shown[k][0] == target[image, 0, y, x] for k in fits)
            found.update(fits)
        assert found == set(range(len(shown)))


def test_overlapping_boxes_against_loops():
    rng = np.random.default_rng(2)
    corner = rng.uniform(0, 12, (5, 20, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(4, 12, (5, 20, 2))], 2)
    kept = not_overlapped(torch.tensor(boxes))
    assert kept.any()
    assert not kept.all()
    for image in range(5):
        mine = []
        for k, box in enumerate(boxes[image]):
            if all(iou(box, boxes[image, other]) <= 0.5 for other in mine):
                mine.append(k)
        assert torch.nonzero(kept[image])[:, 0].tolist() == mine


def test_detections_of_cells_that_hold_the_truth():
    scenes = evaluation_scenes()
    target = target_of(scenes.boxes, scenes.digits, 8, 8)
    sure = torch.nn.functional.one_hot(target[:, 0].long() + 1, 11)[..., 1:].movedim(-1, 1) * 12.0 - 6
    found = detect(torch.cat([sure, target[:, 1:]], 1))
    assert found.boxes.shape == (256, 32, 4)
    assert average_precision(found, scenes.boxes, scenes.digits) == pytest.approx(1)
    assert torch.equal((found.scores > 0.5).sum(1), (scenes.digits >= 0).sum(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_visible(value):
    cells = torch.full((2, 14, 8, 8), -5.0)
    cells[1, 10 if value == float("inf") else 3, 2, 2] = value
    cells[1, 4, 2, 2] = 5
    found = detect(cells)
    seen = [torch.isfinite(found.boxes[i]).all() and torch.isfinite(found.scores[i]).all() for i in range(2)]
    assert seen == [True, False]


def test_models_compute_what_they_claim():
    model = UNet().eval()
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 11, 32, 32)
    assert detector_model.Detector().eval()(torch.zeros(2, 1, 32, 32)).shape == (2, 14, 8, 8)
    small = torch.rand(2, 11, 16, 16)
    assert pixel_scores(small).shape == (2, 11, 32, 32)
    assert torch.equal(pixel_scores(pixel_scores(small)), pixel_scores(small))


def test_without_transformers(monkeypatch, tmp_path):
    real = importlib.import_module

    def missing(name, *rest):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setenv("UNSILENT_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        UsageError, match=r"'scenes-segformer' needs transformers; pip install 'unsilent\[transformers\]'"
    ):
        load("scenes-segformer")


@pytest.mark.parametrize("name", few(SCENES))
def test_clean_batches(zoo, name):
    workload = zoo(name)
    assert isinstance(workload, CalibratedWorkload)
    seen = {image.numpy().tobytes() for batch in workload.batches() for image in batch}
    for part in CLEAN_PARTS:
        batches = workload.clean_batches(part, 30)
        assert sum(map(len, batches)) == 30
        assert all(torch.equal(a, b) for a, b in zip(batches, workload.clean_batches(part, 30), strict=True))
        own = {image.numpy().tobytes() for batch in batches for image in batch}
        assert len(own) == 30
        assert not own & seen
        seen |= own
        with torch.no_grad():
            output = workload.run(workload.model(), batches[0])
        assert not workload.judge(output, output, batches[0]).incorrect.any()


@pytest.mark.parametrize("name", few(SCENES))
def test_the_stated_score_is_that_of_the_model(zoo, name):
    workload, scenes = zoo(name), evaluation_scenes()
    with torch.no_grad():
        output = workload.run(workload.model(), scenes.images)
    if name == "scenes-detector":
        score = average_precision(Detections(**output), scenes.boxes, scenes.digits)
    else:
        score = mean_iou(output.argmax(1), scenes.labels)
    assert score == pytest.approx(workload.info["accuracy"]["value"], abs=0.002)
