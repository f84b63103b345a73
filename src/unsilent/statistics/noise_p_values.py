"""P values of one comparison against clean ones: for exceeding the noise, and for staying within a margin.

*Beyond noise.* The observed and the clean comparisons form one pool of R + 1 members. Every measure is standardised with the
mean and standard deviation of the whole pool, and each member is represented by its largest standardised value (for differences
the absolute value). All members are treated alike, so exchangeable members stay exchangeable, and ``p = (1 + #{clean >=
observed}) / (R + 1)`` holds its level exactly, for all distributions and dependencies between measures. For one distance this
is the plain rank test, since ``z`` increases with the value. For the p value of a single measure, its value is compared with the
largest of *all* measures (Westfall & Young's single-step maxT). The p values of unaffected measures hold their level jointly,
whatever the other measures do, since more measures can only increase the largest value.

*Within the margin* (two one-sided tests, Schuirmann 1987, with ranks instead of t). An effect is assumed to shift the value. If
the effect were the margin m or more, ``x - m`` would be distributed like another clean value or above, so ``p = (1 + #{clean <=
x - m}) / (R + 1)``. The lower side is analogous, and the larger p value counts. Distances have the upper side only.

*Fitted*: the normal distribution for differences and the log-normal for distances, with Student's t for one further value, ``t =
(x - mean) / (s sqrt(1 + 1/R))``. Under this assumption p values can be below 1/(R + 1). It is accepted only if the test of
Shapiro and Wilk (1965) does not refute it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from unsilent.basics.errors import UsageError
from unsilent.statistics.null_distribution import Measure, NullDistribution

Floats = NDArray[np.float64]

LEAST_FITTED = 20
"""Minimum number of clean comparisons to check whether a distribution fits."""
_REFUTED = 0.05


def beyond_noise_p_values(observed: Floats, null: Floats, measures: Sequence[Measure]) -> Floats:
    """P value of each measure, corrected for the number of measures, float64[k].

    The smallest of them is the p value of all measures together.

    Args:
        observed: Observed values, float64[k]; a value that is not finite exceeds all finite ones.
        null: Clean values, float64[R, k], all finite.
        measures: The k measures.
    """
    z = standardised(np.vstack([observed, null]), measures)
    worst = z[1:].max(axis=1)
    # Equal values must stay ties in spite of rounding of their mean.
    bar = np.where(np.isinf(z[0]), math.inf, z[0] - 1e-9 * np.maximum(1.0, np.abs(np.where(np.isinf(z[0]), 0.0, z[0]))))
    at_least = worst[:, None] >= bar
    result: Floats = (1 + at_least.sum(axis=0)) / (len(null) + 1)
    return result


def standardised(pool: Floats, measures: Sequence[Measure]) -> Floats:
    """The pool as distances from its mean in standard deviations; 0 for a measure without spread."""
    z = np.zeros_like(pool)
    for k, measure in enumerate(measures):
        column = pool[:, k]
        if not np.isfinite(column).all():  # only the observed value can be infinite or NaN
            z[:, k] = np.where(np.isfinite(column), 0.0, math.inf)
            continue
        scale = float(np.abs(column).max())
        centred = column / scale if scale else column  # squares of very large values would overflow
        centred = centred - centred.mean()
        sd = float(centred.std())
        if sd > 1e-12:  # values are at most 1 here; a smaller sd is rounding of the mean of equal values
            z[:, k] = centred / sd
        if not measure.is_distance:
            z[:, k] = np.abs(z[:, k])
    return z


def within_margin_p_value(observed: Floats, null: Floats, measures: Sequence[Measure]) -> float:
    """P value of the hypothesis that at least one measure is off by its margin or more."""
    return max(_within(float(observed[k]), null[:, k], m) for k, m in enumerate(measures))


def _within(x: float, clean: Floats, measure: Measure) -> float:
    if not math.isfinite(x):
        return 1.0
    slack = 1e-12 * max(abs(x), measure.margin, float(np.abs(clean).max()))
    below = int((clean <= x - measure.margin + slack).sum())
    above = 0 if measure.is_distance else int((clean >= x + measure.margin - slack).sum())
    return (1 + max(below, above)) / (len(clean) + 1)


class FittedNull:
    """P values from a distribution fitted to the clean comparisons.

    Raises:
        UsageError: there are too few clean comparisons, a measure has no spread, or its distribution is refuted.
    """

    def __init__(self, null: NullDistribution, measures: Sequence[Measure]) -> None:
        if null.n < LEAST_FITTED:
            raise UsageError(
                f"{null.n} clean comparisons are too few to check whether a distribution fits; make at least {LEAST_FITTED}"
            )
        self._measures, self._n = measures, null.n
        values = null.values(measures)
        self._clean = [_clean_values_on_normal_scale(values[:, k], m, len(measures)) for k, m in enumerate(measures)]

    def beyond_noise_p_values(self, observed: Floats) -> Floats:
        """P values like those of the function `beyond_noise_p_values`, with a Bonferroni correction."""
        p = [self._beyond(float(x), k) for k, x in enumerate(observed)]
        return np.minimum(1.0, np.array(p, dtype=np.float64) * len(p))

    def within_margin_p_value(self, observed: Floats) -> float:
        """The p value like that of the function `within_margin_p_value`."""
        return max(self._within(float(x), k) for k, x in enumerate(observed))

    def _beyond(self, x: float, k: int) -> float:
        if not math.isfinite(x):
            return 0.0
        upper = self._upper(x, k)
        return upper if self._measures[k].is_distance else 2 * min(upper, 1 - upper)

    def _within(self, x: float, k: int) -> float:
        measure = self._measures[k]
        if not math.isfinite(x):
            return 1.0
        below = 1 - self._upper(x - measure.margin, k)
        return below if measure.is_distance else max(below, self._upper(x + measure.margin, k))

    def _upper(self, x: float, k: int) -> float:
        """Probability that another clean value is x or more."""
        if self._measures[k].is_distance and x <= 0:
            return 1.0
        y = math.log(x) if self._measures[k].is_distance else x
        clean = self._clean[k]
        spread = float(clean.std(ddof=1)) * math.sqrt(1 + 1 / self._n)
        return float(stdtr(self._n - 1, (float(clean.mean()) - y) / spread))


def _clean_values_on_normal_scale(clean: Floats, measure: Measure, count: int) -> Floats:
    """The clean values on the scale on which they should be normal; raises ``UsageError`` if they are not."""
    from scipy.stats import shapiro  # slow to load

    law = "log-normal" if measure.is_distance else "normal"
    if float(np.ptp(clean)) == 0 or (measure.is_distance and float(clean.min()) <= 0):
        raise UsageError(
            f"no {law} distribution fits {measure.name}: its clean values "
            f"{'are all equal' if np.ptp(clean) == 0 else 'include 0'}; use ranks instead"
        )
    values: Floats = np.log(clean) if measure.is_distance else clean
    p = float(shapiro((values - values.mean()) / values.std()).pvalue)
    if p < _REFUTED / count:
        raise UsageError(
            f"clean values of {measure.name} are not {law} (Shapiro-Wilk p {p:.2g}); "
            "use ranks instead, with more replicas if needed"
        )
    return values
