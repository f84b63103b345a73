"""A store's trials, sorted by what they say something about: strata, their weights, and which of their trials count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from unsilent.campaigns.driver import ROUND
from unsilent.errors import UsageError
from unsilent.outcomes.base import Outcome
from unsilent.statistics import Stratum
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.rounds import Cell, CellPlan, current
from unsilent.studies.pvf.spec import TargetInfo, TrialRow
from unsilent.studies.pvf.tallies import Sample, Tally, Weighed

NOTHING = Tally(np.zeros((0, len(Outcome)), np.int64))


class Stored:
    """All trials of a store, read once.

    Attributes:
        spec, description: of the campaign. rows: by (stratum, flips), numbers ascending. plans: what the last rounds decided.
    """

    def __init__(self, store: PvfStore, unit: str) -> None:
        self.spec, self.description = store.spec, store.description
        self.unit = unit
        if self.spec.one_batch and unit == "batch" and len(set(self.description.samples)) > 1:
            raise UsageError(
                f"--one-batch drew batches by their samples, and this workload's have {_few(self.description.samples)}; per "
                "batch all would count alike: give --unit sample, or batches of one size"
            )
        self.plans: dict[Cell, CellPlan] = current(store.records(ROUND))
        self.rows: dict[Cell, list[TrialRow]] = {}
        for row in store.rows():
            self.rows.setdefault((row.trial.target, row.trial.flips), []).append(row)
        self._groups = {t.name: t.group for t in self.description.targets}
        self._tallies: dict[tuple[str, int | None, range | None], Tally] = {}

    @property
    def trials(self) -> int:
        """Trials of all strata, pilots included."""
        return sum(map(len, self.rows.values()))

    def look(self, groups: Iterable[str], flips: int | None) -> int | None:
        """The last look that all these reported targets have come to; None where they have no plan, or a pilot alone."""
        plans = [self.plans.get((group, flips)) for group in groups]
        return min((-1 if p is None or not p.first else p.look for p in plans), default=-1) if any(plans) else None

    def sample(self, targets: Sequence[TargetInfo], flips: int | None) -> Sample:
        """What counts for a row over these strata: of each as many trials as the least advanced one has looks."""
        look = self.look((t.group for t in targets), flips)
        if look == -1:  # a pilot is all there is of some
            look = None
        found = []
        for target in targets:
            plan = self.plans.get((target.group, flips))
            which = None if plan is None else plan.counting(target.name, look)
            centre = plan.centre.get(target.name, 0.0) if plan is not None and look is not None else 0.0
            found.append(Weighed(target.share, self._tally(target.name, flips, which), centre))
        if not self.spec.enumerated:
            return Sample(tuple(found), look)
        left = tuple(t.slots - len(w.tally.classes) for w, t in zip(found, targets, strict=True))
        listed = self.spec.faults is not None
        if not any(left):
            return Sample(tuple(found), look, "whole list" if listed else "exhaustive")
        return Sample(tuple(found), look, left=left if listed else ())

    def pilot(self, stratum: str, flips: int | None, upto: int) -> Stratum:
        """The first trials of a stratum."""
        return Stratum.of(self._tally(stratum, flips, range(upto)).shares)

    def counts(self, row: TrialRow) -> bool:
        """Whether a trial counts for estimates at all."""
        plan = self.plans.get((self._groups[row.trial.target], row.trial.flips))
        return plan is None or row.trial.k in plan.counting(row.trial.target)

    def _tally(self, stratum: str, flips: int | None, which: range | None) -> Tally:
        key = (stratum, flips, which)
        if key not in self._tallies:
            rows = self.rows.get((stratum, flips), [])
            mine = rows if which is None else [r for r in rows if r.trial.k in which]
            self._tallies[key] = Tally.of(mine, self.description.samples, self.unit) if mine else NOTHING
        return self._tallies[key]


def _few(numbers: Sequence[int], most: int = 6) -> str:
    return ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")
