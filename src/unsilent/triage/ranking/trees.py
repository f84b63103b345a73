"""Gradient-boosted trees for binary classification, fitted by scikit-learn and evaluated with numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.series import Bools, Floats

TREES, DEPTH, RATE = 60, 3, 0.1
LEAST_LEAF = 4
"""Least number of examples in a leaf."""
SHARE = 0.7
"""Share of the examples for each tree, drawn with the seed."""
COLUMN_SHARE = 0.3
"""Share of the columns that are considered in each node: no few columns dominate, and the search is faster."""
MOST_NODES = 2**16


@dataclass(frozen=True, eq=False)
class Trees:
    """Boosted trees whose sum is the logarithm of the odds.

    Attributes:
        start: float64[1], added to the sum.
        roots: int64[t], the first node of each tree.
        left, right: int64[n], the children of a node, which are later nodes; -1 in a leaf.
        column: int64[n], the column that a node tests.
        threshold: float64[n], the largest value that leads to the left.
        value: float64[n], the value of a leaf, and for a node the mean of the training examples that pass it.
    """

    start: Floats
    roots: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    column: NDArray[np.int64]
    threshold: Floats
    value: Floats

    def probabilities(self, rows: Floats) -> Floats:
        """Predicted probability for each row, float64[n]."""
        result: Floats = 1 / (1 + np.exp(-np.clip(self.start[0] + self.contributions(rows).sum(1), -50, 50)))
        return result

    def contributions(self, rows: Floats) -> Floats:
        """The contribution of each column to the logarithm of the odds, float64[n, columns + 1].

        The last column is the sum of the roots.
        """
        rows = np.asarray(rows, np.float32)  # like the comparison in scikit-learn
        result, every = np.zeros((len(rows), rows.shape[1] + 1)), np.arange(len(rows))
        result[:, -1] = self.value[self.roots].sum()
        for root in self.roots:
            node = np.full(len(rows), root)
            while len(inner := every[self.left[node] >= 0]):
                at = node[inner]
                column = self.column[at]
                is_left = rows[inner, column] <= self.threshold[at]
                node[inner] = np.where(is_left, self.left[at], self.right[at])
                result[inner, column] += self.value[node[inner]] - self.value[at]
        return result

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, to be written to a file."""
        return vars(self)


def fit_trees(rows: Floats, answers: Bools, seed: int) -> Trees:
    """Trees fitted to examples; a constant if all answers are equal.

    ``rows`` is float64[n, columns].
    """
    right = int(answers.sum())
    if not 0 < right < len(answers):
        none = np.zeros(0, np.int64)
        odds = math.log((right + 0.5) / (len(answers) - right + 0.5))
        return Trees(np.array([odds]), none, none, none, none, np.zeros(0), np.zeros(0))
    from sklearn.ensemble import GradientBoostingClassifier

    fitted = GradientBoostingClassifier(
        n_estimators=TREES, max_depth=DEPTH, learning_rate=RATE, min_samples_leaf=LEAST_LEAF, subsample=SHARE,
        max_features=COLUMN_SHARE, random_state=seed,
    ).fit(rows, answers)  # fmt: skip
    return trees_of(fitted)


def trees_of(fitted: Any) -> Trees:
    """Trees converted from a fitted ``GradientBoostingClassifier`` of two classes."""
    prior = fitted.init_.class_prior_[1]
    parts, begin, roots = [], 0, []
    for (estimator,) in fitted.estimators_:
        tree = estimator.tree_
        left, right = tree.children_left.astype(np.int64), tree.children_right.astype(np.int64)
        value = fitted.learning_rate * tree.value[:, 0, 0]
        weight = tree.weighted_n_node_samples
        for node in range(tree.node_count - 1, -1, -1):  # leaves were moved after the tree was grown; nodes were not
            if left[node] >= 0:
                both = np.array([left[node], right[node]])
                value[node] = np.average(value[both], weights=weight[both])
        is_leaf = left < 0
        moved = [np.where(is_leaf, -1, side + begin) for side in (left, right)]
        parts.append((*moved, np.where(is_leaf, 0, tree.feature), np.where(is_leaf, 0.0, tree.threshold), value))
        roots.append(begin)
        begin += tree.node_count
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Trees(np.array([math.log(prior / (1 - prior))]), np.array(roots, np.int64), *joined)


def trees_from(arrays: Mapping[str, NDArray[Any]], prefix: str, columns: int) -> Trees:
    """Trees from the arrays of a file.

    Raises ``ValueError`` or ``KeyError`` if the arrays are not valid trees.
    """
    read = {}
    for field in fields(Trees):
        array = arrays[prefix + field.name]
        kind = np.float64 if field.name in ("start", "threshold", "value") else np.int64
        if array.dtype != kind or array.ndim != 1 or len(array) > MOST_NODES:
            raise ValueError(f"{prefix}{field.name} is no list of at most {MOST_NODES} numbers of type {kind.__name__}")
        if kind is np.float64 and not np.isfinite(array).all():
            raise ValueError(f"{prefix}{field.name} has values that are not finite")
        read[field.name] = array
    trees = Trees(**read)
    count, is_leaf = len(trees.value), trees.left == -1
    if len(trees.start) != 1 or any(len(read[name]) != count for name in ("left", "right", "column", "threshold")):
        raise ValueError(f"the arrays of {prefix} differ in length")
    nodes = np.arange(count)
    are_later = (trees.left > nodes) & (trees.right > nodes) & (trees.left < count) & (trees.right < count)
    if not (are_later | (is_leaf & (trees.right == -1))).all():
        raise ValueError(f"a node of {prefix} does not lead to later ones")
    if (
        not ((trees.roots >= 0) & (trees.roots < count)).all()
        or not ((trees.column >= 0) & (trees.column < columns)).all()
    ):
        raise ValueError(f"{prefix} has a root or a column that does not exist")
    if len(trees.roots) > MOST_ROOTS:
        raise ValueError(f"{prefix} has more than {MOST_ROOTS} trees")
    return trees


MOST_ROOTS = 1000
"""Most roots in a file; a model of this package has fewer."""
