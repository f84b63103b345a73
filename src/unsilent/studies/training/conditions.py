"""What foretells latent harm: large values in what optimizers and normalisation layers remember, within two steps of the fault.

He et al. (ISCA 2023) say that every latent outcome is preceded by a very large gradient history or moving variance within two
iterations of the fault. What is very large there is said in the body of the paper, which was not read: the factors here are
ours. The largest magnitude of each is compared with the largest of the fault-free run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.records import Condition, Judged, Point
from unsilent.studies.training.spec import WATCHED, TrainingFound

FACTORS = (10.0, 100.0, 1e4)
ANY = "any"


def points(trials: Sequence[Judged], found: TrainingFound) -> tuple[Point, ...]:
    """Largest values within two steps, as multiples of golden's largest of any step; inf for what is no number."""
    golden = np.array([[np.nan if x is None else x for x in row] for row in found.watched])
    usual = [np.nan if np.isnan(column).all() else float(np.nanmax(column)) for column in golden.T]
    return tuple(Point(str(one.row.trial), str(one.outcome), _ratios(one, usual)) for one in trials)


def _ratios(one: Judged, usual: Sequence[float]) -> tuple[float | None, ...]:
    seen = one.row.watched
    if not len(seen):
        return (None,) * len(WATCHED)
    return tuple(
        None if np.isnan(most) or np.isnan(column).all() or not most > 0 else float(np.nanmax(column)) / most
        for column, most in zip(seen.T, usual, strict=True)
    )


def conditions(trials: Sequence[Judged], found: Sequence[Point], confidence: float) -> tuple[Condition, ...]:
    """A contingency table for each kind and factor; trials that died are left out."""
    pairs = [(one, point) for one, point in zip(trials, found, strict=True) if any(r is not None for r in point.ratios)]
    kinds = [kind for i, kind in enumerate(WATCHED) if any(point.ratios[i] is not None for _, point in pairs)]
    return tuple(_condition(kind, factor, pairs, confidence) for kind in (*kinds, ANY) for factor in FACTORS)


def _condition(kind: str, factor: float, pairs: Sequence[tuple[Judged, Point]], confidence: float) -> Condition:
    table = {(kind, large): 0 for kind in ("latent", "harmless", "loud") for large in (True, False)}
    different = {True: 0, False: 0}
    for one, point in pairs:
        ratios = point.ratios if kind == ANY else (point.ratios[WATCHED.index(kind)],)
        large = any(r is not None and r > factor for r in ratios)
        table["latent" if one.outcome.latent else "loud" if one.outcome.harmful else "harmless", large] += 1
        different[large] += one.by_implementation.latent
    hit, missed, false, clear = (table[what, large] for what in ("latent", "harmless") for large in (True, False))
    return Condition(
        kind,
        factor,
        hit,
        missed,
        false,
        clear,
        clopper_pearson(hit, hit + missed, confidence),
        clopper_pearson(clear, clear + false, confidence),
        table["loud", True],
        table["loud", False],
        clopper_pearson(different[True], sum(different.values()), confidence),
    )
