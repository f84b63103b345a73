"""The rule of the guard: magnitudes against bounds, safe for NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.basics.errors import UsageError
from unsilent.detectors.moment_bounds import CalibratedBounds, first_moment_bounds, indices_beyond_bounds

ANY = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(ANY, ANY), max_size=30))
def test_only_what_is_between_zero_and_its_bound_passes(pairs):
    largest, bounds = (np.array([p[i] for p in pairs], dtype=float) for i in (0, 1))
    wrong = [i for i, (x, b) in enumerate(pairs) if math.isnan(x) or math.isnan(b) or not 0 <= x <= b]
    assert indices_beyond_bounds(largest, bounds).tolist() == wrong


def test_the_constant_of_the_artifact():
    """20.0 for a batch of 1,024 images of 32 x 32 positions (technique/detection/models/my_adam.py)."""
    assert first_moment_bounds(np.array([1024 * 32 * 32.0]), 1024)[0] == 20
    assert first_moment_bounds(np.array([1024 * 32 * 32.0]), 1024, decay=0.9)[0] == pytest.approx(200)
    # A sum of n terms of variance 1 / m² has 20 standard deviations there.
    rng = np.random.default_rng(0)
    sums = (rng.normal(size=(20_000, 64)) / 8).sum(1)
    assert sums.std() * 20 == pytest.approx(first_moment_bounds(np.array([64.0]), 8)[0], rel=0.02)
    with pytest.raises(UsageError, match="expected a batch of 1 or more"):
        first_moment_bounds(np.ones(1), 0)


def test_calibrated_bounds_follow_clean_steps_and_their_kind():
    rule = CalibratedBounds(np.array([0, 0, 1]), factor=10)
    assert rule.bounds.tolist() == [0, 0, 0]
    rule.learn(np.array([2.0, 0.0, 5.0]))
    rule.learn(np.array([1.0, 0.0, 6.0]))
    assert rule.bounds == pytest.approx([20, 2, 60])
    rule.learn(np.array([np.nan, 1.0, 0.0]))
    assert rule.bounds == pytest.approx([20, 10, 60])
    with pytest.raises(UsageError, match="expected more than 1"):
        CalibratedBounds(np.zeros(1, int), factor=1)
