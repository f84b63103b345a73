"""What the guard did with faults whose unguarded end is known."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from unsilent.campaigns.spec import TrialId
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.records import Caught, GuardFound, Judged
from unsilent.studies.training.spec import RANDOM, TrainingRow

WITHIN = 2
"""Steps from the fault to the alarm, with which two steps are enough to go back."""
LARGE = 1e4
SIZES = (1.0, 1e2, 1e4, 1e8)
"""Limits of the sizes, as multiples of what was usual in the struck tensor."""


def saved(trials: Sequence[Judged], guarded: Mapping[TrialId, TrainingRow], confidence: float) -> GuardFound | None:
    """Of different trials that were run again under the guard; None where none was."""
    different = [(one, guarded[one.row.trial]) for one in trials if one.different and one.row.trial in guarded]
    if not different:
        return None
    pairs = [(one, again) for one, again in different if one.harmful]
    edges = (0.0, *SIZES, math.inf)
    names = [f"up to {SIZES[0]:g}", *(f"{a:g} to {b:g}" for a, b in itertools.pairwise(SIZES))]
    names.append(f"above {SIZES[-1]:g}")
    sizes = tuple(
        _caught(
            name,
            [again for one, again in pairs if low < size(one.row) <= high or (low == size(one.row) == 0)],
            confidence,
        )
        for name, low, high in zip(names, edges, edges[1:], strict=False)
    )
    groups: dict[str, list[TrainingRow]] = {}
    for one, again in pairs:
        target = one.row.trial.target
        groups.setdefault(one.row.struck.phase if target == RANDOM else target, []).append(again)
    kinds = Counter(
        again.error.partition(":")[2].strip().split(" reaches")[0].rsplit(" ", 1)[0]
        for _, again in pairs
        if again.caught is not None
    )
    return GuardFound(
        large=LARGE,
        different=_caught("all different", [again for _, again in different], confidence),
        all=_caught("all harmful", [again for _, again in pairs], confidence),
        largest=_caught(
            f"wrote more than {LARGE:g} x usual", [again for one, again in pairs if size(one.row) > LARGE], confidence
        ),
        sizes=sizes,
        groups=tuple(_caught(name, groups[name], confidence) for name in sorted(groups)),
        late=sum(again.caught is not None and again.caught > WITHIN for _, again in pairs),
        stopped=sum(again.reason == "stopped" for _, again in pairs),
        alarms=dict(kinds),
    )


def size(row: TrainingRow) -> float:
    """Largest magnitude that was written, as a multiple of the largest that was in the struck tensor; 0 where nobody knows."""
    if math.isinf(row.written):
        return math.inf
    if math.isnan(row.written):
        return 0.0
    if not row.usual > 0:
        return math.inf if row.written > 0 else 0.0
    return row.written / row.usual


def _caught(name: str, rows: Sequence[TrainingRow], confidence: float) -> Caught:
    within = [row for row in rows if row.caught is not None and row.caught <= WITHIN and row.reason != "stopped"]
    same = sum(row.bits for row in within)
    return Caught(name, len(rows), len(within), same, clopper_pearson(len(within), len(rows), confidence))
