"""Campaigns without a model: outcomes are looked up in a table of all faults; planning and intervals are the product's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tallies import PvfEstimator, StratifiedTrials, StratumTally, Tally
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.precision import PrecisionPlanner
from unsilent.studies.pvf.row_scopes import StoredTrials, target_groups


class Table:
    """Outcomes of every single bit flip, by stratum of an adaptive campaign of the same model.

    Attributes:
        classes: by stratum, units of each fault by outcome, int64[faults, outcomes]. shares: of them that are incorrect.
    """

    def __init__(self, exhaustive: Path, adaptive: Path) -> None:
        with PvfStore(adaptive) as store:
            self.spec, self.description = store.spec, store.baseline
        strata = {(t.component, bit): t.name for t in self.description.targets for bit in t.bits or ()}
        owners = {t.site: t.component for t in self.description.tensors}
        found: dict[str, list[np.ndarray]] = {t.name: [] for t in self.description.targets}
        with PvfStore(exhaustive) as store:
            for row in store.rows():
                (fault,) = json.loads(row.faults)
                bit = int(fault["operands"][0], 16).bit_length() - 1
                codes = np.frombuffer(row.outcome_codes, np.uint8)
                found[strata[owners[fault["site"]], bit]].append(np.bincount(codes, minlength=len(Outcome)))
        self.classes = {name: np.array(rows) for name, rows in found.items()}
        self.shares = {name: Tally(rows).incorrect_share_per_trial for name, rows in self.classes.items()}
        self.truth = {g.name: self._mean(g.targets) for g in target_groups(Simulated(self, 0), 1)}

    def _mean(self, targets) -> float:
        return sum(t.share * self.shares[t.name].mean() for t in targets) / sum(t.share for t in targets)


class Simulated(StoredTrials):
    """What a store would hold."""

    def __init__(self, table: Table, seed: int) -> None:
        self.spec, self.description, self.unit = table.spec, table.description, "sample"
        self.plans, self.rows, self._tallies = {}, {}, {}
        self._table, self._rng = table, np.random.default_rng(seed)
        self._drawn: dict[str, np.ndarray] = {}

    @property
    def trials(self) -> int:
        return sum(plan.total_trials for plan in self.plans.values())

    def at(self, group, look: int) -> StratifiedTrials:
        """What counted for a row at an earlier look."""
        return StratifiedTrials(
            tuple(
                StratumTally(
                    t.share,
                    self._tally(t.name, 1, self.plans[t.group, 1].counting_trial_numbers(t.name, look)),
                    self.plans[t.group, 1].pilot_means[t.name],
                )
                for t in group.targets
            ),
            look,
        )

    def _tally(self, stratum: str, flips: int | None, which: range | None) -> Tally:
        which = which or range(0)
        key = (stratum, flips, which)
        if key in self._tallies:
            return self._tallies[key]
        drawn = self._drawn.get(stratum, np.zeros(0, np.int64))
        if drawn.size < which.stop:
            classes = self._table.classes[stratum]
            drawn = np.append(drawn, self._rng.integers(len(classes), size=which.stop - drawn.size))
            self._drawn[stratum] = drawn
        found = self._tallies[key] = Tally(self._table.classes[stratum][drawn[which.start : which.stop]])
        return found


def campaign(table: Table, planner: PrecisionPlanner, seed: int, looks: int | None = None) -> Simulated:
    """Rounds until the planner is content, or so many looks are done."""
    sim = Simulated(table, seed)
    while (decided := planner.round_after(sim)) and (looks is None or max(c.look for c in decided) < looks):
        sim.plans |= {c.cell: c for c in decided}
    return sim


def rows(sim: Simulated, question: PvfEstimator):
    """Name and interval of every reported row."""
    return [(g.name, question.estimate(g.sample)) for g in target_groups(sim, 1)]


class Remembering(PvfEstimator):
    """Answers the same sample only once: looks and rows ask for the same intervals."""

    def estimate(self, sample):
        known = self.__dict__.setdefault("_known", {})
        key = (
            tuple((s.share, s.expected_mean, id(s.tally)) for s in sample.strata),
            sample.look_number,
            self.confidence,
        )
        if key not in known:
            known[key] = (super().estimate(sample), sample)  # the sample keeps its tallies alive, and their ids
        return known[key][0]

    def of(self, transient):
        return self
