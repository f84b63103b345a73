"""The terms of Dr. DNA against loops, and what no value may break."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unsilent.detectors.activations.dr_dna import DrDna
from unsilent.detectors.activations.rule import LARGEST_SCORE


def clean(samples, seed=0, sites=6):
    """Values of sites with different means and spreads."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, sites)) * np.arange(1, sites + 1) + 10 * np.arange(sites)


PROFILE, HELD_OUT, FURTHER = clean(400), clean(200, 1), clean(300, 2)
LAYER = DrDna().fit(PROFILE, HELD_OUT)


def terms_by_loops(rule, profile, sample):
    """Surprise, distance and location of one sample."""
    n, sites = profile.shape
    surprise, standard = 0.0, []
    for i in range(sites):
        column = profile[:, i]
        low, width = column.min(), (column.max() - column.min()) / rule.bins
        cell = (sample[i] - low) / width
        same = sum(min(int((v - low) / width), rule.bins - 1) == min(int(cell), rule.bins - 1) for v in column)
        if not 0 <= cell <= rule.bins:
            same = 0
        beyond = max(-cell, cell - rule.bins, 0) / rule.bins
        surprise += -math.log((same + rule.smoothing) / (n + rule.smoothing * (rule.bins + 2))) + math.log1p(beyond)
        standard.append((sample[i] - column.mean()) / column.std())
    rows = (profile - profile.mean(0)) / profile.std(0)
    correlation = np.array([[np.mean(a * b) for a in rows.T] for b in rows.T])
    correlation = (1 - rule.shrinkage) * correlation + rule.shrinkage * np.eye(sites)
    distance = math.log1p(np.array(standard) @ np.linalg.inv(correlation) @ np.array(standard) / sites)
    largest, smallest = {int(np.argmax(row)) for row in rows}, {int(np.argmin(row)) for row in rows}
    missed = (int(np.argmax(standard)) not in largest) + (int(np.argmin(standard)) not in smallest)
    return surprise / sites, distance, missed / 2


@pytest.mark.parametrize("sample", [*FURTHER[:20], PROFILE.max(0), PROFILE.min(0), PROFILE.max(0) * 7, -PROFILE[3]])
def test_the_terms_are_those_of_loops(sample):
    rule = DrDna()
    assert rule._terms(LAYER, sample[None])[:, 0] == pytest.approx(terms_by_loops(rule, PROFILE, sample))


@pytest.mark.parametrize("term", ["surprise", "distance"])
def test_terms_of_clean_samples_are_scaled(term):
    rule = DrDna(**{"surprise": 0, "distance": 0, "location": 0} | {term: 1})
    scores = rule.score(rule.fit(PROFILE, HELD_OUT), HELD_OUT)
    assert (np.median(scores), np.quantile(scores, 0.99)) == pytest.approx((0, 1))
    assert abs(np.median(rule.score(LAYER, FURTHER))) < 0.5


def test_sites_that_are_usual_one_by_one_but_not_together_are_far_away():
    rng = np.random.default_rng(3)
    profile = np.repeat(rng.normal(size=(300, 1)), 4, axis=1) + 0.01 * rng.normal(size=(300, 4))
    layer = DrDna().fit(profile[:200], profile[200:])
    torn = np.array([[0.5, 0.5, 0.5, -0.5]])
    assert DrDna().score(layer, torn) > 2
    assert DrDna().score(layer, np.full((1, 4), 0.5)) < 1


def test_several_layers_at_once_have_the_scores_of_each():
    layers = [DrDna().fit(clean(200, seed), clean(100, seed + 10)) for seed in range(3)]
    readings = np.array([clean(7, seed + 20) for seed in range(3)])
    stacked = {key: np.array([layer[key] for layer in layers]) for key in layers[0]}
    expected = [DrDna().score(layer, reading) for layer, reading in zip(layers, readings, strict=True)]
    np.testing.assert_allclose(DrDna().score(stacked, readings), expected, rtol=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e308, -1e308, 1e6])
@pytest.mark.parametrize("site", [0, 5])
def test_what_is_out_of_range_scores_above_all_clean_samples(value, site):
    samples = FURTHER[:50].copy()
    samples[:, site] = value
    scores = DrDna().score(LAYER, samples)
    assert (scores > DrDna().score(LAYER, FURTHER).max()).all()
    assert (scores <= LARGEST_SCORE).all()


@given(hnp.arrays(np.float64, (3, 6), elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_any_values_have_a_score(values):
    assert np.isfinite(DrDna().score(LAYER, values)).all()


def test_values_further_away_score_no_lower():
    samples = np.repeat(FURTHER[:1], 30, axis=0)
    samples[:, 2] = PROFILE[:, 2].max() + np.logspace(-2, 8, 30)
    assert (np.diff(DrDna().score(LAYER, samples)) >= 0).all()


def test_constant_sites_are_no_problem():
    profile = np.ones((50, 4))
    layer = DrDna().fit(profile, profile)
    assert DrDna().score(layer, profile[:1]) == pytest.approx([0])
    assert DrDna().score(layer, np.array([[1, 1, 1, 1.001]])) > 1


def test_the_margin_is_the_largest_score_so_far():
    scores = np.array([[1.0, 0], [3, -1], [2, 5]])
    assert DrDna().cumulate(scores).tolist() == [[1, 0], [3, 0], [3, 5]]
