"""Measures how far series are from their own past and from those of other ranks, on a logarithmic scale.

A score is a number of typical deviations of the past: 1.4826 times the median absolute deviation, at least `LEAST_DEVIATION`.
It is infinite if a value is not finite (and those of other ranks are), and NaN if it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.series import Bools, Floats
from unsilent.triage.bundle import Bundle, RankSeries, SeriesName
from unsilent.triage.findings import Blanks

BEFORE, AFTER = 8, 16
"""Default number of steps before and after the alarm that a query examines."""
LEAST_STEPS = 8
"""Least number of past values for a score."""
LEAST_DEVIATION = 0.1
"""Least deviation, about a tenth of the value: a smaller change of a nearly constant series is not unusual."""
FAR = 8.0
"""Least score of an unusual value, which is more than twice or less than half the usual value."""
FEW = 8
"""Up to this number of ranks, each is compared with the median of the others; with more, with that of all, which one hardly
changes."""
_SMALLEST = 1e-300


def window(bundle: Bundle, blanks: Blanks) -> tuple[int, int]:
    """The first and the last step that a query looks at."""
    return blanks.steps or (bundle.incident.step - BEFORE, bundle.incident.step + AFTER)


def past_end(bundle: Bundle, blanks: Blanks) -> int:
    """The step before which values count as normal."""
    return min(window(bundle, blanks)[0], bundle.incident.step - BEFORE)


def past_scores(series: RankSeries, before: int) -> Floats:
    """Deviations of each value from the values of its series before a step, float64[n, m]."""
    logarithms = _logarithms(series)
    scores = _scores(logarithms, series.steps < before)
    return np.where(series.seen & ~np.isfinite(series.values), np.inf, scores)


def past_gaps(series: RankSeries, before: int) -> Floats:
    """The logarithm of each magnitude minus the median of its series before a step, float64[n, m].

    NaN if either is unknown.
    """
    logarithms = _logarithms(series)
    gaps: Floats = logarithms - _median(logarithms[series.steps < before])
    return gaps


def peer_scores(
    ranks: Mapping[int, RankSeries], before: int
) -> tuple[NDArray[np.int64], tuple[SeriesName, ...], dict[int, Floats]]:
    """Deviations of each rank from the median of the other ranks, float64[n, m].

    Returns the steps and series that all ranks have, and the deviations by rank.
    """
    every = [*ranks.values()]
    common = set.intersection(*(set(rank_series.names) for rank_series in every))
    names = tuple(name for name in dict.fromkeys(every[0].names) if name in common)
    steps = every[0].steps
    for rank_series in every[1:]:
        steps = np.intersect1d(steps, rank_series.steps)
    common_parts = [_common(rank_series, steps, names) for rank_series in every]
    logarithms = np.stack([_logarithms(rank_series) for rank_series in common_parts])
    bad = np.stack([rank_series.seen & ~np.isfinite(rank_series.values) for rank_series in common_parts])
    is_alone = bad.sum(0) == 1
    all_centre = _median(logarithms) if len(every) > FEW else None
    scores: dict[int, Floats] = {}
    for place, rank in enumerate(ranks):
        others = [number for number in range(len(every)) if number != place]
        gaps = logarithms[place] - (_median(logarithms[others]) if all_centre is None else all_centre)
        from_others = _scores(gaps, steps < before)
        scores[rank] = np.where(bad[place] & is_alone, np.inf, from_others)
    return steps, names, scores


def _common(series: RankSeries, steps: NDArray[np.int64], names: tuple[SeriesName, ...]) -> RankSeries:
    rows, places = np.isin(series.steps, steps), {name: place for place, name in enumerate(series.names)}
    columns = [places[name] for name in names]
    return RankSeries(steps, names, series.values[rows][:, columns], series.seen[rows][:, columns])


def _logarithms(series: RankSeries) -> Floats:
    """Logarithms of magnitudes, or NaN for values that are missing or not finite."""
    is_known: Bools = series.seen & np.isfinite(series.values)
    return np.where(is_known, np.log(np.maximum(np.abs(np.where(is_known, series.values, 1.0)), _SMALLEST)), np.nan)


def _scores(values: Floats, is_past: Bools) -> Floats:
    past = values[is_past]
    centre = _median(past)
    deviation = np.maximum(1.4826 * _median(np.abs(past - centre)), LEAST_DEVIATION)
    scores: Floats = np.abs(values - centre) / deviation
    return np.where(np.isfinite(past).sum(0) >= LEAST_STEPS, scores, np.nan)


def _median(values: Floats) -> Floats:
    """The median of known values over the first axis, or NaN if none is known."""
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    ordered = np.sort(values, axis=0)  # NaN comes last; far faster than nanmedian
    known = np.isfinite(values).sum(0)
    low, high = (
        np.take_along_axis(ordered, np.maximum(place, 0)[None], 0)[0] for place in ((known - 1) // 2, known // 2)
    )
    result: Floats = np.where(known > 0, (low + high) / 2, np.nan)
    return result
