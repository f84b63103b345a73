"""Values that are infinite by design are left out where they are infinite; all others stay."""

from __future__ import annotations

import numpy as np

from unsilent.detectors.series import GRADIENT, L2, VALUE, Series
from unsilent.monitor.signals.row import SignalValues
from unsilent.monitor.step_judge import FIRST_VALUES, InfiniteValues


def signals(values):
    values = np.array(values, dtype=np.float64)
    return SignalValues(values, ~np.isnan(values), (), (), np.zeros(0, np.int64))


def test_only_a_value_that_was_not_finite_at_first_is_left_out(caplog):
    series = [
        Series(GRADIENT, "w", L2),
        Series(VALUE, "mask", L2),
        Series(VALUE, "late", L2),
        Series(VALUE, "good", L2),
    ]
    found = InfiniteValues()
    inf, unread = np.inf, np.nan
    assert found.leave_out(0, series[:1], signals([inf])).seen.tolist() == [True]
    for step in range(1, FIRST_VALUES):
        assert found.leave_out(step, series, signals([inf, inf, unread, 1])).seen.tolist() == [True, False, False, True]
    for step in range(FIRST_VALUES, 2 * FIRST_VALUES):
        assert found.leave_out(step, series, signals([inf, 2, inf, 1])).seen.tolist() == [True, True, False, True]
    assert found.leave_out(99, series, signals([inf, inf, inf, inf])).seen.tolist() == [True, False, False, True]
    told = [record.getMessage() for record in caplog.records]
    assert [("mask" in text, "late" in text, "good" in text) for text in told] == [
        (True, False, False),
        (False, True, False),
    ]
