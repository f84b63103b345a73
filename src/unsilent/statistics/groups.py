"""Which parts of the data vary more over replicas than others: error spread of classes and sub-groups, corrected for their size.

A small group varies more than a large one by itself, so the raw spread of a class says nothing beside that of the whole. Which
correction is right follows from the replicas sharing one test set. Let ``e_i`` be 1 where a replica gets sample i wrong, ``v_i``
its variance over replicas, and X the error of a group of n samples. Then ::

    Var(X) = sum_i v_i / n^2 + sum_{i != j} Cov(e_i, e_j) / n^2

*Binomial sampling*, ``p (1 - p) / n``, would be right where each replica had test samples of its own. Here it is too much:
samples that all replicas get right, or all get wrong, do not vary at all, and the draw of the samples is common to all replicas.
What size gives by itself is the first term, each sample changing sides on its own. What remains, scaled to ``c = mean_{i != j}
Cov(e_i, e_j)``, does not depend on n: for samples drawn from the group it is, without bias, the variance over replicas of the
group's error on unlimited data. The root of c is `GroupSpread.common`.

Whether a group is *more sensitive* is another question, since its samples may change sides more often as well as together. It
is asked by drawing groups of that size at random from all samples: their variance is on average ``mean(v) / n + (1 - 1/n) c_all``
(exact for drawing without replacement), and the rank of the group among them is an exact p value for "membership has nothing
to do with it", given these replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.errors import UsageError
from unsilent.statistics.comparing import holm
from unsilent.statistics.intervals import Interval
from unsilent.statistics.replicas import enough, over_pairs, root

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one class, per replica, float64[R]: true positives of all positives, and the two kinds of error.

    Recall and FNR are shares of the samples that *are* of the class, FPR of those that are *not*.
    """

    recall: Floats
    fnr: Floats
    fpr: Floats


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """How the error of one group varies over replicas.

    Attributes:
        n: its samples. error: mean over replicas. sd: as observed. by_size: sd that a group of n samples drawn at random has.
        common: sd of its error on unlimited data, which does not depend on n. p: that a random group of this size varies as
        much. corrected: p, for all groups together (Holm).
    """

    name: str
    n: int
    error: float
    sd: Interval
    by_size: float
    common: Interval
    p: float
    corrected: float


def rates(predictions: NDArray[Any], truth: NDArray[Any], positive: int) -> Rates:
    """Recall, FNR and FPR of class ``positive``; predictions int[R, n], truth int[n].

    >>> rates(np.array([[1, 0, 0, 1]]), np.array([1, 1, 1, 0]), positive=1).fnr
    array([0.66666667])
    """
    predictions, truth = np.asarray(predictions), np.asarray(truth)
    inside = truth == positive
    if predictions.ndim != 2 or truth.shape != predictions.shape[1:]:
        raise ValueError(f"need predictions [R, n] and truth [n], got {predictions.shape} and {truth.shape}")
    if inside.all() or not inside.any():
        raise UsageError(
            f"class {positive!r} has {int(inside.sum())} of {truth.size} samples; recall and false-positive rate need "
            "samples inside and outside of it: leave the class out"
        )
    recall = (predictions[:, inside] == positive).mean(axis=1)
    return Rates(recall, 1 - recall, (predictions[:, ~inside] == positive).mean(axis=1))


def group_spread(
    wrong: NDArray[Any],
    groups: Mapping[str, NDArray[np.bool_]],
    confidence: float = 0.95,
    draws: int = 1999,
    seed: int = 0,
) -> list[GroupSpread]:
    """Spread of each group's error, corrected for its size.

    Args:
        wrong: what each replica gets wrong, bool[R, n]. For FNR give the samples of a class alone, for FPR those outside.
        groups: name -> its samples, bool[n], at least two; groups may overlap.
        draws, seed: of the random groups.
    """
    wrong = np.asarray(wrong, dtype=np.float64)
    if wrong.ndim != 2 or not np.isin(wrong, (0.0, 1.0)).all():
        raise ValueError("need right or wrong, bool[R, n]")
    enough(wrong.shape[0])
    for name, members in groups.items():
        if members.shape != wrong.shape[1:] or members.sum() < 2:
            raise UsageError(
                f"group {name!r} has {int(members.sum())} samples of {wrong.shape[1]}; at least 2 are needed to tell "
                "samples that move together from single ones: merge it with another"
            )
    masks = {name: np.asarray(members, dtype=np.bool_) for name, members in groups.items()}
    sizes = np.array([int(members.sum()) for members in masks.values()])
    observed = np.array([wrong[:, members].mean(axis=1).var(ddof=1) for members in masks.values()])
    p = _ranks(wrong, sizes, observed, draws, seed)
    single, together = float(wrong.var(axis=0, ddof=1).mean()), _common(wrong)
    return [
        GroupSpread(
            name=name,
            n=int(n),
            error=float(wrong[:, members].mean()),
            sd=root(over_pairs(_halved(wrong[:, members].mean(axis=1)), confidence, most=0.5)),
            by_size=float(max(0.0, single / n + (1 - 1 / n) * together) ** 0.5),
            common=root(over_pairs(_kernel(wrong[:, members]), confidence, most=0.5)),
            p=one,
            corrected=corrected,
        )
        for (name, members), n, one, corrected in zip(masks.items(), sizes, p, holm(p), strict=True)
    ]


def _halved(values: Floats) -> Floats:
    """Kernel of the variance, [R, R]."""
    return (values[:, None] - values[None, :]) ** 2 / 2


def _kernel(wrong: Floats) -> Floats:
    """Kernel of the mean covariance of two samples, [R, R]: that of Var(X) less that of ``sum v_i / n^2``, scaled to pairs."""
    n = wrong.shape[1]
    apart = np.array([(wrong != one).mean(axis=1) for one in wrong])
    found: Floats = (_halved(wrong.mean(axis=1)) - apart / 2 / n) * n / (n - 1)
    return found


def _common(wrong: Floats) -> float:
    """Mean covariance of two different samples over replicas."""
    count = wrong.shape[0]
    return float(np.sum(_kernel(wrong))) / float(count * (count - 1))


def _ranks(wrong: Floats, sizes: NDArray[np.int64], observed: Floats, draws: int, seed: int) -> list[float]:
    """Share of random groups, the observed one among them, that vary at least as much as each group."""
    rng, above = np.random.default_rng(seed), np.ones(len(sizes))
    for _ in range(draws):
        sums = np.cumsum(wrong[:, rng.permutation(wrong.shape[1])], axis=1)
        drawn = (sums[:, sizes - 1] / sizes).var(axis=0, ddof=1)
        above += drawn >= observed * (1 - 1e-9)
    return [float(share) for share in above / (draws + 1)]
