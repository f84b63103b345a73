"""What every rule on activations keeps to; a new one joins by its row in `ACTIVATION_RULES`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unsilent.detectors.activations.rule import LARGEST_SCORE
from unsilent.detectors.activations.rules import ACTIVATION_RULES, make_activation_rule

RULES = [make_activation_rule(name) for name in ACTIVATION_RULES]
NUMBERS = {"sites": 8, "range": 2, "quantiles": 5, "checksum": 1}


def clean(rule, samples, seed):
    """Readings of clean samples."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(samples, NUMBERS[rule.reads])) * 3 + 1
    if rule.reads == "checksum":
        return np.abs(values)
    return values if rule.reads == "sites" else np.sort(values, axis=1)


def margins(rule, layers, readings):
    """Margins of n samples after each layer, float64[layers, n]."""
    return rule.cumulate(
        np.array([rule.score(layer, reading) for layer, reading in zip(layers, readings, strict=True)])
    )


@pytest.fixture(params=RULES, ids=lambda rule: rule.name)
def fitted(request):
    """A rule, and what it knows of a layer."""
    rule = request.param
    return rule, rule.fit(clean(rule, 300, 0), clean(rule, 200, 1))


def test_most_clean_samples_score_below_faulty_ones(fitted):
    rule, layer = fitted
    usual = rule.score(layer, clean(rule, 500, 2))
    for value in (np.nan, np.inf, 1e30):
        faulty = clean(rule, 50, 3)
        faulty[:, -1] = value
        if rule.name == "nonfinite" and value == 1e30:
            continue
        assert (rule.score(layer, faulty) > np.quantile(usual, 0.99)).all()


@given(data=st.data())
def test_any_reading_has_a_score_and_is_judged_alone(data):
    for rule in RULES:
        layer = rule.fit(clean(rule, 50, 0), clean(rule, 50, 1))
        shape = (3, NUMBERS[rule.reads])
        reading = data.draw(hnp.arrays(np.float64, shape, elements=st.floats(allow_nan=True, allow_infinity=True)))
        before = reading.copy()
        scores = rule.score(layer, reading)
        assert np.isfinite(scores).all()
        assert (np.abs(scores) <= LARGEST_SCORE).all()
        alone = [rule.score(layer, reading[n : n + 1])[0] for n in range(3)]
        assert alone == pytest.approx(
            scores.tolist(), rel=1e-9, abs=1e-12
        )  # products of matrices add up in another order
        np.testing.assert_array_equal(reading, before)


def test_constant_layers_are_no_problem(fitted):
    rule, _ = fitted
    profile = np.zeros((20, NUMBERS[rule.reads]))
    layer = rule.fit(profile, profile)
    assert np.isfinite(rule.score(layer, profile)).all()


def test_what_is_known_of_a_layer_are_arrays(fitted):
    _, layer = fitted
    assert all(isinstance(value, np.ndarray) and value.dtype == np.float64 for value in layer.values())


@given(hnp.arrays(np.float64, (6, 4), elements=st.floats(-100, 100)))
def test_a_margin_depends_on_no_later_layer(scores):
    for rule in RULES:
        whole = rule.cumulate(scores)
        assert whole.shape == scores.shape
        for count in range(1, 7):
            np.testing.assert_array_equal(rule.cumulate(scores[:count]), whole[:count])


def test_margins_of_layers(fitted):
    rule, layer = fitted
    readings = [clean(rule, 4, seed) for seed in (5, 6)]
    result = margins(rule, [layer, layer], readings)
    assert result.shape == (2, 4)
    np.testing.assert_array_equal(result[0], rule.score(layer, readings[0]))


@given(
    st.integers(0, 2**32),
    st.floats(1e-6, 1e6),
    st.lists(st.floats(0, 1e-6), min_size=1, max_size=4),
    st.floats(1e-3, 1),
)
def test_a_quantile_without_spread_gives_clean_samples_no_large_score(seed, unit, spreads, change):
    """Some quantiles hardly differ between clean samples; a change by one deviation of the others is nowhere far away."""
    rule, rng = make_activation_rule("quantiles"), np.random.default_rng(seed)
    deviations = unit * np.array([*spreads, *[1.0] * (5 - len(spreads))])
    profile = deviations * rng.normal(size=(200, 5))
    layer = rule.fit(profile, profile)
    reading = profile.mean(0) + change * unit * rng.choice([-1, 1], (20, 5))
    least = 5 - len(spreads)  # of deviations of about one unit
    assert rule.score(layer, reading).max() <= change * 5 / least / 0.1 / 0.8
    far = profile.mean(0) + 1e3 * unit * np.eye(5)
    assert rule.score(layer, far).min() >= 500
