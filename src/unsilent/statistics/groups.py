"""Spread of the error of classes and sub-groups over replicas, corrected for the group size.

A small group varies more than a large one because of its size alone, so the raw spread of a class cannot be compared with that
of all samples. The right correction follows from the fact that all replicas share one test set. Let ``e_i`` be 1 if a replica
gets sample i wrong, ``v_i`` its variance over replicas, and X the error of a group of n samples. Then ::

    Var(X) = sum_i v_i / n^2 + sum_{i != j} Cov(e_i, e_j) / n^2

*Binomial sampling*, ``p (1 - p) / n``, would be right if each replica had its own test samples. Here it is too large: samples
that all replicas get right, or all get wrong, do not vary at all, and the draw of the samples is common to all replicas.
The effect of size is the first term, in which each sample varies independently. The second term, scaled to ``c = mean_{i != j}
Cov(e_i, e_j)``, does not depend on n: for samples drawn from the group it is an unbiased estimate of the variance over replicas
of the group's error on unlimited data. The square root of c is `GroupSpread.common_sd`.

Whether a group is *more sensitive* is another question, since its samples may change more often as well as together. The test
draws groups of the same size at random from all samples. Their variance is on average ``mean(v) / n + (1 - 1/n) c_all`` (exact
for drawing without replacement). The rank of the group among them is an exact p value, given these replicas, for the hypothesis
that membership has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.statistics.comparing import holm
from unsilent.statistics.intervals import Interval
from unsilent.statistics.replica_spread import (
    check_replica_count,
    max_possible_sd,
    mean_over_pairs,
    sd_interval_from_variance,
    spread,
)

Floats = NDArray[np.float64]
ERRORS = 3
"""Number of standard errors within which a p value is too close to a level to be decided."""
DRAWS, LEAST_DRAWS = 19_999, 999
"""Maximum number of random groups for a comparison, and the minimum if there are many samples."""
EFFORT = 1e9
"""Number of elements to process for all random groups, which takes about two seconds."""
_BLOCK = 2**20
_NOISE = 1e-12
"""Relative size below which a difference counts as rounding error."""


@dataclass(frozen=True, slots=True)
class ClassErrorRates:
    """Recall, false-negative rate and false-positive rate of one class, per replica, float64[R].

    Recall and FNR are shares of the samples that *are* of the class, FPR of those that are *not*.
    """

    recall: Floats
    fnr: Floats
    fpr: Floats


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """Spread of one group's error over replicas.

    Attributes:
        n: Number of samples.
        error: Mean error over replicas.
        sd: Observed standard deviation of the error over replicas.
        sd_by_size: Standard deviation expected for n samples drawn at random from all samples.
        common_sd: Standard deviation of the group's error on unlimited data, which does not depend on n.
        p: Probability that a random group of this size varies at least as much.
        corrected: ``p`` corrected for all groups together (Holm).
        p_standard_error: Standard error of ``corrected`` due to the random draw of groups.
        draws: Number of random groups.
    """

    name: str
    n: int
    error: float
    sd: Interval
    sd_by_size: float
    common_sd: Interval
    p: float
    corrected: float
    p_standard_error: float
    draws: int

    def is_near_level(self, level: float) -> bool:
        """Whether ``corrected`` is too close to the level to be decided with these random groups."""
        return abs(self.corrected - level) <= ERRORS * self.p_standard_error


def class_error_rates(predictions: NDArray[Any], truth: NDArray[Any], positive: int) -> ClassErrorRates:
    """Recall, FNR and FPR of class ``positive``, from predictions int[R, n] and truth int[n].

    >>> class_error_rates(np.array([[1, 0, 0, 1]]), np.array([1, 1, 1, 0]), positive=1).fnr
    array([0.66666667])
    """
    predictions, truth = np.asarray(predictions), np.asarray(truth)
    inside = truth == positive
    if predictions.ndim != 2 or truth.shape != predictions.shape[1:]:
        raise ValueError(f"expected predictions [R, n] and truth [n], found {predictions.shape} and {truth.shape}")
    if inside.all() or not inside.any():
        raise UsageError(
            f"class {positive!r} has {int(inside.sum())} of {truth.size} samples; recall and false-positive rate need "
            "samples inside and outside of a class: leave this class out"
        )
    recall = (predictions[:, inside] == positive).mean(axis=1)
    return ClassErrorRates(recall, 1 - recall, (predictions[:, ~inside] == positive).mean(axis=1))


def group_spread(
    wrong: NDArray[Any],
    groups: Mapping[str, NDArray[np.bool_]],
    confidence: float = 0.95,
    draws: int | None = None,
    seed: int = 0,
) -> list[GroupSpread]:
    """Spread of each group's error, corrected for its size.

    Args:
        wrong: Whether each replica gets each sample wrong, bool[R, n]. For FNR give only the samples of a class, for FPR
            only the other samples.
        groups: Mask of each group's samples by name, bool[n], with at least two samples; groups may overlap.
        confidence: Confidence of the intervals.
        draws: Number of random groups; ``None`` for as many as `EFFORT` allows, at most `DRAWS`.
        seed: Seed of the random groups.
    """
    wrong = np.asarray(wrong, dtype=np.float64)
    if wrong.ndim != 2 or not np.isin(wrong, (0.0, 1.0)).all():
        raise ValueError("expected wrong as bool[R, n]: True where a replica predicts a sample incorrectly")
    check_replica_count(wrong.shape[0])
    for name, members in groups.items():
        if members.shape != wrong.shape[1:] or members.sum() < 2:
            raise UsageError(
                f"group {name!r} has {int(members.sum())} of {wrong.shape[1]} samples; expected at least 2, to see "
                "whether samples change together: merge the group with another"
            )
    masks = {name: np.asarray(members, dtype=np.bool_) for name, members in groups.items()}
    sizes = np.array([int(members.sum()) for members in masks.values()])
    p, drawn = _ranks(wrong, list(masks.values()), draws, seed)
    single, together = float(wrong.var(axis=0, ddof=1).mean()), _common(wrong)
    result = []
    for (name, members), n, p_value, corrected in zip(masks.items(), sizes, p, holm(p), strict=True):
        group_wrong = wrong[:, members]
        sd = spread(group_wrong.mean(axis=1), confidence, max_difference=1.0).sd
        result.append(
            GroupSpread(
                name=name,
                n=int(n),
                error=float(group_wrong.mean()),
                sd=sd,
                sd_by_size=float(max(0.0, single / n + (1 - 1 / n) * together) ** 0.5),
                common_sd=_in_common(group_wrong, sd, confidence),
                p=p_value,
                corrected=corrected,
                p_standard_error=corrected / p_value * (p_value * (1 - p_value) / (drawn + 1)) ** 0.5,
                draws=drawn,
            )
        )
    return result


def _in_common(wrong: Floats, sd: Interval, confidence: float) -> Interval:
    """The interval for the square root of the mean covariance of two samples.

    The covariance cannot be below 0, but its estimate can. So the upper limit is at least the half-width, as if the estimate were
    0, and at least the limit that follows from the upper limit of the group's variance. If pairs of replicas give no information
    (one sample that changes gives none on two samples), all of the variation may be common.
    """
    kernel, n = _kernel(wrong), wrong.shape[1]
    if kernel.any():
        result = mean_over_pairs(kernel, confidence, max_difference=0.5)
        estimate, scale = result.estimate or 0.0, n / (n - 1)
        below, above = (estimate + (limit**2 - (sd.estimate or 0.0) ** 2) * scale for limit in (sd.low, sd.high))
        return sd_interval_from_variance(
            replace(result, low=min(result.low, below), high=max(result.high, result.half_width, above))
        )
    high = min(sd.high * (n / (n - 1)) ** 0.5, max_possible_sd(wrong.shape[0]))
    method = sd.method if sd.estimate == 0 else "all of the group's sd"
    return Interval(0.0, 0.0, high, confidence, wrong.shape[0], method)


def _kernel(wrong: Floats) -> Floats:
    """Pairwise terms over replicas, [R, R], whose mean is the mean covariance of two samples."""
    n = wrong.shape[1]
    apart = np.array([(wrong != row).mean(axis=1) for row in wrong]) / 2 / n
    shares = wrong.mean(axis=1)
    whole = (shares[:, None] - shares[None, :]) ** 2 / 2  # the kernel of the variance
    result: Floats = (whole - apart) * n / (n - 1)
    result[np.abs(whole - apart) <= _NOISE * max(whole.max(), apart.max())] = 0.0
    return result


def _common(wrong: Floats) -> float:
    """Mean covariance over replicas of two different samples."""
    count = wrong.shape[0]
    return float(np.sum(_kernel(wrong))) / float(count * (count - 1))


def _ranks(
    wrong: Floats, members: Sequence[NDArray[np.bool_]], draws: int | None, seed: int
) -> tuple[list[float], int]:
    """Share of random groups that vary at least as much as each group, and the number of random groups.

    Samples that all replicas get right, or all get wrong, do not affect the variance. The others are counted in whole numbers, so
    that equal groups have exactly equal variances.
    """
    replicas, n = wrong.shape
    moving = np.flatnonzero(wrong.min(axis=0) != wrong.max(axis=0))
    errors = wrong[:, moving].astype(np.float32)
    sizes = np.array([int(mask.sum()) for mask in members])
    observed = np.array([_squares(errors @ mask[moving].astype(np.float32)) for mask in members])
    if draws is None:
        effort = n + len(moving) * len(np.unique(sizes)) * (1 + replicas / 20)
        draws = int(min(DRAWS, max(LEAST_DRAWS, EFFORT / effort)))
    rng, above, order = np.random.default_rng(seed), np.ones(len(sizes)), np.arange(n, dtype=np.int32)
    for start in range(0, draws, block := max(1, _BLOCK // n)):
        count = min(block, draws - start)
        places = rng.permuted(np.broadcast_to(order, (count, n)), axis=1)[:, : len(moving)]
        for size in np.unique(sizes):  # the samples in the first ``size`` places are a random group
            drawn = _squares(errors @ (places < size).astype(np.float32).T)
            same = sizes == size
            above[same] += (drawn[None, :] >= observed[same, None]).sum(axis=1)
    return [float(share) for share in above / (draws + 1)], draws


def _squares(sums: NDArray[np.float32]) -> Any:
    """Variance over replicas, [R] or [R, draws], times a constant that makes it a whole number."""
    exact = sums.astype(np.float64)
    return len(exact) * (exact**2).sum(axis=0) - exact.sum(axis=0) ** 2
