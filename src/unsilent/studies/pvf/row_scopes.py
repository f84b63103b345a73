"""Groups the trials of a store for the rows of estimates.

Groups are strata, targets, sums of targets, and the layers in which single faults fell.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.rounds import Cell, CellPlan, latest_plans
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tallies import PvfEstimator, ScoreTally, StratifiedTrials, StratumTally, Tally
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.records import LostScore, PvfRow
from unsilent.studies.pvf.spec import PvfBaseline, PvfTrialRow, TargetInfo, TensorInfo

TrialNumbers = tuple[tuple[int, range], ...] | None
"""Pairs of a number of samples and the numbers of the trials that evaluate so many; None for all trials."""
NOTHING = Tally(np.zeros((0, len(Outcome)), np.int64))


class StoredTrials:
    """All trials of a store.

    ``earlier`` holds the trials read before, so that only new ones are read.

    Attributes:
        spec, description: Spec and baseline of the campaign.
        rows: Rows of trials by (stratum, flips), in ascending order of trial numbers.
        plans: Plans that the last rounds decided.
        groups: The reported target of each stratum.
    """

    _score_limits: tuple[float, float] | None = None
    """Least and most possible loss if losses of a score are counted, else None."""

    def __init__(self, store: PvfStore, unit: str, earlier: StoredTrials | None = None) -> None:
        self.spec, self.description = store.spec, store.baseline
        self.unit = unit
        if self.spec.samples != 0 and unit == "batch":
            raise UsageError(
                "--unit batch needs trials that evaluate whole batches, but those of this campaign evaluate some samples; "
                "use --unit sample, or --samples all in a new campaign"
            )
        self._counted = ""
        self.plans: dict[Cell, CellPlan] = latest_plans(store.records(ROUND))
        self.rows: dict[Cell, list[PvfTrialRow]] = {}
        self.rows_written = store.rows_written
        for row in store.rows(after=0 if earlier is None else earlier.rows_written):
            self.rows.setdefault((row.trial.target, row.trial.flips), []).append(row)
        for cell, known in (earlier.rows if earlier is not None else {}).items():
            rows = [*known, *self.rows.get(cell, ())]
            self.rows[cell] = sorted(rows, key=lambda row: row.trial[2:])
        self.groups = {t.name: t.group for t in self.description.targets}
        strata = {(t.name, flips) for flips in self.spec.flips for t in self.description.targets_at(flips)}
        if wrong := self.rows.keys() - strata:
            name, flips = min(wrong, key=str)
            raise StoreError(f"the store is damaged: no trial of {name!r} has {flips} flips; use a backup copy")
        self._tallies: dict[tuple[str, int | None, TrialNumbers], Tally] = {}

    @property
    def trial_count(self) -> int:
        """The number of trials of all strata, including pilots."""
        return sum(map(len, self.rows.values()))

    @property
    def seconds(self) -> float:
        """The total time of all trials, as measured by the workers."""
        return sum(row.seconds for rows in self.rows.values() for row in rows)

    def count(self, stratum: str, flips: int | None) -> int:
        """The number of trials of a stratum, including the pilot."""
        return len(self.rows.get((stratum, flips), ()))

    def last_common_look(self, groups: Iterable[str], flips: int | None) -> int | None:
        """The last interim look that all of the targets have reached.

        None if no target has a plan, and -1 if some target has only a pilot.
        """
        plans = [self.plans.get((group, flips)) for group in groups]
        if not any(plans):
            return None
        return min(-1 if p is None or not p.first_look_trials else p.look for p in plans)

    def sample(self, targets: Sequence[TargetInfo], flips: int | None) -> StratifiedTrials:
        """The trials that count for a row over some strata, up to their last common interim look."""
        look = self.last_common_look((t.group for t in targets), flips)
        if look == -1:  # some targets have only a pilot
            look = None
        result = []
        for target in targets:
            plan = self.plans.get((target.group, flips))
            which = None if plan is None else (plan.counting_trials(target.name, look),)
            centre = plan.pilot_means.get(target.name, 0.0) if plan is not None and look is not None else 0.0
            centre = centre if self._score_limits is None else self._share_of_range(0.0)
            result.append(StratumTally(target.share, self._tally(target.name, flips, which), centre))
        if not self.spec.is_enumerated:
            return StratifiedTrials(tuple(result), look)
        left = tuple(t.slots - len(w.tally.outcome_counts) for w, t in zip(result, targets, strict=True))
        listed = self.spec.faults is not None
        if not any(left):
            return StratifiedTrials(tuple(result), look, "whole list" if listed else "exhaustive")
        return StratifiedTrials(tuple(result), look, not_run_counts=left if listed else ())

    def pilot(self, stratum: str, flips: int | None, which: Sequence[tuple[int, range]]) -> Tally:
        """The outcomes of the pilot trials of a stratum."""
        return self._tally(stratum, flips, tuple(which))

    def counted_rows(self, target: TargetInfo, flips: int | None, look: int | None) -> list[PvfTrialRow]:
        """The trials of a target that count at an interim look."""
        plan = self.plans.get((target.group, flips))
        rows = self.rows.get((target.name, flips), [])
        return rows if plan is None else [row for row in rows if plan.is_counted(row.trial, look)]

    def is_counted(self, row: PvfTrialRow) -> bool:
        """Whether a trial counts for estimates."""
        plan = self.plans.get((self.groups[row.trial.target], row.trial.flips))
        return plan is None or plan.is_counted(row.trial)

    def _tally(self, stratum: str, flips: int | None, which: TrialNumbers) -> Tally:
        key = (stratum, flips, which)
        if key not in self._tallies:
            rows = self.rows.get((stratum, flips), [])
            numbers = None if which is None else dict(which)
            self._tallies[key] = self.tally(
                [row for row in rows if numbers is None or row.trial.k in numbers.get(row.trial.sample_count, ())]
            )
        return self._tallies[key]

    def stratum(self, share: float, rows: Sequence[PvfTrialRow]) -> StratumTally:
        """Trials as a stratum with a given share of the sampling law."""
        centre = 0.0 if self._score_limits is None else self._share_of_range(0.0)
        return StratumTally(share, self.tally(rows), centre)

    def tally(self, rows: Sequence[PvfTrialRow]) -> Tally:
        """The outcomes of trials, counted in the requested unit."""
        codes = [row.outcome_codes for row in rows]
        tally = Tally.of(codes, self.description.samples, self.unit, self._counted)
        if self._score_limits is None:
            return tally
        lost = [self._share_of_range(row.score_lost) for row in rows if not math.isnan(row.score_lost)]
        return ScoreTally(tally.outcome_counts, np.array(lost, np.float64))

    def _share_of_range(self, lost: float) -> float:
        """A loss as a share of the possible range, from 0 to 1."""
        assert self._score_limits is not None
        least, most = self._score_limits
        return min(max((lost - least) / (most - least), 0.0), 1.0)

    def lost_task_metric(self) -> StoredTrials | None:
        """These trials, counted by their loss of score or accuracy; None if neither is known.

        For accuracy, only right answers that a fault changed count as incorrect.
        """
        scores = self.description.scores
        if scores is None and not self.description.right_answers:
            return None
        result = copy.copy(self)
        result.unit, result._counted, result._tallies = "sample", self.description.right_answers, {}
        result._score_limits = None if scores is None else scores.loss_limits
        return result


@dataclass(frozen=True)
class RowScope:
    """The strata, trials and memory size behind one row."""

    name: str
    level: str
    parent: str
    flips: int | None
    targets: tuple[TargetInfo, ...]
    sample: StratifiedTrials
    elements: int
    bits: Counter[int]
    """Number of bits by the width of the elements that they belong to."""

    @property
    def tally(self) -> Tally:
        """The outcomes of all trials together."""
        return Tally.joined(s.tally for s in self.sample.strata)

    def outcome_mix(self) -> dict[str, float]:
        """The share of the units by outcome, weighted by stratum; empty without trials."""
        seen = [s for s in self.sample.strata if s.tally.outcome_counts.size]
        total = sum(s.share for s in seen)
        by_name: dict[str, float] = {}
        for stratum in seen:
            units = max(1, int(stratum.tally.units_per_trial.sum()))
            for name, count in stratum.tally.totals().items():
                if name != Outcome.SPARED.name.lower():
                    by_name[name] = by_name.get(name, 0.0) + stratum.share / total * count / units
        return by_name

    def silent_share(self) -> float | None:
        """The share of the incorrect units that are silent, weighted like the estimate."""
        strata = self.sample.strata
        if len(strata) == 1:
            return strata[0].tally.silent_share
        wrong = [
            s.share * float(s.tally.incorrect_share_per_trial.mean()) if s.tally.incorrect_share_per_trial.size else 0.0
            for s in strata
        ]
        if not sum(wrong):
            return None
        return sum(w * (s.tally.silent_share or 0.0) for w, s in zip(wrong, strata, strict=True)) / sum(wrong)


def target_groups(stored: StoredTrials, flips: int | None) -> list[RowScope]:
    """The groups of trials at one number of flips: the model, components, layers and targets."""
    targets = stored.description.targets_at(flips)
    if not targets:  # no fault comes through the protection of any memory
        return []
    level = targets[0].level
    result = [_rolled_up("model", "model", "", targets, stored, flips)]
    if level != "component":
        for name, members in _grouped_by(targets, lambda t: t.component):
            result.append(_rolled_up(name, "component", "", members, stored, flips))
    if level in ("tensor", "bit"):
        for name, members in _grouped_by(targets, lambda t: t.layer):
            result.append(_rolled_up(name, "layer", members[0].component, members, stored, flips))
    for name, members in _grouped_by(targets, lambda t: t.group):
        parent = {"component": "", "layer": members[0].component}.get(level, members[0].layer)
        result.append(_rolled_up(name, level, parent, members, stored, flips))
    return result


def _grouped_by(
    targets: Sequence[TargetInfo], key: Callable[[TargetInfo], str]
) -> Iterable[tuple[str, list[TargetInfo]]]:
    by_name: dict[str, list[TargetInfo]] = defaultdict(list)
    for target in targets:
        by_name[key(target)].append(target)
    return by_name.items()


def _rolled_up(
    name: str, level: str, parent: str, members: Sequence[TargetInfo], stored: StoredTrials, flips: int | None
) -> RowScope:
    bits: Counter[int] = Counter()
    for target in members:
        bits.update(dict(target.bits_by_width))
    # Targets of single bits have the same elements at every bit position, so these are counted once.
    elements = sum(t.elements for t in members if len(members) == 1 or t.bits is None or 0 in t.bits)
    return RowScope(name, level, parent, flips, tuple(members), stored.sample(members, flips), elements, bits)


def layer_groups(hits: Sequence[SingleElementTrial], stored: StoredTrials) -> list[RowScope]:
    """The groups of trials whose single fault fell in the same layer.

    Given the layer that was hit, such a trial is a uniform draw from it, so the estimate is unbiased; its n is random.
    """
    if not hits:
        return []
    description = stored.description
    tensors: dict[tuple[str, str], list[TensorInfo]] = defaultdict(list)
    for tensor in description.tensors:
        tensors[tensor.component, tensor.layer].append(tensor)
    groups, fell = [], rows_by_layer(hits)
    for (component, layer), layer_tensors in tensors.items():
        rows = fell[component, layer]
        members = [t for t in description.targets_at(1) if t.component == component]
        shares = {t.name: _share(t, layer_tensors, stored.spec.law) for t in members}
        targets = tuple(t for t in members if shares[t.name])
        strata = tuple(stored.stratum(shares[t.name], rows[t.name]) for t in targets)
        bits = Counter[int]()
        for tensor in layer_tensors:
            bits[tensor.width] += tensor.elements * tensor.width
        strata = strata or (StratumTally(1.0, NOTHING),)  # the fault model corrupts nothing in this layer
        look = stored.last_common_look([component], 1)
        whole = stored.sample(members, 1)
        sample = StratifiedTrials(strata, None if look == -1 else look, whole.exhaustive_of)
        groups.append(
            RowScope(layer, "layer", component, 1, targets, sample, sum(t.elements for t in layer_tensors), bits)
        )
    return groups


def rows_by_layer(hits: Iterable[SingleElementTrial]) -> dict[tuple[str, str], dict[str, list[PvfTrialRow]]]:
    """The trials whose single fault fell in a layer, by (component, layer) and then by target."""
    by_name: dict[tuple[str, str], dict[str, list[PvfTrialRow]]] = defaultdict(lambda: defaultdict(list))
    for hit in hits:
        by_name[hit.tensor.component, hit.tensor.layer][hit.row.trial.target].append(hit.row)
    return by_name


def _share(target: TargetInfo, tensors: Sequence[TensorInfo], law: str) -> float:
    """The share of the sampling law's probability in some tensors that belongs to the bits of a target."""
    mass = {t.site + t.dtype: float(t.elements) if law == "per-element" else 1.0 for t in tensors}
    if not target.dtype:
        return 1.0
    mine = sum(
        mass[t.site + t.dtype]
        * (1 if target.bits is None else len(target.bits) / t.width)
        * (target.elements_by_site.get(t.site, 0) / t.elements if target.elements_by_site else 1)
        for t in tensors
        if t.dtype == target.dtype
    )
    return mine / sum(mass.values())


@dataclass(frozen=True)
class SingleElementTrial:
    """A trial that corrupted exactly one element; ``bit`` is set if exactly one bit was flipped."""

    row: PvfTrialRow
    tensor: TensorInfo
    element: int
    bit: int | None


def single_element_trials(rows: Iterable[PvfTrialRow], description: PvfBaseline) -> list[SingleElementTrial]:
    """The trials that corrupted exactly one element."""
    tensors = {(t.site, t.dtype): t for t in description.tensors}
    result = []
    for row in rows:
        if row.trial.flips not in (1, None):
            continue
        try:
            faults = json.loads(row.faults)
            if not isinstance(faults, list) or len(faults) != 1 or len(faults[0]["elements"]) != 1:
                continue
            fault = faults[0]
            mask = int(fault["operands"][0], 16) if fault["operation"] == "xor" else 0
            bit = mask.bit_length() - 1 if mask.bit_count() == 1 else None
            tensor, element = tensors[fault["site"], fault["dtype"]], int(fault["elements"][0])
            if not 0 <= element < prod(tensor.shape) or (bit is not None and bit >= tensor.width):
                raise ValueError("it lies outside its tensor")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"the store is damaged: the fault of trial {row.trial} cannot be read ({error})") from None
        result.append(SingleElementTrial(row, tensor, element, bit))
    return result


def make_rows(
    groups: Sequence[RowScope], lost: Sequence[RowScope], limits: tuple[float, float], question: PvfEstimator
) -> list[PvfRow]:
    """One row per group; joint limits hold for all rows of a level and number of flips.

    Args:
        lost: Groups of `StoredTrials.lost_task_metric` that match ``groups``; empty without labels and score.
        limits: Least and most possible loss; (0, 1) for accuracy.
    """
    family = Counter((g.level, g.flips) for g in groups)
    losses: list[LostScore | None] = [LostScore.of(question.estimate(group.sample), *limits) for group in lost]
    pairs = zip(groups, losses or [None] * len(groups), strict=True)
    return [_row(group, loss, question, family[group.level, group.flips]) for group, loss in pairs]


def _row(group: RowScope, lost: LostScore | None, question: PvfEstimator, family: int) -> PvfRow:
    interval = question.estimate(group.sample)
    joint = question.with_joint_confidence(family).estimate(group.sample)
    tally = group.tally
    totals = tally.totals()
    due = {o.name.lower(): totals[o.name.lower()] for o in Outcome if o.due}
    return PvfRow(
        target=group.name,
        level=group.level,
        parent=group.parent,
        flips=group.flips,
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        confidence=question.confidence,
        n=len(tally.outcome_counts),
        unit=question.unit or "sample",
        units=int(tally.units_per_trial.sum()),
        masked=totals["masked"],
        benign=totals["benign"],
        sdc=totals["sdc"],
        due=sum(due.values()),
        due_kinds=due,
        elements=group.elements,
        bits=sum(group.bits.values()),
        method=interval.method,
        silent_share=group.silent_share(),
        incorrect_trials=int((tally.incorrect_per_trial > 0).sum()),
        joint_low=joint.low,
        joint_high=joint.high,
        outcome_mix=group.outcome_mix(),
        widest_share_of_bits=max(group.bits.values()) / sum(group.bits.values()),
        score_lost=lost,
    )
