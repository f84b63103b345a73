"""What every judge must do: the contract that is shipped. A new one joins by its row in `OUTPUTS`."""

from __future__ import annotations

import pytest
import torch

from unsilent.outcomes import judge
from unsilent.outcomes.judges import JUDGES
from unsilent.testing import JudgeContract


def scores(*shape):
    """Scores, and others whose largest are at the places of the smallest."""
    golden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return golden, -golden


def boxes(*corners):
    return {
        "boxes": torch.tensor([[*one, 90.0, 90.0] for one in corners]),
        "scores": torch.ones(2),
        "labels": torch.ones(2),
    }


OUTPUTS = {
    "top1": scores(4, 5),
    "topk:k=2": scores(4, 5),
    "threshold:at=0.4,logits=true": scores(4),
    "next-token": scores(4, 2, 5),
    "exact-sequence": scores(4, 2, 5),
    "tolerance:rtol=0.1": scores(4, 5),
    "segmentation:background=0": scores(4, 3, 6, 6),
    "detections:score=0.4": (
        [boxes((1.0, 1.0), (2.0, 80.0)), boxes((1.0, 1.0), (2.0, 2.0))],
        [boxes((1.0, 1.0), (80.0, 2.0)), boxes((1.0, 1.0), (2.0, 2.0))],
    ),
}
"""A golden and a faulty output by the text of a judge that finds a difference."""


class TestJudges(JudgeContract):
    @pytest.fixture(autouse=True, params=OUTPUTS)
    def _text(self, request):
        self.text = request.param

    def make_judge(self):
        return judge(self.text)

    def make_outputs(self):
        return (*OUTPUTS[self.text], None)


def test_every_judge_has_outputs():
    assert {text.partition(":")[0] for text in OUTPUTS} == set(JUDGES)
