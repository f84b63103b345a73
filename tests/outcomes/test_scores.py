"""Scores of single samples, and what a trial loses of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.scores import Score, lost_score

MASKED, BENIGN, SDC, NONFINITE, HANG, SPARED = (
    Outcome.MASKED, Outcome.BENIGN, Outcome.SDC, Outcome.NONFINITE, Outcome.HANG, Outcome.SPARED,
)  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "faulty", "lost"),
    [
        (MASKED, math.nan, 0.0),  # bit-identical: not scored
        (BENIGN, 0.25, 0.5),
        (SDC, 0.95, -0.2),  # a fault may help
        (SDC, -3.0, 0.75),  # below the range
        (SDC, 7.0, -0.25),  # above it
        (BENIGN, math.inf, 0.75),
        (BENIGN, -math.inf, 0.75),
        (SDC, math.nan, 0.75),
        (NONFINITE, 0.9, 0.75),
        (HANG, math.nan, 0.75),
    ],
)
def test_what_one_sample_loses(outcome, faulty, lost):
    codes = np.array([outcome, SPARED], np.uint8)
    result = lost_score(codes, np.array([faulty, 0.1]), np.array([0.75, 0.6]), 0.0, 1.0)
    assert result == pytest.approx(lost)


def test_mean_over_evaluated_samples():
    codes = np.array([MASKED, SDC, SPARED, NONFINITE], np.uint8)
    lost = lost_score(codes, np.array([math.nan, -2.0, math.nan, 0.0]), np.array([-1.0, -1.5, -0.5, -2.0]), -4.0, 0.0)
    assert lost == pytest.approx((0 + 0.5 + 2.0) / 3)
    assert math.isnan(lost_score(np.array([SPARED], np.uint8), np.zeros(1), np.zeros(1), 0.0, 1.0))


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (torch.zeros(3), r"returned float32\[3\]; expected a number for each of the 2 samples"),
        (torch.zeros(()), r"returned float32\[\]"),
        (torch.tensor([0.5, 1.5]), "the IoU of a fault-free sample is 1.5; expected 0 to 1: give score_range"),
        (torch.tensor([0.5, math.nan]), "the IoU of a fault-free sample is nan"),
    ],
)
def test_fault_free_scores_that_do_not_fit(returned, why):
    with pytest.raises(UsageError, match=why):
        Score("IoU", lambda output, batch: returned).of_golden(None, None, 2)


def test_a_score_that_draws_numbers_is_refused():
    with pytest.raises(UsageError, match="differs when it is computed again"):
        Score("IoU", lambda output, batch: torch.rand(2)).of_golden(None, None, 2)


@pytest.mark.parametrize("limits", [(1.0, 0.0), (0.0, 0.0), (-math.inf, 0.0), (0.0, math.nan)])
def test_a_range_without_limits_is_refused(limits):
    with pytest.raises(UsageError, match="expected two finite numbers, the lowest score first"):
        Score("loss", lambda output, batch: output, *limits)
