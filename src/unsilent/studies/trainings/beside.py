"""Two campaigns of struck trainings beside each other: with and without batch norm, one optimizer and another."""

from __future__ import annotations

from unsilent.errors import UsageError
from unsilent.statistics.comparing import Counts, joint_differences
from unsilent.statistics.intervals import Interval
from unsilent.studies.trainings.judging import SHARES
from unsilent.studies.trainings.records import Contrast, TrainingResult

SAME = ("faults", "accelerator", "value", "phases", "per")
"""What must be equal in two specs, so that both strike by the same law."""


def beside(one: TrainingResult, other: TrainingResult) -> tuple[Contrast, ...]:
    """The second against the first: what is different, harm, latent harm, and each class that occurs.

    Limits of the differences hold for all rows together. Raises ``UsageError`` where their faults are of other laws.
    """
    unequal = [name for name in SAME if one.spec[name] != other.spec[name]]
    if unequal:
        raise UsageError(
            f"{one.store} and {other.store} strike by other laws ({', '.join(unequal)} differ); compare those of the same faults"
        )
    rows = {kind: (getattr(one.whole, kind), getattr(other.whole, kind)) for kind in SHARES}
    for mine, theirs in zip(one.classes, other.classes, strict=True):
        if mine.n or theirs.n:
            rows[mine.name] = mine.share, theirs.share
    gaps = joint_differences([(_counts(second), _counts(first)) for first, second in rows.values()], one.confidence)
    return tuple(
        Contrast(name, told(one), told(other), *shares, gap)
        for (name, shares), gap in zip(rows.items(), gaps, strict=True)
    )


def _counts(share: Interval) -> Counts:
    """Events and trials of a share."""
    return round((share.estimate or 0.0) * share.n), share.n


def told(result: TrainingResult) -> str:
    """A campaign in a few words."""
    return (
        f"{result.workload} ({' and '.join(dict.fromkeys(result.optimizers)) or 'no optimizer'}, {result.n:,} trials)"
    )
