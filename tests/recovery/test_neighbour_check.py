"""Whether a neighbour computed what the rank of the batch computes, on small numbers."""

from __future__ import annotations

import numpy as np
import pytest

from unsilent.recovery.neighbour_check import DATA_ELSEWHERE, NO_EARLIER_STEP, SAME_BATCHES, Findings, compare

THEIRS = np.array([[1.0, 3.0, np.nan], [2.0, 5.0, 1e-9]])
OWN = THEIRS * [[1.3, 0.5, 1.0]]


def test_a_neighbour_that_computes_the_same_but_for_rounding_is_evidence():
    assert compare(THEIRS * 1.009, THEIRS, OWN) == ("", 0)


def test_a_neighbour_that_computes_from_data_of_its_own_is_not():
    assert compare(OWN, THEIRS, OWN)[0] == DATA_ELSEWHERE


@pytest.mark.parametrize("column", [0, 1])
def test_one_number_is_enough(column):
    near = THEIRS.copy()
    near[0, column] *= 1.02
    assert compare(near, THEIRS, OWN)[0] == DATA_ELSEWHERE


def test_iterations_after_one_that_is_known_do_not_count_for_a_faulty_device_spoils_them():
    near = THEIRS.copy()
    near[1] *= 100
    assert compare(near, THEIRS, OWN) == ("", 0)
    near[0], unread = np.nan, THEIRS.copy()
    assert compare(near, unread, OWN) == (DATA_ELSEWHERE, 1)


def test_a_gradient_that_is_rounding_alone_does_not_count():
    near, theirs = THEIRS[1:].copy(), THEIRS[1:]
    near[0, 2] *= -3
    assert compare(near, theirs, OWN[1:])[0] == ""


def test_nothing_to_compare_is_no_agreement():
    assert compare(THEIRS[:0], THEIRS[:0], OWN[:0]) == (NO_EARLIER_STEP, -1)
    unread = np.full_like(THEIRS, np.nan)
    assert compare(unread, THEIRS, OWN) == (NO_EARLIER_STEP, -1)


def test_ranks_with_batches_alike_are_not_told_apart():
    assert compare(THEIRS, THEIRS, THEIRS) == (SAME_BATCHES, 0)


def test_ranks_that_read_other_series_are_not_compared():
    assert compare(THEIRS[:, :1], THEIRS, OWN)[0] == DATA_ELSEWHERE


def test_what_is_usual_is_that_of_the_job_else_that_before_the_first_finding():
    signals, original = np.array([[1.0], [2.0], [3.0]]), np.array([[np.nan], [20.0], [np.nan]])
    usual = Findings(frozenset(), True, 1, signals, original).usual()
    assert usual[:2].tolist() == [[1.0], [20.0]]
    assert np.isnan(usual[2]).all()
