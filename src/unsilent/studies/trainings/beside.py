"""Two campaigns of struck trainings beside each other: with and without batch norm, one optimizer and another."""

from __future__ import annotations

from collections.abc import Iterator

from unsilent.errors import UsageError
from unsilent.statistics.comparing import difference
from unsilent.studies.trainings.judging import SHARES
from unsilent.studies.trainings.records import Contrast, TrainingResult

SAME = ("faults", "accelerator", "value", "phases", "per")
"""What must be equal in two specs, so that both strike by the same law."""


def beside(one: TrainingResult, other: TrainingResult) -> tuple[Contrast, ...]:
    """The second against the first: what is different, harm, latent harm, and each class that occurs.

    Raises ``UsageError`` where their faults are of other laws.
    """
    unequal = [name for name in SAME if one.spec[name] != other.spec[name]]
    if unequal:
        raise UsageError(
            f"{one.store} and {other.store} strike by other laws ({', '.join(unequal)} differ); compare those of the same faults"
        )
    return tuple(_contrasts(one, other))


def _contrasts(one: TrainingResult, other: TrainingResult) -> Iterator[Contrast]:
    names = told(one), told(other)
    for kind in SHARES:
        first, second = getattr(one.whole, kind), getattr(other.whole, kind)
        yield Contrast(kind, *names, first, second, difference(second, first))
    for mine, theirs in zip(one.classes, other.classes, strict=True):
        if mine.n or theirs.n:
            yield Contrast(mine.name, *names, mine.share, theirs.share, difference(theirs.share, mine.share))


def told(result: TrainingResult) -> str:
    """A campaign in a few words."""
    return (
        f"{result.workload} ({' and '.join(dict.fromkeys(result.optimizers)) or 'no optimizer'}, {result.n:,} trials)"
    )
