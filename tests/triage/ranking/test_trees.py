"""Trees as arrays come to what scikit-learn comes to, and arrays of others are checked."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingClassifier

from unsilent.triage.ranking.trees import fit_trees, trees_from, trees_of

RNG = np.random.default_rng(0)
ROWS = np.round(RNG.normal(size=(120, 5)), 2)  # ties with thresholds
ANSWERS = ROWS[:, 0] + ROWS[:, 1] * ROWS[:, 2] + 0.3 * RNG.normal(size=120) > 0


def test_probabilities_are_those_of_scikit_learn():
    fitted = GradientBoostingClassifier(n_estimators=20, subsample=0.7, random_state=3).fit(ROWS, ANSWERS)
    others = np.vstack([ROWS, RNG.normal(size=(50, 5)), np.full((1, 5), 1e30), np.zeros((1, 5))])
    np.testing.assert_allclose(trees_of(fitted).probabilities(others), fitted.predict_proba(others)[:, 1], rtol=1e-9)


def test_contributions_come_to_the_whole():
    trees = fit_trees(ROWS, ANSWERS, 0)
    total = trees.contributions(ROWS).sum(1) + trees.start[0]
    np.testing.assert_allclose(1 / (1 + np.exp(-total)), trees.probabilities(ROWS))
    moved = np.abs(trees.contributions(ROWS)).mean(0)
    assert moved[0] == moved[:5].max()
    assert moved[0] > 3 * moved[3:5].max()


@pytest.mark.parametrize(("answer", "chance"), [(True, 120.5 / 121), (False, 0.5 / 121)])
def test_answers_that_are_all_alike_need_no_tree(answer, chance):
    trees = fit_trees(ROWS, np.full(120, answer), 0)
    assert len(trees.roots) == 0
    np.testing.assert_allclose(trees.probabilities(ROWS), chance)


def test_a_seed_decides():
    first, again, other = (fit_trees(ROWS, ANSWERS, seed).probabilities(ROWS) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("left", lambda a: a * 0),  # a circle
        ("left", lambda a: a + 10**9),
        ("right", lambda a: np.where(a < 0, 5, a)),
        ("column", lambda a: a + 5),
        ("column", lambda a: a - 1),
        ("column", lambda a: a.astype(np.float64)),
        ("threshold", lambda a: a * np.nan),
        ("value", lambda a: a[:-1]),
        ("value", lambda a: a[None]),
        ("roots", lambda a: a + 10**9),
        ("roots", lambda a: a - 1),
        ("roots", lambda a: np.zeros(2000, np.int64)),
        ("start", lambda a: np.zeros(0)),
        ("start", lambda a: a.astype(object)),
        ("left", lambda a: np.full(2**17, -1)),
    ],
)
def test_arrays_that_are_no_trees_are_refused(name, change):
    arrays = {f"x/{own}": array for own, array in vars(fit_trees(ROWS, ANSWERS, 0)).items()}
    assert len(trees_from(arrays, "x/", 5).roots) > 0
    with pytest.raises(ValueError, match="x/"):
        trees_from({**arrays, f"x/{name}": change(arrays[f"x/{name}"])}, "x/", 5)
