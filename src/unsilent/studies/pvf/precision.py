"""Plans campaigns that stop when every reported row is precise enough.

A pilot of every stratum shows where outcomes vary, and is extended until it is long enough for its plan. It determines the number
of samples per trial, unless that is given, and the trials of look 0 (Neyman's allocation, with enough trials everywhere for
outcomes that the pilot did not show). If a row is then not precise enough, its strata grow from look to look by a fixed factor.
All decisions use complete rounds, so they do not depend on jobs, executor or interruptions.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.expected_end import ExpectedEnd
from unsilent.campaigns.rounds import Cell, CellPlan, latest_plans, trial_ids_of_plans
from unsilent.campaigns.spec import Json, TrialId
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.report.text import listed
from unsilent.statistics import Stratum, stratified
from unsilent.statistics.interim import GROWTH, confidence_at
from unsilent.statistics.planning import allocate, expected_half_width, expected_interval
from unsilent.studies.pvf.expected_end import expected_end
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.pilots import (
    PILOT_PER_WIDE,
    WIDE_SAMPLES,
    PilotView,
    choose_samples,
    first_pilot,
    first_wide_pilot,
)
from unsilent.studies.pvf.records import flips_suffix, samples_text
from unsilent.studies.pvf.row_scopes import RowScope, StoredTrials, target_groups
from unsilent.studies.pvf.spec import TargetInfo
from unsilent.studies.pvf.wanted_precision import Precision

PILOT_PART = 0.05
"""Minimum ratio of a pilot to its plan; a shorter pilot is extended in the proportions of the plan. Plans made from shorter
pilots are too small or too large so often that campaigns take more trials in all (docs/concepts/statistics.md has figures)."""
PILOT_GROWTH = 4
"""Largest factor by which a pilot is extended at once: its plan may be far too large."""
PLANNING_MARGIN = 0.9
"""A plan aims slightly below the requested half-width, since the pilot's variances are estimates."""
HOPELESS = 20
"""A plan that needs this many times the allowed trials is refused without a longer pilot."""
REPLAN_FACTOR = 3.0
"""A tighter precision that needs this many times more trials gets a new plan, with all earlier trials as its pilot."""
_FARTHEST = 40


@dataclass
class PrecisionPlanner:
    """Decides which trials a campaign runs next, round by round.

    Attributes:
        most_trials: Maximum number of trials of a target at each number of flips, including the pilot.
        wall_seconds: Function that converts seconds of work of one worker to seconds of wall time.
        imprecise_rows: Names of the rows that stay wider than requested because of ``most_trials``.
        end: The end that was expected when the last round was decided; None for a pilot.
    """

    precision: Precision
    question: PvfEstimator
    most_trials: int
    wall_seconds: Callable[[float], float] = float
    imprecise_rows: tuple[str, ...] = ()
    end: ExpectedEnd | None = None
    _round_began: float = 0.0
    _driver: tuple[float, int] = (0.0, 0)
    """Seconds of rounds in which no worker ran a trial, and the number of trials of these rounds."""
    _stored: StoredTrials | None = None
    """Trials of the store when the last round was decided; a planner is used for one store only."""

    def requested_trials(self, store: PvfStore) -> Iterator[TrialId]:
        """All trials of the rounds so far."""
        self._round_began = time.monotonic()
        return trial_ids_of_plans(latest_plans(store.records(ROUND)).values())

    def decide_next_round(self, store: PvfStore) -> list[Json]:
        """The plans of the next round; empty if no more trials are needed or allowed.

        Raises:
            UsageError: the plan of look 0 needs more than ``most_trials``; the message has the needed trials and the possible
                precision.
        """
        whole, earlier = time.monotonic() - self._round_began, self._stored
        stored = self._read_trials_of_store(store)
        if earlier is not None:
            idle, trials = whole - (stored.seconds - earlier.seconds), stored.trial_count - earlier.trial_count
            self._driver = self._driver[0] + max(0.0, idle), self._driver[1] + trials
        return [plan.to_json() for plan in self.round_after(stored)]

    def _read_trials_of_store(self, store: PvfStore) -> StoredTrials:
        unit = self.question.with_default_unit(store.spec.is_transient).unit or "sample"
        self._stored = StoredTrials(store, unit, self._stored)
        return self._stored

    def describe_round(self, store: PvfStore) -> str:
        """A sentence on the last decided round: its purpose, its trials and the expected end."""
        self.end = self.expected_end(store)
        return self._purpose(store) + (f"; {self.end}" if self.end else "")

    def expected_end(self, store: PvfStore) -> ExpectedEnd | None:
        """The expected end of a campaign; None before all its pilots are complete."""
        begun = time.perf_counter()
        stored = self._read_trials_of_store(store)
        if not stored.plans or not all(plan.first_look_trials for plan in stored.plans.values()):
            return None
        question, precision = self.question.with_default_unit(stored.spec.is_transient), self.precision
        rows = self._chosen([g for flips in stored.spec.flips for g in target_groups(stored, flips)])
        view = PilotView(stored, [*stored.plans.values()], with_all=True)
        return expected_end(
            stored,
            view,
            rows,
            lambda estimates: np.maximum(precision.absolute, precision.relative * estimates),
            question.confidence,
            self.most_trials,
            lambda work: self.wall_seconds(work) + time.perf_counter() - begun,
            self._driver,
        )

    def _purpose(self, store: PvfStore) -> str:
        plans = latest_plans(store.records(ROUND)).values()
        total = f"{sum(plan.total_trials for plan in plans):,} trials in all"
        if not all(plan.first_look_trials for plan in plans):
            return f"pilot: {total}"
        pilot = sum(plan.pilot_size for plan in plans)
        if any(plan.look for plan in plans):
            return f"some intervals are still too wide: {total}"
        chosen = {plan.group: plan.samples for plan in plans}
        some = f", each on {samples_text(chosen)} of the samples" if any(chosen.values()) else ""
        return f"plan made from {pilot:,} pilot trials: {total}{some}"

    def round_after(self, stored: StoredTrials) -> list[CellPlan]:
        """The plans of the next round, given the stored trials."""
        question = self.question.with_default_unit(stored.spec.is_transient)
        precision_text = f"{self.precision} at {question.confidence:g} per {question.unit}"
        groups = self._chosen([g for flips in stored.spec.flips for g in target_groups(stored, flips)])
        if not stored.description.targets:  # no fault comes through the protection of memories
            return []
        if not stored.plans:
            return self._pilots(stored, precision_text)
        if any(not plan.first_look_trials for plan in stored.plans.values()):
            return self._planned(stored, groups, precision_text)
        wide = [g for g in groups if not self.precision.is_reached_by(question.estimate(g.sample))]
        self.imprecise_rows = ()
        if not wide:
            return []
        growing = dict.fromkeys(stored.plans, 0)
        for group in wide:
            looks = self._looks(group)
            for target in group.targets:
                cell = target.group, group.flips
                growing[cell] = max(growing[cell], looks)
        renewed = any(plan.target_precision != precision_text for plan in stored.plans.values())
        if renewed and GROWTH ** max(growing.values()) > REPLAN_FACTOR:
            return self._planned(stored, groups, precision_text)
        return self._grown(stored, wide, growing)

    def _chosen(self, groups: Sequence[RowScope]) -> list[RowScope]:
        """The rows that must be precise; raises ``UsageError`` if a name matches no row."""
        names, globs = list(dict.fromkeys(group.name for group in groups)), self.precision.rows
        for glob in globs:
            if not fnmatch.filter(names, glob):
                raise UsageError(f"--ci or --rel is for {glob!r}, which is no row; the rows are {listed(names, 8)}")
        return [g for g in groups if not globs or any(fnmatch.fnmatchcase(g.name, glob) for glob in globs)]

    def _pilots(self, stored: StoredTrials, precision_text: str) -> list[CellPlan]:
        samples = wide = 0
        if stored.spec.samples is None:
            samples, wide = 1, min(WIDE_SAMPLES, max(stored.description.samples))
        plans = []
        for flips in stored.spec.flips:
            strata: dict[str, list[str]] = {}
            for target in stored.description.targets_at(flips):
                strata.setdefault(target.group, []).append(target.name)
            some = first_wide_pilot(name for names in strata.values() for name in names) if wide > 1 else {}
            for group, pilot in first_pilot(strata).items():
                plan = CellPlan(group, flips, precision_text, pilot, {}, {}, pilot_samples=samples)
                if wide > 1:
                    wide_pilot = {name: some[name] for name in pilot if some.get(name)}
                    plan = replace(plan, wide_pilot_trials=wide_pilot, wide_samples=wide)
                plans.append(plan)
        longest = max(plans, key=lambda plan: plan.pilot_size)
        if longest.pilot_size > self.most_trials:
            raise UsageError(
                f"--trials allows {self.most_trials:,} trials per target, but --ci and --rel need a pilot of "
                f"{longest.pilot_size} trials in {longest.group!r} to plan the rest; raise --trials, or omit --ci and --rel"
            )
        return plans

    def _planned(self, stored: StoredTrials, groups: Sequence[RowScope], precision_text: str) -> list[CellPlan]:
        """Plans for the first interim look, or longer pilots if those so far are too short."""
        plans = [_with_all_as_pilot(plan, precision_text) for plan in stored.plans.values()]
        view = PilotView(stored, plans)
        plans = [replace(plan, samples=self._samples(plan, view)) for plan in plans]
        sizes = self._sizes(view, plans, groups, True)
        rough = [_with_look(plan, view, sizes) for plan in plans]
        if longer := [more for plan in rough if (more := self._longer_pilot(plan)) is not None]:
            return longer
        sizes = self._sizes(view, plans, groups, False)
        return [self._affordable(_with_look(plan, view, sizes), view, groups) for plan in plans]

    def _sizes(
        self, view: PilotView, plans: Sequence[CellPlan], groups: Sequence[RowScope], is_rough: bool
    ) -> dict[Cell, int]:
        """The number of trials of each stratum at the first interim look, enough for every row.

        Strata that belong to none of these rows get as many trials as their pilot had.
        """
        of_target = {name: plan.samples for plan in plans for name in plan.pilot_trials}
        needed = {(target.name, group.flips) for group in groups for target in group.targets}
        sizes = {
            (name, plan.flips): 0 if (name, plan.flips) in needed else count
            for plan in plans
            for name, count in plan.pilot_trials.items()
        }
        for group in reversed(groups):  # small rows first: their trials are mostly enough for sums of these rows
            strata = view.strata(group.targets, group.flips, of_target)
            cells = [(t.name, group.flips) for t in group.targets]
            aim = self._aim(view, group.targets, group.flips)
            sizes.update(
                zip(cells, self._sufficient_sizes(strata, [sizes[c] for c in cells], aim, is_rough), strict=True)
            )
        return sizes

    def _samples(self, plan: CellPlan, view: PilotView) -> int:
        """The number of samples per trial of a plan; chosen only once."""
        if view.stored.plans[plan.cell].first_look_trials:
            return plan.samples
        if view.cost is None:
            return plan.pilot_samples
        targets = [t for t in view.stored.description.targets_at(plan.flips) if t.group == plan.group]
        aim = self._aim(view, targets, plan.flips)
        level = confidence_at(0, self.question.confidence)

        def trials(samples: int) -> int:
            strata = view.strata(targets, plan.flips, {t.name: samples for t in targets})
            return sum(allocate(strata, aim, level, is_rough=True))

        return choose_samples(trials, view.cost, view.stored.description.samples)

    def _aim(self, view: PilotView, targets: Sequence[TargetInfo], flips: int | None) -> float:
        """The half-width that the first interim look is planned to reach."""
        return PLANNING_MARGIN * self.precision.target_half_width(view.estimate(targets, flips))

    def _longer_pilot(self, plan: CellPlan) -> CellPlan | None:
        """A longer pilot; None if the pilot is long enough, or a longer one would take too many trials."""
        now, needed = plan.pilot_size, sum(plan.first_look_trials.values())
        part = min(PILOT_PART, PILOT_GROWTH * now / needed)
        too_long = part * needed > PILOT_PART * self.most_trials or needed > HOPELESS * self.most_trials
        if now >= PILOT_PART * needed or too_long:
            return None
        pilot = {n: max(k, math.ceil(part * plan.first_look_trials[n])) for n, k in plan.pilot_trials.items()}
        wide = {n: max(plan.wide_pilot_trials.get(n, 0), k // PILOT_PER_WIDE) for n, k in pilot.items()}
        wide = {n: k for n, k in wide.items() if k and plan.wide_samples}
        begun = replace(plan, first_look_trials={}, pilot_means={}, samples=0)
        return replace(begun, pilot_trials=pilot, wide_pilot_trials=wide)

    def _sufficient_sizes(
        self, strata: Sequence[Stratum], sizes: Sequence[int], aim: float, is_rough: bool
    ) -> list[int]:
        """Sizes of strata that reach the aim, at least as large as the given ones."""
        level = confidence_at(0, self.question.confidence)
        if not is_rough and all(sizes) and expected_interval(strata, sizes, level).half_width <= aim:
            return list(sizes)
        return [max(a, b) for a, b in zip(sizes, allocate(strata, aim, level, is_rough), strict=True)]

    def _affordable(self, plan: CellPlan, view: PilotView, groups: Sequence[RowScope]) -> CellPlan:
        """The plan, reduced to the allowed trials if these may be enough.

        Raises ``UsageError`` if they cannot be enough.
        """
        needed, stored = plan.total_trials, view.stored
        if needed <= self.most_trials:
            return plan
        targets = [t for t in stored.description.targets if t.name in plan.first_look_trials]
        strata = view.strata(targets, plan.flips, dict.fromkeys(plan.pilot_trials, plan.samples))
        scale = (self.most_trials - plan.pilot_size) / sum(plan.first_look_trials.values())
        sizes = {t.name: max(1, math.floor(scale * plan.first_look_trials[t.name])) for t in targets}
        level = confidence_at(0, self.question.confidence)
        if scale > 0 and self._may_do(view.seen(targets, plan.flips), list(sizes.values()), level):
            return replace(plan, first_look_trials=sizes)
        widths = [expected_interval(strata, list(sizes.values()), level).half_width] if scale > 0 else []
        question = self.question.with_default_unit(stored.spec.is_transient)
        mine = [g for g in groups if (g.name, g.flips) == (plan.group, plan.flips)]
        widths += [question.estimate(g.sample).half_width for g in mine]
        at = flips_suffix(plan.flips) if len(stored.spec.flips) > 1 else ""
        raise UsageError(
            f"{self.precision} of {plan.group!r}{at} needs about {_round(needed):,} trials, but --trials allows "
            f"{self.most_trials:,}, which reach about ±{100 * min(widths):.2g} points; set --trials {_round(1.5 * needed)} "
            "(1.5 times the forecast) or a coarser --ci or --rel"
        )

    def _may_do(self, strata: Sequence[Stratum], sizes: Sequence[int], level: float) -> bool:
        """Whether given sizes reach the precision if the estimate is as large as the pilot allows.

        A relative half-width is easier to reach for a larger estimate.
        """
        seen = stratified(strata, level)
        mean = sum(s.weight * s.mean for s in strata)
        variance = sum(
            s.weight**2 * (s.variance * seen.high / mean if mean else seen.high * (1 - seen.high)) / n
            for s, n in zip(strata, sizes, strict=True)
        )
        coarsest = max(s.weight / n for s, n in zip(strata, sizes, strict=True))
        return float(expected_half_width(variance, coarsest, level)) <= self.precision.target_half_width(seen.high)

    def _looks(self, group: RowScope) -> int:
        """The number of further interim looks after which a row is expected to be precise enough."""
        now = group.sample.look_number or 0
        total = sum(s.share for s in group.sample.strata)
        strata = [
            Stratum.of(s.tally.incorrect_share_per_trial, s.share / total, s.expected_mean) for s in group.sample.strata
        ]
        aim = self.precision.target_half_width(sum(s.weight * s.mean for s in strata))
        for more in range(1, _FARTHEST):
            level = confidence_at(now + more, self.question.confidence)
            sizes = [math.ceil(s.n * GROWTH**more) for s in strata]
            if expected_interval(strata, sizes, level).half_width <= aim:
                return more
        return _FARTHEST

    def _grown(self, stored: StoredTrials, wide: Sequence[RowScope], growing: dict[Cell, int]) -> list[CellPlan]:
        """The plans of cells with imprecise rows, with as many further looks as trials are allowed."""
        result = []
        for cell, plan in stored.plans.items():
            look = plan.look + growing[cell]
            while look > plan.look and replace(plan, look=look).total_trials > self.most_trials:
                look -= 1
            if look > plan.look:
                result.append(replace(plan, look=look))
        if not result:
            self.imprecise_rows = tuple(f"{g.name}{flips_suffix(g.flips)}" for g in wide)
        return result


def _round(trials: float) -> int:
    """The number rounded to two significant digits."""
    return int(float(f"{trials:.2g}"))


def _with_look(plan: CellPlan, view: PilotView, sizes: Mapping[Cell, int]) -> CellPlan:
    trials = {name: sizes[name, plan.flips] for name in plan.pilot_trials}
    means = {name: view.forecasts[name, plan.flips].mean for name in plan.pilot_trials}
    return replace(plan, first_look_trials=trials, pilot_means=means)


def _with_all_as_pilot(plan: CellPlan, precision_text: str) -> CellPlan:
    """The plan as it was before its first interim look, except that all trials so far are its pilot."""
    if plan.first_look_trials:
        numbers = {name: plan.counting_trials(name)[1].stop for name in plan.pilot_trials}
        same = plan.samples == plan.pilot_samples
        changed = {"pilot_trials": numbers} if same else {"wide_pilot_trials": numbers, "wide_samples": plan.samples}
        plan = replace(plan, **changed)
    return replace(plan, target_precision=precision_text, first_look_trials={}, pilot_means={}, look=0)
