"""What rules find in a step: the worst first, and what is new before what goes on."""

import numpy as np

from unsilent.detectors.rules import make_rule
from unsilent.detectors.series import Series
from unsilent.monitor.rule_streams import RuleStreams
from unsilent.monitor.signals.row import SignalValues

SERIES = [Series("gradient", name, "l2") for name in "abc"]


def found(streams, *values):
    """Tensors of the findings of a step, and which of them are new; None: not seen."""
    seen = np.array([value is not None for value in values])
    numbers = np.array([0.0 if value is None else value for value in values])
    signals = SignalValues(numbers, seen, (), (), np.zeros(0, np.int64))
    return [(one.series.tensor, one.is_new, one.flagged) for one in streams.judge(SERIES, signals, 0.0)]


def test_what_is_found_already_hides_nothing():
    streams = RuleStreams([make_rule("nonfinite")])
    assert found(streams, np.nan, 1.0, 1.0) == [("a", True, 1)]
    assert found(streams, np.nan, 1.0, 1.0) == [("a", False, 1)]
    assert found(streams, np.nan, 1.0, np.nan) == [("c", True, 2)]
    assert found(streams, None, 1.0, None) == []
    assert found(streams, np.nan, 1.0, None) == [("a", False, 1)]  # it was not seen in between
    assert found(streams, 1.0, 1.0, None) == []
    assert found(streams, np.nan, 1.0, np.nan) == [("a", True, 2)]


def test_everything_is_new_after_going_back():
    streams = RuleStreams([make_rule("nonfinite")])
    before = streams.state
    assert found(streams, 1.0, np.nan, 1.0) == [("b", True, 1)]
    streams.state = before
    assert found(streams, 1.0, np.nan, 1.0) == [("b", True, 1)]
