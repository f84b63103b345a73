"""Where two models disagree: against obvious references, and where digests that are blind to order see nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.compare.disagreement import SampleRecords, compare_outputs
from unsilent.outcomes import judge


def scores(seed: int, n: int = 40, classes: int = 6) -> torch.Tensor:
    return torch.randn(n, classes, generator=torch.Generator().manual_seed(seed))


def compared(original, deployed, how="top1", labels=None):
    return compare_outputs(judge(how), original, deployed, None, labels)


@pytest.mark.parametrize(
    "change", [lambda y: y.flip(1), lambda y: -y, lambda y: y.roll(1, 1)], ids=["swapped", "negated", "rolled"]
)
def test_outputs_of_the_same_norm_and_parity_in_other_places_are_other_answers(change):
    original = scores(0)
    found = compared(original, change(original))
    expected = original.argmax(1) != change(original).argmax(1)
    assert found.changed.tolist() == expected.tolist()
    assert found.changed.mean() > 0.9


def test_lost_and_gained_are_what_loops_count():
    original, deployed, labels = scores(1), scores(2), torch.arange(40) % 6
    found = compared(original, deployed, labels=labels)
    pairs = [
        (int(a.argmax()) == int(y), int(b.argmax()) == int(y))
        for a, b, y in zip(original, deployed, labels, strict=True)
    ]
    assert found.lost.tolist() == [a and not b for a, b in pairs]
    assert found.gained.tolist() == [b and not a for a, b in pairs]
    assert 0 < found.lost.sum() < found.changed.sum()


def test_divergences_are_those_of_scipy():
    from scipy.spatial.distance import jensenshannon
    from scipy.stats import entropy

    original, deployed = scores(3).double(), scores(4).double()
    p, q = (torch.softmax(x, 1).numpy() for x in (original, deployed))
    found = compared(original, deployed)
    np.testing.assert_allclose(found.kl, entropy(p, q, axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.js, jensenshannon(p, q, axis=1, base=2) ** 2, rtol=1e-5)
    best = p.argmax(1)
    np.testing.assert_allclose(found.confidence_delta, [abs(p[i, k] - q[i, k]) for i, k in enumerate(best)], rtol=1e-5)
    five = [len({*np.argsort(-a)[:5]} & {*np.argsort(-b)[:5]}) / 5 for a, b in zip(p, q, strict=True)]
    np.testing.assert_allclose(found.overlap, five)


def test_probabilities_are_not_put_through_a_softmax_again():
    original, deployed = scores(5), scores(6)
    of_scores = compared(original, deployed)
    of_probabilities = compared(torch.softmax(original, 1), torch.softmax(deployed, 1))
    np.testing.assert_allclose(of_probabilities.kl, of_scores.kl, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_reduced_precision_are_probabilities_in_both_models(dtype):
    """Rows of bfloat16 add up to 1 within about 4e-3 only."""
    from scipy.stats import entropy

    original = torch.softmax(2 * scores(5, classes=200).double(), 1)
    deployed = torch.softmax(2 * scores(5, classes=200) + 0.1 * scores(6, classes=200), 1).to(dtype)
    if dtype is torch.bfloat16:
        assert (deployed.double().sum(1) - 1).abs().max() > 1e-3
    for given in (deployed, deployed.float()):  # an adapter returns float32
        np.testing.assert_allclose(
            compared(original, given).kl, entropy(original, deployed.double(), axis=1), rtol=1e-4
        )


def test_both_models_are_read_alike():
    """Where the scores of one model are no probabilities, those of the other are none either."""
    from scipy.stats import entropy

    original, deployed = torch.softmax(scores(5), 1), scores(6)
    p, q = (torch.softmax(x.double(), 1) for x in (original, deployed))
    np.testing.assert_allclose(compared(original, deployed).kl, entropy(p, q, axis=1), rtol=1e-5)


def test_the_same_outputs_agree_in_all():
    found = compared(scores(7), scores(7), labels=torch.zeros(40, dtype=torch.int64))
    assert found.identical.all()
    assert not found.changed.any()
    assert not found.lost.any()
    assert found.kl.max() == found.js.max() == found.confidence_delta.max() == 0
    assert found.worst(8) == []


def test_other_answers_of_all_kinds_of_outputs():
    masks = torch.zeros(4, 8, 8, dtype=torch.int64)
    other = masks.clone()
    other[2, :4] = 1
    assert compared(masks, other, "segmentation").changed.tolist() == [False, False, True, False]
    tokens = torch.arange(12).view(3, 4)
    assert compared(tokens, tokens[:, :3], "exact-sequence").changed.tolist() == [True] * 3
    boxes = [
        {"boxes": torch.tensor([[0.0, 0, 4, 4]]), "scores": torch.tensor([0.9]), "labels": torch.tensor([label])}
        for label in (1, 2)
    ]
    assert compared(boxes, [boxes[0], boxes[0]], "detections").changed.tolist() == [False, True]
    assert compared(np.eye(3, 4, dtype=np.float32), np.eye(3, 4, 1, dtype=np.float32)).changed.all()


def test_another_number_of_sequences_is_refused():
    with pytest.raises(UsageError, match=r"\[3\] and the deployed model with \[2\]"):
        compared(torch.ones(3, 4).long(), torch.ones(2, 4).long(), "exact-sequence")


def test_the_worst_inputs_are_lost_ones_then_changed_ones():
    records = SampleRecords(
        identical=np.array([False, True, False, False]),
        changed=np.array([True, False, True, False]),
        severity=np.array([0.9, 0.0, 0.1, 0.5]),
        right_before=np.array([False, True, True, True]),
        right_after=np.array([False, True, False, True]),
    )
    assert records.worst(8) == [2, 0, 3]
    assert records.worst(1) == [2]


@pytest.mark.parametrize(
    ("deployed", "how", "labels", "message"),
    [
        (scores(1, classes=7), "top1", None, r"\[40, 6\] and the deployed model with \[40, 7\]"),
        (scores(1, n=39), "top1", None, r"\[40, 6\] and the deployed model with \[39, 6\]"),
        (scores(1), "exact-sequence", None, "needs logits"),
        (scores(1, classes=7), "tolerance", None, "expected two models with the same inputs and the same classes"),
        (scores(1), "top1", torch.full((40,), 6), "labels range from 6 to 6; the models answer with classes 0 to 5"),
        (scores(1), "top1", torch.zeros(39), r"float32\[39\]; expected a whole number for each of its 40 inputs"),
        (scores(1), "top1", torch.full((40,), 0.5), "expected a whole number for each"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_in_one_line(deployed, how, labels, message):
    with pytest.raises(UsageError, match=message) as raised:
        compared(scores(0), deployed, how, labels)
    assert "\n" not in str(raised.value)
