"""Campaigns without a model: outcomes are looked up in a table of all faults; planning and intervals are the product's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from claims import small_mlp
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tallies import PvfEstimator, StratifiedTrials, StratumTally, Tally
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.precision import PrecisionPlanner
from unsilent.studies.pvf.row_scopes import StoredTrials, target_groups


class Table:
    """Outcomes of every single bit flip, by stratum of an adaptive campaign of the same model, whose samples are one batch.

    Attributes:
        classes: by stratum, units of each fault by outcome, int64[faults, outcomes]. shares: of them that are incorrect.
        codes: the outcome of each sample, uint8[faults, samples]. places: site, element and bit of each fault.
    """

    def __init__(self, exhaustive: Path, adaptive: Path) -> None:
        with PvfStore(adaptive) as store:
            self.spec, self.description = store.spec, store.baseline
        # The top exponent bit is split by the sign of the element.
        strata = {
            (t.component, bit, is_negative): t.name
            for t in self.description.targets
            for bit in t.bits or ()
            for is_negative in (True, False)
            if not t.name.endswith("-positive" if is_negative else "-negative")
        }
        negative = {
            f"param:{n}": p.detach().signbit().flatten() for n, p in small_mlp.make().model().named_parameters()
        }
        owners = {t.site: t.component for t in self.description.tensors}
        found: dict[str, list[np.ndarray]] = {t.name: [] for t in self.description.targets}
        self.places: dict[str, list[tuple[str, int, int]]] = {t.name: [] for t in self.description.targets}
        codes_of: dict[str, list[np.ndarray]] = {t.name: [] for t in self.description.targets}
        with PvfStore(exhaustive) as store:
            for row in store.rows():
                (fault,) = json.loads(row.faults)
                bit = int(fault["operands"][0], 16).bit_length() - 1
                codes = np.frombuffer(row.outcome_codes, np.uint8)
                site, (element,) = fault["site"], fault["elements"]
                name = strata[owners[site], bit, bool(negative[site][element])]
                found[name].append(np.bincount(codes, minlength=len(Outcome)))
                codes_of[name].append(codes)
                self.places[name].append((site, element, bit))
        self.classes = {name: np.array(rows) for name, rows in found.items()}
        self.codes = {name: np.array(rows) for name, rows in codes_of.items()}
        self.shares = {name: Tally(rows).incorrect_share_per_trial for name, rows in self.classes.items()}
        self.truth = {g.name: self._mean(g.targets) for g in target_groups(Simulated(self, 0), 1)}

    def _mean(self, targets) -> float:
        return sum(t.share * self.shares[t.name].mean() for t in targets) / sum(t.share for t in targets)


class Simulated(StoredTrials):
    """What a store would hold.

    ``samples``: those of a trial, None where the planner chooses. ``cost``: seconds of a trial and of each of its samples.
    """

    def __init__(
        self, table: Table, seed: int, samples: int | None = 0, cost: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        self.spec, self.description, self.unit = replace(table.spec, samples=samples), table.description, "sample"
        self.description = replace(table.description, trial_seconds=cost[0], sample_seconds=cost[1])
        self._cost = cost
        self.plans, self.rows, self._tallies = {}, {}, {}
        self._table, self._rng = table, np.random.default_rng(seed)
        self._drawn: dict[tuple[str, int], np.ndarray] = {}

    @property
    def trials(self) -> int:
        return sum(plan.total_trials for plan in self.plans.values())

    def at(self, group, look: int) -> StratifiedTrials:
        """What counted for a row at an earlier look."""
        return StratifiedTrials(
            tuple(
                StratumTally(
                    t.share,
                    self._tally(t.name, 1, (self.plans[t.group, 1].counting_trials(t.name, look),)),
                    self.plans[t.group, 1].pilot_means[t.name],
                )
                for t in group.targets
            ),
            look,
        )

    @property
    def seconds(self) -> float:
        """What all trials cost."""
        return sum(
            len(numbers) * self._seconds(samples)
            for plan in self.plans.values()
            for stratum in plan.pilot_trials
            for samples, numbers in plan.trial_numbers(stratum).items()
        )

    def _seconds(self, samples: int) -> float:
        per_trial, per_sample = self._cost
        return per_trial + per_sample * (samples or self.spec.samples or sum(self.description.samples))

    def _tally(self, stratum: str, flips: int | None, which) -> Tally:
        key = (stratum, flips, which)
        if key not in self._tallies:
            parts = [self._outcomes(stratum, samples)(numbers) for samples, numbers in which or ((0, range(0)),)]
            self._tallies[key] = Tally(np.concatenate(parts))
        return self._tallies[key]

    def _outcomes(self, stratum: str, samples: int):
        """Units by outcome of trials of so many samples, int64[trials, outcomes], by their numbers."""

        def outcomes(numbers: range) -> np.ndarray:
            counts = self._drawn.get((stratum, samples))
            if counts is None or len(counts) < numbers.stop:
                more = self._draw(
                    stratum, samples or self.spec.samples or 0, numbers.stop - (0 if counts is None else len(counts))
                )
                counts = self._drawn[stratum, samples] = more if counts is None else np.concatenate([counts, more])
            return counts[numbers.start : numbers.stop]

        return outcomes

    def _draw(self, stratum: str, samples: int, n: int) -> np.ndarray:
        faults = self._rng.integers(len(self._table.classes[stratum]), size=n)
        size = self._table.codes[stratum].shape[1]
        if not samples or samples >= size:
            return self._table.classes[stratum][faults]
        if samples == 1:
            chosen = self._table.codes[stratum][faults, self._rng.integers(size, size=n)][:, None]
        else:
            order = self._rng.random((n, size)).argpartition(samples, axis=1)[:, :samples]
            chosen = np.take_along_axis(self._table.codes[stratum][faults], order, axis=1)
        return (chosen[:, :, None] == np.arange(len(Outcome))).sum(1).astype(np.int64)


def campaign(table: Table, planner: PrecisionPlanner, seed: int, looks: int | None = None, **more) -> Simulated:
    """Rounds until the planner is content, or so many looks are done; ``more``: of `Simulated`."""
    sim = Simulated(table, seed, **more)
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
