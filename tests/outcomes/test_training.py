"""Classes of a faulty training run on curves written by hand, among them the numbers of the published sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.basics.errors import UsageError
from unsilent.outcomes.training import Thresholds, TrainingCurves, TrainingOutcome, averaged, classify_training

STEPS = 200
GOLDEN = TrainingCurves(np.full(STEPS, 0.8), np.full(STEPS, 0.5), 0.75)


def ended(*metric, test=0.75, losses=None, **more):
    """The last value goes on to the end."""
    curve = np.full(STEPS, float(metric[-1]))
    curve[: len(metric)] = metric
    return TrainingCurves(curve, np.full(STEPS, 0.5) if losses is None else np.asarray(losses, float), test, **more)


def lost(step):
    losses = np.full(STEPS, 0.5)
    losses[step:] = np.nan
    return ended(0.8, losses=losses)


@pytest.mark.parametrize(
    ("faulty", "word"),
    [
        (ended(0.8, same_bits=True), "masked-bitwise"),
        (ended(0.8), "masked-benign"),
        (ended(0.8, 0.1, 0.3, 0.5, 0.7, 0.8), "masked-benign"),  # it healed
        (lost(0), "immediate-nan"),
        (lost(1), "short-term-nan"),
        (lost(10), "short-term-nan"),
        (lost(11), "slow-degrade"),
        (ended(0.8, 0.1), "sharp-degrade"),
        (ended(0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), "slow-degrade"),
        (ended(0.8, 0.5, 0.5, 0.4, 0.4, 0.3, 0.3, 0.2, 0.1), "sharp-slow-degrade"),
        (ended(0.8, test=0.5), "low-test"),
        (ended(0.8, test=0.9), "improved"),
        (ended(0.8, test=float("nan")), "low-test"),
    ],
)
def test_each_class(faulty, word):
    assert classify_training(GOLDEN, faulty) == word


def test_the_published_slow_sample_is_slow():
    """ResNet-18 on CIFAR-10, fault at epoch 7 step 35 (training-accuracy column of the artifact's expected results)."""
    sample = ended(0.563, 0.459, 0.313, 0.263, 0.188, 0.2, test=0.438)
    golden = TrainingCurves(np.full(STEPS, 0.563), np.full(STEPS, 1.0), 0.832)
    assert classify_training(golden, sample) == TrainingOutcome.SLOW_DEGRADE


def test_what_fault_free_runs_do_as_well_is_no_harm():
    for faulty in (ended(0.8, 0.8, 0.7, 0.6), ended(0.8, test=0.5), ended(0.8, test=0.9)):
        assert classify_training(GOLDEN, faulty, beyond_noise=False) == TrainingOutcome.MASKED_BENIGN
    assert classify_training(GOLDEN, lost(0), beyond_noise=False) == TrainingOutcome.IMMEDIATE_NAN


def test_thresholds_are_settings():
    low = ended(0.8, 0.79, 0.78, 0.77)
    assert classify_training(GOLDEN, low) == "slow-degrade"
    assert classify_training(GOLDEN, low, Thresholds(gap=0.05)) == "masked-benign"
    assert classify_training(GOLDEN, ended(0.8, 0.1), Thresholds(drop=0.9)) == "slow-degrade"
    for bad in ({"gap": -0.1}, {"drop": float("nan")}, {"short_term": 0}):
        with pytest.raises(UsageError, match="expected more than 0"):
            Thresholds(**bad)


def test_harm_and_latency():
    assert {o for o in TrainingOutcome if not o.harmful} == {"masked-bitwise", "masked-benign", "improved"}
    assert {o for o in TrainingOutcome if o.latent} == {
        "sharp-degrade",
        "slow-degrade",
        "sharp-slow-degrade",
        "low-test",
    }


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 70))
def test_the_moving_mean_is_one(values, window):
    width = min(window, len(values))
    expected = [np.mean(values[i : i + width]) for i in range(len(values) - width + 1)]
    assert averaged(np.array(values), window) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40), st.floats(allow_nan=True))
def test_any_curve_has_a_class(metric, test):
    curve = np.array(metric)
    with np.errstate(all="ignore"):
        found = classify_training(GOLDEN, TrainingCurves(curve, np.full(len(curve), 0.5), test))
    assert found in set(TrainingOutcome)
