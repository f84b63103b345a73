"""The judges of label maps and of detections, against sets and exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unsilent import UsageError
from unsilent.outcomes import Outcome, judge, judge_text
from unsilent.outcomes.classify import classify
from unsilent.outcomes.detections import box_overlap

FAR = [100.0, 100.0, 110.0, 110.0]


def pixels(labels, background):
    return {(*place, label) for place, label in np.ndenumerate(labels) if label != background}


@given(st.integers(0, 10_000), st.sampled_from([None, 0, 2]), st.floats(0.5, 1))
def test_segmentation_compares_sets_of_labelled_pixels(seed, background, limit):
    rng = np.random.default_rng(seed)
    golden = rng.normal(size=(5, 3, 4, 4))
    faulty = golden + rng.normal(size=golden.shape) * rng.choice([0, 1], size=(5, 1, 4, 4), p=[0.8, 0.2])
    made = judge(f"segmentation:iou={limit},background={'none' if background is None else background}")
    wrong, severity = made(torch.tensor(golden), torch.tensor(faulty), None)
    for i in range(5):
        a, b = (pixels(x[i].argmax(0), background) for x in (golden, faulty))
        overlap = len(a & b) / len(a | b) if a | b else 1.0
        assert severity[i] == pytest.approx(1 - overlap)
        assert wrong[i] == (overlap < limit)
    of_labels = made(torch.tensor(golden.argmax(1)), torch.tensor(faulty.argmax(1)), None)
    assert (of_labels.severity == severity).all()


def test_segmentation_of_nothing_but_background_is_unchanged():
    nothing = torch.zeros(2, 3, 3, dtype=torch.int64)
    some = nothing.clone()
    some[1, 0, 0] = 1
    verdict = judge("segmentation:background=0")(nothing, some, None)
    assert verdict.incorrect.tolist() == [False, True]
    assert verdict.severity.tolist() == [0, 1]


def test_a_limit_of_one_allows_no_change():
    golden = torch.zeros(1, 30, 30, dtype=torch.int64)
    faulty = golden.clone()
    faulty[0, 3, 3] = 1
    assert not judge("segmentation")(golden, faulty, None).incorrect[0]
    assert judge("segmentation:iou=1")(golden, faulty, None).incorrect[0]


def test_scores_of_a_segmentation_that_are_not_finite_do_not_raise():
    golden = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    verdict = judge("segmentation")(golden, torch.full_like(golden, float("nan")), None)
    assert verdict.incorrect.all()
    assert np.isfinite(verdict.severity).all()


def detections(*found):
    """One image: (label, score, left, top, right, bottom) each."""
    table = torch.tensor(found).reshape(-1, 6)
    return {"boxes": table[:, 2:], "scores": table[:, 1], "labels": table[:, 0].long()}


@pytest.mark.parametrize(
    ("faulty", "severity"),
    [
        ([(1, 0.9, 0, 0, 10, 10), (2, 0.8, 20, 20, 30, 30)], 0),
        ([(2, 0.4, 20, 21, 30, 30), (1, 0.6, 0, 0, 10, 11)], 0),  # order, scores and edges
        ([(1, 0.9, 0, 0, 10, 10), (2, 0.8, 20, 20, 30, 30), (3, 0.1, 20, 0, 30, 9)], 0),  # one below the score
        ([(1, 0.9, 0, 0, 10, 10)], 1 / 3),
        ([(1, 0.9, 0, 0, 10, 10), (2, 0.2, 20, 20, 30, 30)], 1 / 3),
        ([(1, 0.9, 0, 0, 10, 10), (3, 0.8, 20, 20, 30, 30)], 1 / 2),
        ([(1, 0.9, 0, 0, 10, 10), (2, 0.8, 26, 20, 36, 30)], 1 / 2),
        ([(1, 0.9, 0, 0, 10, 10), (2, 0.8, 20, 20, 30, 30), (2, 0.7, 20, 20, 30, 30)], 1 / 5),
        ([], 1),
        ([(1, 0.9, 0, 0, 10, float("nan")), (2, 0.8, 20, 20, 30, 30)], 1 / 2),
        ([(1, float("nan"), 0, 0, 10, 10), (2, 0.8, 20, 20, 30, 30)], 1 / 3),
    ],
)
def test_detections_that_changed(faulty, severity):
    golden = detections((1, 0.9, 0, 0, 10, 10), (2, 0.8, 20, 20, 30, 30))
    verdict = judge("detections")([golden], [detections(*faulty)], None)
    assert verdict.severity == pytest.approx([severity])
    assert verdict.incorrect.tolist() == [severity > 0]


def test_an_image_without_detections_is_unchanged():
    assert judge("detections")([detections()], [detections()], None).severity.tolist() == [0]


def most_pairs(same):
    """Largest number of pairs, by trying all."""
    rows, columns = same.shape
    if rows > columns:
        return most_pairs(same.T)
    return max(sum(same[r, c] for r, c in enumerate(order)) for order in itertools.permutations(range(columns), rows))


@given(st.integers(0, 10_000))
def test_detections_form_as_many_pairs_as_possible(seed):
    rng = np.random.default_rng(seed)
    outputs = []
    for k in (4, 5):
        corner = rng.integers(0, 6, (3, k, 2))
        boxes = np.concatenate([corner, corner + rng.integers(3, 8, (3, k, 2))], 2).astype(float)
        outputs.append({"boxes": boxes, "scores": rng.uniform(0.1, 1, (3, k)), "labels": rng.integers(0, 2, (3, k))})
    wrong, severity = judge("detections:iou=0.3,score=0.4")(
        *({k: torch.tensor(v) for k, v in o.items()} for o in outputs), None
    )
    for i in range(3):
        golden, faulty = ([(b, c) for b, s, c in zip(o["boxes"][i], o["scores"][i], o["labels"][i], strict=True) if s >= 0.4]
                          for o in outputs)  # fmt: skip
        same = np.array([[c == d and overlap(a, b) >= 0.3 for b, d in faulty] for a, c in golden], bool)
        count = len(golden) + len(faulty)
        pairs = most_pairs(same.reshape(len(golden), len(faulty)))
        assert severity[i] == pytest.approx((count - 2 * pairs) / max(count, 1))
        assert wrong[i] == (count != 2 * pairs)


def overlap(a, b):
    """Of boxes with whole-number edges: by counting squares."""
    first, second = ({(x, y) for x in range(int(q[0]), int(q[2])) for y in range(int(q[1]), int(q[3]))} for q in (a, b))
    return len(first & second) / len(first | second)


def test_overlap_of_odd_boxes():
    inf = float("inf")
    boxes = np.array([[0, 0, 0, 0], [0, 0, inf, inf], [5, 5, 1, 1], FAR], float)
    result = box_overlap(boxes, boxes)
    assert (np.diag(result) == 1).all()
    assert not (result[~np.eye(4, dtype=bool)] >= 0.5).any()


def test_padded_and_listed_detections_end_alike():
    golden = {"boxes": torch.tensor([[FAR, [0, 0, 9, 9.0]]] * 2), "scores": torch.tensor([[0.9, 0.0]] * 2)}
    golden["labels"] = torch.zeros(2, 2, dtype=torch.int64)
    faulty = {key: value.clone() for key, value in golden.items()}
    faulty["scores"][0, 1] = 0.7
    faulty["scores"][1, 1] = 0.2
    made = judge("detections")
    padded = classify(made, golden, faulty, None, 2)
    listed = classify(made, *([{k: v[i] for k, v in o.items()} for i in range(2)] for o in (golden, faulty)), None, 2)
    assert padded.codes.tolist() == listed.codes.tolist() == [Outcome.SDC, Outcome.BENIGN]
    assert padded.severity.tolist() == listed.severity.tolist() == [pytest.approx(1 / 3), 0]


@pytest.mark.parametrize("text", ["segmentation:iou=0.9,background=0", "detections:score=0.5"])
def test_text_recreates_a_judge(text):
    assert judge(judge_text(judge(text))) == judge(text)


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        ("segmentation:iou=0", None, "segmentation: iou is 0.0; expected a value above 0, at most 1"),
        ("detections:iou=2", None, "detections: iou is 2.0; expected a value above 0, at most 1"),
        ("detections:score=0", None, "detections: score is 0.0; expected a value between 0 and 1"),
        ("segmentation", torch.zeros(2, 3, 4), r"needs class scores \[n, classes, height, width\] or whole-number"),
        ("detections", torch.zeros(2, 3), "needs an output with boxes, scores, labels"),
        ("detections", [{"boxes": torch.zeros(2, 4)}], "needs an output with boxes, scores, labels"),
        (
            "detections",
            {"boxes": torch.zeros(2, 4), "scores": torch.zeros(2), "labels": torch.zeros(2)},
            r"boxes \[2, 4\], scores \[2\] and labels \[2\] do not fit .* expected \[n, k, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(text, output, message):
    with pytest.raises(UsageError, match=message):
        judge(text)(output, output, None)


def test_another_number_of_images_is_an_error():
    with pytest.raises(UsageError, match="1 golden images, 2 faulty ones"):
        judge("detections")([detections()], [detections()] * 2, None)
